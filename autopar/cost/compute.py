"""The cost of computation by a roofline: launch + max(FLOPs / (rate · efficiency), bytes /
bandwidth).

The rate is that of the op's own dtype. The efficiency depends on the FLOPs that one rank does in
one op (`Device.efficiency`, from calibration or nominal). Attention has efficiencies of its own
(`Device.attention`), ops without FLOPs a bandwidth of their own (`Device.op_bytes_per_s`).

FLOPs and bytes of one rank enter, numbers or arrays of them; seconds leave. The planner prices a
strategy of a node with `node_seconds` or, for many at once, `rule_seconds`; the simulator calls
them too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from autopar.ir.band import Place
from autopar.ir.layout import Layout
from autopar.ir.sharding_rule import Attends, Dims, OpShardingRule
from autopar.ir.strategy import Strategy
from autopar.world import Device, World

Numbers = TypeVar("Numbers", float, NDArray[np.float64])  # one number, or an array of them

# AdamW reads parameter, gradient and two moments, and writes all but the gradient.
_OPTIMIZER_PASSES = 7
_BACKWARD = 2  # a matmul has two in its backward; what is read is read and written back


def matmul_seconds(
    flops: Numbers, moved_bytes: Numbers, dtype: torch.dtype, device: Device
) -> Numbers:
    """Return the seconds of one op on one rank, elementwise: of a matmul or, with 0 FLOPs, of any
    other op.

    `flops` and `moved_bytes` are one rank's own, of one evaluation. Assumed: the operands are read
    and the results written once; computing and moving overlap, launching overlaps with neither;
    matmuls of as many FLOPs are equally efficient, whatever their shape.

    >>> device = Device("d", {"float32": 1e12}, 8e9, 1e10, {"float32": ((1e6, 0.5),)})
    >>> matmul_seconds(np.array([1e12, 0.0]), np.array([1e9, 1e9]), torch.float32, device)
    array([2. , 0.1])
    """
    return _roofline(flops, efficiency(flops, dtype, device), moved_bytes, dtype, device)


def _roofline(
    flops: Numbers, share: Numbers, moved_bytes: Numbers, dtype: torch.dtype, device: Device
) -> Numbers:
    """Return the seconds of an op that reaches this share of the FLOP/s or of the bandwidth."""
    computing = flops / (device.rate(dtype) * share)
    memory, others = device.memory_bytes_per_s, op_bytes_per_s(device)
    if isinstance(computing, float) and isinstance(moved_bytes, float | int):
        return max(computing, moved_bytes / (memory if flops else others)) + device.launch_s
    moving = moved_bytes / np.where(np.asarray(flops) > 0, memory, others)
    return np.maximum(computing, moving) + device.launch_s


def op_bytes_per_s(device: Device) -> float:
    """Return the bytes that ops without FLOPs read and write in a second; memory's bandwidth where
    it was not calibrated.
    """
    return device.op_bytes_per_s or device.memory_bytes_per_s


def efficiency(flops: Numbers, dtype: torch.dtype, device: Device) -> Numbers:
    """Return the share of `device.rate(dtype)` that a matmul of so many FLOPs reaches: straight
    lines between the measured points on logarithmic axes, constant beyond them; 1 where there are
    none.
    """
    points = _log_points(device, dtype)
    if points is None:
        return flops * 0.0 + 1.0
    sizes, shares = points
    if len(sizes) == 1:
        return flops * 0.0 + float(np.exp(shares[0]))
    share = np.exp(np.interp(np.log(np.maximum(flops, 1.0)), sizes, shares))
    return float(share) if isinstance(flops, float | int) else share


@lru_cache(maxsize=64)
def _log_points(
    device: Device, dtype: torch.dtype
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return the logarithms of the measured FLOPs and shares; None where nothing was measured."""
    points = device.points(dtype)
    if not points:
        return None
    sizes, shares = np.log(np.array(points, dtype=np.float64)).T
    return sizes, shares


def attention_seconds(
    flops: Numbers,
    moved_bytes: Numbers,
    attends: Attends,
    backward: bool,
    dtype: torch.dtype,
    device: Device,
) -> Numbers:
    """Return the seconds of the forward or the backward of attention on one rank, elementwise; the
    FLOPs and bytes are the rank's own. Where attention was not calibrated it is as efficient as a
    matmul of as many FLOPs.
    """
    calibrated = attention_share(attends, backward, dtype, device)
    share = efficiency(flops, dtype, device) if calibrated is None else flops * 0.0 + calibrated
    return _roofline(flops, share, moved_bytes, dtype, device)


def attention_share(
    attends: Attends, backward: bool, dtype: torch.dtype, device: Device
) -> float | None:
    """Return the share of `device.rate(dtype)` that attention reaches; None where it was not
    calibrated.

    Seconds per FLOP are taken to be linear in 1 / keys (what blocks of a causal mask compute in
    vain, and starting rows) and in 1 / head size (what each score takes besides its matmuls), and
    constant beyond what was measured.
    """
    grid = _attention_grid(device, dtype, attends.causal, backward)
    if grid is None:
        return None
    keys, sizes, costs = grid
    by_size = [np.interp(1 / attends.keys, keys, row) for row in costs]
    return float(1 / np.interp(1 / attends.head_size, sizes, by_size))


