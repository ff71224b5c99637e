"""Computation: a roofline, max(FLOPs / rate, bytes / bandwidth), forward and backward, of one node
on one rank.
"""

from __future__ import annotations

from ..layout import Layout
from ..rules import Spec
from ..strategies import Strategy
from ..world import World

_OPTIMIZER_PASSES = (
    7  # AdamW reads parameter, gradient and two moments, and writes all but the gradient
)


def node_seconds(
    spec: Spec, strategy: Strategy, element_bytes: int, gradient: bool, world: World
) -> float:
    """Forward, and backward at twice the forward (two products for each one, two reads for each
    read).
    """
    elements = sum(
        layout.local_size
        for layout in (*strategy.operands, *strategy.results)
        if layout is not None
    )
    passes = 3 if gradient else 1
    work = passes * spec.flops / strategy.parts / world.device.flops
    moved = passes * elements * element_bytes / world.device.memory_bytes_per_s
    return max(work, moved)


def optimizer_seconds(layout: Layout, element_bytes: int, world: World) -> float:
    """The optimizer's step on the stored part of a parameter: it is bound by memory."""
    return _OPTIMIZER_PASSES * layout.local_size * element_bytes / world.device.memory_bytes_per_s
