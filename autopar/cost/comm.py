"""Communication: ring costs of the collectives on a uniform link (design: seconds = words /
bandwidth + hops · latency).

On an axis of p ranks, with B the bytes of the whole value on that axis, a rank sends (p-1)/p·B in
an all-gather or a reduce-scatter, twice that in an all-reduce, (p-1)/p²·B in an all-to-all; the
panels of SUMMA count as the gather or scatter that they are, p broadcasts or reduces of B/p
(Thakur, Rabenseifner, Gropp 2005, ring algorithms).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..layout import Step, Traffic
from ..mesh import Mesh
from ..world import World
from .inside import Inside

_PASSES = {
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_reduce": 2,
    "all_to_all": 1,
    "broadcast": 1,
    "reduce": 1,
}


class Cost(NamedTuple):
    """What one collective costs a rank: wire bytes and seconds."""

    kind: str
    axes: tuple[str, ...]
    backward: bool
    bytes: float
    seconds: float


def collective_cost(
    traffic: Traffic, ranks: int, element_bytes: int, world: World
) -> tuple[float, float]:
    """(bytes a rank sends, seconds) of one collective over `ranks` ranks."""
    passes = _PASSES[traffic.collective]
    sent = passes * (ranks - 1) / ranks * traffic.elements * element_bytes
    if traffic.collective == "all_to_all":
        sent /= ranks
    return sent, sent / world.bytes_per_s + passes * (ranks - 1) * world.latency_s


def costs(path: Iterable[Step], grad: bool, element_bytes: int, world: World) -> Iterator[Cost]:
    """Every collective of a path of changes, forward and backward."""
    for step in path:
        for backward, traffic in enumerate(step.traffic(grad)):
            if traffic is not None:
                sent, seconds = collective_cost(traffic, step.group_size, element_bytes, world)
                yield Cost(traffic.collective, step.axes, bool(backward), sent, seconds)


def inside_costs(
    found: Iterable[Inside], mesh: Mesh, element_bytes: int, world: World
) -> Iterator[Cost]:
    """Every collective inside a sharded implementation."""
    for traffic, axes, backward in found:
        sent, seconds = collective_cost(
            traffic, math.prod(mesh.sizes[a] for a in axes), element_bytes, world
        )
        yield Cost(traffic.collective, axes, backward, sent, seconds)


def path_seconds(path: Iterable[Step], grad: bool, element_bytes: int, world: World) -> float:
    """Seconds of all collectives of a path, plus what slicing and padding in memory cost (so that
    ties go to fewer steps).
    """
    total = 0.0
    for step in path:
        total += (
            max(step.before.local_size, step.after.local_size)
            * element_bytes
            / world.device.memory_bytes_per_s
        )
    return total + sum(cost.seconds for cost in costs(path, grad, element_bytes, world))
