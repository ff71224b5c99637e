"""Deep models: costs and plans of a model with many equal blocks, from a shorter one.

Example: of 80 equal transformer blocks the outer ones stay and the middle is left out, so a search
takes as long for 80 blocks as for 8.

`DeepModel` extrapolates figures. Under equal layouts every further block of a run adds the same
seconds and bytes; figures of the shorter program, and of one with a block more per run, go on in
straight lines. They are estimates, to compare plans by: what is emitted in the end is computed in
full. The planner searches the shorter program (planner/solve.py), and gives the blocks left out the
layouts of the one that stands for them: `DeepModel.full_plan`. It reads sums, steps and peaks off
shorter programs (objective.py, simulate.py, rematerialize.py).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence, Set
from functools import cached_property
from typing import Any

from torch import fx

from autopar._compat import LazyGraphModule
from autopar.ir.graph import (
    Block,
    Unit,
    block_keys,
    block_name,
    blocks,
    module_path,
    numbered_block,
    remember,
    repeats,
)
from autopar.ir.layout import Layout
from autopar.ir.plan import Plan
from autopar.ir.program import Program, Signature

_EDGE, _MORE = 1, 1


class DeepModel:
    """A program and its runs of equal units: each is one block or several that come in turns, equal
    in what they compute, how they are connected, and their layouts if a plan is chosen. `known`:
    the same program with another plan. `edge`: units that stay at either end of a run; `more`:
    further units, which show what each adds.
    """

    @staticmethod
    def of(program: Program) -> DeepModel:
        """Return the deep model of a program, whose runs are found once for a graph."""
        bare, graph = dataclasses.replace(program, tensors={}, plan=None), program.module.graph
        known = remember(graph, "blocks", (program.signature,), lambda: DeepModel(bare))
        return DeepModel(program, known)

    def __init__(
        self, program: Program, known: DeepModel | None = None, edge: int = _EDGE, more: int = _MORE
    ) -> None:
        self.program, self._edge, self._more = program, edge, more
        self.blocks: dict[Block, list[fx.Node]] = known.blocks if known else _blocks(program)
        self._places: dict[fx.Node, tuple[Block, int]] = (
            known._places
            if known
            else {n: (b, i) for b, nodes in self.blocks.items() for i, n in enumerate(nodes)}
        )
        self._keys: dict[Block, Hashable] = (
            known._keys if known else block_keys(self.blocks, self._places)
        )
        self._apart: dict[tuple[Unit, ...], bool] = known._apart if known else {}
        plan = program.plan
        copies = _copies(plan) if plan else {}
        laid_out = {b: _block_layouts(plan, copies, nodes) for b, nodes in self.blocks.items()}
        keys = {b: (self._keys[b], laid_out[b]) for b in self.blocks}
        long_runs = (tuple(run) for run in repeats(keys) if len(run) > 2 * edge + more)
        self.runs = tuple(run for run in long_runs if self._is_apart(run))
        self._shorter: dict[int | None, Program] = {}
        # Modules without these nodes and their signatures, which programs that differ in their
        # plans alone share.
        self._modules: dict[Hashable, tuple[fx.GraphModule, Signature]] = (
            known._modules if known else {}
        )

    def _is_apart(self, run: tuple[Unit, ...]) -> bool:
        """Whether the blocks of the run alone use what is left out. No plan changes that."""
        if run not in self._apart:
            nodes = (node for unit in run[:-1] for node in self._nodes(unit))
            inside = {node for unit in run for node in self._nodes(unit)}
            self._apart[run] = all(user in inside for node in nodes for user in node.users)
        return self._apart[run]

    def _nodes(self, unit: Unit) -> list[fx.Node]:
        return [node for block in unit for node in self.blocks[block]]

    def under(self, plan: Plan) -> DeepModel:
        """Return the same program with another plan."""
        return DeepModel(dataclasses.replace(self.program, plan=plan), self)

    def samples(self) -> tuple[tuple[float, Program], ...]:
        """Return shorter programs with weights. A figure that grows linearly with the number of
        units, such as the seconds or the bytes of a step, is for the full program the weighted sum
        of these programs' figures.
        """
        weights = [(len(run) - 2 * self._edge) / self._more for run in self.runs]
        longer = [(weight, self.shorter(index)) for index, weight in enumerate(weights)]
        return ((1 - sum(weights), self.shorter()), *longer)

    def shorter(self, more: int | None = None) -> Program:
        """Return the program without the middle of every run, but with a few units more of run
        number `more`. It is the program itself where it has no runs.
        """
        if more not in self._shorter:
            self._shorter[more] = self._shortened(set() if more is None else {more})
        return self._shorter[more]

    @cached_property
    def longer(self) -> Program:
        """The shorter program with a few units more of every run."""
        return self._shortened(set(range(len(self.runs))))

    def full_plan(self, plan: Plan) -> Plan:
        """Return a plan for the full program from one for `longer`: blocks that are left out get
        the layouts of the ones that stand for them.
        """
        if not self.runs:
            return plan
        stands = {
            n.name: twin.name for n, twin in self._stand_ins(set(range(len(self.runs)))).items()
        }
        names = [node.name for node in self.program.module.graph.nodes]
        pairs = [(name, stands.get(name, name)) for name in names]
        copies = _copies(plan)
        return dataclasses.replace(
            plan,
            choices={name: plan.choices[own] for name, own in pairs if own in plan.choices},
            stored={name: plan.stored[own] for name, own in pairs if own in plan.stored},
            copies={(n, i): at for n, own in pairs for i, at in copies.get(own, ())},
        )

    def _shortened(self, more: set[int]) -> Program:
        if not self.runs:
            return self.program
        stands = self._stand_ins(more)
        key = self.program.module, frozenset(stands.items())
        gone = {node.name for node in stands}
        if key not in self._modules:
            signature = self.program.signature
            inputs = tuple(entry for entry in signature.inputs if entry.node not in gone)
            self._modules[key] = (
                _module_without(self.program.module, stands),
                dataclasses.replace(signature, inputs=inputs),
            )
        return _without_nodes(self.program, *self._modules[key], gone)

    def _stand_ins(self, more: set[int]) -> dict[fx.Node, fx.Node]:
        """Return the nodes that are left out, each with the node that stands for it."""
        stands: dict[fx.Node, fx.Node] = {}
        for index, run in enumerate(self.runs):
            first = self._edge + self._more * (index in more)
            twins = self._nodes(run[first - 1])
            for unit in run[first : -self._edge]:
                stands.update(zip(self._nodes(unit), twins, strict=True))
        return stands

    def stand_in(self, name: str) -> str:
        """Return the name of the block that stands for this one in the shortest program: itself if
        it stays.
        """
        for run in self.runs:
            for unit in run[self._edge : -self._edge]:
                for block, twin in zip(unit, run[self._edge - 1], strict=True):
                    if name == block_name(block):
                        return block_name(twin)
        return name


def _blocks(program: Program) -> dict[Block, list[fx.Node]]:
    """Return the nodes of every repeated block, with the placeholders of its parameters."""
    targets = {entry.node: entry.target for entry in program.signature.inputs}
    blocks: dict[Block, list[fx.Node]] = defaultdict(list)
    for node in program.module.graph.nodes:
        path = targets.get(node.name, "") if node.op == "placeholder" else module_path(node)
        block = numbered_block(path) if node.op != "output" else None
        if block is not None:
            blocks[block].append(node)
    return blocks


def _copies(plan: Plan) -> dict[str, list[tuple[int, Layout]]]:
    """Return the copies of the plan by the name of the node that makes the value."""
    copies: dict[str, list[tuple[int, Layout]]] = defaultdict(list)
    for (name, index), layout in sorted(plan.copies.items(), key=lambda copy: copy[0]):
        copies[name].append((index, layout))
    return copies


def _block_layouts(
    plan: Plan | None, copies: Mapping[str, list[tuple[int, Layout]]], nodes: Sequence[fx.Node]
) -> Hashable:
    """Return the layouts that the plan gives a block's nodes, None without a plan."""
    if plan is None:
        return None
    names = [node.name for node in nodes]
    return tuple(
        (plan.choices.get(name), plan.stored.get(name), *copies.get(name, ())) for name in names
    )


