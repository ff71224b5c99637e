"""What people do with a module: modes, attributes, classes, hooks, copies, numbers that they
assign, write and draw, states. The same is done to a plain one (rank_scripts/module_ranks.py).
"""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.runtime.training.module_state import ModuleState
from launch import launched

slow = pytest.mark.slow
Facts = Callable[[str], dict[str, Any]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.config, self.width = {"layers": 2}, 8

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()

    def count(self) -> int:
        return len(self.blocks)


@pytest.fixture
def par() -> Any:
    return autopar.parallelize(Net(), 1, (torch.ones(4, 8),))


def test_it_is_the_users_module(par: Any) -> None:
    assert isinstance(par, Net) and isinstance(par, autopar.ParallelModule)
    assert type(par).__name__ == "Net" and repr(par) == repr(Net())
    assert par.blocks[1][0].weight is par.get_parameter("blocks.1.0.weight")
    assert type(par.blocks[0][0]) is nn.Linear and type(par.blocks) is nn.ModuleList
    assert par.config == {"layers": 2} and par.width == 8 and par.count() == 2
    assert par.device == torch.device("cpu")
    with pytest.raises(AttributeError, match="has no attribute 'depth'"):
        _ = par.depth


class Named(Net):
    """A model with a name that a parallel module has for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 3

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.rows


def test_a_name_that_both_have_is_said_and_its_trace_sees_the_users(
    capsys: pytest.CaptureFixture[str],
) -> None:
    net = Named()
    par: Any = autopar.parallelize(net, 1, (torch.ones(4, 8),))
    assert "a parallel module has its own rows: what Named means" in capsys.readouterr().err
    assert par.rows() == slice(0, 4)
    torch.testing.assert_close(par(torch.ones(4, 8)), net(torch.ones(4, 8)))
    torch.testing.assert_close(par(torch.ones(2, 8)), net(torch.ones(2, 8)))  # planned anew
    assert par.rows() == slice(0, 4)


def test_hooks_of_the_root_run(par: Any) -> None:
    seen: list[Any] = []
    par.register_forward_hook(lambda module, inputs, result: seen.append(result))
    result = par(torch.ones(4, 8))
    assert seen[0] is result


class Noisy(Net):
    """A model with an attribute whose inner state is not compared."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.noise is None)


def test_what_cannot_be_compared_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    autopar.parallelize(Noisy(), 1, (torch.ones(4, 8),))
    said = capsys.readouterr().err
    assert "forward reads noise (random.Random), and a change inside of it is not seen" in said


def test_a_copy_trains_apart(par: Any) -> None:
    x = torch.ones(4, 8)
    twin = copy.deepcopy(par)
    before = par(x).item()
    twin(x).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert par(x).item() == before != twin(x).item()
    assert all(p.grad is None for p in par.parameters())
    assert (
        twin._autopar.watch.name
        != par._autopar.watch.name
        != copy.deepcopy(par)._autopar.watch.name
    )


@pytest.mark.slow
def test_a_copy_has_hooks_of_its_own_and_outlives_the_first() -> None:
    x, seen = torch.ones(4, 8), list[Any]()
    first = autopar.parallelize(Net(), 1, (x,))
    twin = copy.deepcopy(first)
    twin.register_forward_hook(lambda module, inputs, result: seen.append(module))
    first(x)
    assert seen == []
    twin(x)
    assert seen == [twin]
    del first
    gc.collect()
    state = {name: value + 1 for name, value in Net().state_dict().items()}
    twin.load_state_dict(state)
    weight = twin.get_parameter("blocks.0.0.weight")
    torch.testing.assert_close(weight.detach(), state["blocks.0.0.weight"])


def test_a_state_of_another_shape_is_refused_as_torch_does(par: Any) -> None:
    state = Net().state_dict()
    state["blocks.0.0.weight"] = torch.ones(3, 3)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.0\.weight"):
        par.load_state_dict(state)


# -- on ranks --------------------------------------------------------------------------------------
@pytest.fixture
def facts(tmp_path: Path) -> Facts:
    """What the two ranks saw in a task."""
    return lambda task: launched(tmp_path, 2, task, script="module_ranks.py")[task]


def same(a: Any, b: Any) -> bool:
    """Whether two values, or two lists of lists of values, are equal but for roundings."""
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 1e-5 * max(1.0, abs(b))
    return type(a) is type(b) and bool(a == b)


def apart(facts: dict[str, Any], *but: str) -> dict[str, Any]:
    """The pairs of what came out of the parallel and of the plain module that are not the same."""
    return {name: p for name, p in facts.items() if name not in but and not same(*p)}


PAIRS = ("modes", "classes", "read", "frozen", "traced hooks", "copies", "complexes", "attributes")


@pytest.mark.slow_cells(
    "attributes", "classes", "complexes", "copies", "frozen", "modes", "traced hooks",
)  # fmt: skip
@pytest.mark.parametrize("task", PAIRS)
def test_what_people_do_gives_what_one_device_gives(facts: Facts, task: str) -> None:
    pairs = facts(task)
    assert len(pairs) >= 2 and apart(pairs) == {}


@pytest.mark.slow
def test_assigned_numbers_and_gradients_are_those_that_the_graph_reads(
    facts: Facts,
) -> None:
    pairs = facts("assigned fsdp")
    assert len(pairs) == 9 and apart(pairs, "another shape", "another dtype") == {}
    assert "InputError: data of a parallel tensor of shape (32, 16)" in pairs["another shape"]
    assert "convert it with .to(torch.float32)" in pairs["another dtype"]


@pytest.mark.parametrize("task", ["written", pytest.param("assigned megatron", marks=slow)])
def test_writes_and_draws_reach_the_rank_that_holds_them(facts: Facts, task: str) -> None:
    pairs = facts(task)
    assert len(pairs) > 8 and apart(pairs, "another shape", "another dtype") == {}


def test_states_have_all_that_the_plain_ones_have(facts: Facts) -> None:
    pairs = facts("states")
    assert apart(pairs, "refused", "whole on every rank") == {}
    for said in pairs["refused"]:
        assert said.startswith("InputError: this rank holds a part of (")
        assert (
            "get_model_state_dict(par" in said and "if rank == 0: torch.save(state, path)" in said
        )
    assert pairs["whole on every rank"] == "Tensor"


@pytest.mark.slow
def test_numbers_that_change_are_inputs_where_forward_computes_with_them(
    facts: Facts,
) -> None:
    pairs = facts("numbers")
    for how in ("arithmetic", "half", "isinstance", "exp", "branch"):
        assert same(*pairs[how]), how
    # one graph for every beta, and one for every beta and gain
    assert pairs["arithmetic: graphs"] == pairs["half: graphs"] == 2
    assert pairs["arithmetic: keyed"] == pairs["half: keyed"] == []
    for how in ("isinstance", "exp", "branch"):
        assert pairs[f"{how}: graphs"] > 3, how
        assert pairs[f"{how}: keyed"] == ["the argument beta"]


def test_what_no_graph_can_know_is_refused_by_name(facts: Facts) -> None:
    errors = facts("refusals")
    assert "call the parallel model" in errors["submodule"]
    assert "parameter.full_tensor()" in errors["submodule"]
    assert "InputError: a hook of 0 (Linear) was added or taken away" in errors["hook"]
    assert errors["no hook"] == "nothing was raised" and errors["hook of the root"] == 1
    assert "InputError: 2.bias was taken from the model" in errors["no bias"]
    assert "InputError: the submodules of Sequential were replaced" in errors["replaced"]
    assert "InputError: parameter 0.weight is a Parameter of" in errors["a plain parameter"]


@pytest.mark.slow
def test_ranks_whose_modules_differ_all_hear_of_it(facts: Facts) -> None:
    everyones = facts("differ")["said"]
    assert len(everyones) == 2
    for said in everyones:
        assert said.startswith("RankError: ") and "tau is 0.5, was 1.0" in said


def test_a_property_that_forward_reads_is_not_computed_for_the_state() -> None:
    """A parametrized weight is a property: of a parallel module's parameters it cannot be computed
    outside a call (test_odd_ranks.py trains one on ranks).
    """

    class Computed(nn.Linear):
        @property
        def scale(self) -> Tensor:
            raise AssertionError("the property was computed")

    root = nn.Sequential(Computed(2, 2))
    reads = {("0", "scale"), ("0", "weight"), ("0", "missing")}
    assert ModuleState(root, reads).holds()
