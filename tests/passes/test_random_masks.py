"""Masks of random numbers become dropout: the same on every rank, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.errors import PlanError
from autopar.passes.random_masks import random_masks
from autopar.planner.planner import trace_model

KEEP = 0.75


def stochastic_depth(x: Tensor) -> Tensor:
    keep = KEEP + torch.rand((x.shape[0], 1, 1), dtype=x.dtype, device=x.device)
    return x.div(KEEP) * keep.floor_()


def stochastic_depth_by_bernoulli(x: Tensor) -> Tensor:
    return x * x.new_empty((x.shape[0], 1, 1)).bernoulli_(KEEP).div_(KEEP)


def masked(x: Tensor) -> Tensor:
    return x.masked_fill(torch.rand(x.shape[:2])[..., None] < 1 - KEEP, 0.0)


def kept_above(x: Tensor) -> Tensor:
    return torch.where(torch.rand_like(x) >= 1 - KEEP, x, -x)


def kept_at_most(x: Tensor) -> Tensor:
    return torch.where(torch.rand_like(x) <= KEEP, x, -x)


def dropped_above(x: Tensor) -> Tensor:
    return torch.where(torch.rand_like(x) > KEEP, -x, x)


DRAWS = (
    stochastic_depth,
    stochastic_depth_by_bernoulli,
    masked,
    kept_above,
    kept_at_most,
    dropped_above,
)


@pytest.mark.parametrize(
    "module", [nn.Dropout1d(0.25), nn.AlphaDropout(0.25), nn.FeatureAlphaDropout(0.25)], ids=str
)
def test_torch_s_other_dropouts_are_masks(module: nn.Module) -> None:
    check = autopar.verify(Model(module), 4, inputs(), layout="megatron")
    assert max(check.loss_error, check.grad_error, check.step_error) < 1e-12


class Model(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.draw = nn.Linear(16, 32), nn.Linear(32, 16), draw

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.draw(self.down(F.gelu(self.up(x))))).square().mean()


def inputs() -> tuple[Tensor]:
    return (torch.randn(8, 4, 16),)


@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)
@pytest.mark.parametrize("layout", ["megatron", "fsdp"])
def test_every_layout_draws_the_same(draw: Callable[[Tensor], Tensor], layout: str) -> None:
    check = autopar.verify(Model(draw), 4, inputs(), layout=layout)
    assert max(check.loss_error, check.grad_error, check.step_error) < 1e-12


@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)
def test_as_many_are_kept_as_on_one_device(draw: Callable[[Tensor], Tensor]) -> None:
    """The part of ones that a draw leaves alone, of the model and of its graph."""

    class Draw(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return draw(x)

    torch.manual_seed(0)
    ones = torch.ones(4000, 1, 1)
    program = random_masks(trace_model(Draw(), (ones,)))
    for result in (draw(ones), program.module(ones)[0]):
        assert len(result.unique()) == 2
        assert float((result == result.max()).float().mean()) == pytest.approx(KEEP, abs=0.03)
        assert float(result.max()) in (1.0, pytest.approx(1 / KEEP))


def test_every_call_draws_anew() -> None:
    par = autopar.parallelize(Model(stochastic_depth), 1, (x := inputs())[:1])
    losses = {float(par(*x).detach()) for _ in range(4)}
    assert len(losses) > 1


class Other(nn.Module):
    """Numbers that are no mask, or more than one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand_like(x)
        if self.how == "two masks":  # of the same numbers
            return torch.where(drawn < 0.5, x, 0.0) + torch.where(drawn >= 0.5, 2 * x, 0.0)
        if self.how == "beyond one":
            return x * (drawn + 1.5).floor()
        return x * (drawn < x)


@pytest.mark.parametrize("how", ["two masks", "beyond one", "of a tensor"])
def test_other_uses_of_the_numbers_are_refused(how: str) -> None:
    with pytest.raises(PlanError, match="the model draws random numbers"):
        autopar.plan(nn.Sequential(nn.Linear(16, 16), Other(how)), 4, inputs())
