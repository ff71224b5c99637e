"""Dropout whose mask does not know the layout.

Whether an element is kept is a hash of the seed and of its GLOBAL index: every layout drops exactly
what one device would drop, ranks that hold the same element agree, ranks that hold different ones
are independent, and nothing is stored or communicated: the backward computes the mask again.
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
_BLOCK = 1 << 15  # elements that a CPU hashes at a time: what they need stays in its cache


def next_seed(seed: int) -> int:
    """The seed of the next call of a model. Raises InputError where `torch.utils.checkpoint` calls
    it again in a backward, which would drop other elements than the forward did.
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
    """Zeros elements of x with probability p and divides the others by 1 - p.

    `seed` is an int64 tensor of one element, the same on all ranks; `shape` is the global shape of
    x, `digits_by_dim` the digits of each of its dims (() where whole), `coordinates` one tensor for
    every digit, through all dims in turn.
    """
    if p == 0:
        return x
    if p == 1:
        return x * 0
    counts = [len(digits) for digits in digits_by_dim]
    facts = [number for digits in digits_by_dim for _, *pair in digits for number in pair]
    return _drop(x, p, seed, list(coordinates), counts, facts, list(shape))


class _How(NamedTuple):
    """What a dropout is told that is no tensor: see `_drop`."""

    p: float
    counts: tuple[int, ...]
    facts: tuple[int, ...]
    shape: tuple[int, ...]


# One op in every graph: its mask is some hundred of them, which nobody wants to read or to launch.
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
    """`counts`: digits of each dim; `facts`: (stride, size) of each digit in turn."""
    how = _How(p, tuple(counts), tuple(facts), tuple(shape))
    if x.device.type == "cpu":
        return _in_blocks(x, seed, coordinates, how)
    return _for_device(how)(x, seed, *coordinates)


