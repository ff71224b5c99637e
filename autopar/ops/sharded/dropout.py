"""Dropout whose mask does not depend on the layout.

Whether an element is kept is a hash of the seed and of its GLOBAL index (index_hash.py). So every
layout drops exactly what one device would drop, and the backward computes the mask again.

ops/local.py emits `dropout`, attention.py calls it for its weights, and the runtime calls
`next_seed` for each call of a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar._compat import compiled_for, in_backward
from autopar.errors import InputError
from autopar.ops.sharded.index_hash import (
    BLOCK,
    Shard,
    all_indices,
    hash_of,
    hash_words,
    in_rows,
    keys_of,
    to_signed,
)
from autopar.ops.sharded.vocabulary import Digit


def next_seed(seed: int) -> int:
    """Return the seed of the next call of a model.

    Raises InputError where `torch.utils.checkpoint` calls the model again in a backward, which
    would draw other numbers than the forward did.
    """
    if in_backward():
        raise InputError(
            "a model with dropout or random draws that autopar parallelized is run again within a "
            "backward (by torch.utils.checkpoint around it?), where it would draw others than "
            'before: checkpoint its parts inside of the model, or ask for recompute="full"'
        )
    return seed + 1


def dropout(
    x: Tensor,
    p: float,
    seed: Tensor,
    coordinates: Sequence[Tensor],
    digits_by_dim: Sequence[Sequence[Digit]],
    shape: Sequence[int],
) -> Tensor:
    """Return x with elements set to zero with probability p and the others divided by 1 - p.

    `seed` is an int64 tensor of one element, the same on all ranks; `shape` is the global shape of
    x, `digits_by_dim` the digits of each of its dims (() where unsharded), `coordinates` one tensor
    for every digit, through all dims in turn.
    """
    if p == 0:
        return x
    if p == 1:
        return x * 0
    shard = Shard.of(digits_by_dim, shape)
    return _drop(x, p, seed, list(coordinates), *map(list, shard))


class _DropoutArguments(NamedTuple):
    """The arguments of a dropout that are no tensors: see `_drop`."""

    p: float
    shard: Shard


# Dropout is one op in a graph: its mask takes some hundred ops, too many to read or to launch.
@torch.library.custom_op("autopar::dropout", mutates_args=())
def _drop(
    x: Tensor,
    p: float,
    seed: Tensor,
    coordinates: Sequence[Tensor],
    counts: Sequence[int],
    facts: Sequence[int],
    shape: Sequence[int],
) -> Tensor:
    """Return x with elements dropped; `counts`, `facts` and `shape` are those of its Shard."""
    how = _DropoutArguments(p, Shard(tuple(counts), tuple(facts), tuple(shape)))
    if x.device.type == "cpu":
        return _in_blocks(x, seed, coordinates, how)
    return _compile_formula(how)(x, seed, *coordinates)


@_drop.register_fake
def _drop_fake(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, p, seed, coordinates, *facts = inputs
    ctx.save_for_backward(seed, *coordinates)
    ctx.facts = p, facts


def _drop_gradient(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    seed, *coordinates = ctx.saved_tensors
    p, facts = ctx.facts
    lists = [None if fact else list(fact) for fact in facts]  # torch takes [] for no tensors
    x_gradient = _drop(gradient, p, seed, coordinates, *facts)
    return x_gradient, None, None, [None] * len(coordinates), *lists


_drop.register_autograd(_drop_gradient, setup_context=_save_for_backward)


# -- on GPUs ---------------------------------------------------------------------------------------
@cache
def _compile_formula(how: _DropoutArguments) -> Callable[..., Tensor]:
    """Return the plain formula for a GPU, compiled to one kernel by inductor where Triton is
    installed.
    """
    plain = partial(_all_at_once, how=how)
    return compiled_for(plain) if find_spec("triton") else plain


def _all_at_once(x: Tensor, seed: Tensor, *coordinates: Tensor, how: _DropoutArguments) -> Tensor:
    """Return x with elements dropped, by the formula over all elements at once."""
    tables = how.shard.index_tables(x.shape, coordinates, x.device)
    index = all_indices(tables, x.device).expand(x.shape)
    keep_mask = hash_of(index, keys_of(seed)) >= round(how.p * 2**32)
    return torch.where(keep_mask, x / (1 - how.p), 0).contiguous()


def _formula(
    x: Tensor,
    p: float,
    seed: Tensor,
    coordinates: Sequence[Tensor],
    counts: Sequence[int],
    facts: Sequence[int],
    shape: Sequence[int],
) -> Tensor:
    shard = Shard(tuple(counts), tuple(facts), tuple(shape))
    return _all_at_once(x, seed, *coordinates, how=_DropoutArguments(p, shard))


# The formula that a compiler gets in place of the op, to fuse it with its neighbours.
FORMULAS: dict[Any, Callable[..., Tensor]] = {torch.ops.autopar.dropout.default: _formula}


# -- on a CPU --------------------------------------------------------------------------------------
def _in_blocks(
    x: Tensor, seed: Tensor, coordinates: Sequence[Tensor], how: _DropoutArguments
) -> Tensor:
    """Return x with elements dropped, computed in blocks that fit a CPU's cache."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not y.numel():
        return y
    rows, row = in_rows(how.shard.index_tables(x.shape, coordinates, x.device), x.device)
    narrow, keys = math.prod(how.shard.shape) <= 2**31, keys_of(seed)
    if narrow:
        rows, row, keys = rows.int(), row.int(), (to_signed(keys[0]), to_signed(keys[1]))
    hashed, threshold = (hash_words, -(2**31)) if narrow else (hash_of, 0)
    threshold += round(how.p * 2**32)
    source, target = x.reshape(-1, len(row)), y.view(-1, len(row))
    count = max(1, BLOCK // len(row))
    for first in range(0, len(rows), count):
        part = slice(first, first + count)
        dropped = hashed(rows[part, None] + row, keys) < threshold
        torch.div(source[part], 1 - how.p, out=target[part]).masked_fill_(dropped, 0)
    return y
