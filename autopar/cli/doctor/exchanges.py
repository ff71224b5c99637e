"""The checks that come first: versions, devices, links and process groups.

Each check takes the Session and returns a Finding; it raises Absent where there is nothing to look
at. All of them are collective.

Every kind of collective that emitted graphs use, alone and joined, against what it must give.

The numbers are small integers, which bfloat16 holds and adds without rounding, so a result is equal
or wrong. Each kind runs over every group of a mesh of two axes, so an order of ranks that is wrong
in a group of some ranks shows.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar import _compat
from autopar.cli.doctor import machine
from autopar.cli.doctor.session import Absent, Finding, Session, grid_4d, parallel
from autopar.cost.calibration import measure
from autopar.cost.communication import flat_price
from autopar.cost.network import pattern
from autopar.cost.simulator.graph_events import collective_of
from autopar.ir.graph import ordered
from autopar.ir.mesh import Mesh, group_ranks
from autopar.ops import comm, devices
from autopar.ops.process_groups import connect
from autopar.passes.overlap import fuse
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
    devices.agree_on_device((), session.device)  # raises where two ranks have one
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


KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce")
JOINED = ("all_gather", "reduce_scatter", "all_reduce")  # what the bucket pass joins
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
_ROWS, _COLUMNS = 37, 5  # of one rank for one other
_MEMBERS = 3  # collectives that are joined


class Group(NamedTuple):
    """A group of ranks: its name, its ranks in order, and this rank's place among them."""

    name: str
    ranks: tuple[int, ...]
    place: int

    @property
    def size(self) -> int:
        return len(self.ranks)


class Trial(NamedTuple):
    """One collective to try: its operand on this rank, and what must come out; None where the
    result is not defined on this rank.
    """

    run: Callable[[Tensor], Tensor]
    operand: Tensor
    expected: Tensor | None


def alone(session: Session, kind: str) -> Finding:
    """Enter: a kind of KINDS. Leave: how many results were looked at, over every group and of every
    dtype; a fault that names the first group and dtype whose result is another than it must be.
    """
    tried, wrong = 0, []
    for group in _groups(session):
        for dtype in DTYPES:
            for trial in trials(kind, group, dtype, session.device):
                found = trial.run(trial.operand)
                tried += 1
                if trial.expected is not None and not torch.equal(found, trial.expected):
                    wrong.append(_named(group, dtype))
    return _finding(tried, wrong)


def joined(session: Session, kind: str) -> Finding:
    """Enter: a kind of JOINED. Leave: the same of three collectives that go as one, in the form
    that the bucket pass gives them on this device.
    """
    tried, wrong, forms = 0, [], set()
    for group in _groups(session):
        for dtype in DTYPES[:2]:
            several = [next(trials(kind, group, dtype, session.device, n)) for n in range(_MEMBERS)]
            operands = [trial.operand for trial in several]
            graph = ranks.together("joining", partial(_as_one, several, operands))
            forms |= {str(collective_of(node)) for node in graph.graph.nodes} - {"None"}
            for value, trial in zip(graph(*operands), several, strict=True):
                tried += 1
                if trial.expected is None or not torch.equal(value, trial.expected):
                    wrong.append(_named(group, dtype))
    return _finding(tried, wrong, form=sorted(forms))


