"""Random bits that do not depend on the layout: a hash of a seed and of an element's GLOBAL index.

Example: of a tensor of (8, 6) whose rows lie on four ranks, rank 1 hashes the indices 12 to 23. So
ranks that hold the same element have the same bits for it, others have independent ones, nothing is
stored or communicated, and a backward hashes again what it needs.

dropout.py takes one word of 32 bits for each element, draws.py two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.ops.sharded.vocabulary import Digit, globalize

BLOCK = 1 << 15  # elements that a CPU hashes at a time, so that its cache holds them

_WORD = 0xFFFFFFFF
_ROUNDS = (15, 0x7FEB352D), (16, 0x45D9F3B)  # of `_mix`: shift and multiplier
_SECOND = 0x5851F42D  # makes the second word's keys others than the first's


# -- where elements lie ----------------------------------------------------------------------------
class Shard(NamedTuple):
    """Where a rank's elements lie in a tensor of the global `shape`: `counts` has the number of
    digits of each dim, `facts` (stride, size) of each digit in turn.
    """

    counts: tuple[int, ...]
    facts: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, digits_by_dim: Sequence[Sequence[Digit]], shape: Sequence[int]) -> Shard:
        """Return the shard with these digits of each dim."""
        counts = tuple(len(digits) for digits in digits_by_dim)
        facts = tuple(number for digits in digits_by_dim for _, *pair in digits for number in pair)
        return cls(counts, facts, tuple(shape))

    def index_tables(
        self, local_shape: Sequence[int], coordinates: Sequence[Tensor], device: torch.device
    ) -> list[Tensor]:
        """Return for every dim what each position on it adds to the row-major index in the global
        tensor, int64. `coordinates`: one tensor for every digit, through all dims in turn.
        """
        digits: list[Digit] = [
            ("", stride, size) for stride, size in zip(self.facts[::2], self.facts[1::2])
        ]
        ends = (0, *accumulate(self.counts))
        tables = []
        for dim, (first, last) in enumerate(pairwise(ends)):
            local = torch.arange(local_shape[dim], device=device)
            index = globalize(local, coordinates[first:last], digits[first:last])
            tables.append(index * math.prod(self.shape[dim + 1 :]))
        return tables


def all_indices(tables: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the global index of every element, in the shape of the shard."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, table in enumerate(tables):
        index = index + table.view(-1, *[1] * (len(tables) - dim - 1))
    return index


def in_rows(tables: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (rows, row), flat: element (i, j) of the shard as a matrix has the global index
    `rows[i] + row[j]`. A row has at most BLOCK elements.
    """
    split_dim, inner = len(tables), 1
    while split_dim > 0 and inner * len(tables[split_dim - 1]) <= BLOCK:
        split_dim -= 1
        inner *= len(tables[split_dim])
    return _outer_sums(tables[:split_dim], device), _outer_sums(tables[split_dim:], device)


def _outer_sums(tables: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return a flat tensor of the sum of one entry of each table, in every combination, the last
    table fastest.
    """
    sums = torch.zeros(1, dtype=torch.int64, device=device)
    for table in tables:
        sums = (sums[:, None] + table).flatten()
    return sums


# -- the hash --------------------------------------------------------------------------------------
Keys = tuple[Tensor, Tensor]


def keys_of(seed: Tensor) -> Keys:
    """Return two 32-bit words of a seed; both words of the seed go in, mixed in between.

    Seeds of one step differ in their upper word, by the number of the draw.
    """
    seed = seed.reshape(())
    key = _mix((_mix(seed & _WORD) + ((seed >> 32) & _WORD) + 0x3C6EF372) & _WORD)
    return key, _mix((key + 0x1E3779B9) & _WORD)


def second_keys(seed: Tensor) -> Keys:
    """Return the keys of a second word of random bits for each element, independent of the
    first.
    """
    key, other = keys_of(seed)
    return _mix((other + _SECOND) & _WORD), _mix((key ^ _SECOND) & _WORD)


def hash_of(index: Tensor, keys: Keys) -> Tensor:
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


def hash_words(index: Tensor, keys: Keys) -> Tensor:
    """Return `hash_of` of indices below 2^31, less 2^31, all in int32."""
    return _mix_words(_mix_words(index ^ keys[0]) ^ keys[1]).bitwise_xor_(-(2**31))


def _mix_words(word: Tensor) -> Tensor:
    """Return `_mix` of words whose bits an int32 holds; multiplied unsigned, they wrap around."""
    word = word.bitwise_xor_((word >> 16).bitwise_and_(0xFFFF))
    for shift, factor in _ROUNDS:
        word.view(torch.uint32).mul_(factor)
        word = word.bitwise_xor_((word >> shift).bitwise_and_(_WORD >> shift))
    return word


def to_signed(word: Tensor) -> Tensor:
    """Return the int32 of the same 32 bits."""
    return ((word ^ 2**31) - 2**31).int()
