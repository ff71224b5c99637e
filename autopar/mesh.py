"""The mesh: named axes over the ranks, outer first, and the process groups that carry its
collectives.
"""

from __future__ import annotations

import atexit
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar import _compat
from autopar.errors import WorldError
from autopar.world import ranks

# A name ends in a letter, so that "data2.x2" reads back as names and sizes without a doubt.
_NAME = r"[A-Za-z_](?:[A-Za-z0-9_]*[A-Za-z_])?"
_AXIS = re.compile(f"({_NAME})([0-9]+)")
_GATHERED = {"data": 1, "z": 2}  # axes that weights are gathered over, outer first


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
        """The mesh that `str(mesh)` gives, such as "data2.x2"; "" is the mesh of one rank. Raises
        WorldError.
        """
        parts = text.split(".") if text else []
        matches = [_AXIS.fullmatch(part) for part in parts]
        if not all(matches):
            bad = next(part for part, match in zip(parts, matches, strict=True) if not match)
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
        return tuple(axis.name for axis in self.axes)

    @cached_property
    def sizes(self) -> dict[str, int]:
        return {axis.name: axis.size for axis in self.axes}

    @cached_property
    def storage_order(self) -> tuple[int, ...]:
        """The places of the axes in the order in which they cut a dim that they share in a stored
        tensor: those over which weights are gathered before use, data and z, cut last, so that what
        is gathered is the contiguous part that a product on the other axes takes.

        >>> Mesh.parse("data2.z2.x2.y2").storage_order
        (2, 3, 0, 1)
        """
        return tuple(sorted(range(len(self.axes)), key=lambda i: _GATHERED.get(self.names[i], 0)))

    def stride(self, name: str) -> int:
        """Ranks between two neighbours on this axis."""
        return math.prod(axis.size for axis in self.axes[self._position(name) + 1 :])

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where `rank` stands on every axis. Raises WorldError for a rank outside the mesh."""
        if not 0 <= rank < self.size:
            raise WorldError(f"rank {rank} is not on mesh {self} of {self.size} ranks")
        return {axis.name: rank // self.stride(axis.name) % axis.size for axis in self.axes}

    def group(self, axes: Sequence[str], rank: int) -> list[int]:
        """The ranks that differ from `rank` on `axes` only, itself among them, in mesh order."""
        axes = self.ordered(axes)
        origin = rank - sum(self.coordinate(rank)[name] * self.stride(name) for name in axes)
        offsets = itertools.product(
            *(range(0, self.sizes[n] * self.stride(n), self.stride(n)) for n in axes)
        )
        return [origin + sum(offset) for offset in offsets]

    def ordered(self, axes: str | Sequence[str]) -> tuple[str, ...]:
        """`axes` (one name or several) in mesh order, each once. Raises WorldError for an unknown
        one.
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
    """Some of the ranks of a group: those that differ in (place // stride) % size alone."""

    size: int
    stride: int


def group_name(mesh: str, axes: Sequence[str], digit: Within | None = None, lane: int = 0) -> str:
    """The name of the process group over `axes` (in mesh order), or of the part of it that a digit
    of the place in it says: the same on every rank, so that graphs are too. Groups of two lanes
    have the same ranks, and do not wait for one another.

    >>> group_name("data4.x2", ["data"], Within(2, 1), lane=1)
    'autopar/data4.x2/data/2@1/lane1'
    """
    part = f"/{digit.size}@{digit.stride}" if digit else ""
    return f"autopar/{mesh}/{'.'.join(axes)}{part}" + (f"/lane{lane}" if lane else "")


_GROUP = re.compile(r"autopar/([\w.]*)/([\w.]*)(?:/(\d+)@(\d+))?(?:/lane(\d+))?")


def group_ranks(name: str, rank: int) -> list[int]:
    """The ranks of the group that has this name and `rank` in it, in their order in the group.

    >>> group_ranks("autopar/data4.x2/data/2@1", 5)
    [5, 7]
    """
    mesh, axes, size, stride, _ = _matched(name)
    group = Mesh.parse(mesh).group(axes.split(".") if axes else (), rank)
    if size is None or stride is None:
        return group
    count, apart = int(size), int(stride)
    place = group.index(rank)
    first = place - place // apart % count * apart
    return [group[first + index * apart] for index in range(count)]


def axes_of_group(name: str) -> str:
    """
    >>> axes_of_group("autopar/data4.x2/data/2@1"), axes_of_group("autopar/data4.x2/data.x")
    ('data', 'data.x')
    """
    return _matched(name)[1]


def _matched(name: str) -> tuple[str, str, str | None, str | None, str | None]:
    match = _GROUP.fullmatch(name)
    assert match is not None, f"{name} is no name that group_name gives"
    mesh, axes, size, stride, lane = match.groups()
    return mesh, axes, size, stride, lane


@dataclass(frozen=True)
class _Connection:
    """What one mesh has open: groups by (their ranks, lane), and the names that lead to them."""

    world: dist.ProcessGroup
    device_mesh: DeviceMesh
    groups: dict[tuple[tuple[tuple[int, ...], ...], str], dist.ProcessGroup]
    names: set[str]


_connections: dict[tuple[Mesh, str], _Connection] = {}


