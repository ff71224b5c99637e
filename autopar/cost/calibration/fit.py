"""From measurements to the numbers of a `World`: lines through times, the levels and factors that
explain them, efficiencies of matmuls, shares of attention.

`calibrate` calls `fit_world` on the measured collectives, `efficiencies` on the measured matmuls,
and `attention_cases`, `s_per_flop` and `shares` for attention: forward and backward by the kernel
that torch takes, with a causal mask and without, for a few numbers of keys and head sizes, a
model's own among them. The lines are least squares of relative errors with no unknown below 0
(Lawson and Hanson 1974).
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

_REFERENCE = "all_reduce"  # the kind that levels are fitted to; factors are for the other kinds
_SIZES = (2**14, 2**18, 2**22)  # bytes at which factors are compared
_WIDE = (2**12, *_SIZES, 2**24)  # and through which lines are drawn where there are bends
_MOST, _TINY = 10, 1e-12  # most steps for each unknown; what counts as 0
_ROUNDS = 20  # of fitting bandwidths from the inside out; two suffice unless levels hide another


def line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return (seconds at the start, seconds per byte), neither below 0, of least squares of the
    RELATIVE errors: small sizes count as much as large ones.

    Example: line([0, 1000, 3000], [1.0, 2.0, 4.0]) is (1.0, 0.001), but for rounding.
    """
    times = np.asarray(seconds, dtype=np.float64)
    rows = np.stack([np.ones(len(times)), np.asarray(sizes, dtype=np.float64)], axis=1)
    start, s_per_byte = nonnegative(rows / times[:, None], np.ones(len(times)))
    return float(start), float(s_per_byte)


