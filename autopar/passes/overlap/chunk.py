"""chunk: a product and the collective before or behind it cut into pieces that overlap, where that
is modelled to be faster.

ATP (Cheng et al. 2023) sums the first rows of a product over the ranks while it computes the next
ones; likewise the first rows of a gathered value are multiplied while the next ones arrive. What
can be cut, and how, is in cuts.py and cutting.py. Into how many pieces (one is an answer) is
decided here, product by product: as many as promise most by themselves, then by the simulation of
the whole graph, which knows what hides anyway.

Numbers are the same to the bit but where a library adds up a smaller product in another order, or
an all-reduce on more than two ranks numbers that stand elsewhere in what is sent. Everything
depends on shapes and the world alone, so it is the same on every rank.

Cuts units of a derived graph (cuts.py) into pieces.

Pieces are slices of what comes in, the unit's nodes once for each piece, and the results side by
side where something outside of the unit takes them. Every number is made by the same op from the
same numbers, so it is the same to the bit, but for two: a library may add up the numbers of a
smaller product in another order, and an all-reduce on more than two ranks may add in another order
where a number stands elsewhere in what is sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.cost.compute import matmul_seconds
from autopar.cost.simulator.engine import Run, simulate_overlap
from autopar.cost.simulator.graph_events import (
    Listed,
    Phase,
    bytes_of,
    call_seconds,
    carries_on,
    collective_cost,
    collective_of,
    flops,
    graph_events,
    off_path,
    op_seconds,
)
from autopar.ir.graph import copied, made, ordered
from autopar.passes.overlap.chunk_units import (
    MATMULS,
    SHAPED,
    Cut,
    Unit,
    operand,
    shape_of,
    units,
    value_of,
)
from autopar.world import World

aten = torch.ops.aten


def chunk_units_of(graph: fx.Graph, units: Sequence[Unit]) -> fx.Graph:
    """A copy of the graph with these units of it in pieces."""
    found = copied(graph)
    twins = dict(zip(graph.nodes, found.nodes, strict=True))
    values: dict[Any, Any] = {}
    for unit in units:
        twin = Unit({twins[node]: own for node, own in unit.cuts.items()}, unit.pieces)
        _Knife(found, twin, values).cut()
    sorted_ = ordered(found)
    assert sorted_, "pieces wait for one another"
    return found


class _Knife:
    """Cuts one unit in place. `values`: of calls made before, as equal ones give equal shapes."""

    def __init__(self, graph: fx.Graph, unit: Unit, values: dict[Any, Any]) -> None:
        self.graph, self.unit, self.values = graph, unit, values
        self.parts: dict[fx.Node, list[fx.Node]] = {node: [] for node in unit.cuts}
        self.sliced: dict[tuple[fx.Node, Cut], list[fx.Node]] = {}

    def cut(self) -> None:
        """The pieces stand before the unit's last node: the graph is to be ordered afterwards."""
        cuts = self.unit.cuts
        with self.graph.inserting_before(max(cuts)):
            for stage in _stages(self.unit):
                for number in range(self.unit.pieces):
                    for node in stage:
                        self.parts[node].append(self._piece(node, number))
            for node, own in cuts.items():
                if not cuts.keys() >= node.users.keys():
                    whole = self._joined(self.parts[node], own, value_of(node))
                    whole.meta["custom"] = node.meta.get("custom", {})
                    node.replace_all_uses_with(whole, lambda user: user not in cuts)
        for node in sorted(cuts, reverse=True):
            self.graph.erase_node(node)

    def _piece(self, node: fx.Node, number: int) -> fx.Node:
        arguments = [self._operand(node, i, given, number) for i, given in enumerate(node.args)]
        if node.target in SHAPED:
            arguments[1] = self._smaller(shape_of(node), self.unit.cuts[node])
        piece = self._call(node.target, tuple(arguments), node.kwargs)
        piece.meta["custom"] = node.meta.get("custom", {})
        return piece

    def _operand(self, node: fx.Node, place: int, given: Any, number: int) -> Any:
        """What a piece takes in this place."""
        if not isinstance(given, fx.Node):
            return given
        if given in self.parts:
            return self.parts[given][number]
        own = operand(node, place, self.unit.cuts[node])
        if own is None:
            return given
        if (given, own) not in self.sliced:
            self.sliced[given, own] = self._slices(given, own)
        found = self.sliced[given, own][number]
        return found if collective_of(node) is None else self._contiguous(found)

    def _slices(self, node: fx.Node, own: Cut) -> list[fx.Node]:
        """Views of a value, or copies where the parts of a piece lie apart."""
        shape = shape_of(node)
        dim, split, length = own.dim, node, shape[own.dim] // own.outer
        if own.outer > 1:
            apart = [*shape[:dim], own.outer, length, *shape[dim + 1 :]]
            split, dim = self._call(aten.view.default, (node, apart)), dim + 1
        length //= self.unit.pieces
        found = []
        for start in range(0, length * self.unit.pieces, length):
            piece = self._call(aten.slice.Tensor, (split, dim, start, start + length))
            if own.outer > 1:
                smaller = self._smaller(shape, own)
                piece = self._call(aten.view.default, (self._contiguous(piece), smaller))
            found.append(piece)
        return found

    def _smaller(self, shape: tuple[int, ...], own: Cut) -> list[int]:
        found = list(shape)
        found[own.dim] //= self.unit.pieces
        return found

    def _contiguous(self, node: fx.Node) -> fx.Node:
        if value_of(node).is_contiguous():
            return node
        how = {"memory_format": torch.contiguous_format}
        return self._call(aten.clone.default, (node,), how)

    def _joined(self, parts: Sequence[fx.Node], own: Cut, value: torch.Tensor) -> fx.Node:
        """The whole value, of pieces side by side."""
        if own.outer == 1:
            return made(self.graph, aten.cat.default, (list(parts), own.dim), value)
        shape = shape_of(parts[0])
        apart = [*shape[: own.dim], own.outer, shape[own.dim] // own.outer, *shape[own.dim + 1 :]]
        views = [self._call(aten.view.default, (part, apart)) for part in parts]
        side = self._call(aten.cat.default, (views, own.dim + 1))
        return made(self.graph, aten.view.default, (side, list(value.shape)), value)

    def _call(
        self, target: Any, arguments: tuple[Any, ...], more: Mapping[str, Any] | None = None
    ) -> fx.Node:
        more = more or {}
        key = target, _looks(arguments), _looks(tuple(more.items()))
        if key not in self.values:
            given = fx.node.map_arg(arguments, value_of)
            self.values[key] = target(*given, **more)
        return made(self.graph, target, arguments, self.values[key], more)


def _looks(given: Any) -> Any:
    """What of arguments the shape of a result hangs on."""
    if isinstance(given, list | tuple):
        return tuple(map(_looks, given))
    if not isinstance(given, fx.Node):
        return given
    value = value_of(given)
    return tuple(value.shape), value.stride(), value.dtype


def _stages(unit: Unit) -> Iterator[list[fx.Node]]:
    """In which order the pieces run: gathers; from what they bring to what is issued; then what
    waits for that.
    """
    order = sorted(unit.cuts)
    gathers = [n for n in order if collective_of(n) == "all_gather_into_tensor"]
    late = {n for n in order if collective_of(n) is not None and n not in gathers}
    behind: list[fx.Node] = []
    for node in order:
        if late.intersection(node.all_input_nodes):
            late.add(node)
            behind.append(node)
    yield gathers
    yield [node for node in order if node not in gathers and node not in behind]
    yield behind


PIECES = (2, 4, 8)  # that are tried
WORTH = 0.01  # of the simulated seconds: what pieces must gain
# Of a piece of a product: below, it is slow (48 rows of 384 took a fifth longer on one core).
_LEAST_FLOPS, _LEAST_SIDE = 1e7, 128


class _Choice(NamedTuple):
    """A unit in so many pieces, and the seconds that this promises."""

    unit: Unit
    gain: float


def chunk(
    graph: fx.Graph,
    world: World,
    stored: frozenset[str],
    phase: Phase,
    pieces: int | None = None,
) -> fx.Graph:
    """A copy of the graph with products in pieces; the graph itself where that gains nothing.
    `pieces`: so many of everything that can be cut, whatever it costs.
    """
    listed = graph_events(graph, world, stored, phase)
    whole = off_path(listed)  # stays whole: it is fetched ahead, or waits for the end
    if pieces is not None:
        return _cut(graph, units(graph, pieces, whole))
    able = units(graph, PIECES[0], whole)
    if not able:
        return graph
    able += [unit for count in PIECES[1:] for unit in units(graph, count, whole)]
    run = simulate_overlap(listed.events)
    least = (run.seconds + _meetings(graph, world)) * (1 - WORTH)
    best, seen = graph, set[frozenset[tuple[fx.Node, int]]]()
    for most in reversed(PIECES):
        tried = [unit for unit in able if unit.pieces <= most]
        chosen = _chosen(listed, run, world, tried)
        names = frozenset((next(iter(c.unit.cuts)), c.unit.pieces) for c in chosen)
        if names in seen or sum(choice.gain for choice in chosen) < WORTH * run.seconds:
            continue
        seen.add(names)
        found = _cut(graph, [choice.unit for choice in chosen])
        events = graph_events(found, world, stored, phase).events
        taken = simulate_overlap(events).seconds + _meetings(found, world)
        if taken < least:
            best, least = found, taken
    return best


def _meetings(graph: fx.Graph, world: World) -> float:
    """Seconds that issuing collectives and coming together for them cost besides."""
    return _each(world) * sum(collective_of(node) is not None for node in graph.nodes)


def _each(world: World) -> float:
    return call_seconds(world) + world.meeting_s


def check(found: fx.Graph, before: fx.Graph, units: Sequence[Unit]) -> None:
    """The contract: what goes out is as before, and every collective is there once or, in a unit,
    once a piece.
    """
    found.lint()
    outputs = [graph.output_node().all_input_nodes for graph in (found, before)]
    looks = [[(tuple(v.shape), v.dtype) for v in map(value_of, nodes)] for nodes in outputs]
    assert looks[0] == looks[1], "what goes out has another shape"
    more = sum((unit.pieces - 1) * len(unit.collectives) for unit in units)
    counts = [sum(collective_of(n) is not None for n in graph.nodes) for graph in (found, before)]
    assert counts[0] == counts[1] + more, f"{counts[0]} collectives of {counts[1]} and {more}"


def _cut(graph: fx.Graph, chosen: Sequence[Unit]) -> fx.Graph:
    if not chosen:
        return graph
    found = chunk_units_of(graph, chosen)
    check(found, graph, chosen)
    return found


def _chosen(listed: Listed, run: Run, world: World, tried: Sequence[Unit]) -> list[_Choice]:
    """Of units that share nodes the one that promises most, if it promises anything."""
    exposed = {listed.nodes[index]: seconds for index, seconds in run.exposed.items()}
    known: dict[object, _Alone] = {}
    choices = []
    for unit in tried:
        stood = sum(exposed.get(node, 0.0) for node in unit.collectives)
        if not stood:
            continue
        look = unit.pieces, *((n.target, n.meta["val"].shape) for n in unit.cuts)
        if look not in known:
            known[look] = _alone(unit, world)
        alone = known[look]
        choices.append(_Choice(unit, min(alone.saved, stood) - alone.spent))
    found, taken = [], set[fx.Node]()
    for choice in sorted(choices, key=lambda choice: -choice.gain):
        if choice.gain > 0 and taken.isdisjoint(choice.unit.cuts):
            taken |= choice.unit.cuts.keys()
            found.append(choice)
    return found


class _Alone(NamedTuple):
    """What a unit's pieces save where nothing else runs, and what they spend on computing besides;
    seconds.
    """

    saved: float
    spent: float


def _alone(unit: Unit, world: World) -> _Alone:
    """A product's pieces run under the collectives of others: all of the first, then of each what
    takes longest. Pieces that are too small save nothing.
    """
    pieces, nodes = unit.pieces, list(unit.cuts)
    work = [n for n in nodes if not carries_on(n) and collective_of(n) is None]
    for node in nodes:
        if node.target in MATMULS:
            side = value_of(node).shape[unit.cuts[node].dim] / pieces
            if side < _LEAST_SIDE or flops(node) / pieces < _LEAST_FLOPS:
                return _Alone(0.0, 0.0)
    whole, part = [_stage_seconds(unit, work, world, count) for count in (1, pieces)]
    longer = part[0] * pieces - whole[0]
    saved = sum(whole) - sum(part) - (pieces - 1) * max(part) + longer
    out = [n for n in nodes if not unit.cuts.keys() >= n.users.keys()]
    moved = float(sum(2 * bytes_of(node) for node in out))
    side_by_side = matmul_seconds(0.0, moved, value_of(nodes[0]).dtype, world.device)
    meetings = _each(world) * (pieces - 1) * len(unit.collectives)
    return _Alone(saved, longer + side_by_side + meetings)


def _stage_seconds(unit: Unit, work: Sequence[fx.Node], world: World, pieces: int) -> list[float]:
    """Seconds of one piece: computing, then what each link carries."""
    links: dict[int, float] = defaultdict(float)
    for node in unit.collectives:
        _, seconds, link, _ = collective_cost(node, world, pieces)
        links[link] += seconds
    return [sum(op_seconds(node, world, pieces) for node in work), *links.values()]
