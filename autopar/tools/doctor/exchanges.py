"""The doctor's checks of what ranks exchange: versions, devices, links, process groups,
collectives.

`alone` and `in_bucket` compare every kind of collective that emitted graphs use, alone and fused,
with its expected result. The numbers are small integers, which bfloat16 holds and adds without
rounding, so a result is equal or wrong. Each kind runs over every group of a mesh of two axes, so a
wrong order of ranks in a group of some ranks shows.

examination.py runs them on all ranks. Each check takes the Session and returns a Finding; it raises
Absent where there is nothing to check.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar import _compat
from autopar.cost.calibration import measure
from autopar.cost.communication import flat_price
from autopar.cost.network import pattern
from autopar.cost.simulator.graph_events import collective_of
from autopar.ir.graph import sort
from autopar.ir.mesh import Mesh, group_ranks
from autopar.ops import comm, devices
from autopar.ops.process_groups import connect
from autopar.passes.overlap.bucket import can_fuse, fuse
from autopar.tools.doctor import Absent, Finding, Session, grid_4d, machine, parallel
from autopar.world import ranks, store
from autopar.world.world import running_world

LINK_BYTES = 4 * 2**20
LARGE_BYTES = 256 * 2**20  # on GPUs, too
_ROUNDS = 5


def versions(session: Session) -> Finding:
    """Check that all ranks have the same versions, and return rank 0's; it is a fault where another
    rank differs.
    """
    by_rank = ranks.all_of(machine.versions())
    differ = sorted(
        name for name in by_rank[0] if any(facts[name] != by_rank[0][name] for facts in by_rank)
    )
    fault = ""
    if differ:
        listed = (
            f"{name} is {', '.join(sorted({str(facts[name]) for facts in by_rank}))}"
            for name in differ
        )
        fault = f"the ranks have different versions: {'; '.join(listed)}"
    own = by_rank[0]
    built = (
        f"CUDA {own['cuda']}" if own["cuda"] else f"ROCm {own['rocm']}" if own["rocm"] else "CPU"
    )
    figure = f"torch {own['torch']} ({built}), Python {own['python']}, autopar {own['autopar']}"
    return Finding(figure, own, fault)


def devices_of_ranks(session: Session) -> Finding:
    """Check the devices: return node, device, name and memory of every rank. Faults: two ranks of a
    node with one GPU, ranks with different kinds of device.
    """
    own: dict[str, Any] = {"device": str(session.device), "name": "cpu"}
    if session.cuda:
        own |= machine.gpu(session.device.index)
    pairs = store.all_of([socket.gethostname(), own])
    # nodes are reported by number, as names of hosts are private
    nodes = list(dict.fromkeys(host for host, _ in pairs))
    rank_devices = [
        {"rank": n, "node": nodes.index(host), **device} for n, (host, device) in enumerate(pairs)
    ]
    devices.agree_on_device((), session.device)  # raises where two ranks have one
    names = list(dict.fromkeys(device["name"] for device in rank_devices))
    fault = f"the ranks have different devices: {', '.join(names)}" if len(names) > 1 else ""
    plural = "s" if len(nodes) > 1 else ""
    figure = f"{len(rank_devices)} × {names[0]} on {len(nodes)} node{plural}"
    if session.note:
        figure += f"; {session.note}"
    return Finding(figure, {"ranks": rank_devices, "note": session.note}, fault)


def links(session: Session) -> Finding:
    """Check the links: return the seconds of an all-reduce and of broadcasts over all ranks, of 4
    MB and on GPUs of 256 MB, beside the figures of the world file or the nominal ones.
    """
    if session.ranks == 1:
        raise Absent("one rank has no links: start several with torchrun")
    world, source = ranks.from_rank_0(running_world())
    idle = replace(world, contention=0.0)  # nothing is computed meanwhile
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
            assumed = flat_price(kind, digits, bytes_, idle).seconds
            rows.append(_row(kind, bytes_, took, assumed))
    first = rows[0]
    figure = (
        f"{first['kind']} of {first['bytes'] / 1e6:.1f} MB: {first['seconds'] * 1e3:.2f} ms, "
        f"{first['bytes_per_s'] / 1e9:.3g} GB/s; assumed {first['assumed_seconds'] * 1e3:.2f} ms"
    )
    return Finding(figure, {"collectives": rows, "world": str(world), "assumed_from": source})


def groups(session: Session) -> Finding:
    """Check the process groups: return the names of those that a 4D plan opens; it is a fault where
    a group is not open, or has other ranks than its name says.
    """
    if session.ranks == 1:
        raise Absent("one rank needs no process group: start several with torchrun")
    plan = parallel(session, grid_4d(session.ranks)).plan
    wrong, members = [], {}
    for name in plan.groups:
        full = f"autopar/{plan.mesh}/{name}"
        open_ranks = dist.get_process_group_ranks(_compat.process_group(full))
        members[name] = open_ranks
        if open_ranks != group_ranks(full, session.rank):
            wrong.append(f"{name} has ranks {open_ranks} and not {group_ranks(full, session.rank)}")
    figure = f"mesh {plan.mesh}: {len(plan.groups)} groups, {', '.join(plan.groups)}"
    facts = {"mesh": str(plan.mesh), "groups": members}
    return Finding(figure, facts, "; ".join(wrong))


def _median_seconds(work: Any, session: Session) -> float:
    """Return the median seconds of one run on the slowest rank, after some runs to warm up."""
    repeats = measure.times_for(work, session.device)
    seconds = []
    for _ in range(_ROUNDS):
        measure.barrier()
        seconds.append(measure.seconds(work, repeats.times, session.device))
    return float(max(ranks.all_of(sorted(seconds)[_ROUNDS // 2])))


def _row(kind: str, size: int, took: float, assumed: float) -> dict[str, Any]:
    return {
        "kind": kind,
        "bytes": size,
        "seconds": took,
        "bytes_per_s": size / took,
        "assumed_seconds": assumed,
        "over_assumed": took / assumed,
    }


KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce")
FUSED_KINDS = ("all_gather", "reduce_scatter", "all_reduce")  # the kinds that the bucket pass fuses
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
_ROWS, _COLUMNS = 37, 5  # from one rank to one other
_MEMBERS = 3  # collectives that are fused


class Group(NamedTuple):
    """A group of ranks: its name, its ranks in order, and this rank's place among them."""

    name: str
    ranks: tuple[int, ...]
    place: int

    @property
    def size(self) -> int:
        return len(self.ranks)