def _module_without(module: fx.GraphModule, stands: Mapping[fx.Node, fx.Node]) -> fx.GraphModule:
    """Return the module without these nodes; their users take the values of the nodes that stand
    for them.
    """
    graph, new_nodes = fx.Graph(), dict[fx.Node, fx.Node]()

    def taken(node: fx.Node) -> fx.Node:
        return new_nodes[stands.get(node, node)]

    for node in module.graph.nodes:
        if node.op == "output":
            graph.output(fx.map_arg(node.args[0], taken))
        elif node not in stands:
            new_nodes[node] = graph.node_copy(node, taken)
    return LazyGraphModule(module, graph)


def _without_nodes(
    program: Program, module: fx.GraphModule, signature: Signature, gone: Set[str]
) -> Program:
    """Return the program with its module and signature without these nodes."""
    chains = tuple(chain for chain in program.chains if gone.isdisjoint(chain.nodes))
    return dataclasses.replace(
        program,
        module=module,
        signature=signature,
        chains=chains,
        plan=_plan_of_rest(program.plan, module.graph),
    )


def _plan_of_rest(plan: Plan | None, graph: fx.Graph) -> Plan | None:
    """Return the plan restricted to the nodes that are left."""
    if plan is None:
        return None
    names, left = {node.name for node in graph.nodes}, {*blocks(graph.nodes)}
    choices = {name: choice for name, choice in plan.choices.items() if name in names}
    stored = {name: layout for name, layout in plan.stored.items() if name in names}
    copies = {value: layout for value, layout in plan.copies.items() if value[0] in names}
    again: dict[str, Any] = {
        kind: tuple(name for name in getattr(plan, kind) if name in left)
        for kind in ("recompute", "regather", "rerun")
    }
    return dataclasses.replace(plan, choices=choices, stored=stored, copies=copies, **again)
