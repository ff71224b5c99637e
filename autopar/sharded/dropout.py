"""Dropout whose mask does not know the layout.

Whether an element is kept is a hash of the seed and of its GLOBAL index: every layout drops exactly
what one device would drop, ranks that hold the same element agree, ranks that hold different ones
are independent, and nothing is stored or communicated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autopar._compat import in_backward
from autopar.errors import InputError
from autopar.sharded.index import Digit, globalize

_WORD = 0xFFFFFFFF


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
    index = _global_index(x, coordinates, digits_by_dim, shape)
    kept = _hash(index, seed) >= round(p * 2**32)
    return torch.where(kept, x / (1 - p), 0)


def _global_index(
    x: Tensor,
    coordinates: Sequence[Tensor],
    digits_by_dim: Sequence[Sequence[Digit]],
    shape: Sequence[int],
) -> Tensor:
    """The row-major index in the global tensor of every element of x, int64."""
    flat = torch.zeros((), dtype=torch.int64, device=x.device)
    used = 0
    for dim, digits in enumerate(digits_by_dim):
        local = torch.arange(x.shape[dim], device=x.device)
        index = globalize(local, coordinates[used : used + len(digits)], digits)
        used += len(digits)
        flat = flat + (index * math.prod(shape[dim + 1 :])).view(-1, *[1] * (x.dim() - dim - 1))
    return flat.expand(x.shape)


def _hash(index: Tensor, seed: Tensor) -> Tensor:
    """32 random bits of every (seed, index), in int64 from 0 to 2^32 - 1: both words of both go in,
    mixed in between.
    """
    seed = seed.reshape(())
    key = _mix((_mix(seed & _WORD) + ((seed >> 32) & _WORD) + 0x3C6EF372) & _WORD)
    second_key = _mix((key + 0x1E3779B9) & _WORD)
    # Keys enter twice, or masks of two seeds would be shifted copies of each other.
    return _mix(((_mix((index & _WORD) ^ key) + (index >> 32)) ^ second_key) & _WORD)


def _mix(word: Tensor) -> Tensor:
    """A bijection of 32-bit words in which every bit of the input changes every bit of the output
    about half the time.

    Multiply and xor-shift (the form of MurmurHash3's finalizer; multipliers below 2^31, so that
    int64 products never overflow).
    """
    word = word ^ (word >> 16)
    for shift, factor in ((15, 0x7FEB352D), (16, 0x45D9F3B)):
        word = word.mul_(factor).bitwise_and_(_WORD)  # in place: fresh memory is what costs here
        word = word.bitwise_xor_(word >> shift)
    return word
