"""The load on links when all groups of a pattern communicate at once: the busiest link decides.

The pattern of a group is what the cost depends on of a mesh and some of its axes: a tuple of (size,
stride), outermost first, in the coarsest form. Neighbouring axes are one digit, so a group's cost
does not depend on how the mesh factors it: axes a and b of a2.b3.c4 have the pattern ((6, 4),).

`load` rates three ways to communicate, whatever is sent: a ring in mesh order, everyone with
everyone, and a tree. cost/algorithms.py makes seconds of them. On irregular networks every flow
takes its shortest paths, shared evenly where several are equal.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.errors import WorldError
from autopar.ir.mesh import Mesh
from autopar.world import Level, World

if TYPE_CHECKING:
    import networkx as nx  # imported where it is used: few worlds have an irregular network

Pattern = tuple[tuple[int, int], ...]


@lru_cache(maxsize=1 << 14)
def pattern(mesh: Mesh, axes: tuple[str, ...]) -> Pattern:
    """Return the pattern of the groups over these axes; () where they have one rank only.

    >>> pattern(Mesh.parse("a2.b3.c4"), ("a", "b"))
    ((6, 4),)
    """
    digits: list[tuple[int, int]] = []
    for name in mesh.ordered(axes):
        size, stride = mesh.sizes[name], mesh.stride(name)
        if size == 1:
            continue
        if digits and digits[-1][1] == size * stride:
            size *= digits.pop()[0]
        digits.append((size, stride))
    return tuple(digits)


def size(digits: Pattern) -> int:
    """Return the number of ranks of a group."""
    return math.prod(count for count, _ in digits)


def within(digits: Pattern, block: int) -> int | None:
    """Return how many ranks of a group lie in the same block of so many consecutive ranks; None
    where blocks and groups do not fit into one another.
    """
    inside = 1
    for count, stride in digits:
        if block % (count * stride) == 0:
            inside *= count
        elif block % stride == 0 and (count * stride) % block == 0:
            inside *= block // stride
        elif stride % block != 0:
            return None
    return inside


def halves(digits: Pattern) -> list[tuple[Pattern, Pattern]]:
    """Return every split of a group into groups of groups: (inside, across)."""
    splits = []
    for index, (count, stride) in enumerate(digits):
        for inner in range(1, count):
            inside = ((inner, stride), *digits[index + 1 :]) if inner > 1 else digits[index + 1 :]
            if count % inner == 0 and inside:
                across = (*digits[:index], (count // inner, stride * inner))
                splits.append((inside, across))
    return splits


def members(digits: Pattern, ranks: int) -> NDArray[np.int64]:
    """Return the groups into which a world of so many ranks falls, each a row in mesh order."""
    first = np.arange(ranks)
    offsets = np.zeros(1, dtype=np.int64)
    for count, stride in digits:
        first = first[first // stride % count == 0]
        offsets = (offsets[:, None] + stride * np.arange(count)).ravel()
    return first[:, None] + offsets


_HOP = 1 << 12  # a path's weight is picoseconds · _HOP + hops: whole numbers, so that ties are seen

Demand = dict[int, float]  # bytes a rank sends, by target
Loads = dict[tuple[object, object], float]  # bytes by directed link


@lru_cache(maxsize=16)
def _weighted_network(world: World) -> nx.Graph:
    """Return the network with a weight on every edge: latency first, then hops."""
    graph = world.network.copy()
    for _, _, facts in graph.edges(data=True):
        facts["weight"] = round(facts["latency_s"] * 1e12) * _HOP + 1
    return graph


@lru_cache(maxsize=1 << 12)
def _shortest_paths(world: World, source: int) -> tuple[dict, dict]:
    """Return (previous nodes on the shortest paths, weights of these) to every node, nearest
    first.
    """
    import networkx as nx

    return nx.dijkstra_predecessor_and_distance(_weighted_network(world), source)


def _latency(world: World, source: int, target: int) -> float:
    return _shortest_paths(world, source)[1][target] // _HOP / 1e12


def _route(world: World, source: int, demand: Demand, loads: Loads) -> None:
    """Add to the loads all that one rank sends, along its shortest paths."""
    previous, weights = _shortest_paths(world, source)
    passing = defaultdict(float, demand)
    for node in sorted((n for n in weights if n != source), key=weights.__getitem__, reverse=True):
        if passing[node]:
            share = passing[node] / len(previous[node])
            for neighbour in previous[node]:
                loads[neighbour, node] += share
                passing[neighbour] += share


def _busiest(world: World, demands: dict[int, Demand]) -> float:
    """Return the seconds until the busiest link has carried all demands."""
    loads: Loads = defaultdict(float)
    for source, demand in demands.items():
        _route(world, source, demand, loads)
    edges = world.network.edges
    return max(amount / edges[link]["bytes_per_s"] for link, amount in loads.items())


def load_on_network(world: World, digits: Pattern) -> tuple[float, float, float, float, float]:
    """Return the five numbers of a `Load`, in its order, on an irregular network."""
    groups = members(digits, world.ranks).tolist()
    ring_demands, exchange_demands = {}, {}
    hops, pair_latencies, slowest = [], [], 0.0
    for group in groups:
        next_ranks = dict(zip(group, group[1:] + group[:1], strict=True))
        latencies = [_latency(world, a, b) for a, b in next_ranks.items()]
        hops.append(sum(latencies))
        slowest = max(slowest, *latencies)
        for rank in group:
            others = [other for other in group if other != rank]
            ring_demands[rank] = {next_ranks[rank]: 1.0}
            exchange_demands[rank] = dict.fromkeys(others, 1.0)
            pair_latencies.append(sum(_latency(world, rank, other) for other in others))
    depth = math.ceil(math.log2(len(groups[0])))
    ring, exchange = _busiest(world, ring_demands), _busiest(world, exchange_demands)
    return ring, max(hops), exchange, max(pair_latencies), depth * slowest


class Load(NamedTuple):
    """The load of one pattern on one world.

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
    """Return the load of a pattern. Raises WorldError where the pattern reaches beyond the
    world.
    """
    reach = 1 + sum((count - 1) * stride for count, stride in digits)
    if reach > world.ranks:
        raise WorldError(f"groups reach over {reach} ranks, the world has {world.ranks}")
    if world.links:
        return Load(*load_on_network(world, digits))
    blocks = np.cumprod([level.ranks for level in world.levels]).tolist()
    if any(within(digits, block) is None for block in blocks):
        return _load_edge_by_edge(world, digits)
    return _load_of_aligned_groups(world, digits)


