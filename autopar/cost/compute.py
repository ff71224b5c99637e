"""Computation: a roofline, launch + max(FLOPs / (rate · efficiency), bytes / bandwidth).

The rate is that of the op's own dtype; the efficiency depends on the FLOPs that one rank does in
one op (`Device.efficiency`, by calibration or nominal).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ..layout import Layout
from ..rules import Spec
from ..strategies import Strategy
from ..world import Device, World

Numbers = TypeVar("Numbers", float, NDArray[np.float64])  # one number, or an array of them

_OPTIMIZER_PASSES = (
    7  # AdamW reads parameter, gradient and two moments, and writes all but the gradient
)
_BACKWARD = 2  # a product has two in its backward; a read is read and written back


def product_seconds(
    flops: Numbers, moved_bytes: Numbers, dtype: torch.dtype, device: Device
) -> Numbers:
    """Seconds of one op on one rank, elementwise: of a product or, with 0 FLOPs, of any other op.

    `flops` and `moved_bytes` are one rank's own, of one evaluation. Assumed: the operands are read
    and the results written once; computing and moving overlap, launching overlaps with neither;
    products of as many FLOPs are equally efficient, whatever their shape.

    >>> device = Device("d", {"float32": 1e12}, 8e9, 1e10, {"float32": ((1e6, 0.5),)})
    >>> product_seconds(np.array([1e12, 0.0]), np.array([1e9, 1e9]), torch.float32, device)
    array([2. , 0.1])
    """
    rate = device.rate(dtype) * efficiency(flops, dtype, device)
    moving = moved_bytes / device.memory_bytes_per_s
    if isinstance(flops, float | int) and isinstance(moving, float):
        return max(flops / rate, moving) + device.launch_s
    return np.maximum(flops / rate, moving) + device.launch_s


def efficiency(flops: Numbers, dtype: torch.dtype, device: Device) -> Numbers:
    """The share of `device.rate(dtype)` that a product of so many FLOPs reaches: straight lines
    between the measured points on logarithmic axes, constant beyond them; 1 where there are none.
    """
    points = _logarithms(device, dtype)
    if points is None:
        return flops * 0.0 + 1.0
    sizes, shares = points
    if len(sizes) == 1:
        return flops * 0.0 + float(np.exp(shares[0]))
    found = np.exp(np.interp(np.log(np.maximum(flops, 1.0)), sizes, shares))
    return float(found) if isinstance(flops, float | int) else found


@lru_cache(maxsize=64)
def _logarithms(
    device: Device, dtype: torch.dtype
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    points = device.points(dtype)
    if not points:
        return None
    sizes, shares = np.log(np.array(points, dtype=np.float64)).T
    return sizes, shares


def node_seconds(
    spec: Spec, strategy: Strategy, dtype: torch.dtype, gradient: bool, world: World
) -> float:
    """Of one node on one rank; with `gradient`, the backward at twice the forward.

    All its tensors are taken to have this dtype: that of its first result.
    """
    elements = sum(
        layout.local_size
        for layout in (*strategy.operands, *strategy.results)
        if layout is not None
    )
    once = product_seconds(
        float(spec.flops / strategy.parts), float(elements * dtype.itemsize), dtype, world.device
    )
    return once * (1 + _BACKWARD if gradient else 1)


def optimizer_seconds(layout: Layout, element_bytes: int, world: World) -> float:
    """The optimizer's step on the stored part of a parameter: it is bound by memory."""
    return optimizer_seconds_of(layout.local_size, element_bytes, world)


def optimizer_seconds_of(numbers: int, element_bytes: int, world: World) -> float:
    """The same for so many numbers."""
    return _OPTIMIZER_PASSES * numbers * element_bytes / world.device.memory_bytes_per_s
