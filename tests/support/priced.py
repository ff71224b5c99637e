"""Worlds, and what a collective on one of them is priced at."""

from __future__ import annotations

from autopar.cost.communication import Price, collective_cost
from autopar.ir.layout import Traffic
from autopar.ir.mesh import Mesh
from autopar.world import Device, Level, World

CORE = Device("core", {"float32": 4e10}, 8e9, 1e10)
GPU = Device("gpu", {"bfloat16": 1e15}, 8e10, 3e12)
# Design, section 6: 2 nodes × 2 ranks, 400 Mbit/s between the nodes; latencies fitted to the small
# all-reduces (0.7, 1.9 and 3.4 ms), see autopar/world/machines.py.
START, NEAR, FAR = 0.25e-3, 0.225e-3, 0.825e-3
EMULATED = World((Level(2, 6e8, NEAR), Level(2, 5e7, FAR)), CORE, launch_s=START)


def slow_between(near: int, far: int) -> World:
    """A world of `far` groups of `near` ranks, with slow links between groups."""
    return World((Level(near, 1e10, 1e-7), Level(far, 1e6, 1e-6)), CORE)


def price(world: World, mesh: str, axes: str, kind: str, count: float) -> Price:
    return collective_cost(
        Traffic(kind, int(count)), tuple(axes.split()), Mesh.parse(mesh), 1, world
    )
