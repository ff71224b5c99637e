"""What test_padding.py and test_uneven_ranks.py start, as on_ranks.py says: sizes that no axis
divides, on four ranks and on one device. A task is "CASE:LAYOUT", or "states".
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import autopar
import moe_models
import padded_models
import uneven_batches
import uneven_sequences
from autopar.planner.request import Grid4D, GridContext, GridEP, GridHSDP, Layouts
from autopar.world import ranks
from on_ranks import Facts, everywhere, run_tasks, unsharded

Inputs = dict[str, Tensor]
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3, eps=1e-3)
LAYOUTS: dict[str, Layouts] = {
    name: name for name in ("auto", "ddp", "fsdp", "megatron", "megatron-sp", "4d", "2.5d", "cp")
} | {
    "ep": "ep",
    "ep x megatron": GridEP(expert=2, tensor=2),
    "fsdp x megatron": GridHSDP(shard=2, tensor=2),
    "rows x 4d": Grid4D(x=2, z=2),
    "cp x fsdp": GridContext(2),
}


class Case(NamedTuple):
    """A model in float64, the inputs that it is planned for, and those of each step."""

    model: nn.Module
    planned: Inputs
    steps: list[Inputs]


class Unrounded(TorchFunctionMode):
    """A cast of a float64 tensor to float32 returns the tensor."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        to_float32 = function is Tensor.float or (
            function is Tensor.to and torch.float32 in (*args[1:], *(kwargs or {}).values())
        )
        if to_float32 and args[0].dtype == torch.float64:
            return args[0]
        return function(*args, **(kwargs or {}))


