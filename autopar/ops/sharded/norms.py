"""Layer norm, RMS norm, batch norm, norms of groups and of vectors, softmax and log-softmax over
dims that are split.

Each rank reduces its slice of the dim, and the ranks of the axes add up (or take the maximum of)
these partial results by all-reduces. The norms are exact: layer norm and batch norm take two
all-reduces forward, mean first and then the centred variance, as one step of sums and squares would
cancel. The backward of a norm takes one all-reduce of the sums that torch's own kernel has. Softmax
reduces the maximum and the sum of exponentials forward, and one row sum backward.

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


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: tuple[Tensor, Tensor] | None,
    momentum: float,
    eps: float,
    size: int,
    axes: Sequence[str],
    mesh: str,
) -> tuple[Tensor, ...]:
    """Return x (b, c, ...) less each channel's mean and by its deviation in the batch, that mean,
    one by that deviation, and the `running` mean and variance moved by `momentum`, if they are
    given. `size` numbers a channel has in all, split over `axes`.
    """
    y, mean, variance = _BatchNorm.apply(x, weight, bias, eps, size, tuple(axes), mesh)
    results = (y, mean, torch.rsqrt(variance + eps))
    if running is None:
        return results
    unbiased = variance * (size / (size - 1))
    moved = (old.lerp(new.to(old.dtype), momentum) for old, new in zip(running, (mean, unbiased)))
    return (*results, *moved)


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    first: int,
    eps: float,
    size: int,
    axes: Sequence[str],
    mesh: str,
) -> Tensor:
    """Return x (b, c, ...) normalised over its dims from number `first` on, which hold `size`
    numbers in all and are split over `axes`, times `weight` and plus `bias` of each channel (c).

    With `first` 1 that is a group norm of one group, with 2 an instance norm.
    """
    y = layer_norm(widen(x).flatten(first), None, None, eps, size, axes, mesh).view_as(x)
    y = y if weight is None else y * _of_channels(widen(weight), x)
    return (y if bias is None else y + _of_channels(widen(bias), x)).to(x.dtype)


def vector_norm(
    x: Tensor, order: float, dims: Sequence[int], keepdim: bool, axes: Sequence[str], mesh: str
) -> Tensor:
    """Return sum(|x|^order)^(1/order) over `dims`, some of which are split over `axes`; the order
    is positive and finite. The result is the same on these axes.
    """
    return _VectorNorm.apply(x, order, tuple(dims), keepdim, tuple(axes), mesh)


class _VectorNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        order: float,
        dims: tuple[int, ...],
        keepdim: bool,
        axes: tuple[str, ...],
        mesh: str,
    ) -> Tensor:
        own = torch.linalg.vector_norm(widen(x), order, dims, keepdim=True)
        norm = total(own.pow(order), axes, mesh).pow(1 / order)
        ctx.save_for_backward(x, norm)
        ctx.order = order
        return (norm if keepdim else norm.squeeze(dims)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, norm = ctx.saved_tensors
        power, wide = ctx.order - 1, widen(x)
        scale = (widen(grad).reshape(norm.shape) / norm.pow(power)).masked_fill(norm == 0, 0)
        slope = wide.sgn() * wide.abs().pow(power)
        slope = slope.masked_fill(wide == 0, 0) if power < 0 else slope
        return (slope * scale).to(x.dtype), None, None, None, None, None


class _BatchNorm(Function):
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = widen(x)
        mean = total(_channel_sum(wide), axes, mesh) / size
        centred = wide - _of_channels(mean, x)
        variance = total(_channel_sum(centred * centred), axes, mesh) / size
        scale = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.facts = size, axes, mesh
        ctx.mark_non_differentiable(mean, variance)
        y = centred * _of_channels(scale if weight is None else scale * widen(weight), x)
        y = y if bias is None else y + _of_channels(widen(bias), x)
        return y.to(x.dtype), mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        size, axes, mesh = ctx.facts
        grad = widen(grad)
        normal = (widen(x) - _of_channels(mean, x)) * _of_channels(scale, x)
        own = torch.stack([_channel_sum(grad), _channel_sum(grad * normal)])
        mean_grad, mean_product = (total(own, axes, mesh) / size).unbind(0)
        grad_x = grad - _of_channels(mean_grad, x) - normal * _of_channels(mean_product, x)
        grad_x = grad_x * _of_channels(scale if weight is None else scale * widen(weight), x)
        dtype = x.dtype if weight is None else weight.dtype
        grad_bias, grad_weight = own.to(dtype).unbind(0)
        needs = ctx.needs_input_grad
        return (
            grad_x.to(x.dtype), grad_weight if needs[1] else None, grad_bias if needs[2] else None,
            None, None, None, None,
        )  # fmt: skip


def _channel_sum(x: Tensor) -> Tensor:
    """Return the sum of x (b, c, ...) over all dims but the channels."""
    return x.transpose(0, 1).flatten(1).sum(1)


def _of_channels(numbers: Tensor, x: Tensor) -> Tensor:
    """Return one number for each channel (c) so that it broadcasts to x (b, c, ...)."""
    return numbers.view(-1, *(1,) * (x.dim() - 2))


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
