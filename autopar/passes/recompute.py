"""recompute: what is not kept for the backward but made again when it comes to it.

A block that the plan recomputes keeps nothing but what it is given: activations, gathered weights
and all else that it makes are dropped after its forward, and made again, collectives too. A block
that the plan regathers keeps its activations: only the weights that its products gather are dropped
and gathered again. Either becomes calls of graphs of their own, through `recomputed` one for the
block, through `regathered` one for each product.
"""

from __future__ import annotations

import dataclasses
import heapq
import operator
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.errors import PlanError
from autopar.ir.graph import block_of, blocks, stored
from autopar.ir.plan import Plan
from autopar.ir.program import Program, same_inputs
from autopar.ir.sharding_rule import OpShardingRule
from autopar.ops.recomputation import recompute_in_backward, regather_in_backward

_FETCHING = ("all_gather", "all_to_all")  # of a weight: what makes other memory than the stored one


class _Group(NamedTuple):
    """Nodes that become one call of `target`; of these, those that run again."""

    target: Any
    nodes: tuple[fx.Node, ...]
    again: frozenset[fx.Node]


def recompute(program: Program) -> Program:
    """Every block of `plan.recompute` as one call, every product of those of `plan.regather` whose
    weight is gathered as one with these gathers; the program as it is where there is none.

    Raises PlanError for a name that is no repeated block of the model.
    """
    assert program.plan is not None
    plan = program.plan
    if not plan.recompute and not plan.regather:
        return program
    nodes = list(program.module.graph.nodes)
    known = blocks(nodes)
    for names, done in ((plan.recompute, "recomputed"), (plan.regather, "regathered")):
        strange = [name for name in names if name not in known]
        if strange:
            raise PlanError(
                f"{', '.join(strange)} cannot be {done}: the blocks of this model are "
                f"{', '.join(known) or 'none'}"
            )
    specs = _specs(program)
    groups = [_whole(name, nodes, specs) for name in plan.recompute]
    groups += _fetches(program, frozenset(plan.regather) - {*plan.recompute})
    if not groups:
        return program
    return dataclasses.replace(program, module=_Grouping(program.module, groups).module())


def check(program: Program) -> None:
    """The contract: every block that the plan recomputes is one call, none of its nodes is left
    outside, and no gathered weight that was to be dropped is.
    """
    assert program.plan is not None
    plan: Plan = program.plan
    same_inputs(program)
    calls = program.module.graph.find_nodes(op="call_function", target=recompute_in_backward)
    assert len(calls) == len(plan.recompute), (
        f"{len(calls)} blocks are recomputed, the plan names {len(plan.recompute)}"
    )
    for node in program.module.graph.nodes:
        if node.op == "call_function" and node.target not in (recompute_in_backward, regather_in_backward):
            block = block_of(node)
            assert block not in plan.recompute, f"{node.name} of {block} is not recomputed"
    for group in _fetches(program, frozenset(plan.regather) - {*plan.recompute}):
        raise AssertionError(f"{group.nodes[-1].name}: its weight is gathered, but not again")


def regathers(program: Program) -> tuple[str, ...]:
    """The blocks of an emitted program in which a product's weight is gathered."""
    nodes = program.module.graph.nodes
    found = {block_of(group.nodes[-1]) for group in _fetches(program, frozenset(blocks(nodes)))}
    return tuple(name for name in blocks(nodes) if name in found)


def _specs(program: Program) -> dict[str, OpShardingRule]:
    return program.annotations.specs if program.annotations is not None else {}


def _whole(name: str, nodes: list[fx.Node], specs: dict[str, OpShardingRule]) -> _Group:
    own = _convex(name, nodes)
    unit = tuple(node for node in nodes if node in own)
    return _Group(recompute_in_backward, unit, own - _tail(unit, specs))


def _fetches(program: Program, names: frozenset[str]) -> list[_Group]:
    """Every product in these blocks that takes a gathered weight, with the ops that fetch it from
    where it is stored and that no other node takes anything of. Biases and the like, which autograd
    does not keep, are left out.
    """
    specs = _specs(program)
    fixed, found = stored(program), []
    for node in program.module.graph.nodes if names else ():
        if node.op != "call_function" or node in fixed or "step" in node.meta:
            continue
        if block_of(node) in names:
            spec = specs.get(node.meta.get("source", ""))
            fetch = _fetch(node, fixed) if spec is not None and spec.product is not None else []
            if any(_moves(n) for n in fetch):
                found.append(_Group(regather_in_backward, (*fetch, node), frozenset(fetch)))
    return found


def _fetch(product: fx.Node, fixed: set[fx.Node]) -> list[fx.Node]:
    """The ops between where weights are stored and the product, in their order."""
    own = {product}
    ahead = [n for n in product.all_input_nodes if _is_matrix(n)]
    while ahead:
        node = ahead.pop()
        if node.op == "call_function" and node in fixed and own.issuperset(node.users):
            own.add(node)
            ahead.extend(node.all_input_nodes)
    return sorted(own - {product})


def _is_matrix(node: fx.Node) -> bool:
    layout = node.meta.get("layout")
    return layout is not None and len(layout.shape) > 1


def _moves(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") in _FETCHING and "step" in node.meta


def _tail(unit: tuple[fx.Node, ...], specs: dict[str, OpShardingRule]) -> set[fx.Node]:
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

    def __init__(self, module: fx.GraphModule, groups: list[_Group]) -> None:
        self.source, self.groups = module, groups
        self.nodes = list(module.graph.nodes)
        self.group = {n: number for number, group in enumerate(groups) for n in group.nodes}
        assert len(self.group) == sum(len(group.nodes) for group in groups), (
            "two blocks that are recomputed overlap"
        )
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
            first = (
                place[node] if number is None else min(place[n] for n in self.groups[number].nodes)
            )
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
        number = self.group[unit[0]]
        group, inside = self.groups[number], set(unit)
        inputs = list(
            dict.fromkeys(n for node in unit for n in node.all_input_nodes if n not in inside)
        )
        results = [node for node in unit if any(user not in inside for user in node.users)]
        block = _inner(unit, inputs, results, group.again)
        name = f"{group.target.__name__}_{number}"
        self.root.add_module(name, block)
        how = len(group.again) if group.target is regather_in_backward else _draws(unit)
        arguments: Any = (self.graph.get_attr(name), how, *(self.made[n] for n in inputs))
        call = self.graph.call_function(group.target, arguments)
        call.meta["chain"] = unit[0].meta.get("chain")
        for index, node in enumerate(results):
            item = self.graph.call_function(operator.getitem, (call, index))
            item.meta = {k: v for k, v in node.meta.items() if k == "layout"}
            self.made[node] = item


def _inner(
    unit: list[fx.Node], inputs: list[fx.Node], results: list[fx.Node], again: frozenset[fx.Node]
) -> fx.GraphModule:
    graph, made = fx.Graph(), {}
    for node in inputs:
        made[node] = graph.placeholder(node.name)
        made[node].meta = {k: v for k, v in node.meta.items() if k in ("layout", "val")}
    for node in unit:
        made[node] = graph.node_copy(node, made.__getitem__)
        made[node].meta["again"] = node in again
    graph.output(tuple(made[node] for node in results))
    return fx.GraphModule(torch.nn.Module(), graph, class_name="Block")


def _draws(unit: Collection[fx.Node]) -> bool:
    return any(
        torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in unit
    )
