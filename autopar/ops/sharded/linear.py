"""Products whose operands are copied into another order in memory where calibration found that this
is faster than taking them as they come.

Of y = x · Wᵀ, with x row by row and W stored (n, k): y takes W column by column ("NT"), the
gradient of x, dy · W, takes both row by row ("NN"), that of W, dyᵀ · x, takes dy column by column
("TN").
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from autopar.world import Copied


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, copied: tuple[Copied, Copied, Copied]
) -> Tensor:
    """x (..., k) · weight (n, k)ᵀ + bias (n): (..., n). `copied`: which operand is copied first, in
    the product itself, in that for the gradient of x, in that for the gradient of the weight.
    """
    # Autocast, which knows no meta tensors, casts what autograd knows, not this.
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        return functional.linear(x, weight, bias)
    rows = _Linear.apply(x.flatten(0, -2), weight, bias, copied)
    return rows.unflatten(0, x.shape[:-1])


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, copied: tuple[Copied, ...]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.copied = copied
        left, right = _ordered(x, weight.t(), copied[0])
        return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, for_x, for_weight = ctx.copied
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        dx = torch.mm(*_ordered(dy, weight, for_x)) if wants_x else None
        dw = torch.mm(*_ordered(dy.t(), x, for_weight)) if wants_weight else None
        return dx, dw, dy.sum(0) if wants_bias else None, None


def _ordered(left: Tensor, right: Tensor, copied: Copied) -> tuple[Tensor, Tensor]:
    if copied == "left":
        return other_order(left), right
    return left, (other_order(right) if copied == "right" else right)


def other_order(x: Tensor) -> Tensor:
    """The matrix x, row by row in memory where it lay column by column, and the reverse."""
    return x.t().contiguous().t() if x.is_contiguous() else x.contiguous()
