"""The process groups of a mesh, and the errors of collectives that fail in them.

Example: for "data2.x2" `connect` opens the groups of the axes data and x, and for a graph with a
hierarchical collective the groups of its levels as well. runtime/apply.py calls it on all ranks
together. A group is found by its name in the graph (`ir.mesh.group_name`), which is the same on
every rank.

A collective that fails becomes a RankError that names the collective, the module of the model and
the ranks that are missing; gloo says "Connection closed by peer". comm.py calls `explain` where it
waits for a collective; runtime/backends.py wraps the forward and the backward in `guard`.
"""

from __future__ import annotations

import atexit
import linecache
import operator
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed import DistError
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar import _compat
from autopar._compat import OpOverload, takes_a_list
from autopar.errors import RankError, WorldError
from autopar.ir.graph import module_path
from autopar.ir.mesh import Mesh, axes_of_group, group_name, group_ranks
from autopar.world import ranks
from autopar.world.store import FAILED, Pulse, missing, positions, pulse


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


def connect(mesh: Mesh, device_type: str, names: Iterable[str] = (), copies: int = 1) -> DeviceMesh:
    """Open a process group for every axis and for each of `names` (see `group_name` and
    `collectives.groups_of`), in one order, and return the mesh for DTensor.

    Collective: all ranks of the running default process group call it with the same mesh and names.
    A second call opens only what is not open. A mesh of one rank gives a DeviceMesh with the one
    axis "rank". `copies`: of the mesh, one after the other over the ranks, as the stages of a
    pipeline have; the groups and the DeviceMesh are those of the rank's own copy. Raises WorldError
    where the mesh and the running process group differ in size.
    """
    world = _running_world(mesh, copies)
    _end_groups_at_exit()
    with undone_on_failure():
        connection = _connections.get((mesh, device_type))
        if connection is None or connection.world is not world:
            connection = _connection(mesh, device_type, world, copies)
            _connections[mesh, device_type] = connection
        axis_groups = {group_name(str(mesh), (axis,)) for axis in mesh.names}
        for name in sorted(axis_groups.union(names)):
            if name not in connection.names:
                group = _open_group(mesh, name, connection, copies)
                _compat.unregister_process_group(name)  # a broken connection may have left it
                _compat.register_process_group(name, group)
                connection.names.add(name)
    return connection.device_mesh


