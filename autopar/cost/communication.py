"""Communication: what a collective over axes of a mesh takes on a world, when all groups of the
axes run it at once, in the fastest way (pattern.py, load.py, ways.py).

On axes of p ranks, with B the bytes of the whole value on them, a rank sends (p-1)/p·B in an
all-gather or a reduce-scatter, twice that in an all-reduce, (p-1)/p²·B in an all-to-all; the panels
of SUMMA count as the gather or scatter that they are, p broadcasts or reduces of B/p.

The collectives of an emitted program: what every node moves, forward and backward, read off the
graph in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.cost.algorithms import Algorithm, flat_algorithms, in_step, algorithms
from autopar.cost.network import Pattern, pattern, size
from autopar.ir.graph import every_node
from autopar.ir.layout import Element, Layout, Step, Traffic
from autopar.ir.mesh import Mesh
from autopar.ir.program import Atom, Program
from autopar.ops.collectives import hierarchy_of
from autopar.ops.sharded.inner_collectives import InnerCollective
from autopar.world import World


class Price(NamedTuple):
    """Of one collective: wire bytes a rank sends, seconds, and the way that is the fastest."""

    bytes: float
    seconds: float
    way: Algorithm

    @property
    def takes_s(self) -> float:
        """Seconds of computing that are lost beside it, at most its own."""
        moving = self.seconds - self.way.start_s
        return min(self.seconds, self.way.takes_s + self.way.slows * moving)


class Cost(NamedTuple):
    """What one collective costs a rank: wire bytes and seconds, in which algorithm."""

    kind: str
    axes: tuple[str, ...]
    backward: bool
    bytes: float
    seconds: float
    algorithm: str = "ring"


Hierarchy = tuple[int, ...]
_Find = Callable[[World, str, Pattern], tuple[Algorithm, ...]]


def collective_cost(
    traffic: Traffic,
    axes: tuple[str, ...],
    mesh: Mesh,
    element_bytes: int,
    world: World,
    find: _Find = algorithms,
) -> Price:
    """One collective over these axes of the mesh, run by all of their groups at once, in the
    fastest of the ways that `find` gives.

    Example: on World.preset("dgx-h100", 16) and Mesh.parse("data2.x8"), an all-reduce of 1e9 bytes
    over data takes 20 ms: 1e9 bytes over a rank's card of 50 GB/s; over x 3.9 ms on NVLink. Raises
    WorldError where the mesh is larger than the world.
    """
    return _cheapest(world, mesh, axes, traffic.collective, traffic.elements * element_bytes, find)


def flat_price(kind: str, digits: Pattern, whole_bytes: float, world: World) -> Price:
    """Of one collective in one level, or of several that go as one, of so many bytes of the whole
    value, over groups of a pattern; without what ranks lose on coming together for it.
    """
    found = flat_algorithms(world, kind, digits)
    way = found[0] if len(found) == 1 else min(found, key=lambda way: way.seconds(whole_bytes))
    return Price(sent(kind, size(digits)) * whole_bytes, way.seconds(whole_bytes), way)


def fastest_hierarchy(
    kind: str, axes: tuple[str, ...], mesh: Mesh, whole_bytes: float, world: World
) -> Hierarchy:
    """In which a collective of so many bytes of the whole value takes the least time."""
    return _cheapest(world, mesh, axes, kind, whole_bytes, algorithms).way.inside


def sent(kind: str, ranks: Any) -> Any:
    """Bytes a rank sends per byte of the whole, in a group of so many ranks: a number, an array or
    a sympy expression, as `ranks` is. Source: Thakur, Rabenseifner, Gropp 2005.

    >>> sent("all_reduce", 4)
    1.5
    """
    part = (ranks - 1) / ranks
    if kind == "all_to_all":
        part = part / ranks
    return 2 * part if kind == "all_reduce" else part


def seconds(
    world: World, digits: Pattern, kind: str, whole_bytes: NDArray[np.float64]
) -> NDArray[np.float64]:
    """What `collective_cost` gives, for an array of bytes of the whole value at once: each in the
    way that is the fastest for it. `digits` is `pattern(mesh, axes)`.
    """
    first, *others = in_step(world, algorithms(world, kind, digits))
    fastest = first.all_seconds(whole_bytes)
    for way in others:
        fastest = np.minimum(fastest, way.all_seconds(whole_bytes))
    return fastest


def _cheapest(
    world: World, mesh: Mesh, axes: tuple[str, ...], kind: str, whole: float, find: _Find
) -> Price:
    part, found = _found(world, mesh, axes, kind, find)
    way = found[0] if len(found) == 1 else min(found, key=lambda way: way.seconds(whole))
    return Price(part * whole, way.seconds(whole), way)


@lru_cache(maxsize=1 << 16)
def _found(
    world: World, mesh: Mesh, axes: tuple[str, ...], kind: str, find: _Find
) -> tuple[float, tuple[Algorithm, ...]]:
    """(bytes that a rank sends per byte of the whole, the ways to do so)."""
    digits = pattern(mesh, axes)
    return sent(kind, size(digits)), in_step(world, find(world, kind, digits))


def costs(path: Iterable[Step], element: Element, world: World) -> Iterator[Cost]:
    """Every collective of a path of changes, forward and backward."""
    for step in path:
        for late, traffic in zip((False, True), step.traffic(bool(element.gradient)), strict=True):
            if traffic is not None:
                size = element.of(traffic.collective, late)
                yield _cost(traffic, step.axes, late, step.before.mesh, size, world)
                if element.again and not late:
                    yield _cost(traffic, step.axes, True, step.before.mesh, size, world)


def hierarchies(step: Step, element: Element, world: World) -> tuple[Hierarchy, Hierarchy]:
    """How the collectives of a change are to go, forward and backward: `Way.inside`, () for in one
    level or not at all.
    """
    mesh = step.before.mesh
    forward, backward = (
        collective_cost(t, step.axes, mesh, element.of(t.collective, late), world).way.inside
        if t
        else ()
        for late, t in zip((False, True), step.traffic(bool(element.gradient)), strict=True)
    )
    return forward, backward


def inner_costs(found: Iterable[InnerCollective], mesh: Mesh, world: World) -> Iterator[Cost]:
    """Every collective inside a sharded implementation; these go in one level."""
    for one in found:
        size = one.element_bytes
        yield _cost(one.traffic, one.axes, one.backward, mesh, size, world, flat_algorithms)


def _cost(
    traffic: Traffic,
    axes: tuple[str, ...],
    backward: bool,
    mesh: Mesh,
    element_bytes: int,
    world: World,
    find: _Find = algorithms,
) -> Cost:
    price = collective_cost(traffic, axes, mesh, element_bytes, world, find)
    return Cost(traffic.collective, axes, backward, price.bytes, price.seconds, price.way.algorithm)


def path_seconds(path: Iterable[Step], element: Element, world: World) -> float:
    """Seconds of all collectives of a path, plus what slicing and padding in memory cost (so that
    ties go to fewer steps).
    """
    total = 0.0
    for step in path:
        total += (
            max(step.before.local_size, step.after.local_size)
            * element.bytes
            / world.device.memory_bytes_per_s
        )
    return total + element.share * sum(cost.seconds for cost in costs(path, element, world))


class SentCollective(NamedTuple):
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
        return () if self.inside else hierarchy_of(self.node, self.backward)

    @property
    def chain(self) -> str:
        return str(self.node.meta["chain"])


def sent_collectives(program: Program) -> Iterator[SentCollective]:
    """Every collective of a training step; a forward one that is run again, a second time as one of
    the backward.
    """
    for node, again in every_node(program.module):
        for move in _of_node(node, program):
            yield move
            if again and not move.backward:
                yield move._replace(backward=True, again=True)


def _of_node(node: fx.Node, program: Program) -> Iterator[SentCollective]:
    if "step" in node.meta:
        yield from _of_step(node, node.meta["step"], program)
    for one in node.meta.get("inside", ()):
        yield _of_inside(node, one, program)


def _of_step(node: fx.Node, step: Step, program: Program) -> Iterator[SentCollective]:
    assert program.annotations is not None
    layout = max(step.before, step.after, key=lambda layout: layout.local_size)
    dims = tuple(range(len(layout.shape)))
    atoms = program.annotations.dims[node.meta["value"]]
    element: Element = node.meta["element"]
    for late, traffic in zip((False, True), step.traffic(bool(element.gradient)), strict=True):
        if traffic is not None:
            size = element.of(traffic.collective, late)
            yield SentCollective(node, traffic, step.axes, late, size, False, layout, dims, atoms)


def _of_inside(node: fx.Node, found: InnerCollective, program: Program) -> SentCollective:
    assert program.annotations is not None
    index, layout, dims, times = found.part
    source = node.meta["source"]
    factors = program.annotations.factors[source]
    operand = program.annotations.specs[source].operands[index]
    assert operand is not None
    atoms = tuple(tuple(atom for name in dim for atom in factors[name]) for dim in operand)
    return SentCollective(node, *found[:3], found.element_bytes, True, layout, dims, atoms, times)
