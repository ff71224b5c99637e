"""Trials of forward and backward: what commutes with slicing, and no kernel on shapes that its own
fake implementation refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.utils import parametrizations, weight_norm

import autopar
from autopar.ir.sharding_rule import OpShardingRule
from autopar.ops.rules.trials import rule_by_trial

KERNEL = "autopar_trials"


class _Own(Function):
    """y = 2x, whose backward is another function of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.own = backward
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.own(grad), None


class _Scaled(Function):
    """y = x · w, whose backward gives w the largest entry of the rows, not their sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).amax(0)


def own(backward: Callable[[Tensor], Tensor]) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    return lambda tensors: [_Own.apply(tensors[0], backward)]


def split_dims(rule: OpShardingRule | None) -> list[int]:
    """The dims of the first operand that may be split."""
    if rule is None:
        return []
    dims = rule.operands[0]
    assert dims is not None
    return [dim for dim, names in enumerate(dims) if rule.splittable(names[0])]


BACKWARDS = {
    "its own": (lambda g: 2 * g, [0, 1], False),
    "straight through": (lambda g: g, [0, 1], False),
    "reversed": (lambda g: -g, [0, 1], False),
    "the mean of the rows": (lambda g: g - g.mean(0), [1], False),
    "normed over the last dim": (lambda g: g / g.norm(dim=-1, keepdim=True), [0], True),
    "clipped": (lambda g: g.clamp(-1e3, 1e3), [0, 1], True),
    "clipped by the norm": (lambda g: g / max(1.0, float(g.norm())), [], False),
    "random": (lambda g: g * torch.rand_like(g), [], False),
    "failing": (lambda g: g.no_such_method(), [], False),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_the_backward_must_commute_as_well(name: str) -> None:
    backward, dims, nonlinear = BACKWARDS[name]
    rule = rule_by_trial(own(backward), [torch.empty(4, 6)])
    assert split_dims(rule) == dims
    assert (rule is not None and rule.nonlinear) == nonlinear


def test_gradients_of_what_is_not_cut_must_add_up() -> None:
    values = [torch.empty(4, 6), torch.empty(6)]
    assert split_dims(rule_by_trial(lambda t: [t[0] * t[1]], values)) == [0, 1]
    assert split_dims(rule_by_trial(lambda t: [_Scaled.apply(*t)], values)) == [1]


def test_what_is_computed_in_float32_inside_is_compared_by_its_own_rounding() -> None:
    def normed(tensors: Sequence[Tensor]) -> list[Tensor]:
        x, w = tensors
        return [(torch.nn.functional.normalize(x.float(), dim=-1) * w.float()).to(x.dtype)]

    assert split_dims(rule_by_trial(normed, [torch.empty(64, 6), torch.empty(6)])) == [0]


# -- kernels ---------------------------------------------------------------------------------------
@pytest.fixture(scope="module", autouse=True)
def _library() -> Iterator[None]:
    """An op whose fake implementation checks its shapes, and whose kernel trusts its callers: what
    it is called with is noted.
    """
    library = torch.library.Library(KERNEL, "FRAGMENT")
    for name in ("trusting", "unimagined"):
        library.define(f"{name}(Tensor x, Tensor y) -> Tensor")
        library.impl(name, _trusting, "CPU")
    library.impl("trusting", _checked, "Meta")
    yield
    library._destroy()


SEEN: list[tuple[torch.Size, torch.Size]] = []


def _trusting(x: Tensor, y: Tensor) -> Tensor:
    SEEN.append((x.shape, y.shape))
    return x * y.flatten()[: x.shape[0]].unsqueeze(-1)


def _checked(x: Tensor, y: Tensor) -> Tensor:
    assert x.shape[0] == y.shape[0]
    return torch.empty_like(x)


def run(name: str) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    return lambda tensors: [getattr(getattr(torch.ops, KERNEL), name)(*tensors)]


def test_no_kernel_sees_shapes_that_its_fake_implementation_refuses() -> None:
    SEEN.clear()
    rule = rule_by_trial(run("trusting"), [torch.empty(4, 6), torch.empty(4)])
    assert split_dims(rule) == [0, 1]
    assert SEEN and all(x[0] == y[0] for x, y in SEEN)


def test_an_op_without_a_fake_implementation_is_not_tried() -> None:
    SEEN.clear()
    assert rule_by_trial(run("unimagined"), [torch.empty(4, 6), torch.empty(4)]) is None
    assert not SEEN


def test_a_kernel_that_makes_other_shapes_than_it_says_is_not_split() -> None:
    def other(tensors: Sequence[Tensor]) -> list[Tensor]:
        x = tensors[0]
        return [x if type(x) is Tensor else x[:, :3]]

    assert rule_by_trial(other, [torch.empty(4, 6)]) is None


# -- in models -------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("norm", [weight_norm, parametrizations.weight_norm])
def test_weight_norm_is_planned_and_right(norm: Any, dim: int | None) -> None:
    """Its kernel frees memory twice where the norms are fewer than the rows."""
    model = nn.Sequential(norm(nn.Linear(6, 8), dim=dim), nn.Tanh(), nn.Linear(8, 4))
    for layout, world in (("ddp", 2), ("megatron", 4)):
        autopar.verify(model, world, (torch.randn(4, 6),), layout=layout)
