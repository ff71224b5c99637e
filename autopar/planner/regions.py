"""Regions: nodes that choose their layout together, because nothing is ever converted between them.

A region is a node, or ops that only carry a layout on (pointwise ops, views, pieces of a dim) and
hang on one value alone: to convert that value or the region's results costs no more than to
convert in between. Not so where partial values pass and then no longer do: a sum of two that are
partial may be all-reduced at once, while each by itself would take two collectives.

Tables of what conversions cost between the layouts in which a value is made and is wanted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.cost.communication import path_seconds
from autopar.ir.layout import Element, Layout
from autopar.ir.program import Annotations, Value
from autopar.ir.reshard import reshard_steps
from autopar.ir.strategy import Strategy
from autopar.planner.elimination import LARGEST, too_large
from autopar.world import World

Array = NDArray[np.float64]


class Options(NamedTuple):
    """What one variable chooses from; what looks alike shares the object, and all tables of it."""

    key: int
    items: tuple[Any, ...]
    costs: Array


_EMPTY = Options(-1, ((),), np.zeros(1))  # of a region without nodes: one way to choose nothing

Make = Callable[[], tuple[list[Any], list[float]]]


class Known:
    """What was made before, by what it was made of."""

    def __init__(self) -> None:
        self._options: dict[Hashable, Options] = {}
        self._arrays: dict[Hashable, Array] = {}

    def options(self, key: Hashable, make: Make) -> Options:
        if key not in self._options:
            items, costs = make()
            array = np.array(costs, dtype=np.float64)
            self._options[key] = Options(len(self._options), tuple(items), array)
        return self._options[key]

    def array(self, key: Hashable, make: Callable[[], Array]) -> Array:
        if key not in self._arrays:
            self._arrays[key] = make()
        return self._arrays[key]


@dataclass(eq=False)
class Region:
    """Nodes that choose together: an option is a strategy for each.

    `root`: the value from outside that carriers hang on (None: a node by itself). `sources`: of
    every operand of every node, its value. `uses`: the (node, operand) places that take the root.
    """

    root: Value | None
    nodes: list[str] = field(default_factory=list)
    sources: list[list[Value | None]] = field(default_factory=list)
    uses: list[tuple[int, int]] = field(default_factory=list)
    options: Options = _EMPTY


class Regions:
    """The regions of a graph, as its nodes are placed one after the other."""

    def __init__(self, notes: Annotations, known: Known) -> None:
        self.all: list[Region] = []
        self._notes, self._known = notes, known
        self._made_in: dict[Value, Region] = {}
        self._fed_by: dict[Value, Region] = {}

    def place(self, name: str, sources: list[Value | None], options: Options) -> None:
        """Put a node into the region of what it hangs on, if it only carries that on; else it is a
        region of its own.
        """
        region = self._carried_by(name, sources)
        if region is None or not self._extend(region, name, sources, options):
            region = Region(None)
            self.all.append(region)
            self._extend(region, name, sources, options)
        for index in range(len(options.items[0].results)):
            self._made_in[name, index] = region

    def _carried_by(self, name: str, sources: list[Value | None]) -> Region | None:
        spec = self._notes.specs[name]
        stops = {f for f in spec.whole if spec.sizes[f] > 1} - {"pieces"}
        if spec.product or spec.sum or spec.shared or stops:
            return None
        searched = {s for s in sources if s is not None and s[0] in self._notes.searched}
        homes = {self._home(value, bool(spec.linear)) for value in searched}
        return homes.pop() if len(homes) == 1 else None

    def _home(self, value: Value, partial: bool) -> Region:
        """The region that a carrier of this value belongs to: the one that makes it, if that is one
        of carriers, else the one it feeds. `partial`: it carries partial values on; one that does
        not is no part of a region that makes them.
        """
        made_in = self._made_in.get(value)
        if made_in is not None and made_in.root and (partial or not self._linear(value)):
            return made_in
        if value not in self._fed_by:
            self._fed_by[value] = Region(value)
            self.all.append(self._fed_by[value])
        return self._fed_by[value]

    def _linear(self, value: Value) -> bool:
        """Whether the node that makes it may pass partial values on."""
        return bool(self._notes.specs[value[0]].linear)

    def _extend(
        self, region: Region, name: str, sources: list[Value | None], options: Options
    ) -> bool:
        """Join a node's strategies to the region's, where no conversion is needed between them;
        False where there are none.
        """
        wiring = tuple(_wire(region, source) for source in sources)
        key = ("region", region.options.key, options.key, wiring, tuple(region.uses))
        joined = self._known.options(
            key, lambda: _joined(region.options, options, wiring, region.uses)
        )
        if not joined.items:
            return False
        region.nodes.append(name)
        region.sources.append(sources)
        region.uses.extend((len(region.nodes) - 1, i) for i, w in enumerate(wiring) if w == "root")
        region.options = joined
        return True


Crossing = str | tuple[int, int] | None  # "root", (node of the region, result), or from outside


def _wire(region: Region, source: Value | None) -> Crossing:
    if source is None:
        return None
    if source == region.root:
        return "root"
    return (region.nodes.index(source[0]), source[1]) if source[0] in region.nodes else None


def _joined(
    region: Options, node: Options, wiring: tuple[Crossing, ...], uses: list[tuple[int, int]]
) -> tuple[list[tuple[Strategy, ...]], list[float]]:
    """Every pair of an option of a region and a strategy of the next node that agree on the layouts
    between them.
    """
    tied = [i for i, source in enumerate(wiring) if source is not None]
    fitting: dict[tuple[Layout | None, ...], list[int]] = defaultdict(list)
    for number, strategy in enumerate(node.items):
        fitting[tuple(strategy.operands[i] for i in tied)].append(number)
    items: list[tuple[Strategy, ...]] = []
    seconds: list[float] = []
    for item, cost in zip(region.items, region.costs, strict=True):
        if uses:
            root = item[uses[0][0]].operands[uses[0][1]]
        elif (
            "root" in wiring
        ):  # the first use: every layout of the root will do, if all uses in this node agree
            for number, strategy in enumerate(node.items):
                if len({strategy.operands[i] for i in tied}) == 1:
                    items.append((*item, strategy))
                    seconds.append(cost + node.costs[number])
            continue
        else:
            root = None
        wanted = tuple(_made(item, wiring[i], root) for i in tied)
        for number in fitting.get(wanted, ()):
            items.append((*item, node.items[number]))
            seconds.append(cost + node.costs[number])
    return items, seconds


def _made(item: tuple[Strategy, ...], wire: Crossing, root: Layout | None) -> Layout | None:
    """The layout in which an option of a region provides what this wire carries."""
    if isinstance(wire, tuple):
        return item[wire[0]].results[wire[1]]
    return root


class Want(NamedTuple):
    """One use (or the making) of a value: its variable, and the layout that each option has."""

    variable: int
    key: Hashable
    layouts: tuple[Layout, ...]


class ReshardCosts:
    """Seconds between layouts; tables of the same layouts are made once."""

    def __init__(self, world: World, known: Known) -> None:
        self._known = known
        self._seconds = _pricer(world)

    def direct(self, native: Want, want: Want, element: Element) -> Array:
        """From each option of the maker to each of the user."""
        key = ("direct", native.key, want.key, element)
        return self._known.array(key, lambda: self._between(native.layouts, want.layouts, element))

    def copied(self, native: Want, copy: Want, element: Element) -> Array:
        """From each option of the maker to each copy; the first option of a copy is none."""

        def make() -> Array:
            matrix = self._between(native.layouts, copy.layouts, element)
            return np.concatenate([np.zeros((len(native.layouts), 1)), matrix], axis=1)

        return self._known.array(("copied", native.key, copy.key, element), make)

    def nearer(self, native: Want, copy: Want, want: Want, element: Element) -> Array:
        """To each option of the user from the maker or from the copy, whichever is nearer. Raises
        PlanError where that is a larger table than elimination takes.
        """
        sizes = (len(native.layouts), 1 + len(copy.layouts), len(want.layouts))
        if math.prod(sizes) > LARGEST:
            raise too_large(sizes)

        def make() -> Array:
            direct = self._between(native.layouts, want.layouts, element)[:, None, :]
            through = self._between(copy.layouts, want.layouts, element)[None, :, :]
            return np.concatenate([direct, np.minimum(direct, through)], axis=1)

        return self._known.array(("nearer", native.key, copy.key, want.key, element), make)

    def _between(
        self, sources: Sequence[Layout], targets: Sequence[Layout], element: Element
    ) -> Array:
        rows = {layout: i for i, layout in enumerate(dict.fromkeys(sources))}
        columns = {layout: i for i, layout in enumerate(dict.fromkeys(targets))}
        small = np.array([[self._seconds(a, b, element) for b in columns] for a in rows])
        return small[np.ix_([rows[a] for a in sources], [columns[b] for b in targets])]


@lru_cache(maxsize=4)
def _pricer(world: World) -> Callable[[Layout, Layout, Element], float]:
    """Seconds of the way between two layouts. To plan takes many searches on the same few meshes,
    so it is remembered.
    """

    @lru_cache(maxsize=1 << 20)
    def seconds(source: Layout, target: Layout, element: Element) -> float:
        return path_seconds(reshard_steps(source, target), element, world)

    return seconds
