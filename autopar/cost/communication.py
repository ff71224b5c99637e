"""The cost of communication: bytes and seconds of collectives over axes of a mesh on a world, when
all groups of the axes run at once, each in its fastest algorithm (algorithms.py, network.py).

On axes of p ranks, with B the bytes of the unsharded value on them, a rank sends (p-1)/p·B in an
all-gather or a reduce-scatter, twice that in an all-reduce, (p-1)/p²·B in an all-to-all. The panels
of SUMMA count as the gather or scatter that they replace: p broadcasts or reduces of B/p.

`collective_cost` prices one collective, `costs` and `path_seconds` a path of reshards, for the
planner and the passes. `sent_collectives` lists the collectives of an emitted program, forward and
backward, in the graph's order, for the summary, the formulas and the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.cost.algorithms import Algorithm, algorithms, flat_algorithms
from autopar.cost.network import Pattern, pattern, size
from autopar.ir.graph import every_node
from autopar.ir.layout import ORDER, TRAFFIC, Element, Layout, Step, Traffic
from autopar.ir.many_reshards import steps_between
from autopar.ir.mesh import Mesh
from autopar.ir.program import Atom, Program
from autopar.ops.collectives import hierarchy_of
from autopar.ops.sharded import InnerCollective
from autopar.world import World


class Price(NamedTuple):
    """The price of one collective: bytes that a rank sends, seconds, and the fastest algorithm."""

    bytes: float
    seconds: float
    algorithm: Algorithm


class Cost(NamedTuple):
    """The cost of one collective for a rank: bytes that it sends and seconds, in which
    algorithm.
    """

    kind: str
    axes: tuple[str, ...]
    backward: bool
    bytes: float
    seconds: float
    algorithm: str = "ring"


Hierarchy = tuple[int, ...]
_Finder = Callable[[World, str, Pattern], tuple[Algorithm, ...]]


def collective_cost(
    traffic: Traffic,
    axes: tuple[str, ...],
    mesh: Mesh,
    element_bytes: float,
    world: World,
    find: _Finder = algorithms,
) -> Price:
    """Return the price of one collective over these axes of the mesh, run by all of their groups at
    once, in the fastest of the algorithms that `find` gives.

    Example: on World.preset("dgx-h100", 16) and Mesh.parse("data2.x8"), an all-reduce of 1e9 bytes
    over data takes 20 ms: 1e9 bytes over a rank's card of 50 GB/s; over x 3.9 ms on NVLink. Raises
    WorldError where the mesh is larger than the world.
    """
    return _cheapest_price(
        world, mesh, axes, traffic.collective, traffic.elements * element_bytes, find
    )


def flat_price(kind: str, digits: Pattern, unsharded_bytes: float, world: World) -> Price:
    """Return the price of one collective in one level, or of several that are fused, of so many
    bytes of the unsharded value over groups of a pattern.
    """
    choices = flat_algorithms(world, kind, digits)
    algorithm = (
        choices[0]
        if len(choices) == 1
        else min(choices, key=lambda algorithm: algorithm.seconds(unsharded_bytes))
    )
    return Price(
        sent(kind, size(digits)) * unsharded_bytes, algorithm.seconds(unsharded_bytes), algorithm
    )


def fastest_hierarchy(
    kind: str, axes: tuple[str, ...], mesh: Mesh, unsharded_bytes: float, world: World
) -> Hierarchy:
    """Return the levels in which a collective of so many bytes of the unsharded value takes the
    least time.
    """
    return _cheapest_price(world, mesh, axes, kind, unsharded_bytes, algorithms).algorithm.inside


def sent(kind: str, ranks: Any) -> Any:
    """Return the bytes that a rank sends per byte of the unsharded value, in a group of so many
    ranks: a number, an array or a sympy expression, as `ranks` is. Source: Thakur, Rabenseifner,
    Gropp 2005.

    >>> sent("all_reduce", 4)
    1.5
    """
    fraction = (ranks - 1) / ranks
    if kind == "all_to_all":
        fraction = fraction / ranks
    return 2 * fraction if kind == "all_reduce" else fraction


def seconds(
    world: World, digits: Pattern, kind: str, unsharded_bytes: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the seconds of `collective_cost` for an array of bytes of the unsharded value at once:
    each in the algorithm that is the fastest for it. `digits` is `pattern(mesh, axes)`.
    """
    first, *others = algorithms(world, kind, digits)
    fastest = first.all_seconds(unsharded_bytes)
    for algorithm in others:
        fastest = np.minimum(fastest, algorithm.all_seconds(unsharded_bytes))
    return fastest


