"""Arrays over meshes and what their axes may do: [mesh, option of axis 0, option of axis 1, …]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.rating.frame import FIRST_SLOT
from autopar.rating.prices import Meshes


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