def connect_stages(mesh: Mesh, copies: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Open two process groups over the ranks that have the same place in every copy of a mesh: one
    for what goes to later copies, one for what goes to earlier ones. In each, two ranks send in one
    direction alone, so that on GPUs no send waits behind a receive of the same pair. Collective.
    """
    world = _running_world(mesh, copies)
    _end_groups_at_exit()
    column = _columns.get((mesh, copies))
    if column is None or column[0] is not world:
        columns = [list(range(place, mesh.size * copies, mesh.size)) for place in range(mesh.size)]
        timeout = _compat.timeout_of(world)
        up, _ = dist.new_subgroups_by_enumeration(columns, timeout=timeout)
        down, _ = dist.new_subgroups_by_enumeration(columns, timeout=timeout)
        column = _columns[mesh, copies] = world, up, down
    return column[1:]


_columns: dict[
    tuple[Mesh, int], tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup]
] = {}


def _connection(mesh: Mesh, device_type: str, world: dist.ProcessGroup, copies: int) -> _Connection:
    """Return a new connection; names lead to the same groups for all types of devices. The axes of
    its DeviceMesh are in storage order, as DTensor splits axis by axis.
    """
    sizes, axes = tuple(mesh.sizes.values()) or (1,), mesh.names or ("rank",)
    order = mesh.storage_order or (0,)
    if copies > 1:
        places = torch.arange(mesh.size * copies).view(copies, *sizes)
        places = places.permute(0, *(place + 1 for place in order))
        names = tuple(axes[place] for place in order)
        device_mesh = DeviceMesh(device_type, places, mesh_dim_names=("stage", *names))[names]
    elif order == tuple(range(len(axes))):
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
    _find_open_groups(mesh, new_connection, copies)
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
    _columns.clear()


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
    _compat.forget_default_groups()
    disconnect()
    if running:
        dist.destroy_process_group()


@cache
def _end_groups_at_exit() -> None:
    atexit.register(_end_groups)


def _running_world(mesh: Mesh, copies: int) -> dist.ProcessGroup:
    """Return the default process group. Raises WorldError where none is running or its size is not
    that of the mesh, or of so many copies of it.
    """
    size = mesh.size * copies
    if not dist.is_initialized():
        raise WorldError(
            f"mesh {str(mesh)!r} has {size} ranks, but no process group is running; "
            "start with torchrun and call torch.distributed.init_process_group first"
        )
    running = dist.get_world_size()
    if running != size:
        raise WorldError(
            f"mesh {mesh} has {size} ranks, the running process group has {running}; "
            f"plan for {running} ranks or start {size}"
        )
    world = dist.group.WORLD
    assert world is not None
    return world


def _partition(mesh: Mesh, name: str, copies: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of all groups of this name: every rank is in one group."""
    own = sorted({tuple(group_ranks(name, rank)) for rank in range(mesh.size)})
    firsts = range(0, mesh.size * copies, mesh.size)
    return tuple(tuple(first + rank for rank in group) for first in firsts for group in own)


def _find_open_groups(mesh: Mesh, connection: _Connection, copies: int) -> None:
    """Enter the groups that torch has open already: one of all ranks, and one for every axis of the
    DeviceMesh.
    """
    for axis in mesh.names:
        partition = _partition(mesh, group_name(str(mesh), (axis,)), copies)
        connection.groups[partition] = connection.device_mesh.get_group(axis)
    connection.groups[(tuple(range(mesh.size * copies)),)] = connection.world


def _open_group(mesh: Mesh, name: str, connection: _Connection, copies: int) -> dist.ProcessGroup:
    """Return the group of this rank, opening it at first; names with the same ranks, such as those
    of two levels, share it.
    """
    partition = _partition(mesh, name, copies)
    if partition not in connection.groups:
        group, _ = dist.new_subgroups_by_enumeration(
            [list(members) for members in partition], timeout=_compat.timeout_of(connection.world)
        )
        connection.groups[partition] = group
    return connection.groups[partition]


# -- errors of failed collectives ------------------------------------------------------------------
# Words in the errors of gloo and NCCL for a peer that is gone, or that did not come in time.
_COMMUNICATION_ERROR = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|timed ?out|broken pipe|socket", re.IGNORECASE
)
_TIMED_OUT = re.compile(r"time ?d? ?out", re.IGNORECASE)
_GENERATED = "<eval_with_key>"  # the file name that fx gives to generated code


def guard(run: Callable[..., Any], phase: str) -> Callable[..., Any]:
    """Return the same function with failures of its collectives explained by `explain`.

    `phase` is "forward" or "backward"; the other ranks see in which one this rank is.
    """

    def call(*values: Any) -> Any:
        heartbeat = pulse()
        if heartbeat is not None:
            heartbeat.where = f"in the {phase}"
        try:
            result = run(*values)
        except RuntimeError as error:
            explain(error)
        if heartbeat is not None:
            heartbeat.where = f"after the {phase}"
        return result

    return takes_a_list(call) if getattr(run, "_boxed_call", False) else call


