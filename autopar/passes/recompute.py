"""recompute: the blocks that the plan names keep nothing for the backward but what they are given.

Each becomes a graph of its own, called through `recomputed`: activations, gathered weights and all
else that it makes are dropped after its forward, and made again, collectives too, when the backward
comes to it.
"""

from __future__ import annotations

import dataclasses
import heapq
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from ..errors import PlanError
from ..graphs import block_of, blocks
from ..program import Program
from ..recomputed import recomputed
from ..rules import Spec


def recompute(program: Program) -> Program:
    """Every block of `plan.recompute` as one call; the program as it is where that names none.

    Raises PlanError for a name that is no repeated block of the model.
    """
    assert program.plan is not None
    if not program.plan.recompute:
        return program
    nodes = list(program.module.graph.nodes)
    known = blocks(nodes)
    strange = [name for name in program.plan.recompute if name not in known]
    if strange:
        raise PlanError(
            f"{', '.join(strange)} cannot be recomputed: the blocks of this model are "
            f"{', '.join(known) or 'none'}"
        )
    groups = [_convex(name, nodes) for name in program.plan.recompute]
    specs = program.annotations.specs if program.annotations is not None else {}
    made = _Grouping(program.module, groups, lambda unit: _tail(unit, specs)).module()
    return dataclasses.replace(program, module=made)


def check(program: Program) -> None:
    """The contract: every block that the plan names is one call, and none of its nodes is left
    outside.
    """
    assert program.plan is not None
    program.module.graph.lint()
    calls = program.module.graph.find_nodes(op="call_function", target=recomputed)
    assert len(calls) == len(program.plan.recompute), (
        f"{len(calls)} blocks are recomputed, the plan names {len(program.plan.recompute)}"
    )
    names = [node.name for node in program.module.graph.nodes if node.op == "placeholder"]
    assert names == [entry.node for entry in program.signature.inputs], (
        "placeholders and signature differ"
    )
    for node in program.module.graph.nodes:
        if node.op == "call_function" and node.target is not recomputed:
            block = block_of(node)
            assert block not in program.plan.recompute, f"{node.name} of {block} is not recomputed"


def _tail(unit: list[fx.Node], specs: dict[str, Spec]) -> set[fx.Node]:
    """The last nodes of a block, as far as their backward needs no values: changes of state and
    what is linear in all its operands together. They do not run again: torch stops before.
    """
    found = set()
    for node in reversed(unit):
        spec = specs.get(node.meta.get("source", ""))
        present = {i for i, dims in enumerate(spec.operands) if dims is not None} if spec else set()
        free = spec is not None and spec.product is None and present in spec.linear
        if not (free or "step" in node.meta or node.target is operator.getitem):
            break
        found.add(node)
    return found


def _convex(name: str, nodes: list[fx.Node]) -> frozenset[fx.Node]:
    """The nodes of a block, with all that lies on a way from one of them to another."""
    own = {n for n in nodes if n.op == "call_function" and block_of(n) == name}
    below, above = set(own), set(own)
    for node in nodes:
        if node.op == "call_function" and any(n in below for n in node.all_input_nodes):
            below.add(node)
    for node in reversed(nodes):
        if node.op == "call_function" and any(n in above for n in node.users):
            above.add(node)
    return frozenset(below & above)


class _Grouping:
    """The graph once more, groups of nodes as one call each, in an order that feeds every call."""

    def __init__(
        self,
        module: fx.GraphModule,
        groups: list[frozenset[fx.Node]],
        tail: Callable[[list[fx.Node]], set[fx.Node]],
    ) -> None:
        self.source, self.groups, self.tail = module, groups, tail
        self.nodes = list(module.graph.nodes)
        self.group = {node: number for number, group in enumerate(groups) for node in group}
        assert len(self.group) == sum(map(len, groups)), "two blocks that are recomputed overlap"
        self.graph, self.root = fx.Graph(), torch.nn.Module()
        self.made: dict[fx.Node, fx.Node] = {}

    def module(self) -> fx.GraphModule:
        for unit in self._order():
            if len(unit) == 1 and unit[0] not in self.group:
                node = unit[0]
                self.made[node] = self.graph.node_copy(node, self.made.__getitem__)
            else:
                self._call(unit)
        name = type(self.source).__name__
        return fx.GraphModule(self.root, self.graph, class_name=name)

    def _order(self) -> list[list[fx.Node]]:
        """Units, single nodes and groups, each after what it takes; else as they were."""
        place = {node: number for number, node in enumerate(self.nodes)}
        units: dict[int, list[fx.Node]] = {}
        of: dict[fx.Node, int] = {}
        for node in self.nodes:
            number = self.group.get(node)
            first = place[node] if number is None else min(place[n] for n in self.groups[number])
            units.setdefault(first, []).append(node)
            of[node] = first
        needs = {
            key: {of[n] for node in unit for n in node.all_input_nodes} - {key}
            for key, unit in units.items()
        }
        users: dict[int, list[int]] = {}
        for key, found in needs.items():
            for other in found:
                users.setdefault(other, []).append(key)
        missing = {key: len(found) for key, found in needs.items()}
        ready = [key for key, count in missing.items() if not count]
        heapq.heapify(ready)
        order = []
        while ready:
            key = heapq.heappop(ready)
            order.append(units[key])
            for user in users.get(key, ()):
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(ready, user)
        assert len(order) == len(units), "blocks that are recomputed need one another"
        return order

    def _call(self, unit: list[fx.Node]) -> None:
        """The nodes of one group as a call of a graph of their own."""
        inside = set(unit)
        inputs = list(
            dict.fromkeys(n for node in unit for n in node.all_input_nodes if n not in inside)
        )
        results = [node for node in unit if any(user not in inside for user in node.users)]
        block = _inner(unit, inputs, results, self.tail(unit))
        name = f"recomputed_{self.group[unit[0]]}"
        self.root.add_module(name, block)
        module = self.graph.get_attr(name)
        arguments: Any = (module, _draws(unit), *(self.made[n] for n in inputs))
        call = self.graph.call_function(recomputed, arguments)
        call.meta["chain"] = unit[0].meta.get("chain")
        for index, node in enumerate(results):
            item = self.graph.call_function(operator.getitem, (call, index))
            item.meta = {k: v for k, v in node.meta.items() if k == "layout"}
            self.made[node] = item


def _inner(
    unit: list[fx.Node], inputs: list[fx.Node], results: list[fx.Node], tail: set[fx.Node]
) -> fx.GraphModule:
    graph, made = fx.Graph(), {}
    for node in inputs:
        made[node] = graph.placeholder(node.name)
        made[node].meta = {k: v for k, v in node.meta.items() if k in ("layout", "val")}
    for node in unit:
        made[node] = graph.node_copy(node, made.__getitem__)
        made[node].meta["again"] = node not in tail
    graph.output(tuple(made[node] for node in results))
    return fx.GraphModule(torch.nn.Module(), graph, class_name="Block")


def _draws(unit: Collection[fx.Node]) -> bool:
    return any(
        torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in unit
    )
