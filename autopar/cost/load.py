"""What the links carry when all groups of a pattern communicate at once: the busiest link decides.

Three ways to talk are rated, without regard to what is said: a ring in mesh order, everyone with
everyone, and a tree.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from autopar.cost import routes
from autopar.cost.pattern import Pattern, members, size, within
from autopar.errors import WorldError
from autopar.world import Level, World


class Load(NamedTuple):
    """Of one pattern on one world.

    `ring`: seconds per byte that every rank sends its next neighbour; `ring_hops`: seconds of
    latency once around; `exchange`: seconds per byte that every rank sends each other rank of its
    group; `exchange_hops`: seconds of latency of a rank's messages, one after the other;
    `tree_hops`: seconds of latency from the leaves of a tree to its root.
    """

    ring: float
    ring_hops: float
    exchange: float
    exchange_hops: float
    tree_hops: float


@lru_cache(maxsize=1 << 16)
def load(world: World, digits: Pattern) -> Load:
    """Raises WorldError where the pattern reaches beyond the world."""
    reach = 1 + sum((count - 1) * stride for count, stride in digits)
    if reach > world.ranks:
        raise WorldError(f"groups reach over {reach} ranks, the world has {world.ranks}")
    if world.links:
        return Load(*routes.routed(world, digits))
    blocks = np.cumprod([level.ranks for level in world.levels]).tolist()
    if any(within(digits, block) is None for block in blocks):
        return _counted(world, digits)
    return _nested(world, digits)


def _nested(world: World, digits: Pattern) -> Load:
    """Groups and nodes fit into one another: a node's uplink carries one edge of the ring of each
    group that it holds a part of.
    """
    count = size(digits)
    total, block, below = Load(0, 0, 0, 0, 0), 1, 1
    for level in world.levels:
        wider = block * level.ranks
        inside = within(digits, wider)
        assert inside is not None
        if level.ranks > 1:
            crossing = count // below if below < count else 0
            further = count // inside if inside < count else 0
            ring, exchange = _uplink(level, block, below, inside, count)
            total = Load(
                max(total.ring, ring),
                total.ring_hops + (crossing - further) * level.latency_s,
                max(total.exchange, exchange),
                total.exchange_hops + (inside - below) * level.latency_s,
                total.tree_hops + math.ceil(math.log2(inside // below)) * level.latency_s,
            )
        block, below = wider, inside
    assert below == count, (digits, str(world))
    return total


def _uplink(level: Level, block: int, below: int, inside: int, count: int) -> tuple[float, float]:
    """Seconds per byte of a ring's edge, and of each pair's exchange, on the link of a member of
    `block` ranks; of each group it holds `below` ranks, the level `inside`, all members `count`.
    """
    groups, rate = block // below, level.uplink(block)
    if not level.direct:
        ring = groups / rate if below < count else 0.0
        return ring, block * (count - below) / rate
    parts, wires = inside // below, level.ranks - 1  # what passes on to other levels has own wires
    if parts == 1:
        return 0.0, 0.0
    return groups / (rate * (parts - 1) / wires), block * below / (rate / wires)


def _counted(world: World, digits: Pattern) -> Load:
    """Groups that lie askew in the nodes, such as axes of 3 in nodes of 8: edge by edge."""
    groups = members(digits, world.ranks)
    after = np.roll(groups, -1, axis=1)
    count, block = groups.shape[1], 1
    ring = exchange = 0.0
    edge_latency, pair_latency = np.zeros(groups.shape), 0.0
    for level in world.levels:
        here, there = groups // block, after // block
        held = _held(here)  # ranks that a group has in the member where this one is
        rate = level.uplink(block) if level.ranks > 1 else math.inf
        flows = float(np.bincount(here[here != there], minlength=1).max())
        pairs = float(np.bincount(here.ravel(), weights=(count - held).ravel()).max())
        ring, exchange = max(ring, flows / rate), max(exchange, pairs / rate)
        edge_latency = np.where(here != there, level.latency_s, edge_latency)
        block *= level.ranks
        pair_latency += float((_held(groups // block) - held).max()) * level.latency_s
    slowest = float(edge_latency.max())
    hops = float(edge_latency.sum(axis=1).max())
    return Load(ring, hops, exchange, pair_latency, math.ceil(math.log2(count)) * slowest)


def _held(blocks: np.ndarray) -> np.ndarray:
    """For each rank of each group, how many ranks of the group are in its block."""
    width = int(blocks.max()) + 1
    keys = blocks + np.arange(len(blocks))[:, None] * width
    return np.bincount(keys.ravel())[keys]
