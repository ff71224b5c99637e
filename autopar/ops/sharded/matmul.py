"""Linear layers that copy an operand into another memory order; the pass kernel_choice emits them.

In y = x · Wᵀ, with x row by row in memory and W stored (n, k), y reads W column by column ("NT");
the gradient of x, dy · W, reads both row by row ("NN"); that of W, dyᵀ · x, reads dy column by
column ("TN"). Where calibration found a copy into the other order faster, it is made first.
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
    """Return x (..., k) · weight (n, k)ᵀ + bias (n): (..., n).

    `copied` says which operand is copied first, in the forward matmul, in that for the gradient of
    x, and in that for the gradient of the weight.
    """
    # Autocast, which rejects meta tensors, casts the inputs of torch's ops, not of this function.
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
        left, right = _copy_operand(x, weight.t(), copied[0])
        return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, for_x, for_weight = ctx.copied
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        dx = torch.mm(*_copy_operand(dy, weight, for_x)) if wants_x else None
        dw = torch.mm(*_copy_operand(dy.t(), x, for_weight)) if wants_weight else None
        return dx, dw, dy.sum(0) if wants_bias else None, None


def _copy_operand(left: Tensor, right: Tensor, copied: Copied) -> tuple[Tensor, Tensor]:
    """Return both operands, one of them in the other memory order."""
    if copied == "left":
        return other_order(left), right
    return left, (other_order(right) if copied == "right" else right)


def other_order(x: Tensor) -> Tensor:
    """Return the matrix x row by row in memory where it lay column by column, and the reverse."""
    return x.t().contiguous().t() if x.is_contiguous() else x.contiguous()
