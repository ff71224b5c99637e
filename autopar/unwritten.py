"""Memory that a model takes without writing to it, and what hangs on its content.

Mixtral inverts a permutation by `inv = torch.empty_like(perm); inv[perm] = torch.arange(n)`: what
`empty_like` gives is another number each time, and means nothing. A graph in which such memory is
filled gives the same numbers each time; where two fillings give two values, they mean nothing.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, fx

from autopar.ir.program import Program
from autopar.widened import is_inexact

aten = torch.ops.aten

_UNWRITTEN = {
    aten.empty,
    aten.empty_like,
    aten.empty_permuted,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
}

Fill = Callable[[Tensor], Tensor]


def tame(memory: Tensor) -> Tensor:
    """Fill it with numbers that look like any others: 1.0, the index 0, False."""
    return memory.fill_(1 if is_inexact(memory) else 0)


def poison(memory: Tensor) -> Tensor:
    """Fill it with what shows wherever it gets: nan; where there is none, the index 1 or True."""
    return memory.fill_(float("nan") if is_inexact(memory) else 1)


def unwritten(program: Program) -> list[fx.Node]:
    """The nodes that give memory without writing to it, those within blocks too."""
    return [node for graph in _graphs(program.module) for node in graph.nodes if _is_empty(node)]


def filled(program: Program, fill: Fill, only: str | None = None) -> Program:
    """The program with such memory filled; by `tame` but for the node `only`, if one is named."""
    if not unwritten(program):
        return program
    module = copy.deepcopy(program.module)
    for graph in _graphs(module):
        for node in [node for node in graph.nodes if _is_empty(node)]:
            with graph.inserting_after(node):
                wanted = fill if only in (None, node.name) else tame
                new = graph.call_function(wanted, (node,))
            node.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
            new.meta, node.meta = node.meta, {}
    for each in _modules(module):
        each.recompile()
    return dataclasses.replace(program, module=module)


def differing(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Where two runs give two numbers, as flags; None where they do nowhere."""
    if one is None or other is None or one is other:
        return None
    differ = ~((one == other) | ((one != one) & (other != other)))
    return differ if bool(differ.any()) else None


def _is_empty(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in _UNWRITTEN


def _graphs(module: fx.GraphModule) -> list[fx.Graph]:
    return [each.graph for each in _modules(module)]


def _modules(module: fx.GraphModule) -> list[fx.GraphModule]:
    return [each for each in module.modules() if isinstance(each, fx.GraphModule)]
