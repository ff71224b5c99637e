"""Fuses small collectives of one kind, group and dtype into buckets where that is modelled faster.

cost/simulator/buckets.py says which collectives go together, and the simulation of the whole graph
chooses the bucket size, or no buckets. fuse.py writes the fused collectives. The panels of SUMMA
may first be turned into gathers and scatters (summa_fusion.py), which are then fused as others are.
On more than two ranks a sum may add in another order within a bucket: nothing else here changes
bits.

A derived graph enters and a new one leaves. runtime/backends.py calls `bucket` before `schedule`.
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
from autopar.passes.overlap import summa_fusion
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
    """Return the graph with buckets of the size that is modelled to be the fastest, of at most
    `most` bytes; the graph itself where none is faster. `stored` names the placeholders that are
    there before the step begins. The result is the same on every rank.
    """
    if not most:
        return graph
    sizes = [size for size in buckets.SIZES if size <= most] or [int(most)]
    base, listed = _fastest_panels(graph, world, stored, phase, most)
    best, least = base, listed_seconds(listed, world)
    for groups in choices(listed, sizes):
        candidate = fuse_buckets(base, groups)
        if candidate is None:
            continue
        seconds = graph_seconds(candidate, world, stored, phase)
        if seconds < least:
            best, least = candidate, seconds
    return best


def _fastest_panels(
    graph: fx.Graph, world: World, stored: frozenset[str], phase: Phase, most: float
) -> tuple[fx.Graph, Listed]:
    """Return the graph with its panels in the form that is modelled the fastest, and its events."""
    forms = [graph, *summa_fusion.panel_choices(graph, world, stored, phase, most)]
    candidates = [(form, graph_events(form, world, stored, phase)) for form in forms]
    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda each: listed_seconds(each[1], world))


def fuse_buckets(graph: fx.Graph, several: Sequence[Sequence[fx.Node]]) -> fx.Graph | None:
    """Return a copy of the graph with each bucket fused; None where buckets depend on one
    another.
    """
    fused = copied(graph)
    twins = dict(zip(graph.nodes, fused.nodes, strict=True))
    for members in several:
        fuse(fused, [twins[node] for node in members])
    return fused if ordered(fused) else None


def choices(listed: Listed, sizes: Sequence[int]) -> Iterator[list[list[fx.Node]]]:
    """Yield the buckets for each of these sizes in bytes; the same buckets only once."""
    keys = [_key(node) for node in listed.nodes]
    run, leads = simulate_overlap(listed.events), lead_to_matmuls(listed)
    seen: list[list[buckets.Bucket]] = [[]]
    for size in sizes:
        together = buckets.together(listed.events, keys, leads, run, size)
        if together not in seen:
            seen.append(together)
            yield [[listed.nodes[i] for i in members] for members in together]


def _key(node: fx.Node) -> Hashable:
    """Return what collectives must share to be fused; None for those that cannot be, and for
    ops.
    """
    if not can_fuse(node):
        return None
    return collective_of(node), _dtype(node), str(node.args[1:])


def _dtype(node: fx.Node) -> torch.dtype:
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value.dtype
