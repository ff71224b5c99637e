"""The objective of the search, written down a second time and minimised by trying everything.

A step is what all nodes cost, what all values cost on their way to their uses, and what AdamW costs
on the stored parameters. No regions and no tables: a strategy for every node, one after the other.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import fx

from autopar.cost.communication import inner_costs, path_seconds
from autopar.cost.compute import node_seconds, optimizer_seconds
from autopar.ir.graph import producer
from autopar.ir.layout import Element, I, Layout, R
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Choice, Plan
from autopar.ir.program import Program, Value
from autopar.ir.reshard import reshard_steps
from autopar.ir.sharding_rule import operands_of, results_of, shape_of, value_of
from autopar.ir.strategy import (
    AxisChoice,
    Strategy,
    axis_choices,
    placements,
    split_of,
    strategies,
)
from autopar.ops.sharded import inner_collectives
from autopar.planner.bounds.factor_graph import carries_gradient
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
        self.reshard = cache(self._reshard)
        self.value_seconds = cache(self._value_seconds)

    # -- nodes -------------------------------------------------------------------------------------
    def strategies(
        self, node: fx.Node, joint: list[tuple[AxisChoice, ...]] | None = None
    ) -> list[Strategy]:
        """Every strategy of a node, or those of these joint choices."""
        rule, factors = self.notes.specs[node.name], self.notes.factors[node.name]
        gradient = carries_gradient(self.notes, node)
        choices = axis_choices(rule, factors, self.mesh, gradient)
        operands = tuple(None if n is None else shape_of(value_of(n)) for n in operands_of(node))
        results = tuple(shape_of(v) for v in results_of(node) if isinstance(v, torch.Tensor))
        several = itertools.product(*choices) if joint is None else joint
        return strategies(rule, factors, self.mesh, operands, results, several, may_idle=False)

    def node_seconds(self, node: fx.Node, strategy: Strategy) -> float:
        gradient = carries_gradient(self.notes, node)
        dtype = next(v.dtype for v in results_of(node) if isinstance(v, torch.Tensor))
        own = node_seconds(self.notes.specs[node.name], strategy, dtype, gradient, self.world)
        collectives = [
            x for x in inner_collectives(node, strategy.operands) if gradient or not x.backward
        ]
        return own + sum(cost.seconds for cost in inner_costs(collectives, self.mesh, self.world))

    # -- values ------------------------------------------------------------------------------------
    def _reshard(self, source: Layout, target: Layout, element_bytes: int, gradient: bool) -> float:
        element = Element(element_bytes, element_bytes * gradient)
        return path_seconds(reshard_steps(source, target), element, self.world)

    def placed(self, node: fx.Node) -> Layouts:
        """How a parameter may be stored, or the layout of an input that wants a gradient."""
        value = (node.name, 0)
        whole = I if value in self.notes.gradient else R
        shape = shape_of(value_of(node))
        layouts = placements(self.notes.dims[value], shape, self.mesh, whole)
        return tuple(layout for layout in layouts if layout.is_plain)

    def _value_seconds(
        self, value: Value, produced: Layouts, wanted: tuple[Layouts, ...], copies: Layouts
    ) -> float:
        """The least that it costs to make a value in one of the layouts `produced` (a parameter is
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
            total += 0.0 if copy is None else self.reshard(source, copy, size, gradient)
            return total + sum(
                min(self.reshard(s, t, size, gradient) for s in starts for t in use)
                for use in wanted
            )

        return min(cost(source, copy) for source in produced for copy in (None, *copies))

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
                every = placements(objective.notes.dims[value], shape, objective.mesh)
                layouts_by_use = [layout for layout in every if layout.is_plain]
                whole = output.kind == "mutation" or not shape
                self.of[value].append(tuple(layouts_by_use[:1] if whole else layouts_by_use))


class _Everything:
    """A walk over every combination of strategies. A branch ends where it costs more already than
    `below`.
    """

    def __init__(self, program: Program, mesh: Mesh, world: World, below: float) -> None:
        self.below = below
        self.objective = Objective(program, mesh, world)
        self.nodes, self.uses = self.objective.nodes, _Uses(self.objective).of
        self.place = {node.name: i for i, node in enumerate(self.nodes)}
        self.options = [self._rated(node) for node in self.nodes]
        self.rest = [0.0]  # of the nodes from each on, at least
        for rated in reversed(self.options):
            self.rest.insert(0, self.rest[0] + rated[0][0])
        self.settled: dict[int, list[Value]] = defaultdict(list)  # by the last node that knows them
        self.copies: dict[Value, Layouts] = {}
        for value, takers in self.uses.items():
            places = [t[0] for t in takers if isinstance(t[0], int)]
            self.settled[max([*places, self.place.get(value[0], 0)])].append(value)
            self.copies[value] = _shared(takers, self.options)
        self.chosen: list[Strategy] = []

    def _rated(self, node: fx.Node) -> list[tuple[float, Strategy]]:
        rated = [(self.objective.node_seconds(node, s), s) for s in self.objective.strategies(node)]
        return sorted(rated, key=lambda pair: pair[0])

    def walk(self, depth: int = 0, spent: float = 0.0) -> Iterator[float]:
        """The least seconds with each combination, which is `chosen` at that moment."""
        if depth == len(self.nodes):
            yield spent
            return
        for seconds, strategy in self.options[depth]:
            total, rest = spent + seconds, self.rest[depth + 1]
            if total + rest >= self.below:
                break
            self.chosen.append(strategy)
            for value in self.settled[depth]:
                choices = self.produced(value), self.wanted(value), self.copies[value]
                total += self.objective.value_seconds(value, *choices)
            if total + rest < self.below:
                yield from self.walk(depth + 1, total)
            self.chosen.pop()

    def produced(self, value: Value) -> Layouts:
        if value[0] in self.place:
            return (self.chosen[self.place[value[0]]].results[value[1]],)
        layouts = self.objective.placed(self.objective.named[value[0]])
        return layouts if value[0] in self.objective.parameters else layouts[:1]

    def wanted(self, value: Value) -> tuple[Layouts, ...]:
        return tuple(self._want(taker) for taker in self.uses[value])

    def _want(self, taker: Any) -> Layouts:
        if isinstance(taker[0], int):
            return (self.chosen[taker[0]].operands[taker[1]],)  # type: ignore[return-value]
        return tuple(taker)

    # -- whole plans -------------------------------------------------------------------------------
    def plans(self) -> Iterator[tuple[float, Plan]]:
        """Every plan of fewer seconds than `below`: strategies with a layout for every stored
        parameter and output, and a copy or none of every value with several uses.
        """
        for seconds in self.walk():
            options, least = [], []
            for value in self.uses:
                choices = list(self._choices(value))
                least.append(min(cost for cost, *_ in choices))
                options.append(sorted(choices, key=lambda pair: pair[0]))
            strategies = seconds - math.fsum(least)
            for total, picked in _sums(options, self.below - strategies):
                yield strategies + total, self._plan(dict(zip(self.uses, picked, strict=True)))

    def _choices(self, value: Value) -> Iterator[tuple[float, Layout, Layout | None, Layouts]]:
        """(seconds, where it is made, its copy, where its uses take it)."""
        objective, node = self.objective, self.objective.named[value[0]]
        size = results_of(node)[value[1]].dtype.itemsize
        gradient = value in objective.notes.gradient
        paid = value[0] in objective.parameters
        for source in self.produced(value):
            own = optimizer_seconds(source, size, objective.world) if paid else 0.0
            for copy in (None, *self.copies[value]):
                more = 0.0 if copy is None else objective.reshard(source, copy, size, gradient)
                for targets in itertools.product(*self.wanted(value)):
                    uses = [objective.reshard(source, t, size, gradient) for t in targets]
                    if copy is not None:
                        near = [objective.reshard(copy, t, size, gradient) for t in targets]
                        if all(a >= b for a, b in zip(near, uses, strict=True)):
                            continue  # nobody takes it
                        uses = [min(pair) for pair in zip(near, uses, strict=True)]
                    yield own + more + math.fsum(uses), source, copy, targets

    def _plan(self, picked: Mapping[Value, tuple[float, Layout, Layout | None, Layouts]]) -> Plan:
        objective = self.objective
        choices = {
            node.name: Choice(tuple(map(split_of, s.choices)), s.operands, s.results)
            for node, s in zip(self.nodes, self.chosen, strict=True)
        }
        stored = {v[0]: option[1] for v, option in picked.items() if v[0] not in self.place}
        copies = {value: option[2] for value, option in picked.items() if option[2] is not None}
        outputs = {}
        for number, output in enumerate(objective.program.signature.outputs):
            if output.node is not None:
                value = producer(objective.named[output.node])
                last = [i for i, t in enumerate(self.uses[value]) if not isinstance(t[0], int)]
                outputs[str(number)] = picked[value][3][last[0]]
        return Plan(
            mesh=objective.mesh, layout="auto", choices=choices, stored=stored, copies=copies,
            outputs=outputs, seconds=0.0, world=objective.world,
        )  # fmt: skip


def _sums(choices: list[list[Any]], below: float) -> Iterator[tuple[float, list[Any]]]:
    """One way for each, ascending within each list, of all whose sum is less than `below`."""
    if not choices:
        yield 0.0, []
        return
    rest = math.fsum(others[0][0] for others in choices[1:])
    for option in choices[0]:
        if option[0] + rest >= below:
            return
        for total, picked in _sums(choices[1:], below - option[0]):
            yield option[0] + total, [option, *picked]


def least(program: Program, mesh: Mesh, world: World) -> float:
    """The least modelled seconds of a step over every combination of strategies, stored layouts and
    copies.
    """
    plans = _Everything(program, mesh, world, math.inf)
    for seconds in plans.walk():
        plans.below = min(plans.below, seconds)
    return plans.below


def faster(program: Program, mesh: Mesh, world: World, below: float) -> Iterator[Plan]:
    """Every plan on a mesh that takes fewer than `below` seconds, in no order."""
    for seconds, plan in _Everything(program, mesh, world, below).plans():
        yield dataclasses.replace(plan, seconds=seconds)


def _shared(takers: list[Any], options: list[list[tuple[float, Strategy]]]) -> Layouts:
    """The layouts that two uses or more may want: in these a copy may be kept."""
    counts: Counter[Layout] = Counter()
    for taker in takers if len(takers) > 1 else ():
        if isinstance(taker[0], int):
            counts.update({s.operands[taker[1]] for _, s in options[taker[0]]})  # type: ignore[misc]
        else:
            counts.update(set(taker))
    return tuple(layout for layout, count in counts.items() if count > 1)