def _load_of_aligned_groups(world: World, digits: Pattern) -> Load:
    """Return the load where groups and nodes fit into one another: a node's uplink carries one edge
    of the ring of each group that it holds a part of.
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
    """Return the seconds per byte of a ring's edge, and of each pair's exchange, on the link of a
    member of `block` ranks; of each group it holds `below` ranks, the level `inside`, all members
    `count`.
    """
    groups, rate = block // below, level.uplink(block)
    if not level.direct:
        ring = groups / rate if below < count else 0.0
        return ring, block * (count - below) / rate
    inner, links = inside // below, level.ranks - 1  # traffic to other levels has links of its own
    if inner == 1:
        return 0.0, 0.0
    return groups / (rate * (inner - 1) / links), block * below / (rate / links)


def _load_edge_by_edge(world: World, digits: Pattern) -> Load:
    """Return the load of groups that lie askew in the nodes, such as axes of 3 in nodes of 8: edge
    by edge.
    """
    groups = members(digits, world.ranks)
    next_ranks = np.roll(groups, -1, axis=1)
    count, block = groups.shape[1], 1
    ring = exchange = 0.0
    edge_latency, pair_latency = np.zeros(groups.shape), 0.0
    for level in world.levels:
        here, there = groups // block, next_ranks // block
        together = _ranks_in_block(here)  # ranks that a group has in the member where this one is
        rate = level.uplink(block) if level.ranks > 1 else math.inf
        flows = float(np.bincount(here[here != there], minlength=1).max())
        pairs = float(np.bincount(here.ravel(), weights=(count - together).ravel()).max())
        ring, exchange = max(ring, flows / rate), max(exchange, pairs / rate)
        edge_latency = np.where(here != there, level.latency_s, edge_latency)
        block *= level.ranks
        pair_latency += float((_ranks_in_block(groups // block) - together).max()) * level.latency_s
    slowest = float(edge_latency.max())
    hops = float(edge_latency.sum(axis=1).max())
    return Load(ring, hops, exchange, pair_latency, math.ceil(math.log2(count)) * slowest)


def _ranks_in_block(blocks: np.ndarray) -> np.ndarray:
    """Return for each rank of each group how many ranks of the group are in its block."""
    width = int(blocks.max()) + 1
    keys = blocks + np.arange(len(blocks))[:, None] * width
    return np.bincount(keys.ravel())[keys]
