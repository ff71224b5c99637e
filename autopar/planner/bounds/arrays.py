"""Arrays over many meshes at once: the seconds of collectives and of nodes, for the bounds.

Mesh axes have options (for a region) or states (for a value), each numbered. An array has one dim
per axis, over its options or states, and one for the mesh: first, [mesh, option of axis 0, option
of axis 1, …], in `Meshes` and `NodeCosts`; last in `spread`, `least` and `only`, which translate
between joint options and joint states of message passing. `NodeCosts` gives what a node takes by
the joint options of its axes: computation, the collectives inside it, and the price of the bytes it
saves. Used by option_costs.py, reshard_costs.py, __init__.py and mesh_search.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Hashable, Sequence
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from autopar.cost.activations import Price
from autopar.cost.algorithms import algorithms, flat_algorithms
from autopar.cost.compute import rule_seconds
from autopar.cost.network import pattern
from autopar.ir.graph import carries_gradient
from autopar.ir.layout import Digit
from autopar.ir.mesh import Mesh
from autopar.ir.program import Annotations
from autopar.ir.sharding_rule import (
    Dims,
    OpShardingRule,
    operands_of,
    results_of,
    shape_of,
    value_of,
)
from autopar.ir.strategy import Slot
from autopar.ops.sharded import HAVE_INNER_COLLECTIVES, inner_collectives
from autopar.planner.bounds.factor_graph import FIRST_SLOT, AxisOption, Frame
from autopar.world import World

Array = NDArray[np.float64]
BIG = np.float32(1e6)  # seconds: the cost of what is not allowed
HALF = np.float32(5e5)  # seconds: a cost above this is not allowed either


class Meshes:
    """Meshes with the same number of axes, and the cost of collectives on all of them. `shares`: by
    mesh, of the seconds of collectives that can overlap, where these count in part; () for those
    that the program says.
    """

    def __init__(self, meshes: Sequence[Mesh], world: World, shares: Sequence[float] = ()) -> None:
        self.meshes, self.world, self.shares = tuple(meshes), world, tuple(shares)
        self.count = len(self.meshes[0].axes)
        assert all(len(mesh.axes) == self.count for mesh in meshes)
        self._lines: dict[tuple[str, tuple[int, ...], bool], tuple[Array, Array, Array]] = {}
        self.steps: dict[Hashable, Array] = {}  # of reshards, which reshard_costs.py works out
        self.moves: dict[Hashable, Any] = {}  # its ReshardBounds, by what they depend on

    def __len__(self) -> int:
        return len(self.meshes)

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """The sizes of all axes: [mesh, axis]."""
        sizes = [[axis.size for axis in mesh.axes] for mesh in self.meshes]
        return np.array(sizes, dtype=np.int64).reshape(len(self), self.count)

    def seconds(
        self, kind: str, axes: tuple[int, ...], whole_bytes: Array, flat: bool = False
    ) -> Array:
        """Return the seconds of a collective over the axes at these places, with its fastest
        algorithm: [mesh, …]. `flat`: only algorithms of one level. `whole_bytes`: bytes of the
        unsharded value, [mesh, …].
        """
        shape = (-1,) + (1,) * (whole_bytes.ndim - 1)
        best: Array | None = None
        for start, rate, bends in zip(*self._all_ways(kind, axes, flat), strict=True):
            duration = start.reshape(shape) + rate.reshape(shape) * whole_bytes
            for at, more in bends:
                excess = np.maximum(whole_bytes - at.reshape(shape), 0.0)
                duration += more.reshape(shape) * excess
            best = duration if best is None else np.minimum(best, duration, out=best)
        assert best is not None
        return best

    def _all_ways(self, kind: str, axes: tuple[int, ...], flat: bool) -> tuple[Array, Array, Array]:
        """Return (seconds to start, seconds per byte) of every algorithm, each [algorithm, mesh],
        and its bends: [algorithm, bend, bytes and extra seconds per byte, mesh].
        """
        key = (kind, axes, flat)
        if key not in self._lines:
            find = flat_algorithms if flat else algorithms
            per_mesh = []
            for mesh in self.meshes:
                digits = pattern(mesh, tuple(mesh.axes[a].name for a in axes))
                per_mesh.append(find(self.world, kind, digits))
            longest = max(len(row) for row in per_mesh)
            padded = [[*row, *[row[-1]] * (longest - len(row))] for row in per_mesh]
            bends_max = max(len(algorithm.bends) for row in per_mesh for algorithm in row)
            bends = [
                [
                    [*algorithm.bends, *[(0.0, 0.0)] * (bends_max - len(algorithm.bends))]
                    for algorithm in row
                ]
                for row in padded
            ]
            lines = np.array(
                [[(algorithm.start_s, algorithm.s_per_byte) for algorithm in row] for row in padded]
            )
            shaped = np.array(bends, dtype=np.float64).reshape(len(self), longest, bends_max, 2)
            self._lines[key] = lines[:, :, 0].T, lines[:, :, 1].T, np.moveaxis(shaped, 0, -1)
        return self._lines[key]


_MESHES: dict[tuple[tuple[Mesh, ...], tuple[float, ...], int], Meshes] = {}
_KEPT, _FEW = 32, 16  # of these, each of so many meshes at most: the arrays of more are large


def meshes_of(meshes: tuple[Mesh, ...], world: World, shares: tuple[float, ...] = ()) -> Meshes:
    """Return these meshes with all that is known of them: searches of one plan ask for the same few
    again and again.
    """
    if len(meshes) > _FEW:
        return Meshes(meshes, world, shares)
    known = _MESHES.pop((meshes, shares, id(world)), None)
    if known is None or known.world is not world:
        known = Meshes(meshes, world, shares)
    _MESHES[meshes, shares, id(world)] = known  # the last that was asked for goes last
    while len(_MESHES) > _KEPT:
        del _MESHES[next(iter(_MESHES))]
    return known


def along(column: NDArray[Any], axis: int, count: int) -> NDArray[Any]:
    """Return the column [mesh, option] of one of `count` axes as [mesh, 1, …, option, …, 1]."""
    shape = [column.shape[0]] + [1] * count
    shape[1 + axis] = column.shape[1]
    return column.reshape(shape)


def over_axes(per_axis: NDArray[Any]) -> Any:
    """Return the sum of what every axis costs by itself: from [mesh, axis, option] to joint
    options.
    """
    count = per_axis.shape[1]
    return sum(along(per_axis[:, a], a, count) for a in range(count))


def parts(meshes: Meshes, split: Sequence[bool]) -> NDArray[np.int64]:
    """Return the number of parts into which the axes cut what these options split: [mesh, option,
    …].
    """
    counts: Any = np.ones((len(meshes),) + (1,) * meshes.count, dtype=np.int64)
    for a in range(meshes.count):
        sizes = np.where(np.array(split)[None, :], meshes.sizes[:, a, None], 1)
        counts = counts * along(sizes, a, meshes.count)
    return counts


def local(
    meshes: Meshes, shape: tuple[int, ...], states: Sequence[int | None]
) -> NDArray[np.float64]:
    """Return the number of elements that a rank holds of a tensor of this shape: [mesh,
    option, …].
    """
    return math.prod(shape) / parts(meshes, [s is not None and s >= FIRST_SLOT for s in states])


Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


class Rated(NamedTuple):
    """The options of a variable that some mesh allows, and the seconds of every joint option:
    [mesh, option of axis 0, option of axis 1, …], BIG where it is not allowed. `number`: an
    identity.
    """

    number: int
    options: tuple[int, ...]
    seconds: Floats


def spread(seconds: Floats, states: tuple[int, ...], known: tuple[int, ...]) -> Floats:
    """Return the costs over joint states as costs over joint options, given the state of each
    option.
    """
    if states == known:
        return seconds
    axes = seconds.ndim - 1
    rows = seconds.reshape(len(known) ** axes, -1)
    option_seconds = rows.take(_joint_rows(states, known, axes), axis=0)
    return option_seconds.reshape((len(states),) * axes + (-1,))


@cache
def _joint_rows(states: tuple[int, ...], known: tuple[int, ...], axes: int) -> NDArray[np.intp]:
    """Return for every joint option the index of its joint state."""
    axis_rows = np.array([known.index(state) for state in states], dtype=np.intp)
    rows = np.zeros((), dtype=np.intp)
    for _ in range(axes):
        rows = rows[..., None] * len(known) + axis_rows
    return rows.reshape(-1)


def least(seconds: Floats, states: tuple[int, ...], known: tuple[int, ...]) -> Floats:
    """Return the costs over joint states: the least of the options that have a state, BIG for a
    state without options. A new array, unless nothing changes.
    """
    if states == known:
        return seconds
    first_option, further, unreached = _options_by_state(states, known)
    for dim in range(seconds.ndim - 1):
        before: Any = (slice(None),) * dim
        state_seconds = seconds.take(first_option, axis=dim)
        for place, option in further:
            into = state_seconds[(*before, place)]
            np.minimum(into, seconds[(*before, option)], out=into)
        if unreached:
            state_seconds[(*before, unreached)] = BIG
        seconds = state_seconds
    return seconds


@cache
def _options_by_state(
    states: tuple[int, ...], known: tuple[int, ...]
) -> tuple[NDArray[np.intp], tuple[tuple[int, int], ...], list[int]]:
    """Return for every state the first option that has it (any option where none has), then (state,
    option) of the further options, and the states without an option.
    """
    first = [states.index(state) if state in states else 0 for state in known]
    more = [(known.index(s), i) for i, s in enumerate(states) if first[known.index(s)] != i]
    missing = [place for place, state in enumerate(known) if state not in states]
    return np.array(first, dtype=np.intp), tuple(more), missing


def only(seconds: Floats, states: tuple[int, ...], known: tuple[int, ...]) -> Floats:
    """Set the states that no option has to BIG, in place, and return the array."""
    missing = [place for place, state in enumerate(known) if state not in states]
    for dim in range(seconds.ndim - 1) if missing else ():
        index: Any = (*(slice(None),) * dim, missing)
        seconds[index] = BIG
    return seconds


class NodeCosts:
    """The seconds of a frame's nodes on all meshes."""

    def __init__(self, frame: Frame, meshes: Meshes, price: Price | None) -> None:
        assert frame.program.annotations is not None
        self.frame, self.meshes, self.price = frame, meshes, price
        self.notes: Annotations = frame.program.annotations

    def seconds(self, node: fx.Node, found: list[AxisOption]) -> Any:
        """Return the node's seconds by joint option, [mesh, option of axis 0, …], each axis having
        the options of `found`.
        """
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
        inside: Any = 0.0
        if spec.inside:
            flops = flops * np.where(self._parts_of(spec.uneven, found) > 1, spec.skew, 1.0)
            inside = sum(self._elements(dims, spec, found) for dims in spec.inside)
        total = rule_seconds(
            spec,
            flops,
            elements * dtype.itemsize,
            dtype,
            gradient,
            self.meshes.world.device,
            inside * dtype.itemsize,
        )
        if node.target in HAVE_INNER_COLLECTIVES:
            total = total + self._inside(node, found, gradient)
        if self.price is not None:
            total = total + self.price.seconds_per_byte * self._kept(node, found, self.price)
        return total

    def _parts_of(self, factors: Collection[str], found: list[AxisOption]) -> Any:
        """Return among how many ranks the axes split these factors, by joint option."""
        return parts(
            self.meshes, [isinstance(f.choice, Slot) and f.choice.factor in factors for f in found]
        )

    def _elements(self, dims: Dims, spec: OpShardingRule, found: list[AxisOption]) -> Any:
        """Return the elements on one rank of a tensor that a node makes on the way."""
        names = {name for dim in dims for name in dim}
        return math.prod(spec.sizes[name] for name in names) / self._parts_of(names, found)

    def _kept(self, node: fx.Node, found: list[AxisOption], price: Price) -> Any:
        """Return the bytes that a rank saves of the node for the backward."""
        share, operands = price.memory.of(node), operands_of(node)
        spec = self.notes.specs[node.name]
        results = [v for v in results_of(node) if isinstance(v, torch.Tensor)]
        total: Any = share.inside / self._parts_of(spec.sizes.keys() - spec.uneven, found)
        for index, bytes_per_element in share.operands:
            operand = operands[index]
            if operand is not None and spec.operands[index] is not None:
                states = [f.operands[index] for f in found]
                total = total + bytes_per_element * local(
                    self.meshes, shape_of(value_of(operand)), states
                )
        for index, bytes_per_element in share.results:
            states = [f.results[index] for f in found]
            total = total + bytes_per_element * local(self.meshes, shape_of(results[index]), states)
        return total

    def _inside(self, node: fx.Node, found: list[AxisOption], gradient: bool) -> Any:
        """Return the seconds of the collectives inside a sharded implementation, by the dim that
        each axis splits.
        """
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
            stub = _stub_layout(
                shape_of(value_of(source)), [dims[i] for i in places], self.meshes.sizes
            )
            for collective in inner_collectives(node, [stub]):
                if gradient or not collective.backward:
                    sent_bytes = np.asarray(
                        collective.traffic.elements * collective.element_bytes, dtype=np.float64
                    )
                    axes = tuple(int(a) for a in collective.axes)
                    cell: Any = (slice(None), *places)
                    table[cell] += self.meshes.seconds(
                        collective.traffic.collective,
                        axes,
                        np.broadcast_to(sent_bytes, len(self.meshes)),
                        True,
                    )
        dim_index = np.array([dims.index(h) for h in held])
        for a in range(count):
            table = np.take(table, dim_index, axis=1 + a)
        return table


def _stub_layout(shape: tuple[int, ...], held: list[int], sizes: NDArray[np.int64]) -> Any:
    """Return a stand-in for a layout in which axis a holds a digit of dim held[a] (-1: none), with
    arrays over meshes as its numbers. `inner_collectives` reads nothing else of a layout.
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