class Trial(NamedTuple):
    """One collective to try: its operand on this rank, and the expected result; None where the
    result is not defined on this rank.
    """

    run: Callable[[Tensor], Tensor]
    operand: Tensor
    expected: Tensor | None


def alone(session: Session, kind: str) -> Finding:
    """Check a kind of KINDS by itself: return how many results were compared, over every group and
    in every dtype; the fault names the groups and dtypes with wrong results.
    """
    count, wrong = 0, []
    for group in _groups(session):
        for dtype in DTYPES:
            for trial in trials(kind, group, dtype, session.device):
                result = trial.run(trial.operand)
                count += 1
                if trial.expected is not None and not torch.equal(result, trial.expected):
                    wrong.append(_group_text(group, dtype))
    return _finding(count, wrong)


def in_bucket(session: Session, kind: str) -> Finding:
    """Check a kind of FUSED_KINDS in a bucket: three collectives fused into one, in the form that
    the bucket pass chooses on this device. Returns what `alone` does.
    """
    count, wrong, op_names = 0, [], set()
    for group in _groups(session):
        for dtype in DTYPES[:2]:
            several = [next(trials(kind, group, dtype, session.device, n)) for n in range(_MEMBERS)]
            operands = [trial.operand for trial in several]
            graph = ranks.together("joining", partial(_fuse_trials, several, operands))
            op_names |= {str(collective_of(node)) for node in graph.graph.nodes} - {"None"}
            for value, trial in zip(graph(*operands), several, strict=True):
                count += 1
                if trial.expected is None or not torch.equal(value, trial.expected):
                    wrong.append(_group_text(group, dtype))
    return _finding(count, wrong, form=sorted(op_names))