def curve(
    sizes: Sequence[float], seconds: Sequence[float]
) -> tuple[float, float, tuple[tuple[float, float], ...]]:
    """Return (seconds at the start, seconds per byte, bends (bytes, seconds per byte more from
    there on)), nothing below 0, of least squares of the relative errors.

    Small sizes pay for the launch, large ones fill links and overflow caches, so bytes only ever
    become dearer. Bends are at a few of the `sizes`, which rise.

    Example: curve([1, 10, 100, 200], [5.0, 5.0, 5.0, 15.0]) is (5.0, 0.0, ((100, 0.1),)), but for
    rounding.
    """
    times, at = np.asarray(seconds, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    knees = [0.0, *at[:-1].tolist()]
    rows = np.stack([np.ones(len(at)), *(np.maximum(at - knee, 0.0) for knee in knees)], axis=1)
    start, s_per_byte, *extras = nonnegative(rows / times[:, None], np.ones(len(at))).tolist()
    bends = zip(knees[1:], extras, strict=True)
    return six(start), six(s_per_byte), tuple((knee, six(s)) for knee, s in bends if s > 0)


def nonnegative(rows: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the least squares solution of rows · x = wanted with no x below 0. Columns may differ
    in scale. Source: Lawson and Hanson 1974, chapter 23.
    """
    scale = np.abs(rows).max(axis=0)
    nonzero = np.flatnonzero(scale > 0)
    scaled, solution = rows[:, nonzero] / scale[nonzero], np.zeros(len(nonzero))
    free = np.zeros(len(nonzero), dtype=bool)
    for _ in range(_MOST * len(nonzero)):
        gain = np.where(free, -np.inf, scaled.T @ (wanted - scaled @ solution))
        if free.all() or gain.max() <= _TINY * np.abs(wanted).max() * len(wanted):
            break
        free[gain.argmax()] = True
        solution = _step_inside(scaled, wanted, solution, free)
    result = np.zeros(rows.shape[1])
    result[nonzero] = solution / scale[nonzero]
    return result


def _step_inside(
    rows: NDArray[np.float64],
    wanted: NDArray[np.float64],
    measured: NDArray[np.float64],
    free: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """Move from one solution towards the best among the free columns, as far as none falls below 0;
    those that reach 0 are no longer free.
    """
    while free.any():
        best = np.zeros(len(measured))
        best[free] = np.linalg.lstsq(rows[:, free], wanted, rcond=None)[0]
        low = free & (best <= 0)
        if not low.any():
            return best
        measured = measured + np.min(measured[low] / (measured[low] - best[low])) * (
            best - measured
        )
        free &= measured > _TINY
        measured[~free] = 0.0
    return measured


def fit_world(world: World, measured: Sequence[Measured]) -> World:
    """Return the world with bandwidths, latencies and the launch that explain the all-reduces, a
    factor for each other kind, and the measured table itself.

    Patterns that are not in the table are priced by the formulas with these numbers. An irregular
    network keeps its links.
    """
    together = [m for m in measured if m.together]
    sums = [_without_bends(m) for m in together if m.kind == _REFERENCE]
    bare = replace(world, measured=(), factors={})
    if sums and not world.links:
        bare = _fit_latencies(_fit_bandwidths(bare, sums), sums)
    factors = {
        kind: _factor(bare, [m for m in together if m.kind == kind])
        for kind in dict.fromkeys(m.kind for m in together)
    }
    return replace(bare, factors=factors, measured=tuple(measured))


def _without_bends(measurement: Measured) -> Measured:
    """Return a measurement without bends: a line through its times at sizes far and wide."""
    start, rate = line(_WIDE, [_algorithm(measurement).seconds(size) for size in _WIDE])
    return (
        replace(measurement, start_s=start, s_per_byte=rate, bends=())
        if measurement.bends
        else measurement
    )


def _algorithm(measurement: Measured) -> Algorithm:
    return Algorithm("measured", (), measurement.start_s, measurement.s_per_byte, measurement.bends)


def _fit_bandwidths(world: World, sums: Sequence[Measured]) -> World:
    """Scale the bandwidth of every level until the patterns that cross it and no further take what
    was measured; in the geometric mean of these patterns.
    """
    for _ in range(_ROUNDS):
        for index, level in enumerate(world.levels):
            slower = [
                m.s_per_byte / formula(world, m.kind, m.pattern).s_per_byte
                for m in sums
                if _outermost(world, m.pattern) == index and m.s_per_byte > 0
            ]
            if slower:
                ratio = float(np.clip(np.exp(np.mean(np.log(slower))), 1e-2, 1e2))
                faster = replace(level, bytes_per_s=level.bytes_per_s / ratio)
                world = _with_level(world, index, faster)
    return world


def _fit_latencies(world: World, sums: Sequence[Measured]) -> World:
    """Fit the launch and the latency of every level to the measured starts, which are sums of a
    launch and of hops on every level: least squares of relative errors.
    """
    without_latencies = replace(
        world, launch_s=0.0, levels=tuple(replace(level, latency_s=0.0) for level in world.levels)
    )
    unit_worlds = [replace(without_latencies, launch_s=1.0)] + [
        _with_level(without_latencies, index, replace(level, latency_s=1.0))
        for index, level in enumerate(without_latencies.levels)
    ]
    started = [m for m in sums if m.start_s > 0]
    if not started:
        return without_latencies
    rows = np.array(
        [[formula(u, m.kind, m.pattern).start_s / m.start_s for u in unit_worlds] for m in started]
    )
    launch, *latencies = nonnegative(rows, np.ones(len(started))).tolist()
    levels = zip(without_latencies.levels, latencies, strict=True)
    return replace(
        without_latencies,
        launch_s=launch,
        levels=tuple(replace(level, latency_s=s) for level, s in levels),
    )


def _factor(world: World, measured: Sequence[Measured]) -> float:
    """Return how much longer a kind takes than modelled: the median over patterns and sizes."""
    ratios = []
    for measurement in measured:
        modelled = formula(world, measurement.kind, measurement.pattern)
        for size in _SIZES:
            seconds = _algorithm(measurement).seconds(size)
            if seconds > 0 and modelled.seconds(size) > 0:
                ratios.append(math.log(seconds / modelled.seconds(size)))
    return math.exp(float(np.median(ratios))) if ratios else 1.0


def _outermost(world: World, digits: Pattern) -> int:
    """Return the outermost level whose links the groups of a pattern cross."""
    size, stride = digits[0]
    block, outermost = 1, 0
    for index, level in enumerate(world.levels):
        if level.ranks > 1 and block < size * stride:
            outermost = index
        block *= level.ranks
    return outermost


def _with_level(world: World, index: int, level: Level) -> World:
    return replace(world, levels=(*world.levels[:index], level, *world.levels[index + 1 :]))


def efficiencies(
    measured: Sequence[tuple[float, float]], launch_s: float
) -> tuple[float, tuple[tuple[float, float], ...]]:
    """Return (the highest FLOP/s, points (FLOPs, share of it) in rising order) of matmuls that were
    measured as (FLOPs, seconds). Matmuls within a factor of two of one another are one point, their
    median.

    >>> efficiencies([(1e6, 1e-3), (1e9, 0.1), (1.2e9, 0.1)], 0.0)[1]
    ((1000000.0, 0.0909091), (1095450000.0, 1.0))
    """
    bins: dict[int, list[tuple[float, float]]] = {}
    for flops, seconds in measured:
        # At least a tenth of a measurement is not its launch.
        computing_seconds = max(seconds - launch_s, seconds / 10)
        bins.setdefault(round(math.log2(flops)), []).append(
            (math.log(flops), flops / computing_seconds)
        )
    points = [
        (
            math.exp(np.mean([size for size, _ in members])),
            float(np.median([rate for _, rate in members])),
        )
        for _, members in sorted(bins.items())
    ]
    highest = max(rate for _, rate in points)
    return highest, tuple((six(size), six(rate / highest)) for size, rate in points)


def six(value: float) -> float:
    """Return the value rounded to six digits, as people read the file."""
    return float(f"{value:.6g}")


Attended = tuple[torch.dtype, Attends]  # an attention of a model

CPU_KEYS, GPU_KEYS = (128, 512, 2048), (512, 2048, 8192)
HEAD_SIZES = (32, 128)  # sizes between them follow a line in 1 / head size
LONGEST_S = 1.0  # keys whose longest forward is modelled to take longer are left out
_CPU_FLOPS, _GPU_FLOPS = 2.0**27, 2.0**36  # of one forward at least: launching it does not count
_HEADS = 8  # of one sample, adjacent in memory, as in a model
_MOST_SAMPLES = 512


class Attending(NamedTuple):
    """The forward or the backward of an attention to measure, with as many queries as keys."""

    dtype: torch.dtype
    shape: Attends
    backward: bool


def attention_cases(
    own: Sequence[Attended], dtypes: Sequence[torch.dtype], known: Device, gpu: bool
) -> list[Attending]:
    """Return what to measure: for each dtype, causal or not, every number of keys with every head
    size, `own` ones among them.
    """
    grid = []
    for dtype in dict.fromkeys((*dtypes, *(dtype for dtype, _ in own))):
        for causal in (True, False):
            own_shapes = [shape for other, shape in own if (other, shape.causal) == (dtype, causal)]
            sizes = sorted({*HEAD_SIZES, *(round(shape.head_size) for shape in own_shapes)})
            keys = sorted({*(GPU_KEYS if gpu else CPU_KEYS), *(shape.keys for shape in own_shapes)})
            grid += [
                Attending(dtype, Attends(key_count, size, causal), backward)
                for key_count, size, backward in itertools.product(keys, sizes, (False, True))
                if Attends(key_count, sizes[-1], causal).flops(key_count)
                < LONGEST_S * known.rate(dtype)
            ]
    return grid


def s_per_flop(case: Attending, device: torch.device) -> float:
    """Return the seconds per FLOP of an attention while all ranks run the same."""
    flops, run_once = attention(case, device)
    return measure.shared_seconds(run_once, measure.times_for(run_once, device), device) / flops


def attention(case: Attending, device: torch.device) -> tuple[float, Callable[[], Any]]:
    """Return (FLOPs, a function that runs it once) of an attention of enough samples and heads to
    take long enough.
    """
    shape, least_flops = case.shape, _GPU_FLOPS if device.type == "cuda" else _CPU_FLOPS
    count = max(1, round(least_flops / shape.flops(shape.keys)))
    heads = min(_HEADS, count)
    samples = min(_MOST_SAMPLES, count // heads)
    sizes = samples, shape.keys, heads, round(shape.head_size)
    query, key, value = (
        torch.randn(sizes, device=device).to(case.dtype).requires_grad_().transpose(1, 2)
        for _ in range(3)
    )

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=shape.causal)

    flops = shape.flops(samples * heads * shape.keys)
    if not case.backward:
        return flops, forward
    output = forward()
    output_gradient = torch.randn_like(output)

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(output, (query, key, value), output_gradient, retain_graph=True)

    return flops * ATTENTION_BACKWARD, backward


def shares(times: Mapping[Attending, float], known: Device) -> tuple[Attention, ...]:
    """Return the shares of the `known` device's FLOP/s that attention reaches, from seconds per
    FLOP.
    """
    share_of = {
        case: six(1 / (seconds * known.rate(case.dtype))) for case, seconds in times.items()
    }
    return tuple(
        Attention(
            str(case.dtype).removeprefix("torch."),
            case.shape.causal,
            case.shape.keys,
            round(case.shape.head_size),
            share_of[case],
            share_of[case._replace(backward=True)],
        )
        for case in times
        if not case.backward
    )