class InFloat64(nn.Module):
    """A model in float64 throughout: transformers' norms, routers and losses round to float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model.double()

    def forward(self, **inputs: Tensor) -> Tensor:
        with Unrounded():
            return self.inner(**inputs)


def case(model: nn.Module, planned: Inputs, *others: Inputs) -> Case:
    """Three steps on the inputs that are planned for, or one on these and two on the others."""
    return Case(InFloat64(model), planned, [planned, *(others or (planned,)) * 2])


def first_rows(inputs: Inputs, rows: int) -> Inputs:
    return {name: x[:rows] for name, x in inputs.items()}


def of_experts(model: nn.Module) -> nn.Module:
    """Its grouped matmuls have no float64 on one device."""
    model.config._experts_implementation = "eager"
    return padded_models.Losses(model)


def three_experts() -> Case:
    with mock.patch.object(moe_models, "EXPERTS", 3):
        model, _, inputs = moe_models.mixtral()
    return case(of_experts(model), inputs)


def tokens_of_experts() -> Case:
    model, _, inputs = moe_models.mixtral()
    return case(*uneven_sequences.cut((of_experts(model), inputs), 7))


def last_batch() -> Case:
    """Planned for eight rows, of which the last batches lack one."""
    model, eight = uneven_batches.gpt2(8)
    return case(model, eight, first_rows(eight, 7))


def everything() -> Case:
    """Words, heads, rows and tokens at once."""
    model, inputs = uneven_sequences.cut(padded_models.gpt2(), 7)
    return case(model, first_rows(inputs, 7))


CASES: dict[str, Callable[[], Case]] = {
    "words and heads": lambda: case(*padded_models.gpt2()),
    "25 heads": lambda: case(*padded_models.gpt2(heads=25)),
    "three experts": three_experts,
    "last batch": last_batch,
    "seven rows": lambda: case(*uneven_batches.gpt2(7)),
    "seven tokens": lambda: case(*uneven_sequences.llama(7)),
    "seven tokens of experts": tokens_of_experts,
    "everything": everything,
}


def largest_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative to the largest entry of each; all ranks gather each tensor."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    errors = [
        float((unsharded(actual[name]) - value).abs().max() / value.abs().max().clamp(min=1e-6))
        for name, value in expected.items()
    ]
    return max(errors)


def named(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# -- each layout of a case -------------------------------------------------------------------------
class Trained(NamedTuple):
    """What a model computes: the loss and the gradients of each step, the parameters after them,
    and a loss in eval.
    """

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]
    unrecorded: float


def trained(model: nn.Module, steps: Iterable[Inputs]) -> Trained:
    optimizer = OPTIMIZER(model.parameters())
    losses, gradients_of_steps = [], []
    for inputs in steps:
        optimizer.zero_grad()
        loss = model(**inputs)
        loss.backward()
        losses.append(float(loss))
        gradients_of_steps.append(
            {name: unsharded(x).clone() for name, x in gradients(model).items()}
        )
        optimizer.step()
    with torch.no_grad():
        unrecorded = float(model.eval()(**inputs))
    return Trained(
        losses, gradients_of_steps, {n: unsharded(x) for n, x in named(model).items()}, unrecorded
    )


@functools.cache
def on_one_device(name: str) -> tuple[Case, Trained]:
    own = CASES[name]()
    return own, trained(copy.deepcopy(own.model), own.steps)


def one_layout(name: str, layout: str) -> Facts:
    """Three steps of AdamW against one device."""
    own, expected = on_one_device(name)
    par = autopar.parallelize(own.model, inputs=own.planned, layout=LAYOUTS[layout])
    actual = trained(par, own.steps)
    plans = [graph.program.plan for graph in (par._autopar.first, *par._autopar.graphs.others)]
    pairs = zip(
        [*actual.losses, actual.unrecorded], [*expected.losses, expected.unrecorded], strict=True
    )
    return {
        "mesh": str(par.plan.mesh),
        "padding": [[(each.size, each.padded) for each in plan.padding] for plan in plans],
        "losses": [abs(loss / other - 1) for loss, other in pairs],
        "gradients": [
            largest_error(*each) for each in zip(actual.gradients, expected.gradients, strict=True)
        ],
        "parameters": largest_error(actual.parameters, expected.parameters),
        "losses agree": len(set(map(tuple, everywhere(actual.losses)))) == 1,
    }


# -- what is saved and read ------------------------------------------------------------------------
def states() -> Facts:
    """Three steps of AdamW with clipped gradients, then what is saved and read, and a call in
    another mode on fewer rows.
    """
    model, inputs = padded_models.gpt2()
    model, fresh = model.double(), copy.deepcopy(model.double())
    par = autopar.parallelize(model, inputs=inputs, layout="megatron")
    facts: Facts = {"padding": [(x.size, x.padded) for x in par.plan.padding], "steps": []}
    weight = par.get_parameter("model.transformer.wte.weight")
    facts["rows"] = everywhere(weight.to_local().shape[0])
    facts["shape"] = list(weight.shape)
    optimizers = [OPTIMIZER(m.parameters()) for m in (model, par)]
    for _ in range(3):
        for each, optimizer in zip((model, par), optimizers, strict=True):
            optimizer.zero_grad()
            each(**inputs).backward()
        facts["steps"].append(largest_error(gradients(par), gradients(model)))
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (model, par)]
        facts["norm"] = abs(float(unsharded(norms[1])) / float(norms[0]) - 1)
        for optimizer in optimizers:
            optimizer.step()
    facts["parameters"] = largest_error(named(par), named(model))
    state = {name: unsharded(x) for name, x in par.state_dict().items()}
    facts["state"] = largest_error(state, dict(model.state_dict()))
    folder = ranks.from_rank_0(tempfile.mkdtemp())
    par.save_pretrained(folder)
    other = autopar.parallelize(fresh, inputs=inputs, layout="megatron")
    other.load_weights(folder)
    facts["loaded"] = largest_error(named(other), named(model))
    other.load_state_dict(fresh.state_dict())
    facts["taken"] = largest_error(named(other), named(fresh))
    fewer = first_rows(inputs, 4)
    with torch.no_grad():
        pair = [float(m.eval()(**fewer)) for m in (model, par)]
    facts["fewer"] = abs(pair[1] / pair[0] - 1)
    facts["unshard"] = largest_error(named(par.unshard()), named(model))
    return facts


TASKS = {
    f"{name}:{layout}": partial(one_layout, name, layout) for name in CASES for layout in LAYOUTS
}


if __name__ == "__main__":
    run_tasks({"states": states, **TASKS})