@_drop.register_fake
def _drop_of_fakes(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, p, seed, coordinates, *facts = inputs
    ctx.save_for_backward(seed, *coordinates)
    ctx.facts = p, facts


def _drop_gradient(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    seed, *coordinates = ctx.saved_tensors
    p, facts = ctx.facts
    lists = [None if given else list(given) for given in facts]  # torch takes [] for no tensors
    found = _drop(gradient, p, seed, coordinates, *facts)
    return found, None, None, [None] * len(coordinates), *lists


_drop.register_autograd(_drop_gradient, setup_context=_keep)


# -- on GPUs ---------------------------------------------------------------------------------------
@cache
def _for_device(how: _How) -> Callable[..., Tensor]:
    """The plain formula, made one kernel by inductor where there is Triton."""
    plain = partial(_whole, how=how)
    return compiled_for(plain) if find_spec("triton") else plain


def _whole(x: Tensor, seed: Tensor, *coordinates: Tensor, how: _How) -> Tensor:
    tables = _tables(x, coordinates, how)
    index = torch.zeros((), dtype=torch.int64, device=x.device)
    for dim, table in enumerate(tables):
        index = index + table.view(-1, *[1] * (x.dim() - dim - 1))
    kept = _hash(index.expand(x.shape), _keys(seed)) >= round(how.p * 2**32)
    return torch.where(kept, x / (1 - how.p), 0).contiguous()


def _formula(
    x: Tensor,
    p: float,
    seed: Tensor,
    coordinates: Sequence[Tensor],
    counts: Sequence[int],
    facts: Sequence[int],
    shape: Sequence[int],
) -> Tensor:
    return _whole(x, seed, *coordinates, how=_How(p, tuple(counts), tuple(facts), tuple(shape)))


# What a compiler that fuses it with its neighbours gets in place of the op.
FORMULAS: dict[Any, Callable[..., Tensor]] = {torch.ops.autopar.dropout.default: _formula}


# -- on a CPU --------------------------------------------------------------------------------------
def _in_blocks(x: Tensor, seed: Tensor, coordinates: Sequence[Tensor], how: _How) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not y.numel():
        return y
    tables = _tables(x, coordinates, how)
    at, inner = len(tables), 1
    while at > 0 and inner * x.shape[at - 1] <= _BLOCK:
        at -= 1
        inner *= x.shape[at]
    narrow, keys = math.prod(how.shape) <= 2**31, _keys(seed)
    rows, row = _sums(tables[:at], x.device), _sums(tables[at:], x.device)
    if narrow:
        rows, row, keys = rows.int(), row.int(), (_signed(keys[0]), _signed(keys[1]))
    hashed, threshold = (_hash_words, -(2**31)) if narrow else (_hash, 0)
    threshold += round(how.p * 2**32)
    given, made = x.reshape(-1, inner), y.view(-1, inner)
    count = max(1, _BLOCK // inner)
    for first in range(0, len(rows), count):
        part = slice(first, first + count)
        dropped = hashed(rows[part, None] + row, keys) < threshold
        torch.div(given[part], 1 - how.p, out=made[part]).masked_fill_(dropped, 0)
    return y


def _sums(tables: Sequence[Tensor], device: torch.device) -> Tensor:
    """Flat: the sum of one entry of each table, in every combination, the last one fastest."""
    found = torch.zeros(1, dtype=torch.int64, device=device)
    for table in tables:
        found = (found[:, None] + table).flatten()
    return found


# -- the hash --------------------------------------------------------------------------------------
def _tables(x: Tensor, coordinates: Sequence[Tensor], how: _How) -> list[Tensor]:
    """Of every dim of x what each place on it adds to the row-major index in the global tensor,
    int64.
    """
    digits: list[Digit] = [
        ("", stride, size) for stride, size in zip(how.facts[::2], how.facts[1::2])
    ]
    ends = (0, *accumulate(how.counts))
    found = []
    for dim, (first, last) in enumerate(pairwise(ends)):
        local = torch.arange(x.shape[dim], device=x.device)
        index = globalize(local, coordinates[first:last], digits[first:last])
        found.append(index * math.prod(how.shape[dim + 1 :]))
    return found


Keys = tuple[Tensor, Tensor]


def _keys(seed: Tensor) -> Keys:
    """Two words of a seed; both of its words go in, mixed in between."""
    seed = seed.reshape(())
    key = _mix((_mix(seed & _WORD) + ((seed >> 32) & _WORD) + 0x3C6EF372) & _WORD)
    return key, _mix((key + 0x1E3779B9) & _WORD)


def _hash(index: Tensor, keys: Keys) -> Tensor:
    """32 random bits of every index, in int64 from 0 to 2^32 - 1: both words of it go in.

    Keys enter twice, or masks of two seeds would be shifted copies of each other.
    """
    return _mix(((_mix((index & _WORD) ^ keys[0]) + (index >> 32)) ^ keys[1]) & _WORD)


def _mix(word: Tensor) -> Tensor:
    """A bijection of 32-bit words in which every bit of the input changes every bit of the output
    about half the time.

    Multiply and xor-shift (the form of MurmurHash3's finalizer; multipliers below 2^31, so that
    int64 products never overflow).
    """
    word = word ^ (word >> 16)
    for shift, factor in _ROUNDS:
        word = word.mul_(factor).bitwise_and_(_WORD)  # in place: fresh memory is what costs here
        word = word.bitwise_xor_(word >> shift)
    return word


def _hash_words(index: Tensor, keys: Keys) -> Tensor:
    """`_hash` of indices below 2^31, less 2^31, all in int32."""
    return _mix_words(_mix_words(index ^ keys[0]) ^ keys[1]).bitwise_xor_(-(2**31))


def _mix_words(word: Tensor) -> Tensor:
    """`_mix` of words whose bits an int32 holds; unsigned, products wrap around."""
    word = word.bitwise_xor_((word >> 16).bitwise_and_(0xFFFF))
    for shift, factor in _ROUNDS:
        word.view(torch.uint32).mul_(factor)
        word = word.bitwise_xor_((word >> shift).bitwise_and_(_WORD >> shift))
    return word


def _signed(word: Tensor) -> Tensor:
    """The int32 of the same 32 bits."""
    return ((word ^ 2**31) - 2**31).int()
