"""verify holds the traced graph against the model itself: what a trace loses is lost to both of its
other sides.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
import models
from autopar import VerificationError
from autopar.ops import custom_functions
from autopar.passes import trace
from autopar.passes.trace import original
from autopar.passes.trace.original import compare_original
from custom_functions import KINDS, Net, rows


def test_a_backward_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """`h + f(h)`: every parameter has a gradient, and one is off by half."""
    autopar.verify(Net(KINDS["straight through"]), 2, (rows(),), layout="ddp")
    monkeypatch.setattr(custom_functions, "_is_recorded", lambda function: True)
    with pytest.raises(VerificationError, match=r"Net computes .* gradient of up\.\w+ is off by 5"):
        autopar.verify(Net(KINDS["straight through"]), 2, (rows(),), layout="ddp")


def test_a_model_without_values_or_too_large_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> None:
        raise AssertionError("the model was run")

    model, x = Net(KINDS["straight through"]), rows()
    program = trace.trace(model, (x,))
    monkeypatch.setattr(original, "_of_model", run)
    assert not compare_original(model, program, ((x,), {}), flops=4e10)
    assert not compare_original(model, program, ((x.to("meta"),), {}), flops=1.0)
    with pytest.raises(AssertionError):
        compare_original(model, program, ((x,), {}), flops=3e10)


class Odd(nn.Module):
    """Dropout, a norm with statistics, a counter, an input with a gradient, several results."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = F.dropout(self.norm(self.up(x)), 0.4)
        h = h + F.dropout(self.lstm(h[None])[0][0], 0.1)
        return {"out": self.down(h), "count": 3, "signs": h > 0}


def test_the_model_is_left_as_it_was_and_draws_what_the_graph_draws() -> None:
    torch.manual_seed(0)
    model, x = Odd(), rows().requires_grad_()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    identities = [id(p) for p in model.parameters()]
    program = trace.trace(model, (x,))
    state, numbers = torch.get_rng_state(), random.getstate()
    assert compare_original(model, program, ((x,), {}), flops=1.0)
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == numbers
    assert identities == [id(p) for p in model.parameters()]
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert all(p.grad is None for p in (*model.parameters(), x))


def test_a_buffer_that_the_graph_writes_otherwise_is_found() -> None:
    model, x = Odd(), rows()
    program = trace.trace(model, (x,))
    model.norm.momentum = 0.5
    with pytest.raises(VerificationError, match=r"buffer norm\.running_\w+ is off by"):
        compare_original(model, program, ((x,), {}), flops=1.0)


@pytest.mark.slow_cells("dtype0-llama", "dtype1-gpt2", "dtype1-llama")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_trace_is_not_refused(name: str, dtype: torch.dtype) -> None:
    model, args, kwargs = getattr(models, name)()
    model = model.to(dtype)
    program = trace.trace(model, args, kwargs)
    assert compare_original(model, program, (args, kwargs), flops=1.0)


class Idle(nn.Module):
    """Draws once for nothing, which export leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(8, 8), 1.0

    def forward(self, x: Tensor) -> Tensor:
        F.dropout(x, 0.5)
        return F.dropout(self.up(x) * self.scale, 0.3).square().sum()


def test_a_draw_that_nothing_uses_is_no_difference_and_hides_none() -> None:
    model, x = Idle(), rows()
    program = trace.trace(model, (x,))
    assert compare_original(model, program, ((x,), {}), flops=1.0)
    model.scale = 1.01
    with pytest.raises(VerificationError, match="result is off by"):
        compare_original(model, program, ((x,), {}), flops=1.0)


class Transposed(nn.Module):
    """Draws for a copy of a transposed tensor, which a trace leaves out: then the drawn entries lie
    in another order in memory.
    """

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw, self.rate = draw, 0.3
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.draw(self.up(x).transpose(0, 1).contiguous()), self.rate)
        return self.down(h).square().sum()


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "no other draw": lambda h: h,
    "channels": lambda h: F.dropout2d(h[None].permute(0, 2, 1, 3).contiguous(), 0.5)[0],
    "alpha": lambda h: F.alpha_dropout(h, 0.4, True),
    "rand_like": lambda h: h * (torch.rand_like(h) > 0.5),
    "randn_like": lambda h: h + torch.randn_like(h),
    "in place": lambda h: h + torch.empty_like(h).normal_(),
    "probabilities": lambda h: h * torch.bernoulli(h.detach().sigmoid()),
    "exponential": lambda h: F.gumbel_softmax(h),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "poisson": lambda h: h * torch.poisson(h.detach().exp()),
    "view of the result": lambda h: F.dropout(h.transpose(0, 1), 0.3).transpose(0, 1).view(-1, 8),
}


@pytest.mark.slow_cells("channels")
@pytest.mark.slow_cells("probabilities", "rrelu")
@pytest.mark.parametrize("name", DRAWS)
def test_the_order_of_memory_in_which_numbers_are_drawn_is_no_difference(name: str) -> None:
    torch.manual_seed(0)
    model, x = Transposed(DRAWS[name]), torch.randn(4, 6, 8)
    program = trace.trace(model, (x,))
    assert compare_original(model, program, ((x,), {}), flops=1.0)


@pytest.mark.parametrize("rate", [0.29, 0.0])
def test_another_rate_and_a_dropout_that_is_left_out_are_found(rate: float) -> None:
    torch.manual_seed(0)
    model, x = Transposed(DRAWS["no other draw"]), torch.randn(4, 6, 8)
    program = trace.trace(model, (x,))
    model.rate = rate
    with pytest.raises(VerificationError, match="result is off by"):
        compare_original(model, program, ((x,), {}), flops=1.0)
    (dropout,) = program.module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.dropout.default
    )
    dropout.replace_all_uses_with(dropout.args[0])
    program.module.recompile()
    model.rate = 0.3
    with pytest.raises(VerificationError, match="result is off by"):
        compare_original(model, program, ((x,), {}), flops=1.0)


def test_verify_takes_dropout_of_a_copied_transpose() -> None:
    torch.manual_seed(0)
    model = Transposed(DRAWS["no other draw"])
    assert autopar.verify(model, 2, (torch.randn(4, 6, 8),), layout="ddp").ranks == 2


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_a_nan_against_a_number_is_off(odd: float) -> None:
    number, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, odd])
    assert (
        original._error(other, number, 0.0) == original._error(number, other, 0.0) == float("inf")
    )
    assert original._error(other, other.clone(), 0.0) == 0.0
