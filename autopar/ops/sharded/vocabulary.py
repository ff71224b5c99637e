"""Embedding and cross entropy with the vocabulary split, and the digits of a dim's index that they
need.

Example: of 50 000 classes on four ranks each rank holds logits of 12 500; no rank gathers the full
logits. Tokens may be split too. With m the largest log-sum-exp of a slice, s = sum_c exp(x_c - m),
W = sum_c w_c, label smoothing l and C classes, torch's loss of a token with target t is

    a · log s - (1 - l) · w_t · (x_t - m) - l/C · sum_c w_c (x_c - m),   a = (1 - l) · w_t + l/C · W

so a token needs m (one all-reduce, maximum) and sums over the vocabulary (one all-reduce, stacked).
Its gradient, a · softmax_c - [c = t] (1 - l) w_t - l/C · w_c, needs nothing from other ranks.

ops/local.py emits `embedding` and `cross_entropy`; dropout.py uses `globalize`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn import functional as F

from autopar.errors import LayoutError
from autopar.ops.comm import total
from autopar.ops.sharded.norms import widen

Digit = tuple[
    str, int, int
]  # (axis, stride, size): the axis holds (i // stride) % size of the global index i


def localize(
    index: Tensor, coordinates: Sequence[Tensor], digits: Sequence[Digit]
) -> tuple[Tensor, Tensor]:
    """Return where the elements with these global indices lie on this rank, and whether they do
    (bool).

    The local index is the global one with the digits cut out; it is in range for every index, owned
    or not. With digits [("x", 2, 3)] of a dim of 12, global 7 = (1, 0, 1) lies at local (1, 1) = 3
    on the rank with coordinate 0.
    """
    owned = torch.ones_like(index, dtype=torch.bool)
    local = index
    for coordinate, (_, stride, size) in _by_falling_stride(coordinates, digits):
        owned = owned & (index // stride % size == coordinate)
        local = local // (stride * size) * stride + local % stride
    return local, owned


def globalize(local: Tensor, coordinates: Sequence[Tensor], digits: Sequence[Digit]) -> Tensor:
    """Return the global index of local ones: the inverse of `localize` on what the rank owns."""
    for coordinate, (_, stride, size) in reversed(_by_falling_stride(coordinates, digits)):
        local = local // stride * (stride * size) + coordinate * stride + local % stride
    return local


def _by_falling_stride(
    coordinates: Sequence[Tensor], digits: Sequence[Digit]
) -> list[tuple[Tensor, Digit]]:
    """Return (coordinate, digit) by falling stride: a digit that is cut out must not move those
    still to be cut.
    """
    scalars = [coordinate.squeeze(0) for coordinate in coordinates]
    pairs = zip(scalars, digits, strict=True)
    return sorted(pairs, key=lambda pair: pair[1][1], reverse=True)


def mask_padding(
    x: Tensor, dim: int, size: int, coordinates: Sequence[Tensor], digits: Sequence[Digit]
) -> Tensor:
    """Return x with a number too small to count in the entries of `dim` whose global index is
    `size` or more: the padding of a dim that no axis divides (passes/pad.py). A softmax gives
    them 0.
    """
    own = _is_below_size(x, dim, size, coordinates, digits)
    return x.masked_fill(~own, torch.finfo(x.dtype).min / 2)


def _is_below_size(
    x: Tensor, dim: int, size: int, coordinates: Sequence[Tensor], digits: Sequence[Digit]
) -> Tensor:
    """Return whether the entries of a split dim have a global index below `size` (bool), in a shape
    that broadcasts to x.
    """
    index = torch.arange(x.shape[dim], device=x.device)
    shape = [1] * x.dim()
    shape[dim] = x.shape[dim]
    return (globalize(index, coordinates, digits) < size).view(shape)


def embedding(
    weight: Tensor,
    indices: Tensor,
    coordinates: Sequence[Tensor],
    digits: Sequence[Digit],
    padding_idx: int | None = None,
) -> Tensor:
    """Return rows of `weight` (local rows, width) at global `indices` (...): (..., width), P over
    the digits' axes.

    Rows of other ranks give zeros and no gradient; `padding_idx` (global; None or -1 for none, as
    in ATen) gives its row and no gradient. Nothing is communicated.
    """
    local, owned = localize(indices, coordinates, digits)
    rows = F.embedding(torch.where(owned, local, 0), weight)
    if padding_idx is not None and padding_idx >= 0:
        rows = torch.where((indices == padding_idx).unsqueeze(-1), rows.detach(), rows)
    return torch.where(owned.unsqueeze(-1), rows, 0)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: Literal["mean", "sum", "none"],
    ignore_index: int,
    label_smoothing: float,
    classes: int,
    coordinates: Sequence[Tensor],
    digits: Sequence[Digit],
    token_axes: Sequence[str],
    mesh: str,
) -> Tensor:
    """Return torch's cross_entropy for class indices on a rank's slice of the logits.

    logits: (C), (N, C) or (N, C, d1, ...) with C the local part of the `classes`, split by
    `digits`; target: global class indices without the class dim; weight: (C), split like the
    classes. Where the ranks' parts together are more than the classes, the last ones are padding
    and count for nothing. Tokens are split over `token_axes`. Over the vocabulary axes the result
    is I. Over the token axes it is I for "mean" (over the GLOBAL weight of the tokens that count),
    P for "sum" and
    S for "none". Raises LayoutError for class probabilities as targets.
    """
    if target.is_floating_point():
        raise LayoutError(
            "cross_entropy with class probabilities has no sharded form; keep its operands whole"
        )
    counts = target != ignore_index
    if not digits:
        loss_and_weight = _unsharded_token_loss(
            logits, target, weight, ignore_index, label_smoothing, counts
        )
        return _reduce_loss(*loss_and_weight, counts, reduction, token_axes, mesh).to(logits.dtype)
    if logits.dim() > 1:
        logits = logits.movedim(1, -1)
    axes = tuple(axis for axis, _, _ in digits)
    if logits.shape[-1] * math.prod(size for *_, size in digits) > classes:
        own = _is_below_size(logits, -1, classes, coordinates, digits)
        logits = logits.masked_fill(~own, torch.finfo(logits.dtype).min / 2)
        if weight is None and label_smoothing:  # which sums over all classes
            weight = own.flatten().to(logits.dtype)
    local, owned = localize(torch.where(counts, target, 0), coordinates, digits)
    loss, token_weight = _TokenLoss.apply(
        logits, local, owned, weight, label_smoothing, classes, axes, mesh
    )
    loss = torch.where(counts, loss, 0)
    return _reduce_loss(loss, token_weight, counts, reduction, token_axes, mesh).to(logits.dtype)


def nll_loss(
    log_probabilities: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: Literal["mean", "sum", "none"],
    ignore_index: int,
    token_axes: Sequence[str],
    mesh: str,
) -> Tensor:
    """Return torch's nll_loss on a rank's slice of the tokens, which are split over `token_axes`.

    log_probabilities: (N, C) or (N, C, d1, ...) with all classes; target: class indices without the
    class dim; weight: (C). Over the token axes the result is I for "mean" (over the GLOBAL weight
    of the tokens that count), P for "sum" and S for "none".
    """
    counts = target != ignore_index
    loss = functional.nll_loss(
        log_probabilities, target, weight, reduction="none", ignore_index=ignore_index
    )
    if weight is None:
        token_weight = torch.ones_like(loss)
    else:
        token_weight = weight[torch.where(counts, target, 0)]
    reduced = _reduce_loss(widen(loss), widen(token_weight), counts, reduction, token_axes, mesh)
    return reduced.to(log_probabilities.dtype)


def _unsharded_token_loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    smoothing: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return (loss, w_t) of every token where the classes are unsharded, by torch's own kernels."""
    loss = functional.cross_entropy(
        logits,
        target,
        weight,
        reduction="none",
        ignore_index=ignore_index,
        label_smoothing=smoothing,
    )
    loss = widen(loss)
    if weight is None:
        return loss, torch.ones_like(loss)
    return loss, weight.to(loss.dtype)[torch.where(counts, target, 0)]


