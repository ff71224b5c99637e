"""The mesh: named axes over the ranks, outer first, and the names of the process groups over them.

Example: Mesh.parse("data2.x4") has 8 ranks; rank 6 is at data 1, x 2, and its group over data is
ranks 2 and 6. The graph names that group "autopar/data2.x4/data"; ops/process_groups.py makes it
from `group_ranks`. A mesh knows nothing of the hardware: planner and cost put it on a World.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from autopar.errors import WorldError

# A name ends in a letter, so that names and sizes can be told apart in "data2.x2".
_NAME = r"[A-Za-z_](?:[A-Za-z0-9_]*[A-Za-z_])?"
_AXIS = re.compile(f"({_NAME})([0-9]+)")
_GATHERED = {"data": 1, "z": 2}  # axes over which weights are gathered before use, outer first


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh. Raises WorldError for a name that ends in a digit and for a size below
    1.
    """

    name: str
    size: int

    def __post_init__(self) -> None:
        if not re.fullmatch(_NAME, self.name):
            raise WorldError(
                f"mesh axis {self.name!r}: a name is letters, digits and _, no digit at the end; "
                "call it something like 'data' or 'x'"
            )
        if self.size < 1:
            raise WorldError(f"mesh axis {self.name!r} has size {self.size}; a size is 1 or more")


@dataclass(frozen=True)
class Mesh:
    """Named axes, outer first; a rank is the row-major index of its coordinates. One rank alone has
    no axes.

    >>> mesh = Mesh.parse("data2.x4")
    >>> mesh.size, mesh.stride("data"), mesh.coordinate(6), mesh.group(["data"], 6)
    (8, 4, {'data': 1, 'x': 2}, [2, 6])
    """

    axes: tuple[Axis, ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.axes):
            raise WorldError(f"mesh {self} names an axis twice; give every axis its own name")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.axes)

    @staticmethod
    def parse(text: str) -> Mesh:
        """Return the mesh whose `str` is given, such as "data2.x2"; "" is the mesh of one rank.
        Raises WorldError for a text that is no mesh.
        """
        axes = text.split(".") if text else []
        matches = [_AXIS.fullmatch(axis) for axis in axes]
        if not all(matches):
            bad = next(axis for axis, match in zip(axes, matches, strict=True) if not match)
            raise WorldError(
                f"mesh {text!r}: cannot read {bad!r}; write axes as name and size, 'data2.x4'"
            )
        return Mesh(tuple(Axis(match[1], int(match[2])) for match in matches if match))

    def __str__(self) -> str:
        return ".".join(f"{axis.name}{axis.size}" for axis in self.axes)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(axis.size for axis in self.axes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the axes, outer first."""
        return tuple(axis.name for axis in self.axes)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The size of every axis by its name."""
        return {axis.name: axis.size for axis in self.axes}

    @cached_property
    def storage_order(self) -> tuple[int, ...]:
        """The positions of the axes in the order in which they split a dim of a stored tensor that
        they share. The axes over which weights are gathered before use, data and z, split last, so
        that a gathered weight is the contiguous part that a matmul on the other axes takes.

        >>> Mesh.parse("data2.z2.x2.y2").storage_order
        (2, 3, 0, 1)
        """
        return tuple(sorted(range(len(self.axes)), key=lambda i: _GATHERED.get(self.names[i], 0)))

    def stride(self, name: str) -> int:
        """Return how many ranks apart two neighbours on this axis are."""
        return math.prod(axis.size for axis in self.axes[self._position(name) + 1 :])

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the index of `rank` on every axis. Raises WorldError outside of the mesh."""
        if not 0 <= rank < self.size:
            raise WorldError(f"rank {rank} is not on mesh {self} of {self.size} ranks")
        return {axis.name: rank // self.stride(axis.name) % axis.size for axis in self.axes}

    def group(self, axes: Sequence[str], rank: int) -> list[int]:
        """Return the ranks that differ from `rank` on `axes` only, with `rank` itself, in mesh
        order.
        """
        axes = self.ordered(axes)
        origin = rank - sum(self.coordinate(rank)[name] * self.stride(name) for name in axes)
        offsets = itertools.product(
            *(range(0, self.sizes[n] * self.stride(n), self.stride(n)) for n in axes)
        )
        return [origin + sum(offset) for offset in offsets]

    def ordered(self, axes: str | Sequence[str]) -> tuple[str, ...]:
        """Return `axes` (one name or several) in mesh order, each once. Raises WorldError for an
        unknown one.
        """
        wanted = {axes} if isinstance(axes, str) else set(axes)
        for name in wanted:
            self._position(name)
        return tuple(name for name in self.names if name in wanted)

    def _position(self, name: str) -> int:
        if name not in self.sizes:
            raise WorldError(
                f"mesh {str(self)!r} has no axis {name!r}; it has {', '.join(self.names) or 'none'}"
            )
        return self.names.index(name)


class Within(NamedTuple):
    """A part of a group: ranks whose places in it differ only in the digit (place // stride) %
    size.
    """

    size: int
    stride: int


def group_name(mesh: str, axes: Sequence[str], digit: Within | None = None) -> str:
    """Return the name of the process group over `axes` (in mesh order), or of the parts of it that
    `digit` says. The name is the same on every rank, so all ranks have the same graph.

    >>> group_name("data4.x2", ["data"], Within(2, 1))
    'autopar/data4.x2/data/2@1'
    """
    suffix = f"/{digit.size}@{digit.stride}" if digit else ""
    return f"autopar/{mesh}/{'.'.join(axes)}{suffix}"


_GROUP = re.compile(r"autopar/([\w.]*)/([\w.]*)(?:/(\d+)@(\d+))?")


def group_ranks(name: str, rank: int) -> list[int]:
    """Return the ranks of the group of this name that `rank` is in, in their order in the group.

    >>> group_ranks("autopar/data4.x2/data/2@1", 5)
    [5, 7]
    """
    mesh, axes, size, stride = _parse_group_name(name)
    group = Mesh.parse(mesh).group(axes.split(".") if axes else (), rank)
    if size is None or stride is None:
        return group
    count, apart = int(size), int(stride)
    place = group.index(rank)
    first = place - place // apart % count * apart
    return [group[first + index * apart] for index in range(count)]


def axes_of_group(name: str) -> str:
    """Return the axes of the group of this name, joined by dots.

    >>> axes_of_group("autopar/data4.x2/data/2@1"), axes_of_group("autopar/data4.x2/data.x")
    ('data', 'data.x')
    """
    return _parse_group_name(name)[1]


def _parse_group_name(name: str) -> tuple[str, str, str | None, str | None]:
    """Return the mesh, the axes, and the digit's size and stride in a group's name."""
    match = _GROUP.fullmatch(name)
    assert match is not None, f"{name} is no name that group_name gives"
    mesh, axes, size, stride = match.groups()
    return mesh, axes, size, stride


def factorings(ranks: int, count: int) -> list[tuple[int, ...]]:
    """Return every way to write a number of ranks as a product of so many sizes, in all orders.

    >>> factorings(4, 2)
    [(1, 4), (2, 2), (4, 1)]
    """
    if count == 1:
        return [(ranks,)]
    return [
        (d, *tail)
        for d in range(1, ranks + 1)
        if ranks % d == 0
        for tail in factorings(ranks // d, count - 1)
    ]