def explain(error: RuntimeError, collective: str = "") -> NoReturn:
    """Raise a RankError for an error that gloo or NCCL raised in a collective; raise any other
    error as it is.

    `collective` names the collective, where the caller knows it.
    """
    heartbeat = pulse() if _is_communication_error(error) else None
    if heartbeat is None:
        raise error
    site = _failing_node(error)
    where = " in ".join(text for text in (collective, site) if text) or "a collective"
    try:
        ranks_at_fault = _blame(heartbeat, error)
    except RuntimeError:  # the store is gone
        ranks_at_fault = (
            "the store has gone with the rank that kept it (rank 0, unless torchrun did)"
        )
    message = re.sub(r"^\[\S+\] |\. This is typically.*", "", str(error).strip().splitlines()[0])
    raise RankError(
        f"{where} failed in call {heartbeat.calls}: {ranks_at_fault} [{message}]"
    ) from error


def _is_communication_error(error: RuntimeError) -> bool:
    """Whether an error comes from gloo or NCCL."""
    return isinstance(error, DistError) or (
        type(error) is RuntimeError and bool(_COMMUNICATION_ERROR.search(str(error)))
    )


def _blame(beating: Pulse, error: RuntimeError) -> str:
    """Return which ranks are to blame: those that are gone or have ended, else those that are
    ahead.
    """
    previous, beating.where = beating.where, FAILED
    beating.say()
    silent_ranks = beating.silent()
    signs = beating.signs()
    own_sign = signs[beating.rank]
    if own_sign is not None:
        signs[beating.rank] = own_sign._replace(where=previous)
    where = positions(signs)
    if silent_ranks:
        return f"{missing(silent_ranks)}. The last that was heard: {where}"
    if len({sign.calls for sign in signs if sign is not None}) > 1:
        return f"the ranks have not made the same calls: {where}. Make every call on every rank"
    late = "a rank did not come in time" if _TIMED_OUT.search(str(error)) else "a rank has left"
    return f"{late}, though all ranks have been heard of: {where}"


# -- where it failed -------------------------------------------------------------------------------
def _failing_node(error: RuntimeError) -> str:
    """Return a description of the graph node that was running; "" outside of generated graphs."""
    for frame, line in _frames(error):
        graph = getattr(frame.f_locals.get("self"), "graph", None)
        if frame.f_code.co_filename.startswith(_GENERATED) and isinstance(graph, fx.Graph):
            name = re.match(r"\s*(\w+)", linecache.getline(frame.f_code.co_filename, line))
            for node in graph.nodes:
                if name and node.name == name[1]:
                    return _describe(node)
    return ""


def _frames(error: RuntimeError) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames that the error went through, innermost first, then the running ones, with
    their lines.
    """
    yield from reversed(list(traceback.walk_tb(error.__traceback__)))
    yield from traceback.walk_stack(None)


def _describe(node: fx.Node) -> str:
    """Return a description of a node, such as "all_reduce_3 (all_reduce over data) of
    blocks.1.mlp".
    """
    while _passes_through(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    groups = [arg for arg in node.args if isinstance(arg, str) and arg.startswith("autopar/")]
    kind = (
        node.target._schema.name.split("::")[1].rstrip("_")
        if isinstance(node.target, OpOverload)
        else ""
    )
    over = f" ({kind} over {axes_of_group(groups[0])})" if groups else ""
    # The rewrite inserts collectives between nodes of the model, which have a path.
    near = [node, *node.all_input_nodes, *node.users]
    path = next((path for other in near if (path := _path(other))), "")
    return f"{node.name}{over}" + (f" of {path}" if path else "")


def _kind(node: fx.Node) -> str:
    """Return the kind of a node, such as "all_reduce" for _c10d_functional.all_reduce_."""
    name = node.target._schema.name if isinstance(node.target, OpOverload) else str(node.target)
    return name.split("::")[-1].rstrip("_")


def _path(node: fx.Node) -> str:
    """Return the module path of a node; nodes that AOTAutograd derives carry that of their
    source.
    """
    return str(node.meta.get("custom", {}).get("module", "")) or module_path(node)


def _passes_through(node: fx.Node) -> bool:
    """Whether a node waits for a collective, or takes one result of several."""
    return _kind(node) == "wait_tensor" or node.target is operator.getitem
