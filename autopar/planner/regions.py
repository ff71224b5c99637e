"""Regions: groups of nodes that choose their layout together, as nothing is resharded between them.

Example: linear → gelu → view. The ops after the linear only carry its layout on, so they form one
region. A region is a node, or ops that only carry a layout (pointwise ops, views, pieces of a dim)
and depend on one value: resharding that value or the region's results costs no more than resharding
in between. Partial values are the exception: a sum of two partial ones can be all-reduced at once,
but each by itself would take two collectives.

The options of every node enter `regions_of`, regions with theirs leave. Used by exact_search.py,
objective.py and bounds/factor_graph.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.ir.graph import producer
from autopar.ir.layout import Layout
from autopar.ir.program import Annotations, Value
from autopar.ir.sharding_rule import operands_of
from autopar.ir.strategy import Strategy

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Options:
    """The options of one variable, with the seconds of each. What looks alike shares the object,
    and all tables made from it: they are told apart by identity.
    """

    items: tuple[Any, ...]
    costs: Array


_EMPTY = Options(((),), np.zeros(1))  # of a region without nodes: one empty option


@dataclass(eq=False)
class Region:
    """Nodes that choose together: an option is a strategy for each.

    `root`: the outside value that carriers depend on (None: a single node). `sources`: the value of
    every operand of every node. `uses`: the (node, operand) places that take the root.
    """

    root: Value | None
    nodes: list[str] = field(default_factory=list)
    sources: list[list[Value | None]] = field(default_factory=list)
    uses: list[tuple[int, int]] = field(default_factory=list)
    options: Options = _EMPTY

    def outside_uses(self, searched: Container[str]) -> Iterator[tuple[Value, int, int]]:
        """Yield (value, position of the node, operand) for every use of a value that is made
        outside; several uses of the root count once.
        """
        for position, sources in enumerate(self.sources):
            for index, source in enumerate(sources):
                if source is None or source[0] not in searched or source[0] in self.nodes:
                    continue
                if source != self.root or (position, index) == self.uses[0]:
                    yield source, position, index


def regions_of(
    nodes: Iterable[fx.Node], notes: Annotations, options: Mapping[str, Options]
) -> list[Region]:
    """Return the regions of the nodes that have options, in the order of the graph: each node is in
    that of the value that it depends on, if it only carries that on, else in one of its own.
    """
    regions = _Regions(notes)
    for node in nodes:
        if node.name in options:
            sources = [None if n is None else producer(n) for n in operands_of(node)]
            regions.place(node.name, sources, options[node.name])
    return [region for region in regions.all if region.nodes]


class _Regions:
    """The regions of a graph, built as its nodes are placed in order."""

    def __init__(self, notes: Annotations) -> None:
        self.all: list[Region] = []
        self._notes = notes
        self._known: dict[Hashable, Options] = {}  # joined options, by what they were joined of
        self._region_of: dict[Value, Region] = {}
        self._fed_by: dict[Value, Region] = {}

    def place(self, name: str, sources: list[Value | None], options: Options) -> None:
        """Put a node into the region of the value it depends on, or into one of its own."""
        region = self._carried_by(name, sources)
        if region is None or not self._extend(region, name, sources, options):
            region = Region(None)
            self.all.append(region)
            self._extend(region, name, sources, options)
        for index in range(len(options.items[0].results)):
            self._region_of[name, index] = region

    def _carried_by(self, name: str, sources: list[Value | None]) -> Region | None:
        """Return the region that a node would extend, None where it does more than carry a
        layout.
        """
        rule = self._notes.specs[name]
        unsplittable = {f for f in rule.whole if rule.sizes[f] > 1} - {"pieces"}
        if rule.product or rule.sum or rule.shared or unsplittable:
            return None
        searched = {s for s in sources if s is not None and s[0] in self._notes.searched}
        regions = {self._home(value, bool(rule.linear)) for value in searched}
        return regions.pop() if len(regions) == 1 else None

    def _home(self, value: Value, partial: bool) -> Region:
        """Return the region that a carrier of this value belongs to: the one that makes the value,
        if that consists of carriers, else the one that the value feeds. `partial`: the carrier
        passes partial values on; one that does not is no part of a region that makes them.
        """
        producer = self._region_of.get(value)
        if producer is not None and producer.root:
            makes_partial = self._notes.specs[value[0]].linear
            if partial or not makes_partial:
                return producer
        if value not in self._fed_by:
            self._fed_by[value] = Region(value)
            self.all.append(self._fed_by[value])
        return self._fed_by[value]

    def _extend(
        self, region: Region, name: str, sources: list[Value | None], options: Options
    ) -> bool:
        """Join a node's strategies to the region's where they agree without a reshard; return False
        where none do, or where more would be left to choose than in either: the node does more than
        carry. In T5 every block masks one bias with a choice of its own, so 24 blocks in one region
        would have 2^24 options.
        """
        wiring = tuple(_crossing(region, source) for source in sources)
        key = region.options, options, wiring, tuple(region.uses)
        if key not in self._known:
            self._known[key] = _join_options(region.options, options, wiring, region.uses)
        options_joined = self._known[key]
        most = max(len(region.options.items), len(options.items))
        if not 0 < len(options_joined.items) <= most:
            return False
        region.nodes.append(name)
        region.sources.append(sources)
        region.uses.extend((len(region.nodes) - 1, i) for i, w in enumerate(wiring) if w == "root")
        region.options = options_joined
        return True


Crossing = str | tuple[int, int] | None  # "root", (node of the region, result), or from outside


def _crossing(region: Region, source: Value | None) -> Crossing:
    """Return where an operand of the next node comes from, seen from the region."""
    if source is None:
        return None
    if source == region.root:
        return "root"
    return (region.nodes.index(source[0]), source[1]) if source[0] in region.nodes else None


def _join_options(
    region: Options, node: Options, wiring: tuple[Crossing, ...], uses: list[tuple[int, int]]
) -> Options:
    """Return every pair of an option of the region and a strategy of the next node that agree on
    the layouts between them, with its seconds.
    """
    wired_operands = [i for i, source in enumerate(wiring) if source is not None]
    matching: dict[tuple[Layout | None, ...], list[int]] = defaultdict(list)
    for index, strategy in enumerate(node.items):
        matching[tuple(strategy.operands[i] for i in wired_operands)].append(index)
    items: list[tuple[Strategy, ...]] = []
    seconds: list[float] = []
    for item, cost in zip(region.items, region.costs, strict=True):
        if uses:
            root = item[uses[0][0]].operands[uses[0][1]]
        elif (
            "root" in wiring
        ):  # the first use: every layout of the root will do, if all uses in this node agree
            for index, strategy in enumerate(node.items):
                if len({strategy.operands[i] for i in wired_operands}) == 1:
                    items.append((*item, strategy))
                    seconds.append(cost + node.costs[index])
            continue
        else:
            root = None
        wanted = tuple(_provided_layout(item, wiring[i], root) for i in wired_operands)
        for index in matching.get(wanted, ()):
            items.append((*item, node.items[index]))
            seconds.append(cost + node.costs[index])
    return Options(tuple(items), np.array(seconds, dtype=np.float64))


def _provided_layout(
    item: tuple[Strategy, ...], crossing: Crossing, root: Layout | None
) -> Layout | None:
    """Return the layout in which an option of a region provides what this wire carries."""
    if isinstance(crossing, tuple):
        return item[crossing[0]].results[crossing[1]]
    return root
