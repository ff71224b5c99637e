"""The pass that turns masks of random numbers into dropout, whose mask does not depend on the
layout.

Example: stochastic depth draws `(keep + torch.rand(batch, 1, 1)).floor()`, or
`x.new_empty(batch, 1, 1).bernoulli_(keep)`; masked language models draw
`torch.rand(shape) < 0.15`. Each is 1 with a probability, else 0: the sign of a dropout of ones.
Random numbers that are used otherwise stay; annotate.py refuses them.

A traced program enters and leaves. planner.py runs it before `annotate`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar._compat import LazyGraphModule
from autopar.ir.graph import copied
from autopar.ir.program import Program, same_inputs, same_outputs

aten = torch.ops.aten
_UNIFORM = (aten.rand.default, aten.rand_like.default)  # from 0 to 1
_BELOW = (aten.lt.Scalar, aten.le.Scalar)
_ABOVE = (aten.gt.Scalar, aten.ge.Scalar)
_SHAPES = (  # what may lie between the numbers and the mask
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.reshape.default,
    aten.expand.default,
    aten.permute.default,
    aten.transpose.int,
    aten._to_copy.default,
)


class _Mask(NamedTuple):
    """What a node that is 1, or true, with probability `keep` is made of: the random numbers, and
    `operand`, those numbers in the shape of the mask. Both are the node itself where it draws.
    """

    keep: float
    drawn: fx.Node
    operand: fx.Node


def random_masks(program: Program) -> Program:
    """Return the program with dropout in place of masks of random numbers; the same program where
    it has none.
    """
    if not any(_mask_of(node) for node in program.module.graph.nodes):
        return program
    graph = copied(program.module.graph)
    for node in list(graph.nodes):
        mask = _mask_of(node)
        if mask is not None:
            _replace(graph, node, mask)
    # Draws count as impure, but the graph owes nobody those whose result is not used.
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return dataclasses.replace(program, module=LazyGraphModule(program.module, graph))


def check(program: Program) -> None:
    """The contract: inputs and outputs match the signature, and no mask of random numbers is
    left.
    """
    same_inputs(program)
    same_outputs(program)
    left = [node.name for node in program.module.graph.nodes if _mask_of(node)]
    assert not left, f"random_masks left {left}"


def _mask_of(node: fx.Node) -> _Mask | None:
    """Return what a node is a mask of, None where it is none."""
    arguments: Any = node.args
    if node.target is aten.bernoulli.p:
        keep, operand = arguments[1] if len(arguments) > 1 else 0.5, node
    elif node.target in _BELOW:
        operand, keep = arguments
    elif node.target in _ABOVE:
        operand, keep = arguments[0], 1 - arguments[1]
    elif node.target is aten.floor.default and _adds_number(arguments[0]):
        operand, keep = arguments[0].args
    else:
        return None
    drawn = node if operand is node else _numbers(operand)
    return _Mask(keep, drawn, operand) if drawn is not None and 0 <= keep <= 1 else None


def _adds_number(node: fx.Node) -> bool:
    """Whether a node is `value + number`, and has no other use."""
    return (
        node.target is aten.add.Tensor
        and isinstance(node.args[1], int | float)
        and not node.kwargs
        and len(node.users) == 1
    )


def _numbers(node: Any) -> fx.Node | None:
    """Return the random numbers that a node has in another shape, None where it has others, or they
    have another use, which would see other ones.
    """
    while node.target in _SHAPES and len(node.users) == 1:
        node = node.args[0]
    return node if node.target in _UNIFORM and len(node.users) == 1 else None


def _replace(graph: fx.Graph, node: fx.Node, mask: _Mask) -> None:
    """Make the random numbers ones and zeros, and the mask what these say."""
    with graph.inserting_before(mask.drawn):
        ones = _ones_and_zeros(graph, mask)
    mask.drawn.replace_all_uses_with(ones)
    if mask.drawn is node:
        return
    kept = ones if mask.operand is mask.drawn else mask.operand
    if node.meta["val"].dtype is torch.bool:
        with graph.inserting_before(node):
            kept = graph.call_function(aten.ne.Scalar, (kept, 0))
        kept.meta = dict(node.meta)
    node.replace_all_uses_with(kept)


def _ones_and_zeros(graph: fx.Graph, mask: _Mask) -> fx.Node:
    """Return a node of ones with probability `keep`, else zeros, like the random numbers."""
    value = mask.drawn.meta["val"]

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = graph.call_function(target, args, kwargs)
        new.meta = dict(mask.drawn.meta)
        return new

    shape = [int(size) for size in value.shape]
    ones = call(aten.full.default, shape, 1, dtype=value.dtype, device=value.device)
    return call(aten.sign.default, call(aten.dropout.default, ones, 1 - mask.keep, True))
