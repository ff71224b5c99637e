"""Irregular networks: every flow takes its shortest ways, shared evenly where several are equal."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import lru_cache

import networkx as nx

from autopar.cost.pattern import Pattern, members
from autopar.world import World

_HOP = 1 << 12  # a path's weight is picoseconds · _HOP + hops: whole numbers, so that ties are seen

Demand = dict[int, float]  # bytes a rank sends, by target
Loads = dict[tuple[object, object], float]  # bytes by directed link


@lru_cache(maxsize=16)
def _weighted(world: World) -> nx.Graph:
    graph = world.network.copy()
    for _, _, facts in graph.edges(data=True):
        facts["weight"] = round(facts["latency_s"] * 1e12) * _HOP + 1
    return graph


@lru_cache(maxsize=1 << 12)
def _ways(world: World, source: int) -> tuple[dict, dict]:
    """(previous nodes on the shortest ways, weights of these) to every node, nearest first."""
    return nx.dijkstra_predecessor_and_distance(_weighted(world), source)


def _latency(world: World, source: int, target: int) -> float:
    return _ways(world, source)[1][target] // _HOP / 1e12


def _add(world: World, source: int, demand: Demand, loads: Loads) -> None:
    """Route all that one rank sends."""
    previous, weights = _ways(world, source)
    passing = defaultdict(float, demand)
    for node in sorted((n for n in weights if n != source), key=weights.__getitem__, reverse=True):
        if passing[node]:
            share = passing[node] / len(previous[node])
            for before in previous[node]:
                loads[before, node] += share
                passing[before] += share


def _busiest(world: World, demands: dict[int, Demand]) -> float:
    """Seconds until the busiest link has carried all of it."""
    loads: Loads = defaultdict(float)
    for source, demand in demands.items():
        _add(world, source, demand, loads)
    edges = world.network.edges
    return max(amount / edges[link]["bytes_per_s"] for link, amount in loads.items())


def routed(world: World, digits: Pattern) -> tuple[float, float, float, float, float]:
    """The numbers of `load.Load`, in its order."""
    groups = members(digits, world.ranks).tolist()
    around, everyone = {}, {}
    hops, pairs, slowest = [], [], 0.0
    for group in groups:
        nexts = dict(zip(group, group[1:] + group[:1], strict=True))
        latencies = [_latency(world, a, b) for a, b in nexts.items()]
        hops.append(sum(latencies))
        slowest = max(slowest, *latencies)
        for rank in group:
            others = [other for other in group if other != rank]
            around[rank] = {nexts[rank]: 1.0}
            everyone[rank] = dict.fromkeys(others, 1.0)
            pairs.append(sum(_latency(world, rank, other) for other in others))
    depth = math.ceil(math.log2(len(groups[0])))
    ring, exchange = _busiest(world, around), _busiest(world, everyone)
    return ring, max(hops), exchange, max(pairs), depth * slowest