def connect(mesh: Mesh, device_type: str, names: Iterable[str] = ()) -> DeviceMesh:
    """Opens a process group for every axis, and those that `names` name in addition (see
    `group_name` and `conversion.groups_of`), in one order, and gives the mesh for DTensor.

    Collective: all ranks of the running default process group call it with the same mesh and names.
    A second call opens only what is not open. A mesh of one rank gives a DeviceMesh with the one
    axis "rank". Raises WorldError where the mesh and the running process group differ in size.
    """
    world = _running_world(mesh)
    _end_groups_at_exit()
    with undone_on_failure():
        known = _connections.get((mesh, device_type))
        if known is None or known.world is not world:
            known = _connections[mesh, device_type] = _connection(mesh, device_type, world)
        wanted = {group_name(str(mesh), (axis,)) for axis in mesh.names}
        for name in sorted(wanted.union(names)):
            if name not in known.names:
                group = _group(mesh, name, known)
                _compat.unregister_process_group(name)  # that a broken connection may have left
                _compat.register_process_group(name, group)
                known.names.add(name)
    return known.device_mesh


def _connection(mesh: Mesh, device_type: str, world: dist.ProcessGroup) -> _Connection:
    """A new one; names lead to the same groups for all types of devices. Its axes are in storage
    order, as DTensor cuts axis by axis.
    """
    sizes, axes = tuple(mesh.sizes.values()) or (1,), mesh.names or ("rank",)
    order = mesh.storage_order or (0,)
    if order == tuple(range(len(axes))):
        device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=axes)
    else:
        places = torch.arange(mesh.size).view(sizes).permute(order)
        names = tuple(axes[place] for place in order)
        device_mesh = DeviceMesh(device_type, places, mesh_dim_names=names)
    for axis in axes:
        _compat.set_timeout(device_mesh.get_group(axis), _compat.timeout_of(world))
    for (other, _), known in _connections.items():
        if other == mesh and known.world is world:
            return _Connection(world, device_mesh, known.groups, known.names)
    made = _Connection(world, device_mesh, {}, set())
    _find_open_groups(mesh, made)
    return made


@contextmanager
def undone_on_failure() -> Iterator[None]:
    """What is connected within is forgotten if it fails, so that the next attempt finds all ranks
    alike. Where only some of them fail, it must fail on the others too: see `ranks.together`.
    """
    before = {
        key: (known, dict(known.groups), set(known.names)) for key, known in _connections.items()
    }
    try:
        yield
    except BaseException:
        kept = {name for _, _, names in before.values() for name in names}
        for known in _connections.values():
            for name in known.names - kept:
                _compat.unregister_process_group(name)
        _connections.clear()
        for key, (known, groups, names) in before.items():
            known.groups.clear()
            known.groups.update(groups)
            known.names.intersection_update(names)
            _connections[key] = known
        raise


def disconnect() -> None:
    """Forgets every connection: the names are free again, the next `connect` opens new groups."""
    for connection in _connections.values():
        for name in connection.names:
            _compat.unregister_process_group(name)
    _connections.clear()


def _end_groups() -> None:
    """Ends gloo's threads while Python still runs. Such a thread lets go of the tensors of its last
    collective a moment after that is waited for, and needs Python's lock for it; one that asks for
    the lock while the interpreter is being torn down aborts the process ("terminate called without
    an active exception"). Only a group that nothing holds any more joins its threads.
    """
    running = dist.is_initialized()
    if running and "gloo" not in ranks.backends().values():
        return
    for connection in _connections.values():
        _compat.forget_groups(connection.device_mesh)
    disconnect()
    if running:
        dist.destroy_process_group()


@cache
def _end_groups_at_exit() -> None:
    atexit.register(_end_groups)


def _running_world(mesh: Mesh) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise WorldError(
            f"mesh {str(mesh)!r} has {mesh.size} ranks, but no process group is running; "
            "start with torchrun and call torch.distributed.init_process_group first"
        )
    running = dist.get_world_size()
    if running != mesh.size:
        raise WorldError(
            f"mesh {mesh} has {mesh.size} ranks, the running process group has {running}; "
            f"plan for {running} ranks or start {mesh.size}"
        )
    world = dist.group.WORLD
    assert world is not None
    return world


def _partition(mesh: Mesh, name: str) -> tuple[tuple[int, ...], ...]:
    """All groups of this name: every rank is in one."""
    return tuple(sorted({tuple(group_ranks(name, rank)) for rank in range(mesh.size)}))


def _find_open_groups(mesh: Mesh, connection: _Connection) -> None:
    """What torch has open: one group of all ranks, and one for every axis of the DeviceMesh."""
    for axis in mesh.names:
        key = _partition(mesh, group_name(str(mesh), (axis,))), "0"
        connection.groups[key] = connection.device_mesh.get_group(axis)
    connection.groups[(tuple(range(mesh.size)),), "0"] = connection.world


def _group(mesh: Mesh, name: str, connection: _Connection) -> dist.ProcessGroup:
    """The group of this rank; names with the same ranks, such as those of two levels, share it."""
    partition = _partition(mesh, name)
    key = partition, _matched(name)[-1] or "0"
    if key not in connection.groups:
        group, _ = dist.new_subgroups_by_enumeration(
            [list(members) for members in partition], timeout=_compat.timeout_of(connection.world)
        )
        connection.groups[key] = group
    return connection.groups[key]
