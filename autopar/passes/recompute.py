"""Marks what is not saved for the backward but computed again there (activation checkpointing).

`plan.recompute` names blocks that save their inputs alone: their activations and gathered weights
are dropped after the forward and made again in the backward, collectives included. `plan.regather`
names blocks that save their activations and drop only the weights that their matmuls gathered;
these are gathered again. `plan.rerun` names blocks whose cheap ops run again: norms, activations,
rotary embeddings (selection.py says which).

A recomputed block becomes one call of `recompute_in_backward` on a graph of its own; in a
regathered block each matmul with its gathers becomes one `regather_in_backward`; cheap ops with the
products that take their results become one `rerun_in_backward`, which holds the gathers of these
products, too, where a block is named in both lists.

This is the last pass over a program. planner/planner.py runs it, and planner/rematerialize.py tries
it on candidates to find the fewest blocks that fit the memory limit.
"""

from __future__ import annotations

import dataclasses
import heapq
import operator
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.errors import PlanError
from autopar.ir.graph import block_of, blocks, stored_nodes
from autopar.ir.plan import Plan
from autopar.ir.program import Program, same_inputs
from autopar.ir.sharding_rule import OpShardingRule
from autopar.ops.recomputation import (
    CALLS,
    recompute_in_backward,
    regather_in_backward,
    rerun_in_backward,
)
from autopar.passes.selection import selective_groups

# Reshard steps that bring a weight into memory other than that in which it is stored.
_FETCHES = ("all_gather", "all_to_all")


class _Group(NamedTuple):
    """Nodes that become one call of `target`, and those of them that run again in the backward."""

    target: Any
    nodes: tuple[fx.Node, ...]
    again: frozenset[fx.Node]


def recompute(program: Program) -> Program:
    """Return the program with one call for every block of `plan.recompute`, and one for every
    matmul of the blocks of `plan.regather` whose weight is gathered; the same program where there
    are none.

    Raises PlanError for a name that is no repeated block of the model.
    """
    assert program.plan is not None
    plan = program.plan
    if not plan.recompute and not plan.regather and not plan.rerun:
        return program
    nodes = list(program.module.graph.nodes)
    block_names = blocks(nodes)
    named = (plan.recompute, "recomputed"), (plan.regather, "regathered"), (plan.rerun, "rerun")
    for names, done in named:
        unknown_names = [name for name in names if name not in block_names]
        if unknown_names:
            raise PlanError(
                f"{', '.join(unknown_names)} cannot be {done}: the blocks of this model are "
                f"{', '.join(block_names) or 'none'}"
            )
    rules = _sharding_rules(program)
    groups = [_recompute_group(name, nodes, rules) for name in plan.recompute]
    groups += _lighter_groups(program, plan)
    if not groups:
        return program
    return dataclasses.replace(program, module=_Grouping(program.module, groups).module())


def check(program: Program) -> None:
    """The contract: placeholders match the signature, every recomputed block is one call with none
    of its nodes outside, and no weight to be regathered is gathered outside of such a call.
    """
    assert program.plan is not None
    plan: Plan = program.plan
    same_inputs(program)
    calls = program.module.graph.find_nodes(op="call_function", target=recompute_in_backward)
    assert len(calls) == len(plan.recompute), (
        f"{len(calls)} blocks are recomputed, the plan names {len(plan.recompute)}"
    )
    for node in program.module.graph.nodes:
        if node.op == "call_function" and node.target not in CALLS:
            block = block_of(node)
            assert block not in plan.recompute, f"{node.name} of {block} is not recomputed"
    for group in _regather_groups(program, frozenset(plan.regather) - {*plan.recompute}):
        raise AssertionError(f"{group.nodes[-1].name}: its weight is gathered, but not again")
    for group in _rerun_groups(program, frozenset(plan.rerun) - {*plan.recompute}):
        raise AssertionError(f"{group.nodes[0].name} is cheap, but saved")


def regathers(program: Program) -> tuple[str, ...]:
    """Return the names of the blocks of an emitted program in which a matmul gathers its weight."""
    return _blocks_with(program, _regather_groups)


def reruns(program: Program) -> tuple[str, ...]:
    """Return the names of the blocks of an emitted program that have cheap ops to run again."""
    return _blocks_with(program, _rerun_groups)


