"""Cuts units of a derived graph (cuts.py) into pieces.

Pieces are slices of what comes in, the unit's nodes once for each piece, and the results side by
side where something outside of the unit takes them. Every number is made by the same op from the
same numbers, so it is the same to the bit, but for two: a library may add up the numbers of a
smaller product in another order, and an all-reduce on more than two ranks may add in another order
where a number stands elsewhere in what is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.cost.simulator.graph_events import collective_of
from autopar.cuts import SHAPED, Cut, Unit, operand, shape_of, value_of
from autopar.ir.graph import copied, made, ordered

aten = torch.ops.aten


def cut(graph: fx.Graph, units: Sequence[Unit]) -> fx.Graph:
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
