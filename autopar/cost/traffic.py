"""The collectives of an emitted program: what every node moves, forward and backward, read off the
graph in its order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import fx

from autopar.ir.graph import every_node
from autopar.ir.layout import Element, Layout, Step, Traffic
from autopar.ir.program import Atom, Program
from autopar.ops.reshard_nodes import levels_of
from autopar.ops.sharded.inner_collectives import Inside


class Move(NamedTuple):
    """One collective. Its elements are `times` · the local sizes of these dims of a tensor that
    lies so, and for an all-to-all times the ranks of its group; `atoms` are those of each dim.

    `inside`: within a sharded implementation. `again`: a forward one that is run again.
    """

    node: fx.Node
    traffic: Traffic
    axes: tuple[str, ...]
    backward: bool
    element_bytes: int
    inside: bool
    layout: Layout
    dims: tuple[int, ...]
    atoms: tuple[tuple[Atom, ...], ...]
    times: int = 1
    again: bool = False

    @property
    def bytes(self) -> float:
        """Of the whole value."""
        return float(self.traffic.elements * self.element_bytes)

    @property
    def levels(self) -> tuple[int, ...]:
        """In which it goes; those within an implementation always go in one."""
        return () if self.inside else levels_of(self.node, self.backward)

    @property
    def chain(self) -> str:
        return str(self.node.meta["chain"])


def moves(program: Program) -> Iterator[Move]:
    """Every collective of a training step; a forward one that is run again, a second time as one of
    the backward.
    """
    for node, again in every_node(program.module):
        for move in _of_node(node, program):
            yield move
            if again and not move.backward:
                yield move._replace(backward=True, again=True)


def _of_node(node: fx.Node, program: Program) -> Iterator[Move]:
    if "step" in node.meta:
        yield from _of_step(node, node.meta["step"], program)
    for one in node.meta.get("inside", ()):
        yield _of_inside(node, one, program)


def _of_step(node: fx.Node, step: Step, program: Program) -> Iterator[Move]:
    assert program.annotations is not None
    layout = max(step.before, step.after, key=lambda layout: layout.local_size)
    dims = tuple(range(len(layout.shape)))
    atoms = program.annotations.dims[node.meta["value"]]
    element: Element = node.meta["element"]
    for late, traffic in zip((False, True), step.traffic(bool(element.gradient)), strict=True):
        if traffic is not None:
            size = element.of(traffic.collective, late)
            yield Move(node, traffic, step.axes, late, size, False, layout, dims, atoms)


def _of_inside(node: fx.Node, found: Inside, program: Program) -> Move:
    assert program.annotations is not None
    index, layout, dims, times = found.part
    source = node.meta["source"]
    factors = program.annotations.factors[source]
    operand = program.annotations.specs[source].operands[index]
    assert operand is not None
    atoms = tuple(tuple(atom for name in dim for atom in factors[name]) for dim in operand)
    return Move(node, *found[:3], found.element_bytes, True, layout, dims, atoms, times)
