"""A model is exported once, and again as soon as it or its call may have changed."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
import models
from autopar.passes import trace
from autopar.passes.trace import reuse
from autopar.planner.plan_context import fingerprint

FACTOR = 2.0
BIAS = torch.ones(8)


class Net(nn.Module):
    """A forward that reads attributes of its own, a global, a dict and a submodule's method."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.scale, self.options, self.loss = 0.5, {"power": 2}, F.mse_loss

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        x = self.drop(F.gelu(self.up(x - self.mean))) * self.scale * FACTOR
        z = self.down(x) ** self.options["power"]
        return z if y is None else self.loss(z, y)


def rows(batch: int = 4) -> Tensor:
    return torch.ones(batch, 8)


def test_another_world_and_layout_need_no_second_export(exports: list[nn.Module]) -> None:
    model, inputs = Net(), (rows(), rows())
    first = autopar.plan(model, 2, inputs)
    again = autopar.plan(model, 4, inputs, layout="megatron")
    assert exports == [model] and first.fingerprint == again.fingerprint
    assert autopar.verify(model, 2, inputs, layout="megatron").grad_error < 1e-9
    assert exports == [model]


def test_the_program_holds_the_tensors_of_now(exports: list[nn.Module]) -> None:
    model = Net()
    before = trace.trace(model, (rows(),))
    model.up.weight = nn.Parameter(torch.ones(16, 8))
    after = trace.trace(model, (rows(),))
    assert exports == [model]
    assert after.tensors["up.weight"] is model.up.weight and after.module is not before.module
    assert before.tensors["up.weight"] is not model.up.weight
    assert fingerprint(before) == fingerprint(after) and before.signature == after.signature


def test_what_is_done_to_a_program_does_not_reach_the_next(exports: list[nn.Module]) -> None:
    model = Net()
    graph = trace.trace(model, (rows(),)).module.graph
    names = [node.name for node in graph.nodes]
    graph.erase_node(graph.output_node())
    assert [n.name for n in trace.trace(model, (rows(),)).module.graph.nodes] == names
    assert len(exports) == 1


class Tripled(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


def replaced_forward(model: Net) -> None:
    model.down.forward = lambda x: F.linear(x, model.down.weight)  # type: ignore[method-assign]


def hooked(model: Net) -> None:
    model.up.register_forward_hook(lambda module, args, result: result * 2)


def other_global(model: Net) -> None:
    globals()["FACTOR"] += 1.0


def swapped(model: Net) -> None:
    model.drop = nn.Sequential(nn.Dropout(0.1))  # type: ignore[assignment]


EDITS: dict[str, Callable[[Net], Any]] = {
    "attribute": lambda model: setattr(model, "scale", 0.25),
    "dict": lambda model: model.options.update(power=3),
    "global": other_global,
    "eval": lambda model: model.eval(),
    "rate": lambda model: setattr(model.drop, "p", 0.2),
    "loss": lambda model: setattr(model, "loss", F.l1_loss),
    "submodule": lambda model: setattr(model, "drop", nn.Identity()),
    "class": lambda model: setattr(model, "drop", Tripled()),
    "path": swapped,
    "frozen": lambda model: model.up.weight.requires_grad_(False),
    "dtype": lambda model: model.double(),
    "tied": lambda model: setattr(model.down, "bias", model.up.bias),
    "forward": replaced_forward,
    "hook": hooked,
    "lambda": lambda model: setattr(model, "loss", lambda z, y: (z - y).sum()),
    "persistent": lambda model: model._non_persistent_buffers_set.add("mean"),
    "more outputs": lambda model: setattr(model, "loss", lambda z, y: (F.mse_loss(z, y), z)),
}


NUMBERS = ("attribute", "dict", "global")  # which the exported graph is given as other sizes are


@pytest.mark.slow_cells("dict", "submodule", "forward")
@pytest.mark.slow_cells("class", "persistent")
@pytest.mark.parametrize("change", EDITS)
def test_a_changed_model_is_traced_again(change: str, exports: list[nn.Module]) -> None:
    model = Net()
    tie = nn.Parameter(torch.zeros(8))
    if change == "tied":
        model.up, model.down = nn.Linear(8, 8), nn.Linear(8, 8)
        model.down.bias = tie
    inputs = (rows(), rows())
    before = trace.trace(model, inputs)
    assert trace.trace(model, inputs).signature == before.signature and len(exports) == 1
    EDITS[change](model)
    if change == "dtype":
        inputs = (inputs[0].double(), inputs[1].double())
    after = trace.trace(model, inputs)
    assert len(exports) == (1 if change in NUMBERS else 2)
    paths = [str(node.meta.get("nn_module_stack")) for node in after.module.graph.nodes]
    unlike = fingerprint(before) != fingerprint(after) or before.signature != after.signature
    assert unlike or (change == "path" and any("drop.0" in path for path in paths))
    if change in NUMBERS:
        exported = trace.trace(copy.deepcopy(model), inputs)
        assert len(exports) == 2 and fingerprint(after) == fingerprint(exported)


CALLS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "fewer": ((rows(),), nullcontext()),
    "none": ((rows(), None), nullcontext()),
    "gradient": ((rows().requires_grad_(), rows()), nullcontext()),
    "dtype": ((rows(), rows().bfloat16()), nullcontext()),
    "autocast": ((rows(), rows()), torch.autocast("cpu", torch.bfloat16)),
}