def _cheapest_price(
    world: World,
    mesh: Mesh,
    axes: tuple[str, ...],
    kind: str,
    unsharded_bytes: float,
    find: _Finder,
) -> Price:
    """Return the price of a collective in the algorithm that is the fastest at these bytes."""
    share, choices = _algorithm_choices(world, mesh, axes, kind, find)
    algorithm = (
        choices[0]
        if len(choices) == 1
        else min(choices, key=lambda algorithm: algorithm.seconds(unsharded_bytes))
    )
    return Price(share * unsharded_bytes, algorithm.seconds(unsharded_bytes), algorithm)


@lru_cache(maxsize=1 << 16)
def _algorithm_choices(
    world: World, mesh: Mesh, axes: tuple[str, ...], kind: str, find: _Finder
) -> tuple[float, tuple[Algorithm, ...]]:
    """Return (bytes that a rank sends per byte of the unsharded value, the algorithms to choose
    from).
    """
    digits = pattern(mesh, axes)
    return sent(kind, size(digits)), find(world, kind, digits)


def costs(path: Iterable[Step], element: Element, world: World) -> Iterator[Cost]:
    """Yield the cost of every collective of a path of reshards, forward and backward."""
    for step in path:
        for backward, traffic in zip(
            (False, True), step.traffic(bool(element.gradient)), strict=True
        ):
            if traffic is not None:
                size = element.of(traffic.collective, backward)
                yield _cost(traffic, step.axes, backward, step.before.mesh, size, world)
                if element.again and not backward:
                    yield _cost(traffic, step.axes, True, step.before.mesh, size, world)


def hierarchies(step: Step, element: Element, world: World) -> tuple[Hierarchy, Hierarchy]:
    """Return in which levels the collectives of a reshard should run, forward and backward:
    `Algorithm.inside`, () for one level or for no collective.
    """
    mesh = step.before.mesh
    forward, backward = (
        collective_cost(
            traffic, step.axes, mesh, element.of(traffic.collective, is_backward), world
        ).algorithm.inside
        if traffic
        else ()
        for is_backward, traffic in zip(
            (False, True), step.traffic(bool(element.gradient)), strict=True
        )
    )
    return forward, backward


def inner_costs(
    inner_collectives: Iterable[InnerCollective], mesh: Mesh, world: World
) -> Iterator[Cost]:
    """Yield the cost of every collective inside a sharded implementation; these run in one
    level.
    """
    for inner in inner_collectives:
        size = inner.element_bytes
        yield _cost(inner.traffic, inner.axes, inner.backward, mesh, size, world, flat_algorithms)


def _cost(
    traffic: Traffic,
    axes: tuple[str, ...],
    backward: bool,
    mesh: Mesh,
    element_bytes: float,
    world: World,
    find: _Finder = algorithms,
) -> Cost:
    """Return the cost of one collective, forward or backward."""
    price = collective_cost(traffic, axes, mesh, element_bytes, world, find)
    return Cost(
        traffic.collective, axes, backward, price.bytes, price.seconds, price.algorithm.name
    )


def path_seconds(path: Sequence[Step], element: Element, world: World) -> float:
    """Return the seconds of all collectives of a path of reshards, plus what slicing and padding in
    memory cost (so that ties go to fewer steps).
    """
    in_memory, sending = path_terms(path, element, world)
    return in_memory + element.share * sending


def path_terms(path: Sequence[Step], element: Element, world: World) -> tuple[float, float]:
    """Return the seconds of a path of reshards in memory, and those of its collectives, whatever
    the share of them that counts.
    """
    in_memory = sending = 0.0
    for step in path:
        elements = max(step.before.local_size, step.after.local_size)
        in_memory += elements * element.bytes / world.device.memory_bytes_per_s
        for seconds in _step_seconds(
            step.kind, step.axes, step.before.mesh, elements, element, world
        ):
            sending += seconds
    return in_memory, sending


def terms_between(
    sources: Sequence[Layout], targets: Sequence[Layout], element: Element, world: World
) -> NDArray[np.float64]:
    """Return `path_terms` for each pair of layouts, [source, target, 2]: for many of them at once
    in a hundredth of the time.
    """
    mesh = sources[0].mesh
    terms = np.zeros((len(sources) * len(targets), 2))
    for steps in steps_between(sources, targets):
        everything = 1 << len(mesh.axes)  # more than the bits of all axes
        keys = (steps.elements * len(ORDER) + steps.kinds) * everything + steps.axes
        alike, which = np.unique(keys, return_inverse=True)
        in_memory, sending = [], []
        for key in alike.tolist():
            rest, bits = divmod(key, everything)
            elements, kind = divmod(rest, len(ORDER))
            axes = tuple(name for place, name in enumerate(mesh.names) if bits >> place & 1)
            step_seconds = _step_seconds(ORDER[kind], axes, mesh, elements, element, world)
            in_memory.append(elements * element.bytes / world.device.memory_bytes_per_s)
            sending.append([*step_seconds, 0.0, 0.0, 0.0][:3])
        terms[steps.pairs, 0] += np.array(in_memory)[which]
        for seconds in np.array(sending).T:  # in the order in which `path_terms` adds them
            terms[steps.pairs, 1] += seconds[which]
    return terms.reshape(len(sources), len(targets), 2)


