"""Arrays over meshes and what their axes may do: [mesh, option of axis 0, option of axis 1, …].

What collectives cost on many meshes at once, as arrays.

Between what variables cost by their joint options and what values cost by their joint states.

Options and states are numbered; a joint one has a number for each axis, which is a dim of the
array, and the last dim is the mesh.

What a node costs by every joint option of its axes, on many meshes: computing, the collectives
inside it, and what it keeps, where that has a price.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from autopar.cost.activations import Price
from autopar.cost.algorithms import algorithms, flat_algorithms, in_step
from autopar.cost.compute import rule_seconds
from autopar.cost.network import pattern
from autopar.ir.graph import carries_gradient
from autopar.ir.layout import Digit
from autopar.ir.mesh import Mesh
from autopar.ir.program import Annotations
from autopar.ir.sharding_rule import operands_of, results_of, shape_of, value_of
from autopar.ir.strategy import Slot
from autopar.ops.sharded.inner_collectives import HAVE_INNER_COLLECTIVES, inner_collectives
from autopar.planner.bounds.factor_graph import FIRST_SLOT, AxisOption, Frame
from autopar.world import World

Array = NDArray[np.float64]
BIG = np.float32(1e6)  # seconds: what is not allowed
HALF = np.float32(5e5)  # more is not allowed, either


class Meshes:
    """Meshes with equally many axes. `sizes`: [mesh, axis]."""

    def __init__(self, meshes: Sequence[Mesh], world: World) -> None:
        self.meshes, self.world = tuple(meshes), world
        self.count = len(self.meshes[0].axes)
        assert all(len(mesh.axes) == self.count for mesh in meshes)
        self._lines: dict[tuple[str, tuple[int, ...], bool], tuple[Array, Array, Array]] = {}

    def __len__(self) -> int:
        return len(self.meshes)

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        found = [[axis.size for axis in mesh.axes] for mesh in self.meshes]
        return np.array(found, dtype=np.int64).reshape(len(self), self.count)

    def seconds(
        self, kind: str, axes: tuple[int, ...], whole_bytes: Array, flat: bool = False
    ) -> Array:
        """Of a collective over the axes at these places, in its fastest way; `flat`: of those in
        one level. `whole_bytes`: [mesh, …].
        """
        shape = (-1,) + (1,) * (whole_bytes.ndim - 1)
        best: Array | None = None
        for start, rate, bends in zip(*self._all_ways(kind, axes, flat), strict=True):
            found = start.reshape(shape) + rate.reshape(shape) * whole_bytes
            for at, more in bends:
                over = np.maximum(whole_bytes - at.reshape(shape), 0.0)
                found += more.reshape(shape) * over
            best = found if best is None else np.minimum(best, found, out=best)
        assert best is not None
        return best

    def _all_ways(self, kind: str, axes: tuple[int, ...], flat: bool) -> tuple[Array, Array, Array]:
        """(seconds to start, seconds per byte), each [way, mesh], and the bends of every way: [way,
        bend, bytes and seconds per byte more, mesh].
        """
        key = (kind, axes, flat)
        if key not in self._lines:
            find = flat_algorithms if flat else algorithms
            several = []
            for mesh in self.meshes:
                digits = pattern(mesh, tuple(mesh.axes[a].name for a in axes))
                several.append(in_step(self.world, find(self.world, kind, digits)))
            most = max(len(found) for found in several)
            filled = [[*found, *[found[-1]] * (most - len(found))] for found in several]
            bent = max(len(way.bends) for found in several for way in found)
            bends = [
                [[*way.bends, *[(0.0, 0.0)] * (bent - len(way.bends))] for way in found]
                for found in filled
            ]
            lines = np.array([[(way.start_s, way.s_per_byte) for way in found] for found in filled])
            shaped = np.array(bends, dtype=np.float64).reshape(len(self), most, bent, 2)
            self._lines[key] = lines[:, :, 0].T, lines[:, :, 1].T, np.moveaxis(shaped, 0, -1)
        return self._lines[key]


def along(column: NDArray[Any], axis: int, count: int) -> NDArray[Any]:
    """[mesh, option] of one of `count` axes as [mesh, 1, …, option, …, 1]."""
    shape = [column.shape[0]] + [1] * count
    shape[1 + axis] = column.shape[1]
    return column.reshape(shape)


def over_axes(per_axis: NDArray[Any]) -> Any:
    """The sum of what every axis costs by itself, [mesh, axis, option]."""
    count = per_axis.shape[1]
    return sum(along(per_axis[:, a], a, count) for a in range(count))


def parts(meshes: Meshes, split: Sequence[bool]) -> NDArray[np.int64]:
    """Into how many parts the axes cut what these options split: [mesh, option, …]."""
    found: Any = np.ones((len(meshes),) + (1,) * meshes.count, dtype=np.int64)
    for a in range(meshes.count):
        sizes = np.where(np.array(split)[None, :], meshes.sizes[:, a, None], 1)
        found = found * along(sizes, a, meshes.count)
    return found


def local(
    meshes: Meshes, shape: tuple[int, ...], states: Sequence[int | None]
) -> NDArray[np.float64]:
    """How many numbers of a tensor of this shape a rank has: [mesh, option, …]."""
    return math.prod(shape) / parts(meshes, [s is not None and s >= FIRST_SLOT for s in states])


Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


class Rated(NamedTuple):
    """The options of a variable that some mesh allows, and the seconds of every joint one: [mesh,
    option of axis 0, option of axis 1, …], BIG where it is not allowed. `number`: an identity.
    """

    number: int
    options: tuple[int, ...]
    seconds: Floats


def spread(seconds: Floats, states: tuple[int, ...], known: tuple[int, ...]) -> Floats:
    """From joint states to joint options, given the state of each option."""
    if states == known:
        return seconds
    axes = seconds.ndim - 1
    rows = seconds.reshape(len(known) ** axes, -1)
    found = rows.take(_rows(states, known, axes), axis=0)
    return found.reshape((len(states),) * axes + (-1,))


@cache
def _rows(states: tuple[int, ...], known: tuple[int, ...], axes: int) -> NDArray[np.intp]:
    """The place among joint states of every joint option."""
    one = np.array([known.index(state) for state in states], dtype=np.intp)
    found = np.zeros((), dtype=np.intp)
    for _ in range(axes):
        found = found[..., None] * len(known) + one
    return found.reshape(-1)


def least(seconds: Floats, states: tuple[int, ...], known: tuple[int, ...]) -> Floats:
    """From joint options to joint states: the least of the options that have it, BIG without.
    A new array where that differs.
    """
    if states == known:
        return seconds
    first, more, missing = _options(states, known)
    for dim in range(seconds.ndim - 1):
        before: Any = (slice(None),) * dim
        found = seconds.take(first, axis=dim)
        for place, option in more:
            into = found[(*before, place)]
            np.minimum(into, seconds[(*before, option)], out=into)
        if missing:
            found[(*before, missing)] = BIG
        seconds = found
    return seconds


@cache
def _options(
    states: tuple[int, ...], known: tuple[int, ...]
) -> tuple[NDArray[np.intp], tuple[tuple[int, int], ...], list[int]]:
    """Of every known state the first option that has it (some option where none has), then (state,
    option) of the further ones, and the states without.
    """
    first = [states.index(state) if state in states else 0 for state in known]
    more = [(known.index(s), i) for i, s in enumerate(states) if first[known.index(s)] != i]
    missing = [place for place, state in enumerate(known) if state not in states]
    return np.array(first, dtype=np.intp), tuple(more), missing


def only(seconds: Floats, states: tuple[int, ...], known: tuple[int, ...]) -> Floats:
    """BIG in the states that no option has; in place."""
    missing = [place for place, state in enumerate(known) if state not in states]
    for dim in range(seconds.ndim - 1) if missing else ():
        index: Any = (*(slice(None),) * dim, missing)
        seconds[index] = BIG
    return seconds


class NodeCosts:
    """Rates the nodes of a frame on meshes."""

    def __init__(self, frame: Frame, meshes: Meshes, price: Price | None) -> None:
        assert frame.program.annotations is not None
        self.frame, self.meshes, self.price = frame, meshes, price
        self.notes: Annotations = frame.program.annotations

    def seconds(self, node: fx.Node, found: list[AxisOption]) -> Any:
        """[mesh, option of axis 0, …], each axis having these options."""
        spec = self.notes.specs[node.name]
        gradient = carries_gradient(self.notes, node)
        results = [v for v in results_of(node) if isinstance(v, torch.Tensor)]
        dtype = results[0].dtype
        elements: Any = 0.0
        for index, operand in enumerate(operands_of(node)):
            if operand is not None and spec.operands[index] is not None:
                states = [f.operands[index] for f in found]
                elements = elements + local(self.meshes, shape_of(value_of(operand)), states)
        for index, value in enumerate(results):
            states = [f.results[index] for f in found]
            elements = elements + local(self.meshes, shape_of(value), states)
        flops = spec.flops / parts(self.meshes, [isinstance(f.choice, Slot) for f in found])
        total = rule_seconds(
            spec, flops, elements * dtype.itemsize, dtype, gradient, self.meshes.world.device
        )
        if node.target in HAVE_INNER_COLLECTIVES:
            total = total + self._inside(node, found, gradient)
        if self.price is not None:
            total = total + self.price.seconds_per_byte * self._kept(node, found, self.price)
        return total

    def _kept(self, node: fx.Node, found: list[AxisOption], price: Price) -> Any:
        """Bytes that a rank keeps of the node for the backward."""
        share, operands = price.kept.of(node), operands_of(node)
        spec = self.notes.specs[node.name]
        results = [v for v in results_of(node) if isinstance(v, torch.Tensor)]
        total: Any = share.inside / parts(self.meshes, [isinstance(f.choice, Slot) for f in found])
        for index, each in share.operands:
            operand = operands[index]
            if operand is not None and spec.operands[index] is not None:
                states = [f.operands[index] for f in found]
                total = total + each * local(self.meshes, shape_of(value_of(operand)), states)
        for index, each in share.results:
            states = [f.results[index] for f in found]
            total = total + each * local(self.meshes, shape_of(results[index]), states)
        return total

    def _inside(self, node: fx.Node, found: list[AxisOption], gradient: bool) -> Any:
        """The collectives inside a sharded implementation, by the dim that each axis splits."""
        source = operands_of(node)[0]
        assert source is not None
        slots = self.notes.dims[self.frame.producer(source)]
        numbers = [dim for dim, atoms in enumerate(slots) for a in atoms if not a.opaque]
        states = [f.operands[0] for f in found]
        held = [
            numbers[s - FIRST_SLOT] if s is not None and s >= FIRST_SLOT else -1 for s in states
        ]
        dims, count = sorted(set(held)), self.meshes.count
        table = np.zeros((len(self.meshes),) + (len(dims),) * count)
        for places in itertools.product(range(len(dims)), repeat=count):
            stub = _cut(shape_of(value_of(source)), [dims[i] for i in places], self.meshes.sizes)
            for one in inner_collectives(node.target, [stub]):
                if gradient or not one.backward:
                    whole = np.asarray(one.traffic.elements * one.element_bytes, dtype=np.float64)
                    axes = tuple(int(a) for a in one.axes)
                    cell: Any = (slice(None), *places)
                    table[cell] += self.meshes.seconds(
                        one.traffic.collective, axes, np.broadcast_to(whole, len(self.meshes)), True
                    )
        index = np.array([dims.index(h) for h in held])
        for a in range(count):
            table = np.take(table, index, axis=1 + a)
        return table


def _cut(shape: tuple[int, ...], held: list[int], sizes: NDArray[np.int64]) -> Any:
    """What `inside` asks of a layout in which axis a holds a digit of dim held[a] (-1: none), with
    arrays over meshes for numbers.
    """
    local: list[Any] = [np.full(len(sizes), float(n)) for n in shape]
    for axis, dim in enumerate(held):
        if dim >= 0:
            local[dim] = local[dim] / sizes[:, axis]
    axes = [str(axis) for axis, dim in enumerate(held) if dim >= 0]
    return SimpleNamespace(
        shape=shape,
        local_shape=local,
        local_size=math.prod(local),
        digits=lambda dim: tuple(Digit(str(a), 0, 0) for a, d in enumerate(held) if d == dim),
        axes_of=lambda letter: tuple(axes),
    )