@pytest.mark.slow_cells("fewer")
@pytest.mark.parametrize("call", CALLS)
def test_another_call_is_traced_again(call: str, exports: list[nn.Module]) -> None:
    model, (inputs, around) = Net(), CALLS[call]
    trace.trace(model, (rows(), rows()))
    with around:
        trace.trace(model, inputs)
    assert len(exports) == 2


class Doubtful(nn.Module):
    """A model whose calls cannot be compared by value."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.how = nn.Linear(8, 8), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "constant":
            return self.up(x + BIAS)
        if self.how == "function":
            return self.up(models.Fivefold.apply(x))
        if self.how == "checkpoint":
            return checkpoint(self.up, x, use_reentrant=True)  # type: ignore[no-any-return]
        return self.up(x)


@pytest.mark.slow_cells("function")
@pytest.mark.parametrize("how", ["constant", "function", "checkpoint"])
def test_what_cannot_be_compared_is_traced_again(how: str, exports: list[nn.Module]) -> None:
    model = Doubtful(how)
    for _ in range(2):
        trace.trace(model, (rows().requires_grad_(),))
    assert len(exports) == 2 and model not in reuse._TRACES


def test_a_custom_function_that_comes_later_is_seen(exports: list[nn.Module]) -> None:
    """It makes the calls that the forward made before, with another backward."""

    def multiply(x: Tensor) -> Tensor:
        return x * 1.0

    model = Doubtful("")
    model.up.register_forward_pre_hook(lambda module, args: (model.first(args[0]),))
    model.first = multiply  # type: ignore[assignment]
    before = trace.trace(model, (rows().requires_grad_(),))
    model.first = models.Fivefold.apply  # type: ignore[assignment]
    after = trace.trace(model, (rows().requires_grad_(),))
    assert len(exports) == 2 and fingerprint(before) != fingerprint(after)


def test_nothing_of_a_model_stays_alive() -> None:
    model = Net()
    trace.trace(model, (rows(),))
    alive = weakref.ref(model), weakref.ref(model.up.weight)
    assert model in reuse._TRACES
    del model
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_the_model_and_the_generators_are_as_they_were(exports: list[nn.Module]) -> None:
    model = Net()
    trace.trace(model, (rows(),))
    state, identities = torch.get_rng_state(), {name: id(v) for name, v in model.named_parameters()}
    trace.trace(model, (rows(),))
    assert len(exports) == 1 and torch.equal(state, torch.get_rng_state())
    assert identities == {name: id(v) for name, v in model.named_parameters()}
    assert not model._forward_hooks and not model._forward_pre_hooks
