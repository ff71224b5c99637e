"""Random numbers that do not depend on the layout.

Example: `torch.randn(8, 6)` in a model whose rows lie on four ranks: each rank computes the numbers
of its own two rows, from a hash of the seed, the number of the draw and the elements' GLOBAL
indices (index_hash.py). They are what one device gives, and a backward that runs a block again
gives them again.

Numbers are computed in float64, of two words of 32 random bits for each element (one where the
dtype has no room for more), then rounded.
ops/local.py emits `draw` for the draws of passes/draws.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from autopar._compat import compiled_for
from autopar.ops.sharded.dropout import FORMULAS
from autopar.ops.sharded.index_hash import (
    BLOCK,
    Shard,
    all_indices,
    hash_of,
    in_rows,
    keys_of,
    second_keys,
)
from autopar.ops.sharded.vocabulary import Digit

Kind = Literal["uniform", "normal", "integers"]
# So many bits of a number below 1 are not rounded up to 1.
_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}


def draw(
    kind: Kind,
    limits: Sequence[int],
    size: Sequence[int],
    dtype: torch.dtype,
    seed: Tensor,
    coordinates: Sequence[Tensor],
    digits_by_dim: Sequence[Sequence[Digit]],
    shape: Sequence[int],
) -> Tensor:
    """Return a rank's shard, of the local shape `size`, of a tensor of random numbers: "uniform"
    from 0 to below 1, "normal" of mean 0 and variance 1, or "integers" from `limits[0]` to below
    `limits[1]`.

    `seed`, `coordinates`, `digits_by_dim` and the global `shape` are as in `dropout`.
    """
    shard = Shard.of(digits_by_dim, shape)
    return _draw(kind, list(limits), list(size), dtype, seed, list(coordinates), *map(list, shard))


class _DrawArguments(NamedTuple):
    """The arguments of a draw that are no tensors: see `draw`."""

    kind: str
    limits: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype
    shard: Shard

    def numbers(self, index: Tensor, seed: Tensor) -> Tensor:
        """Return the random numbers of the elements with these global indices."""
        first, exact = hash_of(index, keys_of(seed)), _BITS.get(self.dtype, 53)
        if self.kind == "uniform" and exact <= 32:
            return ((first >> (32 - exact)) * 2.0**-exact).to(self.dtype)
        second = hash_of(index, second_keys(seed))
        if self.kind == "uniform":
            return ((first << 21 | second >> 11) * 2.0**-53).to(self.dtype)
        if self.kind == "normal":  # Box and Muller
            radius = ((first + 0.5) * 2.0**-32).log().mul(-2).sqrt()
            return (radius * (second * (math.tau * 2.0**-32)).cos()).to(self.dtype)
        low, high = self.limits
        bits = (first & 0x7FFFFFFF) << 32 | second
        return (bits % (high - low) + low).to(self.dtype)


@torch.library.custom_op("autopar::draw", mutates_args=())
def _draw(
    kind: str,
    limits: Sequence[int],
    size: Sequence[int],
    dtype: torch.dtype,
    seed: Tensor,
    coordinates: Sequence[Tensor],
    counts: Sequence[int],
    facts: Sequence[int],
    shape: Sequence[int],
) -> Tensor:
    """Return random numbers; `counts`, `facts` and `shape` are those of the rank's Shard."""
    shard = Shard(tuple(counts), tuple(facts), tuple(shape))
    how = _DrawArguments(kind, tuple(limits), tuple(size), dtype, shard)
    if seed.device.type == "cpu":
        return _in_blocks(seed, coordinates, how)
    return _compile_formula(how)(seed, *coordinates)


@_draw.register_fake
def _draw_fake(
    kind: str, limits: Any, size: Sequence[int], dtype: torch.dtype, seed: Tensor, *rest: Any
) -> Tensor:
    return seed.new_empty(list(size), dtype=dtype)


@cache
def _compile_formula(how: _DrawArguments) -> Callable[..., Tensor]:
    """Return the plain formula for a GPU, compiled to one kernel by inductor where Triton is
    installed.
    """
    plain = partial(_all_at_once, how=how)
    return compiled_for(plain) if find_spec("triton") else plain


def _all_at_once(seed: Tensor, *coordinates: Tensor, how: _DrawArguments) -> Tensor:
    """Return random numbers, by the formula over all elements at once."""
    tables = how.shard.index_tables(how.size, coordinates, seed.device)
    index = all_indices(tables, seed.device).expand(how.size)
    return how.numbers(index, seed).contiguous()


def _formula(
    kind: str,
    limits: Sequence[int],
    size: Sequence[int],
    dtype: torch.dtype,
    seed: Tensor,
    coordinates: Sequence[Tensor],
    counts: Sequence[int],
    facts: Sequence[int],
    shape: Sequence[int],
) -> Tensor:
    shard = Shard(tuple(counts), tuple(facts), tuple(shape))
    how = _DrawArguments(kind, tuple(limits), tuple(size), dtype, shard)
    return _all_at_once(seed, *coordinates, how=how)


FORMULAS[torch.ops.autopar.draw.default] = _formula


def _in_blocks(seed: Tensor, coordinates: Sequence[Tensor], how: _DrawArguments) -> Tensor:
    """Return random numbers, computed in blocks that fit a CPU's cache."""
    y = seed.new_empty(how.size, dtype=how.dtype)
    if not y.numel():
        return y
    rows, row = in_rows(how.shard.index_tables(how.size, coordinates, seed.device), seed.device)
    target, count = y.view(-1, len(row)), max(1, BLOCK // len(row))
    for first in range(0, len(rows), count):
        index = rows[first : first + count, None] + row
        target[first : first + count] = how.numbers(index, seed)
    return y
