"""Bytes that no plan is below: what a rank holds at the least, whatever is split or run again.

Example: a decoder of 48 layers has 36 GiB of stored weights and 72 GiB of AdamW's states, and one
tensor of 12 GiB goes from each block to the next. 256 ranks hold an equal part of all that at best,
2.7 GiB each: a limit of 2 GiB is refused before any search.

An annotated program enters, bytes leave. planner.py and world_size.py hold them against a limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor, fx

from autopar.cost.activations import ParameterMemory, SavedActivations, SavedActivationsByNode
from autopar.cost.memory import Budget, Optimizer
from autopar.ir.graph import block_of, producer
from autopar.ir.program import Program
from autopar.ir.sharding_rule import operands_of, value_of


def is_excluded(program: Program, ranks: int, budget: Budget | None) -> bool:
    """Whether every plan on so many ranks holds more than the budget's limit."""
    if budget is None or budget.memory_bytes is None:
        return False
    return least_bytes(program, ranks, budget.optimizer) > budget.memory_bytes


def least_bytes(program: Program, ranks: int, optimizer: Optimizer) -> float:
    """Return bytes that the peak of no plan on so many ranks is below.

    When the forward ends, a rank holds its parameters, the optimizer's states and what each
    repeated block took from the block before: a block that runs again saves that, and another one
    saves it or a copy of its size. When the backward ends, it holds the gradients in place of the
    activations. Of all that, one rank has at least an equal part.
    """
    memory = ParameterMemory(program, optimizer)
    nodes = {node.name: node for node in program.module.graph.nodes if node.op == "placeholder"}
    before_step = after_backward = 0.0
    for entry in program.signature.inputs:
        if entry.kind == "parameter":
            value = value_of(nodes[entry.node])
            size = value.dtype.itemsize
            needed = value.numel() * memory.bytes_per_element(size, entry.trainable)
            after_backward += needed
            before_step += needed - value.numel() * size * entry.trainable
    return max(after_backward, before_step + border_bytes(program)) / ranks


def border_bytes(program: Program) -> float:
    """Return the bytes of all tensors that a repeated block takes from what runs before it and
    saves: each counts once, in the narrower type where the block saves a copy in another, and no
    copy besides.
    """
    notes = program.annotations
    assert notes is not None
    saved_of = SavedActivationsByNode(notes.gradient)
    origins: dict[fx.Node, fx.Node] = {}  # of every node, what it is a copy of
    least: dict[fx.Node, float] = {}  # by origin
    begun = {""}  # blocks of which a node has come, and what is no block
    for node in program.module.graph.nodes:
        source = _copied_operand(node)
        origin = origins[node] = node if source is None else origins[source]
        if node.op != "call_function":
            continue
        begun.add(block_of(node))
        if producer(node) not in notes.gradient or origin.op != node.op:
            continue
        for block in {block_of(user) for user in node.users} - begun:
            saved = [_bytes(copy) for copy in _saved_copies(node, block, saved_of)]
            if saved:
                least[origin] = min(least.get(origin, math.inf), *saved)
    return sum(least.values())


def _bytes(node: fx.Node) -> float:
    value = value_of(node)
    return float(value.numel() * value.dtype.itemsize)


def _saved_copies(node: fx.Node, block: str, saved_of: SavedActivationsByNode) -> Iterator[fx.Node]:
    """Yield a value and the copies that a block makes of it, one of the other, if the block saves
    the last of them for its backward: copies in another type, views.
    """
    pending: list[list[fx.Node]] = [[node]]
    while pending:
        chain = pending.pop()
        for user in chain[-1].users:
            if user.op != "call_function" or block_of(user) != block:
                continue
            if _saves(saved_of(user), user, chain[-1]):
                yield from chain
            elif _copied_operand(user) is not None:
                pending.append([*chain, user])


def _saves(saved: SavedActivations, node: fx.Node, operand: fx.Node) -> bool:
    """Whether a node saves this operand, or makes inside what holds as much as all operands."""
    operands = operands_of(node)
    if any(operands[index] is operand for index in saved.operands):
        return True
    return saved.inside_bytes >= sum(_bytes(each) for each in operands if each is not None)


def _copied_operand(node: fx.Node) -> fx.Node | None:
    """Return the one operand of a node whose one result has as many numbers; None for others."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
        return None
    operands = [operand for operand in operands_of(node) if operand is not None]
    if len(operands) != 1 or not isinstance(operands[0].meta.get("val"), Tensor):
        return None
    return operands[0] if value_of(node).numel() == value_of(operands[0]).numel() else None
