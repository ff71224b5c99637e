"""The checks that come first: versions, devices, links and process groups.

Each check takes the Session and returns a Finding; it raises Absent where there is nothing to look
at. All of them are collective.
"""

from __future__ import annotations

import socket
from typing import Any

import torch
import torch.distributed as dist

from autopar import _compat
from autopar.cost.calibration import measure
from autopar.cost.communication import flat_price
from autopar.cost.network import pattern
from autopar.doctor import machine
from autopar.doctor.models import grid_4d, parallel
from autopar.doctor.result import Absent, Finding
from autopar.doctor.session import Session
from autopar.ir.mesh import Mesh, group_ranks
from autopar.ops import devices
from autopar.ops.process_groups import connect
from autopar.world import ranks, store
from autopar.world.world import running_world

LINK_BYTES = 4 * 2**20
LARGE_BYTES = 256 * 2**20  # on GPUs, too
_ROUNDS = 5


def versions(session: Session) -> Finding:
    """Enter: nothing. Leave: the versions of rank 0; a fault where another rank has other ones."""
    told = ranks.all_of(machine.versions())
    differ = sorted(name for name in told[0] if any(one[name] != told[0][name] for one in told))
    fault = ""
    if differ:
        listed = (
            f"{name} is {', '.join(sorted({str(one[name]) for one in told}))}" for name in differ
        )
        fault = f"the ranks have different versions: {'; '.join(listed)}"
    own = told[0]
    built = (
        f"CUDA {own['cuda']}" if own["cuda"] else f"ROCm {own['rocm']}" if own["rocm"] else "CPU"
    )
    figure = f"torch {own['torch']} ({built}), Python {own['python']}, autopar {own['autopar']}"
    return Finding(figure, own, fault)


def devices_of_ranks(session: Session) -> Finding:
    """Enter: nothing. Leave: node, device, name and memory of every rank; a fault where two ranks
    of a node have one GPU, or where ranks have different kinds of device.
    """
    own: dict[str, Any] = {"device": str(session.device), "name": "cpu"}
    if session.cuda:
        own |= machine.gpu(session.device.index)
    told = store.all_of([socket.gethostname(), own])
    nodes = list(dict.fromkeys(host for host, _ in told))  # numbers: names of hosts are private
    each = [{"rank": n, "node": nodes.index(host), **one} for n, (host, one) in enumerate(told)]
    devices.agreed((), session.device)  # raises where two ranks have one
    names = list(dict.fromkeys(one["name"] for one in each))
    fault = f"the ranks have different devices: {', '.join(names)}" if len(names) > 1 else ""
    plural = "s" if len(nodes) > 1 else ""
    figure = f"{len(each)} × {names[0]} on {len(nodes)} node{plural}"
    if session.note:
        figure += f"; {session.note}"
    return Finding(figure, {"ranks": each, "note": session.note}, fault)


def links(session: Session) -> Finding:
    """Enter: nothing. Leave: seconds of an all-reduce and of broadcasts over all ranks, of 4 MB and
    on GPUs of 256 MB, beside what the world file or nominal figures say.
    """
    if session.ranks == 1:
        raise Absent("one rank has no links: start several with torchrun")
    world, said = ranks.from_rank_0(running_world())
    mesh = Mesh.parse(f"all{session.ranks}")
    connect(mesh, session.device.type)
    group, digits = "autopar/" + f"{mesh}/all", pattern(mesh, ("all",))
    rows, sizes = [], (LINK_BYTES, LARGE_BYTES) if session.cuda else (LINK_BYTES,)
    for size in sizes:
        numbers = torch.ones(size // 4, device=session.device)
        for kind in ("all_reduce", "broadcast"):
            case = measure.Case(kind, digits, True, size)
            took = _median_seconds(measure.collective(case, group, numbers), session)
            bytes_ = measure.actual_bytes(case)
            assumed = flat_price(kind, digits, bytes_, world).seconds
            rows.append(_row(kind, bytes_, took, assumed))
    first = rows[0]
    figure = (
        f"{first['kind']} of {first['bytes'] / 1e6:.1f} MB: {first['seconds'] * 1e3:.2f} ms, "
        f"{first['bytes_per_s'] / 1e9:.3g} GB/s; assumed {first['assumed_seconds'] * 1e3:.2f} ms"
    )
    return Finding(figure, {"collectives": rows, "world": str(world), "assumed_from": said})


def groups(session: Session) -> Finding:
    """Enter: nothing. Leave: the names of the process groups that a 4D plan opens; a fault where a
    group is not open, or has other ranks than its name says.
    """
    if session.ranks == 1:
        raise Absent("one rank needs no process group: start several with torchrun")
    plan = parallel(session, grid_4d(session.ranks)).plan
    wrong, members = [], {}
    for name in plan.groups:
        full = f"autopar/{plan.mesh}/{name}"
        there = dist.get_process_group_ranks(_compat.process_group(full))
        members[name] = there
        if there != group_ranks(full, session.rank):
            wrong.append(f"{name} has ranks {there} and not {group_ranks(full, session.rank)}")
    figure = f"mesh {plan.mesh}: {len(plan.groups)} groups, {', '.join(plan.groups)}"
    facts = {"mesh": str(plan.mesh), "groups": members}
    return Finding(figure, facts, "; ".join(wrong))


def _median_seconds(work: Any, session: Session) -> float:
    """Of one run on the slowest rank: some are run to warm up."""
    often = measure.times_for(work, session.device)
    found = []
    for _ in range(_ROUNDS):
        measure.barrier()
        found.append(measure.seconds(work, often.times, session.device))
    return float(max(ranks.all_of(sorted(found)[_ROUNDS // 2])))


def _row(kind: str, size: int, took: float, assumed: float) -> dict[str, Any]:
    return {
        "kind": kind,
        "bytes": size,
        "seconds": took,
        "bytes_per_s": size / took,
        "assumed_seconds": assumed,
        "over_assumed": took / assumed,
    }