@lru_cache(maxsize=1 << 18)
def _step_seconds(
    kind: str, axes: tuple[str, ...], mesh: Mesh, elements: int, element: Element, world: World
) -> tuple[float, ...]:
    """Return the seconds of the collectives of a step of this kind, in the order of `costs`.
    `elements`: what a rank holds at most, before the step or after it. Many layouts share them.
    """
    if kind == "S->S":
        elements *= math.prod(mesh.sizes[axis] for axis in axes)
    forward, backward = TRAFFIC[kind]
    seconds = []
    for name, late in ((forward, False), (backward if element.gradient else None, True)):
        if name is not None:
            traffic = Traffic(name, elements)
            price = collective_cost(traffic, axes, mesh, element.of(name, late), world)
            seconds += [price.seconds] * (2 if element.again and not late else 1)
    return tuple(seconds)


class SentCollective(NamedTuple):
    """One collective of an emitted program. Its elements are `times` · the local sizes of the dims
    `dims` of a tensor in `layout`, and for an all-to-all times the ranks of its group; `atoms` are
    those of each dim.

    `inside`: within a sharded implementation. `again`: a forward one that is run again.
    """

    node: fx.Node
    traffic: Traffic
    axes: tuple[str, ...]
    backward: bool
    element_bytes: float
    inside: bool
    layout: Layout
    dims: tuple[int, ...]
    atoms: tuple[tuple[Atom, ...], ...]
    times: int = 1
    again: bool = False

    @property
    def bytes(self) -> float:
        """Bytes of the unsharded value."""
        return float(self.traffic.elements * self.element_bytes)

    @property
    def hierarchy(self) -> tuple[int, ...]:
        """The levels in which it runs; one within an implementation always runs in a single
        level.
        """
        return () if self.inside else hierarchy_of(self.node, self.backward)

    @property
    def chain(self) -> str:
        return str(self.node.meta["chain"])


def sent_collectives(program: Program) -> Iterator[SentCollective]:
    """Yield every collective of a training step; a forward one that is run again comes a second
    time, as one of the backward.
    """
    for node, again in every_node(program.module):
        for collective in _collectives_of_node(node, program):
            yield collective
            if again and not collective.backward:
                whole = collective.element_bytes / program.counting.gathers
                yield collective._replace(backward=True, again=True, element_bytes=whole)


def _collectives_of_node(node: fx.Node, program: Program) -> Iterator[SentCollective]:
    if "step" in node.meta:
        yield from _collectives_of_reshard(node, node.meta["step"], program)
    for inner in node.meta.get("inside", ()):
        yield _inner_collective(node, inner, program)


def _collectives_of_reshard(
    node: fx.Node, step: Step, program: Program
) -> Iterator[SentCollective]:
    """Yield the collectives of a reshard, forward and backward."""
    assert program.annotations is not None
    layout = max(step.before, step.after, key=lambda layout: layout.local_size)
    dims = tuple(range(len(layout.shape)))
    atoms = program.annotations.dims[node.meta["value"]]
    element: Element = node.meta["element"]
    for backward, traffic in zip((False, True), step.traffic(bool(element.gradient)), strict=True):
        if traffic is not None:
            size = element.of(traffic.collective, backward)
            yield SentCollective(
                node, traffic, step.axes, backward, size, False, layout, dims, atoms
            )


def _inner_collective(node: fx.Node, inner: InnerCollective, program: Program) -> SentCollective:
    """Return a collective of a sharded implementation, with the dims and atoms of its operand."""
    assert program.annotations is not None
    index, layout, dims, times = inner.part
    source = node.meta["source"]
    factors = program.annotations.factors[source]
    operand = program.annotations.specs[source].operands[index]
    assert operand is not None
    atoms = tuple(tuple(atom for name in dim for atom in factors[name]) for dim in operand)
    return SentCollective(node, *inner[:3], inner.element_bytes, True, layout, dims, atoms, times)
