"""Layer norm, RMS norm, softmax and log-softmax over a dim that is split.

Each rank reduces its slice of the dim, and the ranks of the axes add up (or take the maximum of)
these partial results by all-reduces. The norms are exact: layer norm takes two all-reduces forward,
mean first and then the centred variance, as one step of sums and squares would cancel. The backward
of a norm takes one all-reduce of the row sums that torch's own kernel has. Softmax reduces the
maximum and the sum of exponentials forward, and one row sum backward.

float16 and bfloat16 are computed in float32, as in torch's own kernels. ops/local.py emits these
functions; vocabulary.py uses `widen`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from autopar.ops.comm import total


def reckoning(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a dtype is computed: float32 for float16 and bfloat16, others as
    they are.
    """
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def widen(x: Tensor) -> Tensor:
    """Return x in the dtype that it is computed in."""
    return x.to(reckoning(x.dtype))


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    size: int,
    axes: Sequence[str],
    mesh: str,
) -> Tensor:
    """Return the layer norm of x (..., local size) whose last dim, `size` in all, is split over
    `axes`; weight and bias have (local size).
    """
    return _LayerNorm.apply(x, weight, bias, eps, size, tuple(axes), mesh)


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float | None, size: int, axes: Sequence[str], mesh: str
) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight, split as in `layer_norm`. With `eps` None it is the
    resolution of the dtype computed in, as in torch.
    """
    eps = torch.finfo(reckoning(x.dtype)).eps if eps is None else eps
    return _RMSNorm.apply(x, weight, eps, size, tuple(axes), mesh)


class _LayerNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        size: int,
        axes: tuple[str, ...],
        mesh: str,
    ) -> Tensor:
        wide = widen(x)
        mean = total(wide.sum(-1, keepdim=True), axes, mesh) / size
        centred = wide - mean
        variance = total((centred * centred).sum(-1, keepdim=True), axes, mesh) / size
        scale = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.facts = size, axes, mesh
        y = _scale_by(centred * scale, weight)
        return (y if bias is None else y + widen(bias)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        size, axes, mesh = ctx.facts
        grad = widen(grad)
        normal = (widen(x) - mean) * scale
        inner = _scale_by(grad, weight)
        sums = torch.stack([inner.sum(-1), (inner * normal).sum(-1)])
        mean_grad, mean_product = (total(sums, axes, mesh) / size).unsqueeze(-1).unbind(0)
        grad_x = (inner - mean_grad - normal * mean_product) * scale
        grad_weight = _row_sum(grad * normal).to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = (
            _row_sum(grad).to(x.dtype if weight is None else weight.dtype)
            if ctx.needs_input_grad[2]
            else None
        )
        return grad_x.to(x.dtype), grad_weight, grad_bias, None, None, None, None


class _RMSNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        size: int,
        axes: tuple[str, ...],
        mesh: str,
    ) -> Tensor:
        wide = widen(x)
        mean_square = total((wide * wide).sum(-1, keepdim=True), axes, mesh) / size
        scale = torch.rsqrt(mean_square + eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.facts = size, axes, mesh
        return _scale_by(wide * scale, weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        size, axes, mesh = ctx.facts
        grad = widen(grad)
        normal = widen(x) * scale
        inner = _scale_by(grad, weight)
        mean_product = total((inner * normal).sum(-1, keepdim=True), axes, mesh) / size
        grad_x = (inner - normal * mean_product) * scale
        grad_weight = _row_sum(grad * normal).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return grad_x.to(x.dtype), grad_weight, None, None, None, None


def _scale_by(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x * widen(weight)


def _row_sum(x: Tensor) -> Tensor:
    return x.flatten(0, -2).sum(0) if x.dim() > 1 else x


def softmax(x: Tensor, dim: int, axes: Sequence[str], mesh: str) -> Tensor:
    """Return the softmax over `dim`, which is split over `axes` (any digits); the result is split
    as x is.
    """
    return _Softmax.apply(x, dim, tuple(axes), mesh)


def log_softmax(x: Tensor, dim: int, axes: Sequence[str], mesh: str) -> Tensor:
    """Return the logarithm of `softmax`, without its underflow."""
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
        row_sum = total(product.sum(dim, keepdim=True), axes, mesh)
        return (product - widen(y) * row_sum).to(grad.dtype), None, None, None


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
        row_sum = total(wide.sum(dim, keepdim=True), axes, mesh)
        return (wide - torch.exp(widen(y)) * row_sum).to(grad.dtype), None, None, None