def _blocks_with(
    program: Program, groups_of: Callable[[Program, frozenset[str]], list[_Group]]
) -> tuple[str, ...]:
    """Return the names of the blocks that have groups of a kind, in order."""
    names = blocks(program.module.graph.nodes)
    own_blocks = {block_of(group.nodes[-1]) for group in groups_of(program, frozenset(names))}
    return tuple(name for name in names if name in own_blocks)


def _sharding_rules(program: Program) -> dict[str, OpShardingRule]:
    """Return the sharding rules of the traced nodes, by name."""
    return program.annotations.specs if program.annotations is not None else {}


def _recompute_group(name: str, nodes: list[fx.Node], specs: dict[str, OpShardingRule]) -> _Group:
    """Return the group that recomputes the block `name`, with all of its nodes."""
    block_nodes = _convex_nodes(name, nodes)
    unit = tuple(node for node in nodes if node in block_nodes)
    return _Group(recompute_in_backward, unit, block_nodes - _tail_not_run_again(unit, specs))


def _lighter_groups(program: Program, plan: Plan) -> list[_Group]:
    """Return the groups of blocks that are not recomputed. A product of cheap ops whose weight is
    gathered again is in one group, in which both run again.
    """
    gathers = {
        group.nodes[-1]: group
        for group in _regather_groups(program, frozenset(plan.regather) - {*plan.recompute})
    }
    groups = []
    for group in _rerun_groups(program, frozenset(plan.rerun) - {*plan.recompute}):
        products = [gathers.pop(node) for node in group.nodes if node in gathers]
        fetches = [node for matmul in products for node in matmul.nodes[:-1]]
        again = group.again.union(fetches)
        groups.append(_Group(group.target, (*fetches, *group.nodes), again))
    return [*gathers.values(), *groups]


def _regather_groups(program: Program, names: frozenset[str]) -> list[_Group]:
    """Return a group for every matmul in these blocks that takes a gathered weight. It holds the
    matmul and the ops that fetch the weight from where it is stored, as far as no other node uses
    them. Biases and the like are left out, as autograd does not save them.
    """
    rules = _sharding_rules(program)
    on_stored, groups = stored_nodes(program), []
    for node in program.module.graph.nodes if names else ():
        if node.op != "call_function" or node in on_stored or "step" in node.meta:
            continue
        if block_of(node) in names:
            rule = rules.get(node.meta.get("source", ""))
            fetches = (
                _fetch_ops(node, on_stored) if rule is not None and rule.product is not None else []
            )
            if any(_fetches_weight(n) for n in fetches):
                groups.append(_Group(regather_in_backward, (*fetches, node), frozenset(fetches)))
    return groups


def _rerun_groups(program: Program, names: frozenset[str]) -> list[_Group]:
    """Return the groups of cheap ops with the products that save what they make, in blocks."""
    if not names:
        return []
    nodes, rules = program.module.graph.nodes, _sharding_rules(program)
    return [
        _Group(rerun_in_backward, *group)
        for group in selective_groups(nodes, names, rules, stored_nodes(program))
    ]


def _fetch_ops(matmul: fx.Node, fixed: set[fx.Node]) -> list[fx.Node]:
    """Return the ops between stored weights and the matmul, in the order of the graph."""
    consumers = {matmul}
    pending = [n for n in matmul.all_input_nodes if _is_matrix(n)]
    while pending:
        node = pending.pop()
        if node.op == "call_function" and node in fixed and consumers.issuperset(node.users):
            consumers.add(node)
            pending.extend(node.all_input_nodes)
    return sorted(consumers - {matmul})


def _is_matrix(node: fx.Node) -> bool:
    """Whether a value has two dims or more: biases are left out."""
    layout = node.meta.get("layout")
    return layout is not None and len(layout.shape) > 1


def _fetches_weight(node: fx.Node) -> bool:
    """Whether a node is a reshard step that fetches a weight."""
    return getattr(node.target, "__name__", "") in _FETCHES and "step" in node.meta


def _tail_not_run_again(
    unit: tuple[fx.Node, ...], specs: dict[str, OpShardingRule]
) -> set[fx.Node]:
    """Return the last nodes of a block, as far as their backward needs no saved values: changes of
    state, and ops that are linear in all their operands together. They do not run again, as torch
    stops the recomputation before them.
    """
    tail = set()
    for node in reversed(unit):
        rule = specs.get(node.meta.get("source", ""))
        present = {i for i, dims in enumerate(rule.operands) if dims is not None} if rule else set()
        free = rule is not None and rule.product is None and present in rule.linear
        if not (free or "step" in node.meta or node.target is operator.getitem):
            break
        tail.add(node)
    return tail


