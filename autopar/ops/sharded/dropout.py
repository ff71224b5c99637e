"""Dropout whose mask does not depend on the layout.

Whether an element is kept is a hash of the seed and of its GLOBAL index. So every layout drops
exactly what one device would drop, ranks that hold the same element agree, ranks that hold
different ones are independent, and nothing is stored or communicated: the backward computes the
mask again.

ops/local.py emits `dropout`, attention.py calls it for its weights, and the runtime calls
`next_seed` for each call of a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar._compat import compiled_for, in_backward
from autopar.errors import InputError
from autopar.ops.sharded.vocabulary import Digit, globalize

_WORD = 0xFFFFFFFF
_ROUNDS = (15, 0x7FEB352D), (16, 0x45D9F3B)  # of `_mix`: shift and multiplier
_BLOCK = 1 << 15  # elements that a CPU hashes at a time, so that its cache holds them


def next_seed(seed: int) -> int:
    """Return the seed of the next call of a model.

    Raises InputError where `torch.utils.checkpoint` calls the model again in a backward, which
    would drop other elements than the forward did.
    """
    if in_backward():
        raise InputError(
            "a model with dropout that autopar parallelized is run again within a backward (by "
            "torch.utils.checkpoint around it?), where it would drop other elements than before: "
            'checkpoint its parts inside of the model, or ask for recompute="full"'
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
    counts = [len(digits) for digits in digits_by_dim]
    facts = [number for digits in digits_by_dim for _, *pair in digits for number in pair]
    return _drop(x, p, seed, list(coordinates), counts, facts, list(shape))


class _DropoutArguments(NamedTuple):
    """The arguments of a dropout that are no tensors: see `_drop`."""

    p: float
    counts: tuple[int, ...]
    facts: tuple[int, ...]
    shape: tuple[int, ...]


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
    """Return x with elements dropped; `counts` has the number of digits of each dim, `facts`
    (stride, size) of each digit in turn.
    """
    how = _DropoutArguments(p, tuple(counts), tuple(facts), tuple(shape))
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
    plain = partial(_whole, how=how)
    return compiled_for(plain) if find_spec("triton") else plain


def _whole(x: Tensor, seed: Tensor, *coordinates: Tensor, how: _DropoutArguments) -> Tensor:
    """Return x with elements dropped, by the formula over all elements at once."""
    tables = _index_tables(x, coordinates, how)
    index = torch.zeros((), dtype=torch.int64, device=x.device)
    for dim, table in enumerate(tables):
        index = index + table.view(-1, *[1] * (x.dim() - dim - 1))
    keep_mask = _hash(index.expand(x.shape), _keys(seed)) >= round(how.p * 2**32)
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
    return _whole(
        x, seed, *coordinates, how=_DropoutArguments(p, tuple(counts), tuple(facts), tuple(shape))
    )


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
    tables = _index_tables(x, coordinates, how)
    split_dim, inner = len(tables), 1
    while split_dim > 0 and inner * x.shape[split_dim - 1] <= _BLOCK:
        split_dim -= 1
        inner *= x.shape[split_dim]
    narrow, keys = math.prod(how.shape) <= 2**31, _keys(seed)
    rows, row = _outer_sums(tables[:split_dim], x.device), _outer_sums(tables[split_dim:], x.device)
    if narrow:
        rows, row, keys = rows.int(), row.int(), (_signed(keys[0]), _signed(keys[1]))
    hashed, threshold = (_hash_words, -(2**31)) if narrow else (_hash, 0)
    threshold += round(how.p * 2**32)
    source, target = x.reshape(-1, inner), y.view(-1, inner)
    count = max(1, _BLOCK // inner)
    for first in range(0, len(rows), count):
        part = slice(first, first + count)
        dropped = hashed(rows[part, None] + row, keys) < threshold
        torch.div(source[part], 1 - how.p, out=target[part]).masked_fill_(dropped, 0)
    return y


def _outer_sums(tables: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return a flat tensor of the sum of one entry of each table, in every combination, the last
    table fastest.
    """
    sums = torch.zeros(1, dtype=torch.int64, device=device)
    for table in tables:
        sums = (sums[:, None] + table).flatten()
    return sums


# -- the hash --------------------------------------------------------------------------------------
def _index_tables(x: Tensor, coordinates: Sequence[Tensor], how: _DropoutArguments) -> list[Tensor]:
    """Return for every dim of x what each position on it adds to the row-major index in the global
    tensor, int64.
    """
    digits: list[Digit] = [
        ("", stride, size) for stride, size in zip(how.facts[::2], how.facts[1::2])
    ]
    ends = (0, *accumulate(how.counts))
    tables = []
    for dim, (first, last) in enumerate(pairwise(ends)):
        local = torch.arange(x.shape[dim], device=x.device)
        index = globalize(local, coordinates[first:last], digits[first:last])
        tables.append(index * math.prod(how.shape[dim + 1 :]))
    return tables


Keys = tuple[Tensor, Tensor]


def _keys(seed: Tensor) -> Keys:
    """Return two 32-bit words of a seed; both words of the seed go in, mixed in between."""
    seed = seed.reshape(())
    key = _mix((_mix(seed & _WORD) + ((seed >> 32) & _WORD) + 0x3C6EF372) & _WORD)
    return key, _mix((key + 0x1E3779B9) & _WORD)


def _hash(index: Tensor, keys: Keys) -> Tensor:
    """Return 32 random bits for every index, in int64 from 0 to 2^32 - 1; both words of the index
    go in.

    Keys enter twice, or masks of two seeds would be shifted copies of each other.
    """
    return _mix(((_mix((index & _WORD) ^ keys[0]) + (index >> 32)) ^ keys[1]) & _WORD)


def _mix(word: Tensor) -> Tensor:
    """Return a bijection of 32-bit words in which every bit of the input changes every bit of the
    output about half the time.

    It multiplies and xor-shifts (the form of MurmurHash3's finalizer; multipliers below 2^31, so
    that int64 products never overflow).
    """
    word = word ^ (word >> 16)
    for shift, factor in _ROUNDS:
        word = word.mul_(factor).bitwise_and_(_WORD)  # in place: allocation dominates here
        word = word.bitwise_xor_(word >> shift)
    return word


def _hash_words(index: Tensor, keys: Keys) -> Tensor:
    """Return `_hash` of indices below 2^31, less 2^31, all in int32."""
    return _mix_words(_mix_words(index ^ keys[0]) ^ keys[1]).bitwise_xor_(-(2**31))


def _mix_words(word: Tensor) -> Tensor:
    """Return `_mix` of words whose bits an int32 holds; multiplied unsigned, they wrap around."""
    word = word.bitwise_xor_((word >> 16).bitwise_and_(0xFFFF))
    for shift, factor in _ROUNDS:
        word.view(torch.uint32).mul_(factor)
        word = word.bitwise_xor_((word >> shift).bitwise_and_(_WORD >> shift))
    return word


def _signed(word: Tensor) -> Tensor:
    """Return the int32 of the same 32 bits."""
    return ((word ^ 2**31) - 2**31).int()
