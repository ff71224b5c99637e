"""Meshes with equally many axes, and the seconds of collectives on all of them at once.

Example: the seconds of an all-reduce over axis 0 of 40 meshes, as an array [mesh, …] of its bytes.
numpy takes as long for ten meshes as for one. `distinct_meshes` leaves out those that another
one stands for. Used by space.py, option_costs.py, reshard_costs.py and bound.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost.algorithms import algorithms, flat_algorithms
from autopar.cost.network import Pattern, pattern
from autopar.ir.layout import TRAFFIC
from autopar.ir.mesh import Mesh
from autopar.world import World

Array = NDArray[np.float64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
BIG = np.float32(1e6)  # seconds: the cost of what is not allowed
HALF = np.float32(5e5)  # seconds: a cost above this is not allowed either


class Meshes:
    """Meshes with the same number of axes, and the cost of collectives on all of them. `shares`: by
    mesh, of the seconds of collectives that can overlap, where these count in part; () for those
    that the program says.
    """

    def __init__(self, meshes: Sequence[Mesh], world: World, shares: Sequence[float] = ()) -> None:
        self.meshes, self.world, self.shares = tuple(meshes), world, tuple(shares)
        self.mesh_count, self.axis_count = len(self.meshes), len(self.meshes[0].axes)
        assert all(len(mesh.axes) == self.axis_count for mesh in meshes)
        self._lines: dict[tuple[str, tuple[int, ...], bool], tuple[Array, Array, Array]] = {}
        self.steps: dict[Hashable, Array] = {}  # of reshards, which reshard_costs.py works out
        self.closures: dict[Hashable, Any] = {}  # of several steps, as it takes them
        self.reshards: dict[Hashable, Any] = {}  # its ReshardBounds, by what they depend on

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """The sizes of all axes: [mesh, axis]."""
        sizes = [[axis.size for axis in mesh.axes] for mesh in self.meshes]
        return np.array(sizes, dtype=np.int64).reshape(self.mesh_count, self.axis_count)

    def seconds(
        self, kind: str, axes: tuple[int, ...], unsharded_bytes: Array, flat: bool = False
    ) -> Array:
        """Return the seconds of a collective over the axes at these places, with its fastest
        algorithm: [mesh, …]. `flat`: only algorithms of one level. `unsharded_bytes`: bytes of the
        unsharded value, [mesh, …].
        """
        shape = (-1,) + (1,) * (unsharded_bytes.ndim - 1)
        best: Array | None = None
        for start, rate, bends in zip(*self._all_algorithms(kind, axes, flat), strict=True):
            duration = start.reshape(shape) + rate.reshape(shape) * unsharded_bytes
            for at, more in bends:
                excess = np.maximum(unsharded_bytes - at.reshape(shape), 0.0)
                duration += more.reshape(shape) * excess
            best = duration if best is None else np.minimum(best, duration, out=best)
        assert best is not None
        return best

    def _all_algorithms(
        self, kind: str, axes: tuple[int, ...], flat: bool
    ) -> tuple[Array, Array, Array]:
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
            shaped = np.array(bends, dtype=np.float64).reshape(
                self.mesh_count, longest, bends_max, 2
            )
            self._lines[key] = lines[:, :, 0].T, lines[:, :, 1].T, np.moveaxis(shaped, 0, -1)
        return self._lines[key]


# -- meshes that differ in the order of their axes alone ------------------------------------------
_KINDS = sorted({kind for both in TRAFFIC.values() for kind in both if kind is not None})


def distinct_meshes(meshes: Sequence[Mesh], world: World) -> list[Mesh]:
    """Return the meshes without those that have the axes of an earlier one in another order, in
    which collectives over every set of axes take as long. The bounds of the one are those of the
    other; plans differ in which of two axes that share a dim is the outer one.

    Example: of nodes with 8 ranks, x2.y4 stands for x4.y2 on one node, and on eight of them
    x2.y4.z8 for x4.y2.z8, but not for x2.y8.z4, whose axis of 8 reaches beyond a node.
    """
    numbers: dict[Hashable, int] = {}  # of what collectives take
    number_of: dict[Pattern, int] = {}

    def number(digits: Pattern) -> int:
        if digits not in number_of:
            number_of[digits] = numbers.setdefault(_rounded_seconds(world, digits), len(numbers))
        return number_of[digits]

    def key(mesh: Mesh) -> Hashable:
        """Return the least, over all orders of the axes, of their sizes and of the numbers of every
        set of them.
        """
        places = range(len(mesh.axes))
        sets = [axes for n in places for axes in itertools.combinations(places, n + 1)]
        numbers_of = {a: number(pattern(mesh, tuple(mesh.names[i] for i in a))) for a in sets}
        return min(
            (
                tuple(mesh.axes[place].size for place in order),
                tuple(numbers_of[tuple(sorted(order[i] for i in axes))] for axes in sets),
            )
            for order in itertools.permutations(places)
        )

    first_of_key: dict[Hashable, Mesh] = {}
    for mesh in meshes:
        first_of_key.setdefault(key(mesh), mesh)
    return list(first_of_key.values())


def _rounded_seconds(world: World, digits: Pattern) -> Hashable:
    """Return what every kind of collective takes over a pattern, rounded: hops that are added up in
    another order differ in the last digits.
    """
    return tuple(
        (f"{algorithm.start_s:.6e}", f"{algorithm.s_per_byte:.6e}", algorithm.bends)
        for kind in _KINDS
        for find in (algorithms, flat_algorithms)
        for algorithm in find(world, kind, digits)
    )


# -- known meshes ----------------------------------------------------------------------------------
_MESHES: dict[tuple[tuple[Mesh, ...], tuple[float, ...], int], Meshes] = {}
_MOST_CACHED, _FEW = 32, 16  # each of so many meshes at most: the arrays of more are large


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
    while len(_MESHES) > _MOST_CACHED:
        del _MESHES[next(iter(_MESHES))]
    return known
