"""From measurements to the numbers of a world: lines through times, the levels and factors that
explain them, efficiencies of products.

Calibration of attention: by the kernel that torch takes, forward and backward, with a causal
mask and without, for a few numbers of keys and head sizes; a model's own among them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from autopar.cost.algorithms import Algorithm, formula
from autopar.cost.calibration import measure
from autopar.cost.network import Pattern
from autopar.ir.sharding_rule import ATTENTION_BACKWARD, Attends
from autopar.world import Attention, Device, Level, Measured, World

_REFERENCE = "all_reduce"  # what levels are fitted to; factors say how the other kinds differ
_SIZES = (2**14, 2**18, 2**22)  # bytes at which factors are compared
_WIDE = (2**12, *_SIZES, 2**24)  # and through which lines are drawn where there are bends
_MOST, _TINY = 10, 1e-12  # steps for each unknown; what is nothing
_ROUNDS = 20  # of fitting bandwidths from the inside out; two suffice unless levels hide another


def line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(seconds at the start, seconds per byte), neither below 0, of least squares of the RELATIVE
    errors: small sizes count as much as large ones.

    Example: line([0, 1000, 3000], [1.0, 2.0, 4.0]) is (1.0, 0.001), but for rounding.
    """
    times = np.asarray(seconds, dtype=np.float64)
    rows = np.stack([np.ones(len(times)), np.asarray(sizes, dtype=np.float64)], axis=1)
    start, rate = nonnegative(rows / times[:, None], np.ones(len(times)))
    return float(start), float(rate)


