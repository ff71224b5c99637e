"""A training step as it ran on this rank: from torch.profiler, with the names, the lanes and the
bytes that the step's own script (script.py) knows.

The profile is read on gloo, whose threads say when a collective begins and ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.profiler import ProfilerActivity, profile, record_function

from autopar._compat import pytree
from autopar.cost.simulator.timeline import COMPUTE, WAITS, Seen, Span
from autopar.errors import PlanError
from autopar.runtime.backends import Scheduled
from autopar.runtime.op_log import (
    GRAPH,
    Entry,
    Issued,
    Lasted,
    OpLog,
    lasted,
    log_of_graphs,
    log_of_run,
    ran,
    threads_sending,
)
from autopar.world import ranks

STEP, PHASES = "autopar step", ("forward", "backward")


@dataclass(frozen=True)
class MeasuredStep(Seen):
    """A measured step of one rank, forward and backward. Get one from `par.timeline(*inputs)`.

    A collective is on the wire from when the last rank of its group has come to it until its end,
    in its lane, where the first that was issued counts as the one that runs. `exposed` is for how
    long the thread that computes stood in the wait for it, which includes waking up, but not while
    nothing of this rank was on the wire, as others had not come yet: that is skew. `hidden` is when
    it was on the wire and no wait was on.
    """

    ran: tuple[Span, ...]
    taken: float
    rank: int = 0

    @property
    def title(self) -> str:
        return f"a measured step of rank {self.rank}, forward and backward"

    @property
    def process(self) -> str:
        return f"rank {self.rank}, measured"

    @property
    def spans(self) -> tuple[Span, ...]:
        return self.ran

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.taken


def phase(name: str) -> Any:
    """Marks a part of the step; "forward" and "backward" are known."""
    return record_function(f"autopar {name}")


@contextmanager
def restore_after(module: nn.Module) -> Iterator[None]:
    """Gradients and buffers afterwards are those of before."""
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def backward(found: Any) -> None:
    """Of the first scalar among what a model returned, else of everything in it; nothing where no
    gradient is wanted.
    """
    leaves = [x for x in pytree.tree_leaves(found) if isinstance(x, torch.Tensor)]
    leaves = [x for x in leaves if x.requires_grad]
    leaves = next(([x] for x in leaves if not x.dim()), leaves)
    if leaves:
        torch.autograd.backward(leaves, [torch.ones_like(x) for x in leaves])


def profile_step(step: Callable[[], None]) -> list[Any]:
    """Runs the step once, all ranks from the same moment on; what torch.profiler saw of it."""
    seen = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    with seen:
        ranks.meet()
        with record_function(STEP):
            step()
    return list(seen.events())


def measure_step(
    run: Callable[..., Any],
    step: Callable[[Callable[..., Any]], None],
    times: int = 1,
    passes: int = 2,
) -> list[MeasuredStep]:
    """So many steps of the running ranks, after `passes` that are not looked at. Collective. `step`
    calls what it is given in the place of `run`, which runs the module, and goes backward.
    """

    compiled = isinstance(run, Scheduled) and run.backend not in (None, "aot_eager")
    if compiled or not isinstance(run, Scheduled | fx.GraphModule):
        raise PlanError(
            "a timeline is measured of graphs that run as they are: apply the plan with "
            "backend=None"
        )

    def marked(*values: Any) -> Any:
        with record_function(GRAPH):
            return run(*values)

    for _ in range(passes):
        ranks.together("running a step", lambda: step(run))
    script = ranks.together("listing what a step runs", lambda: _script(run, step))
    ranks.together("running a step again", lambda: step(run))  # as the last one was no usual one
    return [_once(lambda: step(marked), script) for _ in range(times)]


def _once(step: Callable[[], None], script: OpLog) -> MeasuredStep:
    events = ranks.together("profiling a step", lambda: profile_step(step))
    played = ranks.together("reading the profile", lambda: read_profile(events, script))
    return timeline(played, ranks.rank(), ranks.all_of(played.lasted))


def _script(run: Scheduled | fx.GraphModule, step: Callable[[Callable[..., Any]], None]) -> OpLog:
    if isinstance(run, fx.GraphModule):
        return log_of_run(run, step)
    if run.forward is None or run.backward is None:  # nothing wants gradients
        return log_of_run(run.module, step)
    return log_of_graphs([run.forward.graph, run.backward.graph])


class _Op(NamedTuple):
    """An op that ran; `entry` is its number in the script, -1 where that is not known."""

    name: str
    start: float  # microseconds
    end: float
    phase: str
    entry: int


class ReplayedStep(NamedTuple):
    """What one rank's profile says: the ops that ran beside the script, of the collectives among
    them when the transport was at work; in microseconds from `begin` on.
    """

    script: Sequence[Entry]
    ops: list[_Op]
    issued: list[_Op]
    collectives: list[Issued]
    ran: list[tuple[float, float]]
    begin: float
    seconds: float

    @property
    def waits(self) -> list[_Op]:
        return [op for op in self.ops if _waits(op, self.script)]

    @property
    def lasted(self) -> Lasted:
        return lasted(self.collectives, self.ran)


def read_profile(events: Sequence[Any], played: OpLog) -> ReplayedStep:
    """A profile. Raises PlanError where what ran is not what the script says."""
    script = played.entries
    whole = next(event for event in events if event.name == STEP)
    begin = whole.time_range.start
    ops = list(_Reader(played).read(whole, "", False))
    until = {script[op.entry].waits_for: op.end for op in reversed(ops) if _waits(op, script)}
    issued = [op for op in ops if op.entry >= 0 and script[op.entry].kind]
    collectives = [_issued(op, script[op.entry], until.get(op.entry, op.end)) for op in issued]
    when = ran(collectives, events, begin)
    seconds = whole.time_range.elapsed_us() / 1e6
    return ReplayedStep(script, ops, issued, collectives, when, begin, seconds)


def _issued(op: _Op, entry: Entry, until: float) -> Issued:
    return Issued(entry.kind, entry.group, entry.numbers, op.start, max(op.end, until))


def timeline(played: ReplayedStep, rank: int, everywhere: Sequence[Lasted]) -> MeasuredStep:
    """Of this rank, beside how long the collectives of all ranks `lasted`."""
    wire = threads_sending(played.collectives, rank, everywhere)
    sent = [(end - long, end) for (_, end), long in zip(played.ran, wire, strict=True)]
    waited = list(_waited(played, sent))
    spans = [*_computed(played.ops, played.script), *(span for _, span in waited)]
    spans += _collectives(played, sent, waited)
    begin = played.begin
    moved = [s._replace(start=(s.start - begin) / 1e6, end=(s.end - begin) / 1e6) for s in spans]
    return MeasuredStep(tuple(moved), played.seconds, rank)


def _waits(op: _Op, script: Sequence[Entry]) -> bool:
    return op.entry >= 0 and script[op.entry].communicates and not script[op.entry].kind


# -- the profile beside the script -----------------------------------------------------------------
class _Reader:
    """Walks through a profile and the script at once. Collectives and waits must be the same ones;
    in between an op is the next one of its name.
    """

    def __init__(self, script: OpLog) -> None:
        self.script, self.within = script
        self.anchors = [i for i, entry in enumerate(self.script) if entry.communicates]
        self.met, self.at = 0, 0  # anchors; entries

    def read(self, event: Any, now: str, within: bool) -> Iterator[_Op]:
        """The outermost ops below an event; those `within` are the script's."""
        for child in sorted(event.cpu_children, key=lambda e: e.time_range.start):
            name = child.name.removeprefix("autopar ")
            if "::" not in child.name or "autograd::" in child.name:
                inside = within or child.name in self.within
                yield from self.read(child, name if name in PHASES else now, inside)
            else:
                time, number = child.time_range, self._entry(child) if within else -1
                yield _Op(child.name, time.start, time.end, now, number)
        if event.name == STEP and self.met < len(self.anchors):
            self._refuse(self.anchors[self.met], "nothing")

    def _entry(self, event: Any) -> int:
        if event.name.startswith("_c10d_functional::") or event.name == "autopar::reduce":
            return self._anchor(event.name)
        limit = self.anchors[self.met] if self.met < len(self.anchors) else len(self.script)
        for number in range(self.at, limit):
            if self.script[number].op == event.name:
                self.at = number + 1
                return number
        below = [self._entry(child) for child in event.cpu_children]
        return next((number for number in below if number >= 0), -1)

    def _anchor(self, name: str) -> int:
        number = self.anchors[self.met] if self.met < len(self.anchors) else -1
        if number < 0 or self.script[number].op.rstrip("_") != name.rstrip("_"):
            self._refuse(number, name)
        self.met, self.at = self.met + 1, number + 1
        return number

    def _refuse(self, number: int, found: str) -> None:
        wanted = (
            "nothing" if number < 0 else f"{self.script[number].op} of {self.script[number].node}"
        )
        raise PlanError(
            f"the step that ran is not the one of the graph: collective {self.met + 1} is {found}, "
            f"the graph has {wanted}; a timeline is measured of what runs with backend=None"
        )


