"""Attention under a mask that is a description: no rank makes the mask of all queries and keys.

A description has a `Band` (ir/band.py) and pairs of vectors, one of every query and one of every
key, that are compared: packed documents are `segment == segment`, padding is `True == attended`.
A rank whose queries are split has its own part of the queries' vectors, and finds their positions
from its coordinates, so it makes only its own blocks of the mask, one after the other: only keys
within the band are read, and a block without a mask runs torch's flash kernel.

passes/masks.py puts `masked_attention` and `block_mask` in a traced graph, ops/local.py emits them
on shards, and in the place of causal attention where queries are split. The backward computes each
block again, so operands alone are saved.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar._compat import recording_again
from autopar.ir.band import Band, Place, Places
from autopar.ops.sharded.vocabulary import globalize

# By the word in a description: a query sees a key where this holds of (query's, key's).
COMPARE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "le", "lt", "ge", "gt")
}


def places_of(digits: Sequence[int]) -> Places:
    """Return the digits that a flat list of (stride, size, stride, size, …) stands for."""
    return tuple(Place(*pair) for pair in zip(digits[::2], digits[1::2], strict=True))


def visible(
    rows: range,
    columns: range,
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    compare: str,
    band: Band,
    coordinates: Sequence[Tensor],
    places: Places,
    device: torch.device,
) -> Tensor | None:
    """Return which keys of a block its queries see, (batch or 1, 1, rows, columns); None: all."""
    mask = None
    if band.hides(rows, columns, places):
        digits = [("", *place) for place in places]
        local = torch.arange(rows.start, rows.stop, device=device)
        distance = torch.arange(columns.start, columns.stop, device=device)
        distance = distance - globalize(local, coordinates, digits)[:, None]
        if band.after is not None:
            mask = distance <= band.after
        if band.before is not None:
            near = distance >= -band.before
            mask = near if mask is None else mask & near
        mask = None if mask is None else mask[None]
    for query, key, name in zip(queries, keys, compare.split(), strict=True):
        own = query[:, rows.start : rows.stop, None]
        holds = COMPARE[name](own, key[:, None, columns.start : columns.stop])
        mask = holds if mask is None else mask & holds
    return None if mask is None else mask[:, None]


# The mask is one op in a graph, and attention under it another: both are many ops on blocks.
@torch.library.custom_op("autopar::block_mask", mutates_args=())
def block_mask(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    compare: str,
    before: int | None,
    after: int | None,
    rows: int,
    columns: int,
    device: torch.device,
    coordinates: Sequence[Tensor],
    digits: Sequence[int],
) -> Tensor:
    """Return a rank's own block of a mask, bool (batch or 1, 1, rows, columns)."""
    options = compare, Band(before, after), coordinates, places_of(digits), device
    mask = visible(range(rows), range(columns), queries, keys, *options)
    shape = _mask_shape(queries, keys, rows, columns)
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    return mask.expand(shape).contiguous()


def _mask_shape(
    queries: Sequence[Tensor], keys: Sequence[Tensor], rows: int, columns: int
) -> list[int]:
    return [_batch(queries, keys), 1, rows, columns]


def _batch(queries: Sequence[Tensor], keys: Sequence[Tensor]) -> int:
    """Return the rows of the batch that have a mask of their own."""
    return max((x.shape[0] for x in (*queries, *keys)), default=1)


@block_mask.register_fake
def _block_mask_fake(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    compare: str,
    before: int | None,
    after: int | None,
    rows: int,
    columns: int,
    device: torch.device,
    coordinates: Sequence[Tensor],
    digits: Sequence[int],
) -> Tensor:
    shape = _mask_shape(queries, keys, rows, columns)
    return torch.empty(shape, dtype=torch.bool, device=device)


@torch.library.custom_op("autopar::masked_attention", mutates_args=())
def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    compare: str,
    before: int | None,
    after: int | None,
    scale: float | None,
    coordinates: Sequence[Tensor],
    digits: Sequence[int],
) -> Tensor:
    """Return the attention of a rank's queries (…, q, e) to all keys (…, k, e) and values (…, k, v)
    that they see; heads of the queries may be a multiple of those of the keys. A query that sees no
    key gets zeros.

    `queries` and `keys`: int, float or bool vectors (batch or 1, q) and (batch or 1, k);
    `compare`: for each pair of them the word of COMPARE. `digits`: (stride, size) of each digit of
    the queries' positions that an axis holds, `coordinates` the rank's own on these axes.
    """
    result = query.new_empty(*query.shape[:-1], value.shape[-1])
    description = (queries, keys, compare, Band(before, after), coordinates, places_of(digits))
    for rows, columns, mask in _blocks(query, key, *description):
        part = _attend(_cut(query, rows), _cut(key, columns), _cut(value, columns), mask, scale)
        _cut(result, rows).copy_(part)
    return result


