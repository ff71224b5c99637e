"""The layer of a mixture of experts as one operator: tokens, the experts that a router chose for
each, and the experts' weights enter; the weighted sum of the chosen experts' results leaves.

    y[t] = Σ_k scores[t,k] · down[e] · gate(up[e] · x[t])        e = index[t,k]

Rows are sorted by expert, so that every product is one grouped matmul with static shapes, and no
token is dropped. `autopar::experts` is what a traced graph shows. It is composite: autograd and
AOTAutograd see what it consists of, and `autopar::grouped_mm` in it, which counts its FLOPs. What
differs between models (the gate, the layout of the weights, biases, a norm of the results) is a
`Body`, known by its name: passes/trace/experts.py finds it, ops/rules/experts.py reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.utils.flop_counter import register_flop_formula

# The busiest rank of an axis that splits experts is taken to compute so many times the mean of the
# ranks: a router that is trained to balance still sends some experts more tokens than others.
SKEW = 1.2


@dataclass(frozen=True)
class Body:
    """What one expert computes, besides its weights.

    `gate` maps the results of the up product (rows, two f) to (rows, f), or (rows, f) to (rows, f)
    where `gated` is False. `concatenated`: a gated up weight is (two f), else interleaved (f two).
    `transposed`: weights are (e, in, out), else (e, out, in). `splits_inner`: the gate commutes
    with slicing f. `norm` maps the down product's results and a weight to (rows, d).
    """

    gate: Callable[[Tensor], Tensor]
    gated: bool = True
    concatenated: bool = True
    transposed: bool = False
    splits_inner: bool = True
    norm: Callable[[Tensor, Tensor], Tensor] | None = None


BODIES: dict[str, Body] = {}


def expert_layer(
    tokens: Tensor,
    index: Tensor,
    scores: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    norm: Tensor | None,
    body: str,
    experts: int,
) -> Tensor:
    """Return (t, o): for each token the results of its experts, weighted by `scores` and summed.

    tokens: (t, d); index and scores: (t, k); up: (e, two f, d), down: (e, o, f), transposed as the
    `body` says; biases: (e, two f) and (e, o); norm: (o). An index of e or more is an expert that
    lies elsewhere and gives zeros. `experts` is the number of them all, here and elsewhere: e of
    them are taken to get e / experts of the rows.
    """
    how, (count, choices) = BODIES[body], index.shape
    ids, order = torch.sort(index.reshape(-1), stable=True)
    inverse = torch.argsort(order)
    here = up.shape[0]
    own = torch.arange(here, device=ids.device, dtype=ids.dtype)
    offsets = torch.searchsorted(ids, own, right=True).to(torch.int32)
    if not how.transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    rows = _Chosen.apply(tokens, order, inverse, choices)
    hidden = grouped_mm(rows.to(up.dtype), up, offsets, experts)
    places = ids.clamp(max=here - 1) if up_bias is not None or down_bias is not None else ids
    if up_bias is not None:
        hidden = hidden + up_bias[places]
    results = grouped_mm(how.gate(hidden).to(down.dtype), down, offsets, experts)
    if down_bias is not None:
        results = results + down_bias[places]
    if norm is not None:
        assert how.norm is not None
        results = how.norm(results, norm)
    if down_bias is not None or norm is not None:
        results = torch.where((ids < here).unsqueeze(-1), results, 0)
    by_token = _Permuted.apply(results, inverse, order).view(count, choices, -1)
    return (by_token * scores.unsqueeze(-1)).sum(1).to(tokens.dtype)


class _Chosen(Function):
    """The rows of tokens for all their choices, sorted by expert: row order[i] // choices at i.
    Backward takes every token's rows by their places and sums them, without an atomic add.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.choices = choices
        return tokens.index_select(0, order // choices)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        rows = gradient.index_select(0, inverse)
        return rows.unflatten(0, (-1, ctx.choices)).sum(1), None, None, None


class _Permuted(Function):
    """rows[order], whose backward is gradient[inverse]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient.index_select(0, inverse), None, None


_library = torch.library.Library("autopar", "FRAGMENT")
_library.define(
    "experts(Tensor tokens, Tensor index, Tensor scores, Tensor up, Tensor? up_bias, Tensor down, "
    "Tensor? down_bias, Tensor? norm, str body, int experts) -> Tensor"
)
_library.impl("experts", expert_layer, "CompositeImplicitAutograd")
experts_op = torch.ops.autopar.experts.default


# -- the grouped matmul ----------------------------------------------------------------------------
@torch.library.custom_op("autopar::grouped_mm", mutates_args=())
def grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor, experts: int) -> Tensor:
    """Return (r, o): rows (r, i) times the weight (e, i, o) of their expert; expert j's rows end at
    offsets[j] (int32), and rows past the last offset give zeros. `experts` counts for FLOPs only.
    """
    if _fused(rows, weight):
        results = F.grouped_mm(rows, weight, offs=offsets)
        places = torch.arange(rows.shape[0], device=rows.device)
        return torch.where((places < offsets[-1]).unsqueeze(-1), results, 0)  # written by no one
    results = rows.new_zeros(rows.shape[0], weight.shape[2])
    if rows.device.type == "cpu":
        for matrix, start, end in _spans(weight, offsets):
            torch.mm(rows[start:end], matrix, out=results[start:end])
        return results
    for matrix, mine in zip(weight, _masks(rows, offsets), strict=True):
        results += torch.mm(torch.where(mine, rows, 0), matrix)
    return results


@torch.library.custom_op("autopar::grouped_mm_weight", mutates_args=())
def _weight_gradient(rows: Tensor, gradient: Tensor, offsets: Tensor, experts: int) -> Tensor:
    """Return (e, i, o): every expert's rows (r, i), transposed, times their gradient (r, o)."""
    shape = (offsets.shape[0], rows.shape[1], gradient.shape[1])
    if _fused(rows, gradient):
        return F.grouped_mm(rows.t(), gradient, offs=offsets)
    result = rows.new_zeros(shape)
    if rows.device.type == "cpu":
        for matrix, start, end in _spans(result, offsets):
            torch.mm(rows[start:end].t(), gradient[start:end], out=matrix)
        return result
    for matrix, mine in zip(result, _masks(rows, offsets), strict=True):
        matrix.copy_(torch.mm(torch.where(mine, rows, 0).t(), gradient))
    return result


_ALIGNED = 16  # bytes: the stride that torch's kernel of grouped matmuls asks for


def _fused(left: Tensor, right: Tensor) -> bool:
    """Whether torch has a kernel for these operands that does not wait for the offsets."""
    wide = all(x.shape[-1] * x.element_size() % _ALIGNED == 0 for x in (left, right))
    tall = right.dim() == 2 or right.shape[1] * right.element_size() % _ALIGNED == 0
    return left.device.type == "cuda" and left.dtype == torch.bfloat16 and wide and tall


def _spans(matrices: Tensor, offsets: Tensor) -> list[tuple[Tensor, int, int]]:
    """Return each expert's matrix with the start and the end of its rows, without empty ones. Only
    on the CPU, where reading numbers waits for nothing.
    """
    ends = offsets.tolist()
    spans = zip(matrices, [0, *ends[:-1]], ends, strict=True)
    return [(matrix, start, end) for matrix, start, end in spans if start < end]


def _masks(rows: Tensor, offsets: Tensor) -> Tensor:
    """Return (e, r, 1): which rows are an expert's. For dtypes without a kernel on a GPU: products
    with all rows, which no host waits for.
    """
    places = torch.arange(rows.shape[0], device=rows.device)
    starts = torch.cat([offsets.new_zeros(1), offsets[:-1]])
    return ((places >= starts[:, None]) & (places < offsets[:, None])).unsqueeze(-1)


@grouped_mm.register_fake
def _grouped_mm_fake(rows: Tensor, weight: Tensor, offsets: Tensor, experts: int) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@_weight_gradient.register_fake
def _weight_gradient_fake(rows: Tensor, gradient: Tensor, offsets: Tensor, experts: int) -> Tensor:
    return rows.new_empty(offsets.shape[0], rows.shape[1], gradient.shape[1])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, offsets, experts = inputs
    ctx.save_for_backward(rows, weight, offsets)
    ctx.experts = experts


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    rows, weight, offsets = ctx.saved_tensors
    of_rows, of_weight, *_ = ctx.needs_input_grad
    gradient = gradient.contiguous()
    return (
        grouped_mm(gradient, weight.transpose(1, 2), offsets, ctx.experts) if of_rows else None,
        _weight_gradient(rows, gradient, offsets, ctx.experts) if of_weight else None,
        None,
        None,
    )


grouped_mm.register_autograd(_gradients, setup_context=_save_for_backward)


def share_of_rows(here: int, experts: int) -> float:
    """Return the share of all rows that the busiest rank with so many of the experts computes."""
    return 1.0 if here == experts else min(1.0, SKEW * here / experts)


def _grouped_flops(rows: Any, weight: Any, offsets: Any, experts: int, **_: Any) -> int:
    (count, wide), (here, _, out) = rows, weight
    return int(2 * count * wide * out * share_of_rows(here, experts))


def _weight_flops(rows: Any, gradient: Any, offsets: Any, experts: int, **_: Any) -> int:
    (count, wide), (_, out), (here,) = rows, gradient, offsets
    return int(2 * count * wide * out * share_of_rows(here, experts))


register_flop_formula([torch.ops.autopar.grouped_mm])(_grouped_flops)
register_flop_formula([torch.ops.autopar.grouped_mm_weight])(_weight_flops)