# -- spans, in microseconds of the profile ---------------------------------------------------------
def _computed(ops: Sequence[_Op], script: Sequence[Entry]) -> Iterator[Span]:
    for op in ops:
        if _waits(op, script):
            continue
        entry = script[op.entry] if op.entry >= 0 else Entry(op.name, op.name, "")
        kind = "issue" if entry.kind else "compute"
        name = entry.node or op.name
        yield Span(name, kind, COMPUTE, op.start, op.end, op.phase, entry.module)


def _waited(
    played: ReplayedStep, sent: Sequence[tuple[float, float]]
) -> Iterator[tuple[int, Span]]:
    """What was waited for, with the entry of the collective: while nothing of this rank is on the
    wire for other ranks, but after the collective's end for this thread to wake up.
    """
    places = {op.entry: place for place, op in enumerate(played.issued)}
    for op in played.waits:
        number = played.script[op.entry].waits_for
        entry = played.script[number if number >= 0 else op.entry]
        place = places.get(number)
        awake = op.start if place is None else sent[place][1]
        for start, end, still in _cut(op.start, op.end, [*sent, (awake, op.end)]):
            kind = "skew" if still else "wait"
            yield number, Span(entry.node, kind, WAITS, start, end, op.phase, entry.module)


def _cut(
    start: float, end: float, busy: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float, bool]]:
    """From start to end in pieces: (from, to, whether nothing was busy).

    >>> list(_cut(0, 9, [(5, 12), (1, 2), (4, 6)]))
    [(0, 1, True), (1, 2, False), (2, 4, True), (4, 9, False)]
    """
    now = since = start  # until where it is known; from where on something is busy
    for begin, until in sorted(busy):
        begin, until = max(begin, now), min(until, end)
        if begin >= until:
            continue
        if begin > now:
            if since < now:
                yield since, now, False
            yield now, begin, True
            since = begin
        now = until
    if since < now:
        yield since, now, False
    if now < end:
        yield now, end, True


def _collectives(
    played: ReplayedStep, sent: Sequence[tuple[float, float]], waited: Sequence[tuple[int, Span]]
) -> Iterator[Span]:
    waits = [(number, span) for number, span in waited if span.kind == "wait"]
    exposed: dict[int, float] = defaultdict(float)
    for number, span in waits:
        exposed[number] += span.seconds
    for op, one, (start, end) in zip(played.issued, played.collectives, sent, strict=True):
        entry = played.script[op.entry]
        met = sum(max(0.0, min(end, w.end) - max(start, w.start)) for _, w in waits)
        yield Span(
            entry.node,
            entry.kind,
            one.group.removeprefix("autopar/").partition("/")[2] or one.group,
            start,
            end,
            op.phase,
            entry.module,
            entry.bytes,
            exposed[op.entry] / 1e6,
            (end - start - met) / 1e6,
        )
