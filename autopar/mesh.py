"""The mesh: named axes over the ranks, outer first, and the process groups that carry its
collectives.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar import _compat
from autopar.errors import WorldError

# A name ends in a letter, so that "data2.x2" reads back as names and sizes without a doubt.
_NAME = r"[A-Za-z_](?:[A-Za-z0-9_]*[A-Za-z_])?"
_AXIS = re.compile(f"({_NAME})([0-9]+)")
_JOINT_AXES_LIMIT = (
    4  # 2^4 - 1 sets of axes; a fifth axis would double the groups that every rank opens
)


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


def group_name(mesh: str, axes: Sequence[str]) -> str:
    """The name of the process group over `axes` (in mesh order): the same on every rank, so that
    graphs are too.
    """
    return f"autopar/{mesh}/{'.'.join(axes)}"


@dataclass(frozen=True)
class _Connection:
    world: dist.ProcessGroup
    device_mesh: DeviceMesh
    names: tuple[str, ...]


_connections: dict[tuple[Mesh, str], _Connection] = {}


def connect(mesh: Mesh, device_type: str) -> DeviceMesh:
    """Opens a process group for every axis and every set of axes, under `group_name`, and gives the
    mesh for DTensor.

    Collective: all ranks of the running default process group call it with the same mesh. A second
    call reuses what the first one opened. A mesh of one rank gives a DeviceMesh with the one axis
    "rank". Raises WorldError where the mesh and the running process group differ in size.
    """
    world = _running_world(mesh)
    known = _connections.get((mesh, device_type))
    if known is not None and known.world is world:
        return known.device_mesh
    sizes, names = tuple(mesh.sizes.values()) or (1,), mesh.names or ("rank",)
    device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
    groups = _open_groups(mesh, device_mesh, world)
    for name, group in groups.items():
        _compat.register_process_group(name, group)
    _connections[mesh, device_type] = _Connection(world, device_mesh, tuple(groups))
    return device_mesh


def disconnect() -> None:
    """Forgets every connection: the names are free again, the next `connect` opens new groups."""
    for connection in _connections.values():
        for name in connection.names:
            _compat.unregister_process_group(name)
    _connections.clear()


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


def _open_groups(
    mesh: Mesh, device_mesh: DeviceMesh, world: dist.ProcessGroup
) -> dict[str, dist.ProcessGroup]:
    """Every group of this rank by name; all ranks open the sets of axes in the same order."""
    limit = len(mesh.axes) if len(mesh.axes) <= _JOINT_AXES_LIMIT else 1
    sets = [axes for n in range(1, limit + 1) for axes in itertools.combinations(mesh.names, n)]
    if mesh.names and mesh.names not in sets:
        sets.append(mesh.names)
    return {
        group_name(str(mesh), axes): _open_group(mesh, axes, device_mesh, world) for axes in sets
    }


def _open_group(
    mesh: Mesh, axes: tuple[str, ...], device_mesh: DeviceMesh, world: dist.ProcessGroup
) -> dist.ProcessGroup:
    if len(axes) == len(mesh.axes):
        return world
    if len(axes) == 1:
        return device_mesh.get_group(axes[0])
    ranks = sorted({tuple(mesh.group(axes, rank)) for rank in range(mesh.size)})
    group, _ = dist.new_subgroups_by_enumeration([list(group) for group in ranks])
    return group
