"""Softmax and log-softmax over a split dim: the maximum, the sum of exponentials and, backward, one
row sum are reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from autopar.sharded.precision import widen
from autopar.wire import total


def softmax(x: Tensor, dim: int, axes: Sequence[str], mesh: str) -> Tensor:
    """Softmax over `dim`, which is split over `axes` (any digits); the result is split as x is."""
    return _Softmax.apply(x, dim, tuple(axes), mesh)


def log_softmax(x: Tensor, dim: int, axes: Sequence[str], mesh: str) -> Tensor:
    """The logarithm of `softmax`, without its underflow."""
    return _LogSoftmax.apply(x, dim, tuple(axes), mesh)


class _Softmax(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axes: tuple[str, ...], mesh: str) -> Tensor:
        wide = widen(x)
        exp = torch.exp(wide - total(wide.amax(dim, keepdim=True), axes, mesh, "max"))
        y = (exp / total(exp.sum(dim, keepdim=True), axes, mesh)).to(x.dtype)
        ctx.save_for_backward(y)
        ctx.facts = dim, axes, mesh
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        dim, axes, mesh = ctx.facts
        product = widen(grad) * widen(y)
        whole = total(product.sum(dim, keepdim=True), axes, mesh)
        return (product - widen(y) * whole).to(grad.dtype), None, None, None


class _LogSoftmax(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axes: tuple[str, ...], mesh: str) -> Tensor:
        wide = widen(x)
        shifted = wide - total(wide.amax(dim, keepdim=True), axes, mesh, "max")
        y = (shifted - total(torch.exp(shifted).sum(dim, keepdim=True), axes, mesh).log()).to(
            x.dtype
        )
        ctx.save_for_backward(y)
        ctx.facts = dim, axes, mesh
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        dim, axes, mesh = ctx.facts
        wide = widen(grad)
        whole = total(wide.sum(dim, keepdim=True), axes, mesh)
        return (wide - torch.exp(widen(y)) * whole).to(grad.dtype), None, None, None
