"""The objective of the search, written down a second time and minimised by trying everything.

A step is what all nodes cost, what all values cost on their way to their uses, and what AdamW costs
on the stored parameters. No regions and no tables: a strategy for every node, one after the other.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from functools import cache
from typing import Any

import torch
from torch import fx

from autopar.cost.comm import inside_costs, path_seconds
from autopar.cost.compute import node_seconds, optimizer_seconds
from autopar.cost.inside import inside
from autopar.graphs import producer
from autopar.layout import Element, I, Layout, R, steps
from autopar.mesh import Mesh
from autopar.program import Program, Value
from autopar.rating.frame import carries_gradient
from autopar.rules import operands_of, results_of, shape_of, value_of
from autopar.strategies import Choice, Strategy, axis_choices, placements, strategies
from autopar.world import World

Layouts = tuple[Layout, ...]


class Objective:
    """What the search minimises, on one mesh without a constraint."""

    def __init__(self, program: Program, mesh: Mesh, world: World) -> None:
        assert program.annotations is not None
        self.program, self.mesh, self.world = program, mesh, world
        self.notes = program.annotations
        self.named = {node.name: node for node in program.module.graph.nodes}
        self.nodes = [
            node
            for node in self.named.values()
            if node.op == "call_function"
            and node.name in self.notes.searched
            and node.name in self.notes.specs
        ]
        self.conversion = cache(self._conversion)
        self.value_seconds = cache(self._value_seconds)

    # -- nodes -------------------------------------------------------------------------------------
    def strategies(
        self, node: fx.Node, joint: list[tuple[Choice, ...]] | None = None
    ) -> list[Strategy]:
        """Every strategy of a node, or those of these joint choices."""
        spec, factors = self.notes.specs[node.name], self.notes.factors[node.name]
        gradient = carries_gradient(self.notes, node)
        choices = axis_choices(spec, factors, self.mesh, gradient)
        operands = tuple(None if n is None else shape_of(value_of(n)) for n in operands_of(node))
        results = tuple(shape_of(v) for v in results_of(node) if isinstance(v, torch.Tensor))
        several = itertools.product(*choices) if joint is None else joint
        return strategies(spec, factors, self.mesh, operands, results, several, redundant=False)

    def node_seconds(self, node: fx.Node, strategy: Strategy) -> float:
        gradient = carries_gradient(self.notes, node)
        dtype = next(v.dtype for v in results_of(node) if isinstance(v, torch.Tensor))
        own = node_seconds(self.notes.specs[node.name], strategy, dtype, gradient, self.world)
        found = [x for x in inside(node.target, strategy.operands) if gradient or not x.backward]
        return own + sum(cost.seconds for cost in inside_costs(found, self.mesh, self.world))

    # -- values ------------------------------------------------------------------------------------
    def _conversion(
        self, source: Layout, target: Layout, element_bytes: int, gradient: bool
    ) -> float:
        element = Element(element_bytes, element_bytes * gradient)
        return path_seconds(steps(source, target), element, self.world)

    def placed(self, node: fx.Node) -> Layouts:
        """How a parameter may be stored, or the layout of an input that wants a gradient."""
        value = (node.name, 0)
        whole = I if value in self.notes.gradient else R
        shape = shape_of(value_of(node))
        return tuple(placements(self.notes.dims[value], shape, self.mesh, whole))

    def _value_seconds(
        self, value: Value, made: Layouts, wanted: tuple[Layouts, ...], copies: Layouts
    ) -> float:
        """The least that it costs to make a value in one of the layouts `made` (a parameter is
        stored in one, for which the optimizer pays) and to bring it to all uses, each in one of the
        layouts that it takes; over at most one copy.
        """
        node = self.named[value[0]]
        size = results_of(node)[value[1]].dtype.itemsize
        stored = value[0] in self.parameters
        gradient = value in self.notes.gradient

        def cost(source: Layout, copy: Layout | None) -> float:
            starts = [source] if copy is None else [source, copy]
            total = optimizer_seconds(source, size, self.world) if stored else 0.0
            total += 0.0 if copy is None else self.conversion(source, copy, size, gradient)
            return total + sum(
                min(self.conversion(s, t, size, gradient) for s in starts for t in use)
                for use in wanted
            )

        return min(cost(source, copy) for source in made for copy in (None, *copies))

    @property
    def parameters(self) -> set[str]:
        inputs = self.program.signature.inputs
        return {entry.node for entry in inputs if entry.kind == "parameter"}


class _Uses:
    """Who takes a value: (place of the node, operand), and outputs with the layouts they take."""

    def __init__(self, objective: Objective) -> None:
        self.of: dict[Value, list[tuple[int, int] | Layouts]] = defaultdict(list)
        for place, node in enumerate(objective.nodes):
            for index, operand in enumerate(operands_of(node)):
                if operand is not None and producer(operand)[0] in objective.notes.searched:
                    self.of[producer(operand)].append((place, index))
        for output in objective.program.signature.outputs:
            if output.node is not None:
                value = producer(objective.named[output.node])
                shape = shape_of(value_of(objective.named[output.node]))
                found = placements(objective.notes.dims[value], shape, objective.mesh)
                whole = output.kind == "mutation" or not shape
                self.of[value].append(tuple(found[:1] if whole else found))


def least(program: Program, mesh: Mesh, world: World) -> float:
    """The least modelled seconds of a step over every combination of strategies, stored layouts and
    copies. A branch ends where it costs more already than the best found.
    """
    objective = Objective(program, mesh, world)
    nodes, uses = objective.nodes, _Uses(objective).of
    place = {node.name: i for i, node in enumerate(nodes)}
    options = []
    for node in nodes:
        rated = [(objective.node_seconds(node, s), s) for s in objective.strategies(node)]
        options.append(sorted(rated, key=lambda pair: pair[0]))
    rest = [math.fsum(found[0][0] for found in options[i:]) for i in range(len(options) + 1)]
    settled: dict[int, list[Value]] = defaultdict(list)  # values by the last node that knows them
    copies: dict[Value, Layouts] = {}
    for value, takers in uses.items():
        places = [t[0] for t in takers if isinstance(t[0], int)]
        settled[max([*places, place.get(value[0], 0)])].append(value)
        copies[value] = _shared(takers, options)
    best = math.inf
    chosen: list[Strategy] = []

    def made(value: Value) -> Layouts:
        if value[0] in place:
            return (chosen[place[value[0]]].results[value[1]],)
        found = objective.placed(objective.named[value[0]])
        return found if value[0] in objective.parameters else found[:1]

    def want(taker: Any) -> Layouts:
        if isinstance(taker[0], int):
            return (chosen[taker[0]].operands[taker[1]],)  # type: ignore[return-value]
        return tuple(taker)

    def descend(depth: int, spent: float) -> None:
        nonlocal best
        if depth == len(nodes):
            best = min(best, spent)
            return
        for seconds, strategy in options[depth]:
            total = spent + seconds
            if total + rest[depth + 1] >= best:
                break
            chosen.append(strategy)
            for value in settled[depth]:
                wanted = tuple(want(t) for t in uses[value])
                total += objective.value_seconds(value, made(value), wanted, copies[value])
            if total + rest[depth + 1] < best:
                descend(depth + 1, total)
            chosen.pop()

    descend(0, 0.0)
    return best


def _shared(takers: list[Any], options: list[list[tuple[float, Strategy]]]) -> Layouts:
    """The layouts that two uses or more may want: in these a copy may be kept."""
    counts: Counter[Layout] = Counter()
    for taker in takers if len(takers) > 1 else ():
        if isinstance(taker[0], int):
            counts.update({s.operands[taker[1]] for _, s in options[taker[0]]})  # type: ignore[misc]
        else:
            counts.update(set(taker))
    return tuple(layout for layout, count in counts.items() if count > 1)
