"""Cuts matmuls and the collectives around them into pieces that overlap, where that is modelled
faster.

    wait(all_reduce(x @ w))    ->    the first rows are summed while the next are multiplied

ATP (Cheng et al. 2023) sums the first rows of a matmul over the ranks while it computes the next
ones; likewise the first rows of a gathered value are multiplied while the next ones arrive.
chunk_units.py finds what can be cut; `chunk` decides into how many pieces, first by what each unit
promises alone, then by the simulation of the whole graph; `chunk_units_of` writes the pieces.

Numbers are the same to the bit, with two exceptions: a library may add up a smaller matmul in
another order, and so may an all-reduce on more than two ranks where an element stands elsewhere in
what is sent. The choice depends on shapes and the world alone, so it is the same on every rank.
A derived graph enters and one with matmuls in pieces leaves.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.cost.compute import matmul_seconds
from autopar.cost.simulator.engine import Run, simulate_overlap
from autopar.cost.simulator.graph_events import (
    Listed,
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
from autopar.ir.graph import add_node, copy_graph, sort
from autopar.passes.overlap import DerivedGraph, GraphFacts, check_interface, elements_sent
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
    """Return a copy of the graph with these units of it in pieces; the graph itself without any."""
    if not units:
        return graph
    chunked = copy_graph(graph)
    twins = dict(zip(graph.nodes, chunked.nodes, strict=True))
    values: dict[Any, Any] = {}
    for unit in units:
        twin = Unit({twins[node]: cut for node, cut in unit.cut_of.items()}, unit.pieces)
        _ChunkWriter(chunked, twin, values).cut()
    sorted_ = sort(chunked)
    assert sorted_, "pieces wait for one another"
    return chunked


class _ChunkWriter:
    """Cuts one unit in place: slices of what comes in, the unit's nodes once for each piece, and
    the results concatenated where something outside takes them. `values` caches the results of
    calls, as equal calls give equal shapes.
    """

    def __init__(self, graph: fx.Graph, unit: Unit, values: dict[Any, Any]) -> None:
        self.graph, self.unit, self.values = graph, unit, values
        self.pieces_of: dict[fx.Node, list[fx.Node]] = {node: [] for node in unit.cut_of}
        self.sliced: dict[tuple[fx.Node, Cut], list[fx.Node]] = {}

    def cut(self) -> None:
        """Put the pieces before the unit's last node; the graph is to be ordered afterwards."""
        cut_of = self.unit.cut_of
        with self.graph.inserting_before(max(cut_of)):
            for stage in _stages(self.unit):
                for number in range(self.unit.pieces):
                    for node in stage:
                        self.pieces_of[node].append(self._piece(node, number))
            for node, cut in cut_of.items():
                if not cut_of.keys() >= node.users.keys():
                    uncut = self._joined(self.pieces_of[node], cut, value_of(node))
                    uncut.meta["custom"] = node.meta.get("custom", {})
                    node.replace_all_uses_with(uncut, lambda user: user not in cut_of)
        for node in sorted(cut_of, reverse=True):
            self.graph.erase_node(node)

    def _piece(self, node: fx.Node, number: int) -> fx.Node:
        """Emit a node for one piece."""
        arguments = [
            self._operand(node, i, argument, number) for i, argument in enumerate(node.args)
        ]
        if node.target in SHAPED:
            arguments[1] = self._smaller(shape_of(node), self.unit.cut_of[node])
        piece = self._call(node.target, tuple(arguments), node.kwargs)
        piece.meta["custom"] = node.meta.get("custom", {})
        return piece

    def _operand(self, node: fx.Node, place: int, value: Any, number: int) -> Any:
        """Return what a piece takes as operand number `place`."""
        if not isinstance(value, fx.Node):
            return value
        if value in self.pieces_of:
            return self.pieces_of[value][number]
        cut = operand(node, place, self.unit.cut_of[node])
        if cut is None:
            return value
        if (value, cut) not in self.sliced:
            self.sliced[value, cut] = self._slices(value, cut)
        piece = self.sliced[value, cut][number]
        return piece if collective_of(node) is None else self._contiguous(piece)

    def _slices(self, node: fx.Node, own: Cut) -> list[fx.Node]:
        """Return slices of a value: views, or copies where the parts of a piece lie apart."""
        shape = shape_of(node)
        dim, split, length = own.dim, node, shape[own.dim] // own.outer
        if own.outer > 1:
            apart = [*shape[:dim], own.outer, length, *shape[dim + 1 :]]
            split, dim = self._call(aten.view.default, (node, apart)), dim + 1
        length //= self.unit.pieces
        slices = []
        for start in range(0, length * self.unit.pieces, length):
            piece = self._call(aten.slice.Tensor, (split, dim, start, start + length))
            if own.outer > 1:
                smaller = self._smaller(shape, own)
                piece = self._call(aten.view.default, (self._contiguous(piece), smaller))
            slices.append(piece)
        return slices

    def _smaller(self, shape: tuple[int, ...], own: Cut) -> list[int]:
        """Return the shape of one piece of a value of this shape."""
        smaller = list(shape)
        smaller[own.dim] //= self.unit.pieces
        return smaller

    def _contiguous(self, node: fx.Node) -> fx.Node:
        """Return the value, copied where it is not contiguous."""
        if value_of(node).is_contiguous():
            return node
        options = {"memory_format": torch.contiguous_format}
        return self._call(aten.clone.default, (node,), options)

    def _joined(self, pieces: Sequence[fx.Node], own: Cut, value: torch.Tensor) -> fx.Node:
        """Return the uncut value: its pieces concatenated."""
        if own.outer == 1:
            return add_node(self.graph, aten.cat.default, (list(pieces), own.dim), value)
        shape = shape_of(pieces[0])
        apart = [*shape[: own.dim], own.outer, shape[own.dim] // own.outer, *shape[own.dim + 1 :]]
        views = [self._call(aten.view.default, (piece, apart)) for piece in pieces]
        side = self._call(aten.cat.default, (views, own.dim + 1))
        return add_node(self.graph, aten.view.default, (side, list(value.shape)), value)

    def _call(
        self, target: Any, arguments: tuple[Any, ...], more: Mapping[str, Any] | None = None
    ) -> fx.Node:
        """Emit a call whose result has the shape that the op gives for these operands."""
        more = more or {}
        key = target, _shape_key(arguments), _shape_key(tuple(more.items()))
        if key not in self.values:
            operands = fx.node.map_arg(arguments, value_of)
            self.values[key] = target(*operands, **more)
        return add_node(self.graph, target, arguments, self.values[key], more)


def _shape_key(operand: Any) -> Any:
    """Return what of the arguments the shape of a result depends on."""
    if isinstance(operand, list | tuple):
        return tuple(map(_shape_key, operand))
    if not isinstance(operand, fx.Node):
        return operand
    value = value_of(operand)
    return tuple(value.shape), value.stride(), value.dtype


def _stages(unit: Unit) -> Iterator[list[fx.Node]]:
    """Yield the nodes of a unit in the order in which pieces run: the gathers; then from their
    results to the issue of collectives; then what waits for those.
    """
    order = sorted(unit.cut_of)
    gathers = [n for n in order if collective_of(n) == "all_gather_into_tensor"]
    issued_late = {n for n in order if collective_of(n) is not None and n not in gathers}
    behind: list[fx.Node] = []
    for node in order:
        if issued_late.intersection(node.all_input_nodes):
            issued_late.add(node)
            behind.append(node)
    yield gathers
    yield [node for node in order if node not in gathers and node not in behind]
    yield behind


PIECES = (2, 4, 8)  # numbers of pieces that are tried
WORTH = 0.01  # share of the simulated seconds that pieces must gain
# A piece of a matmul below this is slow (48 rows of 384 took a fifth longer on one core).
_LEAST_FLOPS, _LEAST_SIDE = 1e7, 128


class _Choice(NamedTuple):
    """A unit, whose number of pieces is chosen, and the seconds that this promises to save."""

    unit: Unit
    gain: float


def chunk(derived: DerivedGraph, world: World, pieces: int | None = None) -> DerivedGraph:
    """Return the derived graph with matmuls in pieces; the same where that gains nothing. `pieces`
    cuts everything that can be cut into that many pieces, whatever it costs.
    """
    graph = derived.graph
    listed = graph_events(graph, world, derived.resident, derived.phase)
    uncut = off_path(listed)  # not cut: it is fetched ahead, or waits for the end
    if pieces is None:
        chunked = _fastest(derived, listed, uncut, world)
    else:
        chunked = chunk_units_of(graph, units(graph, pieces, uncut))
    return dataclasses.replace(derived, graph=chunked)


def _fastest(derived: DerivedGraph, listed: Listed, uncut: set[fx.Node], world: World) -> fx.Graph:
    """Return the graph in the pieces that are modelled the fastest; itself where none are."""
    graph = derived.graph
    candidates = units(graph, PIECES[0], uncut)
    if not candidates:
        return graph
    candidates += [unit for count in PIECES[1:] for unit in units(graph, count, uncut)]
    run = simulate_overlap(listed.events)
    least = (run.seconds + _issuing_seconds(graph, world)) * (1 - WORTH)
    best, seen = graph, set[frozenset[tuple[fx.Node, int]]]()
    for most in reversed(PIECES):
        allowed = [unit for unit in candidates if unit.pieces <= most]
        choices = _choose_units(listed, run, world, allowed)
        names = frozenset((next(iter(c.unit.cut_of)), c.unit.pieces) for c in choices)
        if names in seen or sum(choice.gain for choice in choices) < WORTH * run.seconds:
            continue
        seen.add(names)
        chunked = chunk_units_of(graph, [choice.unit for choice in choices])
        events = graph_events(chunked, world, derived.resident, derived.phase).events
        seconds = simulate_overlap(events).seconds + _issuing_seconds(chunked, world)
        if seconds < least:
            best, least = chunked, seconds
    return best


def _issuing_seconds(graph: fx.Graph, world: World) -> float:
    """Return the seconds that the computing thread spends on issuing the collectives."""
    return call_seconds(world) * sum(collective_of(node) is not None for node in graph.nodes)


def check(before: GraphFacts, after: DerivedGraph) -> None:
    """The contract: all pieces of a collective together send the elements that it sent."""
    check_interface(before, after.graph)
    elements = elements_sent(after.graph)
    assert elements == before.elements, f"{elements} are sent, not {before.elements}"


def _choose_units(listed: Listed, run: Run, world: World, tried: Sequence[Unit]) -> list[_Choice]:
    """Return, of units that share nodes, the one that promises most, if it promises anything."""
    exposed = {listed.nodes[index]: seconds for index, seconds in run.exposed.items()}
    modelled: dict[object, _Estimate] = {}
    choices = []
    for unit in tried:
        stalled = sum(exposed.get(node, 0.0) for node in unit.collectives)
        if not stalled:
            continue
        key = unit.pieces, *((n.target, n.meta["val"].shape) for n in unit.cut_of)
        if key not in modelled:
            modelled[key] = _estimate(unit, world)
        alone = modelled[key]
        choices.append(_Choice(unit, min(alone.saved, stalled) - alone.spent))
    best, cut_nodes = [], set[fx.Node]()
    for choice in sorted(choices, key=lambda choice: -choice.gain):
        if choice.gain > 0 and cut_nodes.isdisjoint(choice.unit.cut_of):
            cut_nodes |= choice.unit.cut_of.keys()
            best.append(choice)
    return best


class _Estimate(NamedTuple):
    """The seconds that a unit's pieces save where nothing else runs, and the seconds that they
    spend on additional computation.
    """

    saved: float
    spent: float


def _estimate(unit: Unit, world: World) -> _Estimate:
    """Estimate the pieces of a unit as overlapping stages: all of the first piece counts, and of
    each further piece its longest stage, under which the others run. Pieces that are too small save
    nothing.
    """
    pieces, nodes = unit.pieces, list(unit.cut_of)
    work = [n for n in nodes if not carries_on(n) and collective_of(n) is None]
    for node in nodes:
        if node.target in MATMULS:
            side = value_of(node).shape[unit.cut_of[node].dim] / pieces
            if side < _LEAST_SIDE or flops(node) / pieces < _LEAST_FLOPS:
                return _Estimate(0.0, 0.0)
    uncut, piece = [_stage_seconds(unit, work, world, count) for count in (1, pieces)]
    longer = piece[0] * pieces - uncut[0]
    saved = sum(uncut) - sum(piece) - (pieces - 1) * max(piece) + longer
    outputs = [n for n in nodes if not unit.cut_of.keys() >= n.users.keys()]
    moved = float(sum(2 * bytes_of(node) for node in outputs))
    side_by_side = matmul_seconds(0.0, moved, value_of(nodes[0]).dtype, world.device)
    issuing = call_seconds(world) * (pieces - 1) * len(unit.collectives)
    return _Estimate(saved, longer + side_by_side + issuing)


def _stage_seconds(unit: Unit, work: Sequence[fx.Node], world: World, pieces: int) -> list[float]:
    """Return the seconds of one piece: its computation, then each link's communication."""
    links: dict[int, float] = defaultdict(float)
    for node in unit.collectives:
        _, seconds, link, _ = collective_cost(node, world, pieces)
        links[link] += seconds
    return [sum(op_seconds(node, world, pieces) for node in work), *links.values()]
