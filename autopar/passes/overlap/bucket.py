"""bucket: small collectives of one kind, group and dtype joined into one, where that is modelled to
be faster.

What is joined is said in cost/simulator/buckets.py; up to a size that the simulation chooses, none
among them. How the graph is written then is in fuse.py. The panels of SUMMA may first become the
gathers and scatters that they are together (summa.py), which are then joined as others are. On more
than two ranks a sum may add in another order within a bucket: that is the one thing here that
changes bits.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import fx

from autopar.cost.simulator import buckets
from autopar.cost.simulator.engine import simulate_overlap
from autopar.cost.simulator.graph_events import Listed, Phase, collective_of, graph_events, graph_seconds, lead_to_matmuls, listed_seconds
from autopar.ir.graph import copied, ordered
from autopar.passes.overlap import summa_panels
from autopar.passes.overlap.fuse import fuse, can_fuse
from autopar.world import World

aten, functional = torch.ops.aten, torch.ops._c10d_functional


def bucket(
    graph: fx.Graph,
    world: World,
    stored: frozenset[str],
    phase: Phase,
    most: float = math.inf,
) -> fx.Graph:
    """The graph with the buckets of the size that is modelled to be the fastest, of at most `most`
    bytes; the graph itself where none is. The same on every rank.
    """
    if not most:
        return graph
    sizes = [size for size in buckets.SIZES if size <= most] or [int(most)]
    form, listed = _kind_of_bucket(graph, world, stored, phase, most)
    best, least = form, listed_seconds(listed, world)
    for several in choices(listed, sizes):
        found = fuse_buckets(form, several)
        if found is None:
            continue
        taken = graph_seconds(found, world, stored, phase)
        if taken < least:
            best, least = found, taken
    return best


def _kind_of_bucket(
    graph: fx.Graph, world: World, stored: frozenset[str], phase: Phase, most: float
) -> tuple[fx.Graph, Listed]:
    """The graph with its panels in the form that is modelled to be the fastest, and its events."""
    forms = [graph, *summa_panels.panel_choices(graph, world, stored, phase, most)]
    found = [(form, graph_events(form, world, stored, phase)) for form in forms]
    if len(found) == 1:
        return found[0]
    return min(found, key=lambda each: listed_seconds(each[1], world))


def fuse_buckets(graph: fx.Graph, several: Sequence[Sequence[fx.Node]]) -> fx.Graph | None:
    """A copy of the graph with each bucket as one; None where buckets wait for one another."""
    found = copied(graph)
    twins = dict(zip(graph.nodes, found.nodes, strict=True))
    for members in several:
        fuse(found, [twins[node] for node in members])
    return found if ordered(found) else None


def choices(listed: Listed, sizes: Sequence[int]) -> Iterator[list[list[fx.Node]]]:
    """What is joined into buckets of at most each of these bytes, the same buckets once."""
    keys = [_key(node) for node in listed.nodes]
    run, leads = simulate_overlap(listed.events), lead_to_matmuls(listed)
    known: list[list[buckets.Bucket]] = [[]]
    for size in sizes:
        found = buckets.together(listed.events, keys, leads, run, size)
        if found not in known:
            known.append(found)
            yield [[listed.nodes[i] for i in members] for members in found]


def _key(node: fx.Node) -> Hashable:
    """What collectives share that are joined; None for those that are not, and for ops."""
    if not can_fuse(node):
        return None
    return collective_of(node), _dtype(node), str(node.args[1:])


def _dtype(node: fx.Node) -> torch.dtype:
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value.dtype
