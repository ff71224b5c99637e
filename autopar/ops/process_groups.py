"""The process groups of a mesh: `connect` opens one for every axis, and those that a graph names.

Called by runtime/apply.py on all ranks together. A group is found by its name in the graph
(`ir.mesh.group_name`), which is the same on every rank.
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
from autopar.ir.mesh import Mesh, _matched, group_name, group_ranks
from autopar.world import ranks


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