def trials(
    kind: str, group: Group, dtype: torch.dtype, device: torch.device, number: int = 0
) -> Iterator[Trial]:
    """Yield the collectives of one kind over a group; each `number` gives them another length."""
    assert kind in KINDS, kind
    size, place, name = group.size, group.place, group.name
    rows, places = _ROWS + number, range(size)

    def sums(rank: int) -> Tensor:
        return _numbers(size * rows, 3, rank % 2, dtype, device)

    def contents(rank: int, count: int = rows) -> Tensor:
        return _numbers(count, 7, 8 * (rank % 31), dtype, device)

    own = group.ranks[place]
    total = torch.stack([sums(rank) for rank in group.ranks]).sum(0).to(dtype)
    match kind:
        case "all_gather":
            gathered = torch.cat([contents(rank) for rank in group.ranks])
            yield Trial(lambda x: comm.all_gather(x, size, name), contents(own), gathered)
        case "reduce_scatter":
            part = total.chunk(size)[place]
            yield Trial(lambda x: comm.reduce_scatter(x, size, name), sums(own), part)
        case "all_reduce":
            yield Trial(lambda x: comm.all_reduce(x, size, name), sums(own), total)
            most = torch.stack([sums(rank) for rank in group.ranks]).amax(0)
            yield Trial(lambda x: comm.all_reduce(x, size, name, "max"), sums(own), most)
        case "all_to_all":
            from_each = [contents(rank, size * rows).view(size, rows, -1) for rank in group.ranks]
            arrived = torch.stack([x[place] for x in from_each])
            yield Trial(lambda x: comm.all_to_all(x, name), from_each[place], arrived)
        case "broadcast":
            each = [contents(rank) for rank in group.ranks]
            yield from (
                Trial(_with_root(comm.broadcast, n, group), contents(own), each[n]) for n in places
            )
        case "reduce":
            expected = [total if n == place else None for n in places]
            yield from (
                Trial(_with_root(comm.reduce, n, group), sums(own), expected[n]) for n in places
            )


def _groups(session: Session) -> list[Group]:
    """Return the groups of this rank: over all ranks, and over each axis of a mesh of two axes
    where their number has a divisor.
    """
    if session.ranks == 1:
        raise Absent("one rank has nobody to talk to: start several with torchrun")
    inner = next((n for n in range(math.isqrt(session.ranks), 1, -1) if not session.ranks % n), 1)
    mesh = Mesh.parse(f"outer{session.ranks // inner}" + (f".inner{inner}" if inner > 1 else ""))
    axes_of_mesh = [(axis,) for axis in mesh.names]
    names = [comm.group_of(axes, str(mesh)) for axes in dict.fromkeys((mesh.names, *axes_of_mesh))]
    ranks.together("opening groups", lambda: connect(mesh, session.device.type, names))
    members = [tuple(group_ranks(name, session.rank)) for name in names]
    return [
        Group(name, group, group.index(session.rank))
        for name, group in zip(names, members, strict=True)
    ]


def _numbers(
    rows: int, period: int, start: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return (rows, _COLUMNS) integers from `start` on, with this period."""
    integers = torch.arange(rows * _COLUMNS, device=device) % period + start
    return integers.view(rows, _COLUMNS).to(dtype)


def _with_root(call: Callable[..., Tensor], root: int, group: Group) -> Callable[[Tensor], Tensor]:
    return lambda x: call(x, root, group.size, group.name)


def _fuse_trials(several: list[Trial], operands: list[Tensor]) -> fx.GraphModule:
    """Return a graph of these collectives, fused as passes/overlap/bucket.py fuses them."""

    def apart(*xs: Tensor) -> list[Tensor]:
        return [trial.run(x) for trial, x in zip(several, xs, strict=True)]

    module: fx.GraphModule = make_fx(apart, tracing_mode="fake")(*operands)
    members = [node for node in module.graph.nodes if can_fuse(node)]
    assert len(members) == len(several), f"{len(members)} of {len(several)} can be joined"
    fuse(module.graph, members)
    assert sort(module.graph)
    module.graph.lint()
    module.recompile()
    return module


def _group_text(group: Group, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} over {group.name.removeprefix('autopar/')}"


def _finding(count: int, wrong: list[str], **facts: Any) -> Finding:
    figure = f"{count - len(wrong)} of {count} results equal"
    listed = ", ".join(dict.fromkeys(wrong))
    fault = f"wrong numbers: {listed}" if wrong else ""
    return Finding(figure, {"tried": count, "wrong": wrong, **facts}, fault)