def trials(
    kind: str, group: Group, dtype: torch.dtype, device: torch.device, number: int = 0
) -> Iterator[Trial]:
    """The collectives of one kind over a group; `number` gives others of another length."""
    assert kind in KINDS, kind
    size, place, name = group.size, group.place, group.name
    rows, places = _ROWS + number, range(size)

    def sums(rank: int) -> Tensor:
        return _numbers(size * rows, 3, rank % 2, dtype, device)

    def moves(rank: int, count: int = rows) -> Tensor:
        return _numbers(count, 7, 8 * (rank % 31), dtype, device)

    own = group.ranks[place]
    total = torch.stack([sums(rank) for rank in group.ranks]).sum(0).to(dtype)
    match kind:
        case "all_gather":
            whole = torch.cat([moves(rank) for rank in group.ranks])
            yield Trial(lambda x: comm.all_gather(x, size, name), moves(own), whole)
        case "reduce_scatter":
            part = total.chunk(size)[place]
            yield Trial(lambda x: comm.reduce_scatter(x, size, name), sums(own), part)
        case "all_reduce":
            yield Trial(lambda x: comm.all_reduce(x, size, name), sums(own), total)
            most = torch.stack([sums(rank) for rank in group.ranks]).amax(0)
            yield Trial(lambda x: comm.all_reduce(x, size, name, "max"), sums(own), most)
        case "all_to_all":
            from_each = [moves(rank, size * rows).view(size, rows, -1) for rank in group.ranks]
            arrived = torch.stack([x[place] for x in from_each])
            yield Trial(lambda x: comm.all_to_all(x, name), from_each[place], arrived)
        case "broadcast":
            each = [moves(rank) for rank in group.ranks]
            yield from (
                Trial(_rooted(comm.broadcast, n, group), moves(own), each[n]) for n in places
            )
        case "reduce":
            wanted = [total if n == place else None for n in places]
            yield from (Trial(_rooted(comm.reduce, n, group), sums(own), wanted[n]) for n in places)


def _groups(session: Session) -> list[Group]:
    """The groups of this rank: over all ranks, and over each axis of a mesh of two where their
    number has a divisor.
    """
    if session.ranks == 1:
        raise Absent("one rank has nobody to talk to: start several with torchrun")
    inner = next((n for n in range(math.isqrt(session.ranks), 1, -1) if not session.ranks % n), 1)
    mesh = Mesh.parse(f"outer{session.ranks // inner}" + (f".inner{inner}" if inner > 1 else ""))
    over = [(axis,) for axis in mesh.names]
    names = [comm.group_of(axes, str(mesh)) for axes in dict.fromkeys((mesh.names, *over))]
    ranks.together("opening groups", lambda: connect(mesh, session.device.type, names))
    members = [tuple(group_ranks(name, session.rank)) for name in names]
    return [Group(n, who, who.index(session.rank)) for n, who in zip(names, members, strict=True)]


def _numbers(
    rows: int, period: int, start: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """(rows, _COLUMNS) integers from `start` on, with this period."""
    found = torch.arange(rows * _COLUMNS, device=device) % period + start
    return found.view(rows, _COLUMNS).to(dtype)


def _rooted(call: Callable[..., Tensor], root: int, group: Group) -> Callable[[Tensor], Tensor]:
    return lambda x: call(x, root, group.size, group.name)


def _as_one(several: list[Trial], operands: list[Tensor]) -> fx.GraphModule:
    """A graph of these collectives, joined as passes/overlap/bucket.py has it."""

    def apart(*xs: Tensor) -> list[Tensor]:
        return [trial.run(x) for trial, x in zip(several, xs, strict=True)]

    made: fx.GraphModule = make_fx(apart, tracing_mode="fake")(*operands)
    members = [node for node in made.graph.nodes if fuse.can_fuse(node)]
    assert len(members) == len(several), f"{len(members)} of {len(several)} can be joined"
    fuse.fuse(made.graph, members)
    assert ordered(made.graph)
    made.graph.lint()
    made.recompile()
    return made


def _named(group: Group, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} over {group.name.removeprefix('autopar/')}"


def _finding(tried: int, wrong: list[str], **facts: Any) -> Finding:
    figure = f"{tried - len(wrong)} of {tried} results equal"
    listed = ", ".join(dict.fromkeys(wrong))
    fault = f"wrong numbers: {listed}" if wrong else ""
    return Finding(figure, {"tried": tried, "wrong": wrong, **facts}, fault)
