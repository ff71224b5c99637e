"""The process groups of a mesh: `connect` opens one for every axis, and those that a graph names.

Example: for "data2.x2" it opens the groups of the axes data and x, and for a graph with a
hierarchical collective the groups of its levels as well. runtime/apply.py calls it on all ranks
together. A group is found by its name in the graph (`ir.mesh.group_name`), which is the same on
every rank.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar import _compat
from autopar.errors import WorldError
from autopar.ir.mesh import Mesh, group_name, group_ranks
from autopar.world import ranks


@dataclass(frozen=True)
class _Connection:
    """The open groups of one mesh, by the ranks of all groups of a name, and the names registered
    for them.
    """

    world: dist.ProcessGroup
    device_mesh: DeviceMesh
    groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup]
    names: set[str]


_connections: dict[tuple[Mesh, str], _Connection] = {}


def connect(mesh: Mesh, device_type: str, names: Iterable[str] = ()) -> DeviceMesh:
    """Open a process group for every axis and for each of `names` (see `group_name` and
    `collectives.groups_of`), in one order, and return the mesh for DTensor.

    Collective: all ranks of the running default process group call it with the same mesh and names.
    A second call opens only what is not open. A mesh of one rank gives a DeviceMesh with the one
    axis "rank". Raises WorldError where the mesh and the running process group differ in size.
    """
    world = _running_world(mesh)
    _end_groups_at_exit()
    with undone_on_failure():
        connection = _connections.get((mesh, device_type))
        if connection is None or connection.world is not world:
            connection = _connections[mesh, device_type] = _connection(mesh, device_type, world)
        axis_groups = {group_name(str(mesh), (axis,)) for axis in mesh.names}
        for name in sorted(axis_groups.union(names)):
            if name not in connection.names:
                group = _open_group(mesh, name, connection)
                _compat.unregister_process_group(name)  # a broken connection may have left it
                _compat.register_process_group(name, group)
                connection.names.add(name)
    return connection.device_mesh


def _connection(mesh: Mesh, device_type: str, world: dist.ProcessGroup) -> _Connection:
    """Return a new connection; names lead to the same groups for all types of devices. The axes of
    its DeviceMesh are in storage order, as DTensor splits axis by axis.
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
    for (other, _), connection in _connections.items():
        if other == mesh and connection.world is world:
            return _Connection(world, device_mesh, connection.groups, connection.names)
    new_connection = _Connection(world, device_mesh, {}, set())
    _find_open_groups(mesh, new_connection)
    return new_connection


@contextmanager
def undone_on_failure() -> Iterator[None]:
    """Undo the connections made within if it fails, so that the next attempt finds all ranks in the
    same state. Where only some ranks fail, the others must fail too: see `ranks.together`.
    """
    before = {
        key: (connection, dict(connection.groups), set(connection.names))
        for key, connection in _connections.items()
    }
    try:
        yield
    except BaseException:
        names_before = {name for _, _, names in before.values() for name in names}
        for connection in _connections.values():
            for name in connection.names - names_before:
                _compat.unregister_process_group(name)
        _connections.clear()
        for key, (connection, groups, names) in before.items():
            connection.groups.clear()
            connection.groups.update(groups)
            connection.names.intersection_update(names)
            _connections[key] = connection
        raise


def disconnect() -> None:
    """Forget every connection: the names are free again, and the next `connect` opens new
    groups.
    """
    for connection in _connections.values():
        for name in connection.names:
            _compat.unregister_process_group(name)
    _connections.clear()


def _end_groups() -> None:
    """End gloo's threads while Python still runs.

    Such a thread releases the tensors of its last collective a moment after that is waited for, and
    needs the GIL for it. A thread that asks for the GIL while the interpreter is being torn down
    aborts the process ("terminate called without an active exception"). A group joins its threads
    only when nothing holds it any more.
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
    """Return the default process group. Raises WorldError where none is running or its size is not
    that of the mesh.
    """
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
    """Return the ranks of all groups of this name: every rank is in one group."""
    return tuple(sorted({tuple(group_ranks(name, rank)) for rank in range(mesh.size)}))


def _find_open_groups(mesh: Mesh, connection: _Connection) -> None:
    """Enter the groups that torch has open already: one of all ranks, and one for every axis of the
    DeviceMesh.
    """
    for axis in mesh.names:
        partition = _partition(mesh, group_name(str(mesh), (axis,)))
        connection.groups[partition] = connection.device_mesh.get_group(axis)
    connection.groups[(tuple(range(mesh.size)),)] = connection.world


def _open_group(mesh: Mesh, name: str, connection: _Connection) -> dist.ProcessGroup:
    """Return the group of this rank, opening it at first; names with the same ranks, such as those
    of two levels, share it.
    """
    partition = _partition(mesh, name)
    if partition not in connection.groups:
        group, _ = dist.new_subgroups_by_enumeration(
            [list(members) for members in partition], timeout=_compat.timeout_of(connection.world)
        )
        connection.groups[partition] = group
    return connection.groups[partition]