@lru_cache(maxsize=64)
def _attention_grid(
    device: Device, dtype: torch.dtype, causal: bool, backward: bool
) -> tuple[list[float], list[float], NDArray[np.float64]] | None:
    """Return 1 / keys and 1 / head size, both rising, and 1 / share by [head size, keys]."""
    measured = device.attention_shares(dtype, causal)
    if not measured:
        return None
    by_place = {
        (1 / point.head_size, 1 / point.keys): point.backward_share
        if backward
        else point.forward_share
        for point in measured
    }
    sizes, keys = (sorted(set(line)) for line in zip(*by_place, strict=True))
    return keys, sizes, np.array([[1 / by_place[s, k] for k in keys] for s in sizes])


def rule_seconds(
    rule: OpShardingRule,
    flops: Numbers,
    moved_bytes: Numbers,
    dtype: torch.dtype,
    gradient: bool,
    device: Device,
    inside_bytes: Numbers | float = 0.0,
) -> Numbers:
    """Return the seconds of a node with this rule on one rank, elementwise; `flops` and
    `moved_bytes` are those of its forward. `inside_bytes`: of what it makes on the way, which is
    written and read.

    With `gradient` the backward counts too, at twice the forward. That of attention has 2.5 times
    the FLOPs or more (`Attends.backward_times`), takes and makes eight tensors where the forward
    has four, and is one op.
    """
    if rule.attends is None:
        forward_seconds = matmul_seconds(flops, moved_bytes, dtype, device)
        if rule.inside:
            forward_seconds = forward_seconds + 2 * inside_bytes / op_bytes_per_s(device)
        return forward_seconds * (1 + _BACKWARD if gradient else 1)
    forward = attention_seconds(flops, moved_bytes, rule.attends, False, dtype, device)
    if not gradient:
        return forward
    flops, moved_bytes = flops * rule.attends.backward_times, moved_bytes * _BACKWARD
    return forward + attention_seconds(flops, moved_bytes, rule.attends, True, dtype, device)


def node_seconds(
    rule: OpShardingRule, strategy: Strategy, dtype: torch.dtype, gradient: bool, world: World
) -> float:
    """Return the seconds of one node on one rank; with `gradient`, its backward included.

    All its tensors are taken to have this dtype: that of its first result.
    """
    elements = sum(
        layout.local_size
        for layout in (*strategy.operands, *strategy.results)
        if layout is not None
    )
    rule = _with_split_queries(rule, strategy)
    flops, moved_bytes = float(rule.flops / strategy.ranks), float(elements * dtype.itemsize)
    if not rule.inside:
        return rule_seconds(rule, flops, moved_bytes, dtype, gradient, world.device)
    counts = _split_counts(rule, strategy)
    if any(counts[dim] > 1 for dim in counts if rule.uneven.intersection(dim)):
        flops *= rule.skew
    inside = sum(_local_elements(dims, rule, counts) for dims in rule.inside) * dtype.itemsize
    return rule_seconds(rule, flops, moved_bytes, dtype, gradient, world.device, inside)


def _split_counts(rule: OpShardingRule, strategy: Strategy) -> dict[tuple[str, ...], int]:
    """Return among how many ranks each dim of the operands is split, by the dim's factors."""
    counts: dict[tuple[str, ...], int] = {}
    for dims, layout in zip(rule.operands, strategy.operands, strict=True):
        for dim, names in enumerate(dims or ()):
            assert layout is not None
            counts[names] = math.prod(digit.size for digit in layout.digits(dim))
    return counts


def _local_elements(
    dims: Dims, rule: OpShardingRule, counts: Mapping[tuple[str, ...], int]
) -> float:
    """Return the elements on one rank of a tensor with these dims."""
    whole = math.prod(rule.sizes[name] for names in dims for name in names)
    return whole / math.prod(_count(names, counts) for names in dims)


def _count(names: tuple[str, ...], counts: Mapping[tuple[str, ...], int]) -> int:
    """Return among how many ranks a dim is split; its factors may be part of a dim of operands."""
    return next((n for dim, n in counts.items() if set(names) <= set(dim)), 1)


def _with_split_queries(rule: OpShardingRule, strategy: Strategy) -> OpShardingRule:
    """Return the rule of an attention with the FLOPs that it has where its queries lie so: a rank
    with a contiguous part of them computes as many blocks as the last one needs, with a strided
    part no more than its share.
    """
    layout = strategy.operands[0]
    if rule.attends is None or rule.band is None or layout is None:
        return rule
    digits = layout.digits(len(layout.shape) - 2)
    if not digits:
        return rule
    places = tuple(Place(digit.stride, digit.size) for digit in digits)
    share = rule.band.share(layout.local_shape[-2], rule.attends.keys, places)
    attends = rule.attends._replace(share=share)
    flops = rule.flops * attends.flops(1) / rule.attends.flops(1)
    return replace(rule, flops=flops, attends=attends)


def optimizer_seconds(layout: Layout, element_bytes: int, world: World) -> float:
    """Return the seconds of the optimizer's step on the stored part of a parameter: it is bound by
    memory.
    """
    return optimizer_seconds_of(layout.local_size, element_bytes, world)


def optimizer_seconds_of(numbers: int, element_bytes: int, world: World) -> float:
    """Return the seconds of the optimizer's step on so many numbers."""
    return _OPTIMIZER_PASSES * numbers * element_bytes / world.device.memory_bytes_per_s