def _reduce_loss(
    loss: Tensor,
    token_weight: Tensor,
    counts: Tensor,
    reduction: Literal["mean", "sum", "none"],
    token_axes: Sequence[str],
    mesh: str,
) -> Tensor:
    """Return the losses of the tokens reduced as asked: to a mean over all ranks, a local sum, or
    not at all.
    """
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    weight_sum = torch.where(counts, token_weight, 0).sum()
    return _Mean.apply(loss.sum(), weight_sum, tuple(token_axes), mesh)


class _Mean(Function):
    """A sum over the ranks of these axes divided by a sum of weights, which takes no gradient; one
    all-reduce for both. The parts () and () become I ().
    """

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, weight_part: Tensor, axes: tuple[str, ...], mesh: str
    ) -> Tensor:
        loss_sum, weight = total(torch.stack((part, weight_part)), axes, mesh).unbind(0)
        ctx.save_for_backward(weight)
        return loss_sum / weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return grad / weight, None, None, None


class _TokenLoss(Function):
    """(loss, w_t) of every token, with no token ignored. logits (..., C); local, owned (...)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        local: Tensor,
        owned: Tensor,
        weight: Tensor | None,
        smoothing: float,
        classes: int,
        axes: tuple[str, ...],
        mesh: str,
    ) -> tuple[Tensor, Tensor]:
        x = widen(logits)
        weight = None if weight is None else weight.to(x.dtype)
        local = torch.where(owned, local, 0)
        # x may be the largest value of the step: logsumexp is the kernel with the least memory
        local_log_sum = torch.logsumexp(x, -1)
        maximum = total(local_log_sum, axes, mesh, "max")
        sums = total(
            _local_sums(x, local_log_sum, maximum, local, owned, weight, smoothing), axes, mesh
        )
        exp_sum, at_target, token_weight, everywhere, weight_sum = _unstack_sums(
            sums, weight, smoothing, classes
        )
        scale = (1 - smoothing) * token_weight + smoothing / classes * weight_sum
        ctx.save_for_backward(
            logits, local, owned, weight, scale, token_weight, maximum + exp_sum.log()
        )
        ctx.mark_non_differentiable(token_weight)
        ctx.facts = smoothing, classes
        loss = scale * exp_sum.log() - (1 - smoothing) * at_target
        return loss - smoothing / classes * everywhere if smoothing else loss, token_weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        logits, local, owned, weight, scale, token_weight, log_sum = ctx.saved_tensors
        smoothing, classes = ctx.facts
        result = (widen(logits) - log_sum.unsqueeze(-1)).exp_()
        result = result.mul_((scale * grad).unsqueeze(-1))
        hit = torch.where(owned, -(1 - smoothing) * token_weight * grad, 0)
        result = result.scatter_add_(-1, local.unsqueeze(-1), hit.unsqueeze(-1))
        if smoothing:
            even = grad.unsqueeze(-1) * (smoothing / classes)
            result = result.sub_(even if weight is None else even * weight)
        return result.to(logits.dtype), None, None, None, None, None, None, None


def _local_sums(
    x: Tensor,
    own: Tensor,
    maximum: Tensor,
    local: Tensor,
    owned: Tensor,
    weight: Tensor | None,
    smoothing: float,
) -> Tensor:
    """Return this rank's part of the sums that the loss needs, stacked; `_unstack_sums` takes them
    apart.
    """
    at_target = x.gather(-1, local.unsqueeze(-1)).squeeze(-1) - maximum
    at_target = torch.where(owned, at_target, 0)
    rows = [(own - maximum).exp()]
    if weight is None:
        rows.append(at_target)
    else:
        token_weight = torch.where(owned, weight[local], 0)
        rows += [at_target * token_weight, token_weight]
    if smoothing:
        shifted = x - maximum.unsqueeze(-1)
        rows.append((shifted if weight is None else shifted * weight).sum(-1))
    if smoothing and weight is not None:
        rows.append(weight.sum().expand_as(at_target))
    return torch.stack(rows)


def _unstack_sums(
    sums: Tensor, weight: Tensor | None, smoothing: float, classes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return s, w_t (x_t - m), w_t, sum_c w_c (x_c - m), W; without class weights w = 1 and W = C;
    without smoothing the last two are 0.
    """
    rows = list(sums.unbind(0))
    exp_sum, at_target = rows.pop(0), rows.pop(0)
    token_weight = torch.ones_like(exp_sum) if weight is None else rows.pop(0)
    everywhere = rows.pop(0) if smoothing else torch.zeros_like(exp_sum)
    if weight is None:
        return exp_sum, at_target, token_weight, everywhere, torch.full_like(exp_sum, classes)
    return (
        exp_sum,
        at_target,
        token_weight,
        everywhere,
        rows.pop(0) if smoothing else torch.zeros_like(exp_sum),
    )
