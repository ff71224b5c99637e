"""The pattern of a group of ranks: what of a mesh and some of its axes the cost depends on.

A pattern is a tuple of (size, stride), outer first, coarsest that says the same: neighbouring axes
are one digit, so a group's cost does not depend on how the mesh factors it.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.ir.mesh import Mesh

Pattern = tuple[tuple[int, int], ...]


@lru_cache(maxsize=1 << 14)
def pattern(mesh: Mesh, axes: tuple[str, ...]) -> Pattern:
    """The pattern of the groups over these axes; () where they have one rank only.

    >>> pattern(Mesh.parse("a2.b3.c4"), ("a", "b"))
    ((6, 4),)
    """
    digits: list[tuple[int, int]] = []
    for name in mesh.ordered(axes):
        size, stride = mesh.sizes[name], mesh.stride(name)
        if size == 1:
            continue
        if digits and digits[-1][1] == size * stride:
            size *= digits.pop()[0]
        digits.append((size, stride))
    return tuple(digits)


def size(digits: Pattern) -> int:
    """Ranks of a group."""
    return math.prod(count for count, _ in digits)


def within(digits: Pattern, block: int) -> int | None:
    """How many ranks of a group lie in the same block of so many consecutive ranks; None where
    blocks and groups do not fit into one another.
    """
    found = 1
    for count, stride in digits:
        if block % (count * stride) == 0:
            found *= count
        elif block % stride == 0 and (count * stride) % block == 0:
            found *= block // stride
        elif stride % block != 0:
            return None
    return found


def halves(digits: Pattern) -> list[tuple[Pattern, Pattern]]:
    """Every way to see a group as groups of groups: (inside, across)."""
    found = []
    for index, (count, stride) in enumerate(digits):
        for inner in range(1, count):
            inside = ((inner, stride), *digits[index + 1 :]) if inner > 1 else digits[index + 1 :]
            if count % inner == 0 and inside:
                across = (*digits[:index], (count // inner, stride * inner))
                found.append((inside, across))
    return found


def members(digits: Pattern, ranks: int) -> NDArray[np.int64]:
    """The groups that a world of so many ranks falls into, each a row in mesh order."""
    first = np.arange(ranks)
    offsets = np.zeros(1, dtype=np.int64)
    for count, stride in digits:
        first = first[first // stride % count == 0]
        offsets = (offsets[:, None] + stride * np.arange(count)).ravel()
    return first[:, None] + offsets