@masked_attention.register_fake
def _masked_attention_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


def _blocks(
    query: Tensor,
    key: Tensor,
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    compare: str,
    band: Band,
    coordinates: Sequence[Tensor],
    places: Places,
) -> list[tuple[range, range, Callable[[], Tensor | None]]]:
    """Return the queries and keys of every block, and what makes its mask."""
    size, batch = (query.shape[-2], key.shape[-2]), _batch(queries, keys)

    def mask_of(rows: range, columns: range) -> Callable[[], Tensor | None]:
        options = compare, band, coordinates, places, query.device
        return lambda: visible(rows, columns, queries, keys, *options)

    return [(*block, mask_of(*block)) for block in band.blocks(*size, places, batch)]


def _cut(x: Tensor, rows: range) -> Tensor:
    return x[..., rows.start : rows.stop, :]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    make_mask: Callable[[], Tensor | None],
    scale: float | None,
) -> Tensor:
    """Return the attention of one block of queries, by torch's kernels."""
    if not key.shape[-2]:
        return query.new_zeros(*query.shape[:-1], value.shape[-1])
    mask = make_mask()
    repeats = query.shape[-3] // key.shape[-3] if query.dim() > 2 else 1
    if mask is None:
        return F.scaled_dot_product_attention(
            query, key, value, scale=scale, enable_gqa=repeats > 1
        )
    if repeats > 1:  # the kernels that take a mask want as many heads
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    if query.dim() < 4:
        mask = mask.reshape(mask.shape[-2:])
    blind = ~mask.any(-1, keepdim=True)
    seen = F.scaled_dot_product_attention(query, key, value, mask | blind, scale=scale)
    return seen.masked_fill(blind, 0)


@torch.library.custom_op("autopar::masked_attention_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    compare: str,
    before: int | None,
    after: int | None,
    scale: float | None,
    coordinates: Sequence[Tensor],
    digits: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value. Blocks add to those of keys and values, in
    float32 at least.
    """
    wide = [torch.promote_types(x.dtype, torch.float32) for x in (key, value)]
    of_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    of_key, of_value = (
        torch.zeros(x.shape, dtype=dtype, device=x.device)
        for x, dtype in zip((key, value), wide, strict=True)
    )
    description = (queries, keys, compare, Band(before, after), coordinates, places_of(digits))
    for rows, columns, mask in _blocks(query, key, *description):
        if not columns:
            _cut(of_query, rows).zero_()
            continue
        parts = [
            _cut(x, own).detach() for x, own in ((query, rows), (key, columns), (value, columns))
        ]
        with recording_again():
            leaves = [x.requires_grad_() for x in parts]
            result = _attend(leaves[0], leaves[1], leaves[2], mask, scale)
            gradients = torch.autograd.grad(result, leaves, _cut(gradient, rows))
        _cut(of_query, rows).copy_(gradients[0])
        _cut(of_key, columns).add_(gradients[1])
        _cut(of_value, columns).add_(gradients[2])
    return of_query, of_key.to(key.dtype), of_value.to(value.dtype)


@_backward.register_fake
def _backward_fake(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dense = torch.contiguous_format
    query, key, value = (torch.empty_like(x, memory_format=dense) for x in (query, key, value))
    return query, key, value


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, queries, keys, *facts, coordinates, digits = inputs
    ctx.save_for_backward(query, key, value, *queries, *keys, *coordinates)
    ctx.counts = len(queries), len(keys), len(coordinates)
    ctx.facts, ctx.digits = facts, list(digits)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    query, key, value, *others = ctx.saved_tensors
    first, second, third = ctx.counts
    queries, keys = others[:first], others[first : first + second]
    coordinates = others[first + second :]
    gradients = _backward(
        gradient, query, key, value, queries, keys, *ctx.facts, coordinates, ctx.digits
    )
    lists = [[None] * first, [None] * second]
    facts = [None] * len(ctx.facts)
    digits: list[int] | None = None if ctx.digits else []  # torch takes [] for no tensors
    return *gradients, *lists, *facts, [None] * third, digits


masked_attention.register_autograd(_gradients, setup_context=_save_for_backward)


MASKED_ATTENTION = torch.ops.autopar.masked_attention.default
MASKED_ATTENTION_BACKWARD = torch.ops.autopar.masked_attention_backward.default
BLOCK_MASK = torch.ops.autopar.block_mask.default
