"""The modules below a parallel model, its copies, and states of other models and layouts."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import InputError
from autopar.runtime.training.parts import Part, mirror
from launch import launched


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


def test_modules_have_the_places_of_the_original(par: Any) -> None:
    assert par.blocks[1][0].weight is par.get_parameter("blocks.1.0.weight")
    assert len(par.blocks[0]) == 2 and "Part(Tanh)" in repr(par)
    shared = nn.Linear(2, 2)
    both = mirror(nn.Sequential(shared, shared))
    assert both[0] is both[1] and isinstance(both[0], Part)  # type: ignore[index]


def test_they_run_nothing_and_refuse_hooks(par: Any) -> None:
    with pytest.raises(InputError, match="Sequential of a parallel model runs within it alone"):
        par.blocks[0](torch.ones(4, 8))
    for name in ("forward_hook", "forward_pre_hook", "full_backward_hook"):
        with pytest.raises(InputError, match="would never be called"):
            getattr(par.blocks[0], f"register_{name}")(print)
    seen: list[Any] = []
    par.register_forward_hook(lambda module, inputs, result: seen.append(result))
    result = par(torch.ones(4, 8))
    assert seen[0] is result


def test_plain_values_of_the_original_are_there(par: Any) -> None:
    assert par.config == {"layers": 2} and par.width == 8
    assert par.device == torch.device("cpu")
    with pytest.raises(AttributeError, match=r"has no 'count'.* call a method on the original"):
        par.count()
    with pytest.raises(AttributeError, match="has no 'depth'"):
        _ = par.depth


def test_a_copy_trains_apart(par: Any) -> None:
    x = torch.ones(4, 8)
    twin = copy.deepcopy(par)
    before = par(x).item()
    twin(x).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert par(x).item() == before != twin(x).item()
    assert all(p.grad is None for p in par.parameters())
    assert twin._watch.name != par._watch.name != copy.deepcopy(par)._watch.name


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


def test_on_ranks_averages_and_states_are_those_of_one_device(tmp_path: Any) -> None:
    facts = launched(tmp_path, 2, "fsdp", "megatron", script="parts_ranks.py")
    for layout in ("fsdp", "megatron"):
        assert set(facts[layout]) == {"average", "average in eval mode", "plain", "other layout"}
        assert all(apart < 1e-6 for apart in facts[layout].values()), facts[layout]
