"""What collectives cost on many meshes at once, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.cost.algorithms import flat_ways, in_step, ways
from autopar.cost.network import pattern
from autopar.ir.mesh import Mesh
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
            find = flat_ways if flat else ways
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