def curve(
    sizes: Sequence[float], seconds: Sequence[float]
) -> tuple[float, float, tuple[tuple[float, float], ...]]:
    """(seconds at the start, seconds per byte, bends (bytes, seconds per byte more from there on)),
    nothing below 0, of least squares of the relative errors: what is small is launched, what is
    large fills links and overflows caches, so bytes only ever become dearer. Bends are at `sizes`,
    which rise, few of them.

    Example: curve([1, 10, 100, 200], [5.0, 5.0, 5.0, 15.0]) is (5.0, 0.0, ((100, 0.1),)), but for
    rounding.
    """
    times, at = np.asarray(seconds, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    knees = [0.0, *at[:-1].tolist()]
    rows = np.stack([np.ones(len(at)), *(np.maximum(at - knee, 0.0) for knee in knees)], axis=1)
    start, rate, *more = nonnegative(rows / times[:, None], np.ones(len(at))).tolist()
    bends = zip(knees[1:], more, strict=True)
    return six(start), six(rate), tuple((knee, six(s)) for knee, s in bends if s > 0)


def nonnegative(rows: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares of rows · x = wanted with no x below 0. Columns may differ in scale. Source:
    Lawson and Hanson 1974, chapter 23.
    """
    scale = np.abs(rows).max(axis=0)
    used = np.flatnonzero(scale > 0)
    scaled, found = rows[:, used] / scale[used], np.zeros(len(used))
    free = np.zeros(len(used), dtype=bool)
    for _ in range(_MOST * len(used)):
        gain = np.where(free, -np.inf, scaled.T @ (wanted - scaled @ found))
        if free.all() or gain.max() <= _TINY * np.abs(wanted).max() * len(wanted):
            break
        free[gain.argmax()] = True
        found = _inside(scaled, wanted, found, free)
    result = np.zeros(rows.shape[1])
    result[used] = found / scale[used]
    return result


def _inside(
    rows: NDArray[np.float64],
    wanted: NDArray[np.float64],
    found: NDArray[np.float64],
    free: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """From one solution towards the best among the free columns, as far as none falls below 0;
    those that reach 0 are no longer free.
    """
    while free.any():
        best = np.zeros(len(found))
        best[free] = np.linalg.lstsq(rows[:, free], wanted, rcond=None)[0]
        low = free & (best <= 0)
        if not low.any():
            return best
        found = found + np.min(found[low] / (found[low] - best[low])) * (best - found)
        free &= found > _TINY
        found[~free] = 0.0
    return found


def fitted(world: World, measured: Sequence[Measured]) -> World:
    """The world with bandwidths, latencies and the launch that explain the all-reduces, a factor
    for each other kind, and the measured table itself. Patterns that are not in the table are
    priced by the formulas with these. An irregular network keeps its links.
    """
    together = [m for m in measured if m.together]
    sums = [_straight(m) for m in together if m.kind == _REFERENCE]
    bare = replace(world, measured=(), factors={})
    if sums and not world.links:
        bare = _with_latencies(_with_bandwidths(bare, sums), sums)
    factors = {
        kind: _factor(bare, [m for m in together if m.kind == kind])
        for kind in dict.fromkeys(m.kind for m in together)
    }
    return replace(bare, factors=factors, measured=tuple(measured))


def _straight(one: Measured) -> Measured:
    """Without bends: a line through its times at sizes far and wide."""
    start, rate = line(_WIDE, [_way(one).seconds(size) for size in _WIDE])
    return replace(one, start_s=start, s_per_byte=rate, bends=()) if one.bends else one


def _way(one: Measured) -> Algorithm:
    return Algorithm("measured", (), one.start_s, one.s_per_byte, one.bends)


def _with_bandwidths(world: World, sums: Sequence[Measured]) -> World:
    """Scale the bandwidth of every level until the patterns that reach it and no further take what
    was measured; in the middle of them (geometric).
    """
    for _ in range(_ROUNDS):
        for index, level in enumerate(world.levels):
            slower = [
                m.s_per_byte / formula(world, m.kind, m.pattern).s_per_byte
                for m in sums
                if _outermost(world, m.pattern) == index and m.s_per_byte > 0
            ]
            if slower:
                change = float(np.clip(np.exp(np.mean(np.log(slower))), 1e-2, 1e2))
                faster = replace(level, bytes_per_s=level.bytes_per_s / change)
                world = _with_level(world, index, faster)
    return world


def _with_latencies(world: World, sums: Sequence[Measured]) -> World:
    """Starts are sums of a launch and of hops on every level: least squares of relative errors."""
    still = replace(
        world, launch_s=0.0, levels=tuple(replace(level, latency_s=0.0) for level in world.levels)
    )
    units = [replace(still, launch_s=1.0)] + [
        _with_level(still, index, replace(level, latency_s=1.0))
        for index, level in enumerate(still.levels)
    ]
    used = [m for m in sums if m.start_s > 0]
    if not used:
        return still
    rows = np.array(
        [[formula(u, m.kind, m.pattern).start_s / m.start_s for u in units] for m in used]
    )
    launch, *latencies = nonnegative(rows, np.ones(len(used))).tolist()
    levels = zip(still.levels, latencies, strict=True)
    return replace(
        still, launch_s=launch, levels=tuple(replace(level, latency_s=s) for level, s in levels)
    )


def _factor(world: World, measured: Sequence[Measured]) -> float:
    """How much longer than modelled, in the middle over patterns and sizes (geometric)."""
    ratios = []
    for one in measured:
        modelled = formula(world, one.kind, one.pattern)
        for size in _SIZES:
            took = _way(one).seconds(size)
            if took > 0 and modelled.seconds(size) > 0:
                ratios.append(math.log(took / modelled.seconds(size)))
    return math.exp(float(np.median(ratios))) if ratios else 1.0


def _outermost(world: World, digits: Pattern) -> int:
    """The outermost level whose links the groups of a pattern cross."""
    size, stride = digits[0]
    block, found = 1, 0
    for index, level in enumerate(world.levels):
        if level.ranks > 1 and block < size * stride:
            found = index
        block *= level.ranks
    return found


def _with_level(world: World, index: int, level: Level) -> World:
    return replace(world, levels=(*world.levels[:index], level, *world.levels[index + 1 :]))


def efficiencies(
    measured: Sequence[tuple[float, float]], launch_s: float
) -> tuple[float, tuple[tuple[float, float], ...]]:
    """(the highest FLOP/s, points (FLOPs, share of it) in rising order) of products that were
    measured as (FLOPs, seconds). Those within a factor of two of one another are one point, their
    median.

    >>> efficiencies([(1e6, 1e-3), (1e9, 0.1), (1.2e9, 0.1)], 0.0)[1]
    ((1000000.0, 0.0909091), (1095450000.0, 1.0))
    """
    bins: dict[int, list[tuple[float, float]]] = {}
    for flops, seconds in measured:
        worked = max(seconds - launch_s, seconds / 10)  # a launch is not more than most of it
        bins.setdefault(round(math.log2(flops)), []).append((math.log(flops), flops / worked))
    points = [
        (math.exp(np.mean([size for size, _ in found])), float(np.median([r for _, r in found])))
        for _, found in sorted(bins.items())
    ]
    highest = max(rate for _, rate in points)
    return highest, tuple((six(size), six(rate / highest)) for size, rate in points)


def six(value: float) -> float:
    """Six digits: people read the file."""
    return float(f"{value:.6g}")


Attended = tuple[torch.dtype, Attends]  # a model's

CPU_KEYS, GPU_KEYS = (128, 512, 2048), (512, 2048, 8192)
HEAD_SIZES = (32, 128)  # what lies between follows a line in 1 / head size
LONGEST_S = 1.0  # keys whose longest forward is modelled to take longer are left out
_CPU_FLOPS, _GPU_FLOPS = 2.0**27, 2.0**36  # of one forward at least: launching it does not count
_HEADS = 8  # of one sample, which lie beside one another in memory, as in a model
_MOST_SAMPLES = 512


class Attending(NamedTuple):
    """The forward or the backward of attention to measure, of as many queries as keys."""

    dtype: torch.dtype
    shape: Attends
    backward: bool


def wanted(
    own: Sequence[Attended], dtypes: Sequence[torch.dtype], known: Device, gpu: bool
) -> list[Attending]:
    """Of each dtype, causal or not, every number of keys with every head size; `own` ones, too."""
    found = []
    for dtype in dict.fromkeys((*dtypes, *(dtype for dtype, _ in own))):
        for causal in (True, False):
            mine = [one for other, one in own if (other, one.causal) == (dtype, causal)]
            sizes = sorted({*HEAD_SIZES, *(round(one.head_size) for one in mine)})
            keys = sorted({*(GPU_KEYS if gpu else CPU_KEYS), *(one.keys for one in mine)})
            found += [
                Attending(dtype, Attends(many, size, causal), backward)
                for many, size, backward in itertools.product(keys, sizes, (False, True))
                if Attends(many, sizes[-1], causal).flops(many) < LONGEST_S * known.rate(dtype)
            ]
    return found


def s_per_flop(one: Attending, device: torch.device) -> float:
    """What it takes while all ranks do the same."""
    work, run = attention(one, device)
    return measure.shared_seconds(run, measure.times_for(run, device), device) / work


def attention(one: Attending, device: torch.device) -> tuple[float, Callable[[], Any]]:
    """(its FLOPs, what runs it once): so many samples and heads that it takes long enough."""
    shape, least = one.shape, _GPU_FLOPS if device.type == "cuda" else _CPU_FLOPS
    count = max(1, round(least / shape.flops(shape.keys)))
    heads = min(_HEADS, count)
    samples = min(_MOST_SAMPLES, count // heads)
    sizes = samples, shape.keys, heads, round(shape.head_size)
    query, key, value = (
        torch.randn(sizes, device=device).to(one.dtype).requires_grad_().transpose(1, 2)
        for _ in range(3)
    )

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=shape.causal)

    work = shape.flops(samples * heads * shape.keys)
    if not one.backward:
        return work, forward
    made = forward()
    above = torch.randn_like(made)

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(made, (query, key, value), above, retain_graph=True)

    return work * ATTENTION_BACKWARD, backward


def shares(found: Mapping[Attending, float], known: Device) -> tuple[Attention, ...]:
    """The shares of the FLOP/s of the `known` device, from seconds per FLOP."""
    each = {one: six(1 / (seconds * known.rate(one.dtype))) for one, seconds in found.items()}
    return tuple(
        Attention(
            str(one.dtype).removeprefix("torch."),
            one.shape.causal,
            one.shape.keys,
            round(one.shape.head_size),
            each[one],
            each[one._replace(backward=True)],
        )
        for one in found
        if not one.backward
    )
