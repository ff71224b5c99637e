"""What a deep model costs, read off shorter ones.

Of many equal blocks in a row under equal layouts, every further one adds the same to what a step
takes and holds. So a chosen program is made shorter, a little less short once more for each such
run of blocks, and figures go on in straight lines from there. They are estimates, to compare plans
by; what is emitted in the end is worked out whole.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from ._compat import pytree
from .graphs import alike, block_name, blocks, module_path, numbered_block
from .plan import Plan
from .program import Program

_EDGE = 1  # equal blocks that stay at either end of a run
_MORE = 1  # blocks more, for what each adds

Block = tuple[str, int]
Figures = NDArray[np.float64]


class Deep:
    """A chosen program, and its runs of blocks that are alike: in what they compute, how they hang
    together, and their layouts.
    """

    def __init__(self, chosen: Program) -> None:
        self.program = chosen
        self.blocks = _blocks(chosen)
        places = {n: (b, i) for b, nodes in self.blocks.items() for i, n in enumerate(nodes)}
        looks = {b: _look(chosen, places, b, nodes) for b, nodes in self.blocks.items()}
        long = (tuple(run) for run in alike(looks) if len(run) > 2 * _EDGE + _MORE)
        self.runs = tuple(run for run in long if _apart(run, self.blocks, places))
        self._shorter: dict[int | None, Program] = {}

    def extrapolated(self, figures: Callable[[Program], Sequence[float]]) -> Figures:
        """The figures of the chosen program, each of them seconds or bytes of its step."""
        total = least = np.array(figures(self.shorter()))
        for number, run in enumerate(self.runs):
            each = (np.array(figures(self.shorter(number))) - least) / _MORE
            total = total + each * (len(run) - 2 * _EDGE)
        return total

    def shorter(self, more: int | None = None) -> Program:
        """Without the middle of every run; of run number `more` a few blocks more are left. The
        program itself where it has no runs.
        """
        if not self.runs:
            return self.program
        if more not in self._shorter:
            stands: dict[fx.Node, fx.Node] = {}
            for number, run in enumerate(self.runs):
                first = _EDGE + _MORE * (number == more)
                twins = self.blocks[run[first - 1]]
                for block in run[first:-_EDGE]:
                    stands.update(zip(self.blocks[block], twins, strict=True))
            self._shorter[more] = _without(self.program, stands)
        return self._shorter[more]

    def stand_in(self, name: str) -> str:
        """The name of the block that stays in the shortest program for this one."""
        for run in self.runs:
            names = [block_name(block) for block in run]
            if name in names[_EDGE:-_EDGE]:
                return names[_EDGE - 1]
        return name


def _blocks(program: Program) -> dict[Block, list[fx.Node]]:
    """The nodes of every repeated block, with the placeholders of its parameters."""
    targets = {entry.node: entry.target for entry in program.signature.inputs}
    found: dict[Block, list[fx.Node]] = defaultdict(list)
    for node in program.module.graph.nodes:
        path = targets.get(node.name, "") if node.op == "placeholder" else module_path(node)
        block = numbered_block(path) if node.op != "output" else None
        if block is not None:
            found[block].append(node)
    return found


def _apart(
    run: Sequence[Block],
    blocks: Mapping[Block, list[fx.Node]],
    places: Mapping[fx.Node, tuple[Block, int]],
) -> bool:
    """Whether what is left out is used by the blocks of the run alone."""
    own = set(run)
    users = (user for block in run[:-1] for node in blocks[block] for user in node.users)
    return all(user in places and places[user][0] in own for user in users)


def _look(
    program: Program,
    places: Mapping[fx.Node, tuple[Block, int]],
    block: Block,
    nodes: Sequence[fx.Node],
) -> Hashable:
    def seen(value: Any) -> Hashable:
        if not isinstance(value, fx.Node):
            return str(value)
        if value not in places or places[value][0][0] != block[0]:
            return value.name
        other, place = places[value]
        return other[1] - block[1], place

    plan = program.plan
    assert plan is not None
    looks: list[Hashable] = []
    for node in nodes:
        taken = tuple(seen(value) for value in pytree.tree_leaves((node.args, node.kwargs)))
        looks.append((node.op, node.op == "placeholder" or node.target, _shapes(node), taken))
        looks.append(_laid_out(plan, node))
    return tuple(looks)


def _shapes(node: fx.Node) -> Hashable:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    tensors = (value for value in leaves if isinstance(value, torch.Tensor))
    return tuple((tuple(value.shape), value.dtype) for value in tensors)


def _laid_out(plan: Plan, node: fx.Node) -> Hashable:
    copies = tuple((n, at) for (name, n), at in plan.copies.items() if name == node.name)
    return str(plan.choices.get(node.name)), plan.stored.get(node.name), copies


def _without(program: Program, stands: Mapping[fx.Node, fx.Node]) -> Program:
    """Without these nodes; what others take of them they take of the ones that stand for them."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()

    def taken(node: fx.Node) -> fx.Node:
        return made[stands.get(node, node)]

    for node in program.module.graph.nodes:
        if node.op == "output":
            graph.output(fx.map_arg(node.args[0], taken))
        elif node not in stands:
            made[node] = graph.node_copy(node, taken)
    gone = {node.name for node in stands}
    inputs = tuple(e for e in program.signature.inputs if e.node not in gone)
    chains = tuple(chain for chain in program.chains if gone.isdisjoint(chain.nodes))
    return dataclasses.replace(
        program,
        module=fx.GraphModule(program.module, graph),
        signature=dataclasses.replace(program.signature, inputs=inputs),
        chains=chains,
        plan=_planned(program.plan, graph),
    )


def _planned(plan: Plan | None, graph: fx.Graph) -> Plan:
    """What the plan says of the nodes that are left."""
    assert plan is not None
    names, left = {node.name for node in graph.nodes}, {*blocks(graph.nodes)}
    choices = {name: choice for name, choice in plan.choices.items() if name in names}
    stored = {name: layout for name, layout in plan.stored.items() if name in names}
    copies = {value: layout for value, layout in plan.copies.items() if value[0] in names}
    again = tuple(name for name in plan.recompute if name in left)
    fetched = tuple(name for name in plan.regather if name in left)
    return dataclasses.replace(
        plan, choices=choices, stored=stored, copies=copies, recompute=again, regather=fetched
    )