def _convex_nodes(name: str, nodes: list[fx.Node]) -> frozenset[fx.Node]:
    """Return the nodes of a block and all nodes on a path from one of them to another, so that they
    can be one call.
    """
    block_nodes = {n for n in nodes if n.op == "call_function" and block_of(n) == name}
    below, above = set(block_nodes), set(block_nodes)
    for node in nodes:
        if node.op == "call_function" and any(n in below for n in node.all_input_nodes):
            below.add(node)
    for node in reversed(nodes):
        if node.op == "call_function" and any(n in above for n in node.users):
            above.add(node)
    return frozenset(below & above)


class _Grouping:
    """Copies a graph with each group as one call, in an order in which all inputs are ready."""

    def __init__(self, module: fx.GraphModule, groups: list[_Group]) -> None:
        self.source, self.groups = module, groups
        self.nodes = list(module.graph.nodes)
        self.group = {n: number for number, group in enumerate(groups) for n in group.nodes}
        assert len(self.group) == sum(len(group.nodes) for group in groups), (
            "two blocks that are recomputed overlap"
        )
        self.graph, self.root = fx.Graph(), torch.nn.Module()
        self.copies: dict[fx.Node, fx.Node] = {}

    def module(self) -> fx.GraphModule:
        """Return the module with the grouped graph."""
        for unit in self._order():
            if len(unit) == 1 and unit[0] not in self.group:
                node = unit[0]
                self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)
            else:
                self._call(unit)
        name = type(self.source).__name__
        return fx.GraphModule(self.root, self.graph, class_name=name)

    def _order(self) -> list[list[fx.Node]]:
        """Return the units of the new graph, single nodes and groups, each after those that it
        takes values from and otherwise in the order of the source.
        """
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
        for key, needed_units in needs.items():
            for needed in needed_units:
                users.setdefault(needed, []).append(key)
        missing = {key: len(needed_units) for key, needed_units in needs.items()}
        runnable = [key for key, count in missing.items() if not count]
        heapq.heapify(runnable)
        order = []
        while runnable:
            key = heapq.heappop(runnable)
            order.append(units[key])
            for user in users.get(key, ()):
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(runnable, user)
        assert len(order) == len(units), "blocks that are recomputed need one another"
        return order

    def _call(self, unit: list[fx.Node]) -> None:
        """Copy the nodes of one group into a graph of their own, and add a call of it."""
        number = self.group[unit[0]]
        group, inside = self.groups[number], set(unit)
        if group.target is rerun_in_backward:  # what runs again stands first
            unit = sorted(unit, key=lambda node: node not in group.again)
        inputs = list(
            dict.fromkeys(n for node in unit for n in node.all_input_nodes if n not in inside)
        )
        results = [node for node in unit if any(user not in inside for user in node.users)]
        block = _inner_module(unit, inputs, results, group.again)
        name = f"{group.target.__name__}_{number}"
        self.root.add_module(name, block)
        flag = _draws(unit) if group.target is recompute_in_backward else len(group.again)
        arguments: Any = (self.graph.get_attr(name), flag, *(self.copies[n] for n in inputs))
        call = self.graph.call_function(group.target, arguments)
        call.meta["chain"] = unit[0].meta.get("chain")
        for index, node in enumerate(results):
            item = self.graph.call_function(operator.getitem, (call, index))
            item.meta = {k: v for k, v in node.meta.items() if k in ("layout", "dtype")}
            if "value" in node.meta:  # which the node inside stands for
                item.meta["value_inside"] = node.meta["value"]
            self.copies[node] = item


def _inner_module(
    unit: list[fx.Node], inputs: list[fx.Node], results: list[fx.Node], again: frozenset[fx.Node]
) -> fx.GraphModule:
    """Return a module with a graph of these nodes alone, from `inputs` to `results`."""
    graph, copies = fx.Graph(), {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = {k: v for k, v in node.meta.items() if k in ("layout", "val")}
    for node in unit:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta["again"] = node in again
    graph.output(tuple(copies[node] for node in results))
    return fx.GraphModule(torch.nn.Module(), graph, class_name="Block")


def _draws(unit: Collection[fx.Node]) -> bool:
    """Whether one of the nodes draws random numbers."""
    return any(
        torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in unit
    )
