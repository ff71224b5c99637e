"""The objective: what a plan costs, term by term, as the search counts it.

Example: {"compute": 0.08, "all-reduce backward": 0.01, "optimizer": 0.002}, in seconds; the terms
add up to the seconds that exact_search.py minimises. A program and a plan for it enter, the terms
leave; `sum_of_blocks` of a deep model, from shorter ones. Called by why.py, solve.py and fit.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from torch import fx

from autopar.cost.communication import Cost, costs, path_seconds
from autopar.cost.compute import optimizer_seconds
from autopar.cost.nodes import node_costs
from autopar.ir.deep_models import DeepModel
from autopar.ir.graph import producer
from autopar.ir.layout import Element, Layout
from autopar.ir.plan import Plan
from autopar.ir.program import Annotations, Program, Value
from autopar.ir.reshard import reshard_steps
from autopar.ir.sharding_rule import results_of, value_of
from autopar.ir.strategy import Strategy
from autopar.planner.regions import Options, Region, regions_of
from autopar.world import World

CostTerms = dict[str, float]  # seconds of a training step, by what they are spent on

COMPUTE, OPTIMIZER, SLICES = "compute", "optimizer", "slices in memory"


def cost_terms(program: Program, plan: Plan, world: World) -> CostTerms:
    """Return the seconds of a training step by term: computing, every kind of collective forward
    and backward, the optimizer, slicing and padding in memory. Recomputed blocks are not included:
    the search does not know of them.

    Example: sum(cost_terms(program, plan, world).values()) is plan.seconds as the search gave it.
    """
    return _Pricer(program, plan, world).run()


def sum_of_blocks(deep: DeepModel, world: World) -> float:
    """Return the seconds of a chosen program's step as the search adds them up."""
    total = 0.0
    for weight, program in deep.samples():
        assert program.plan is not None
        total += weight * sum(cost_terms(program, program.plan, world).values())
    return total


class _Pricer:
    """Adds up the terms: it follows the regions of the search and the layouts of the plan."""

    def __init__(self, program: Program, plan: Plan, world: World) -> None:
        assert program.annotations is not None
        self.program, self.plan, self.world = program, plan, world
        self.notes: Annotations = program.annotations
        self.nodes = {node.name: node for node in program.module.graph.nodes}
        self.spent: CostTerms = defaultdict(float)
        self.native: dict[Value, Layout] = {}
        self.wants: dict[Value, list[Layout]] = defaultdict(list)

    def run(self) -> CostTerms:
        """Return the terms of the full step."""
        self._stored()
        options: dict[str, Options] = {}
        for node in self.nodes.values():
            if node.name not in self.plan.choices:
                continue
            strategy = self._strategy(node)
            options[node.name] = Options((strategy,), np.zeros(1))
            for index, layout in enumerate(strategy.results):
                self.native[node.name, index] = layout
        for region in regions_of(self.nodes.values(), self.notes, options):
            self._enter(region)
        self._outputs()
        for value, wanted in self.wants.items():
            self._convert(value, wanted)
        return dict(self.spent)

    def _stored(self) -> None:
        parameters = {e.node for e in self.program.signature.inputs if e.kind == "parameter"}
        for name, layout in self.plan.stored.items():
            self.native[name, 0] = layout
            if name in parameters:
                size = value_of(self.nodes[name]).dtype.itemsize
                self.spent[OPTIMIZER] += optimizer_seconds(layout, size, self.world)

    def _strategy(self, node: fx.Node) -> Strategy:
        """Return the node's strategy, after charging its computation and the collectives
        inside it.
        """
        rule, choice = self.notes.specs[node.name], self.plan.choices[node.name]
        ranks = 1
        for axis, split in zip(self.plan.mesh.axes, choice.splits, strict=True):
            ranks *= axis.size if split in rule.sizes else 1
        strategy = Strategy((), choice.operands, choice.results, ranks)
        seconds, collectives = node_costs(node, strategy, self.notes, self.plan.mesh, self.world)
        self.spent[COMPUTE] += seconds
        self._add_costs(collectives)
        return strategy

    def _enter(self, region: Region) -> None:
        """Record the layouts that a region wants of values made outside; several uses of its root
        count once.
        """
        for source, position, index in region.outside_uses(self.notes.searched):
            layout = self.plan.choices[region.nodes[position]].operands[index]
            assert layout is not None
            self.wants[source].append(layout)

    def _outputs(self) -> None:
        for number, output in enumerate(self.program.signature.outputs):
            if output.node is not None and str(number) in self.plan.outputs:
                value = producer(self.nodes[output.node])
                self.wants[value].append(self.plan.outputs[str(number)])

    def _convert(self, value: Value, wanted: list[Layout]) -> None:
        """Charge the reshards of a value, from the layout in which it is made or from its copy,
        whichever is nearer.
        """
        native, copy = self.native[value], self.plan.copies.get(value)
        if copy is not None:
            self._walk(value, native, copy)
        for layout in wanted:
            source = native
            if copy is not None and self._reshard_seconds(
                value, copy, layout
            ) < self._reshard_seconds(value, native, layout):
                source = copy
            self._walk(value, source, layout)

    def _element(self, value: Value) -> Element:
        size = results_of(self.nodes[value[0]])[value[1]].dtype.itemsize
        return self.program.element(value, size)

    def _reshard_seconds(self, value: Value, source: Layout, target: Layout) -> float:
        """Return the seconds of a reshard."""
        return path_seconds(reshard_steps(source, target), self._element(value), self.world)

    def _walk(self, value: Value, source: Layout, target: Layout) -> None:
        """Charge a reshard: its collectives, and the rest as slices in memory."""
        path, element = reshard_steps(source, target), self._element(value)
        paid = self._add_costs(costs(path, element, self.world))
        self.spent[SLICES] += path_seconds(path, element, self.world) - paid

    def _add_costs(self, costs: Iterable[Cost]) -> float:
        total = 0.0
        for cost in costs:
            direction = "backward" if cost.backward else "forward"
            self.spent[f"{cost.kind.replace('_', '-')} {direction}"] += cost.seconds
            total += cost.seconds
        return total
