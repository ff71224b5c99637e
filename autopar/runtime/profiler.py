"""A training step as it ran on this rank, measured by torch.profiler on gloo.

`measure_step` runs the step and profiles it; the profile is read next to the step's op log
(op_log.py), which knows the nodes, groups and bytes that a profile does not; `timeline` makes spans
of both, each collective in the lane of its group. gloo's threads report when a collective begins
and ends. `ParallelModule.timeline` calls this module.
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

from autopar.cost.simulator import COMPUTE, WAITS, Seen, Span
from autopar.errors import PlanError
from autopar.ir.containers import tensors_in
from autopar.runtime.backends import Scheduled
from autopar.runtime.op_log import (
    GRAPH,
    Durations,
    Entry,
    IssuedCollective,
    OpLog,
    collective_periods,
    durations_by_group,
    log_of_graphs,
    log_of_run,
    seconds_sending,
)
from autopar.world import ranks

STEP, PHASES = "autopar step", ("forward", "backward")


@dataclass(frozen=True)
class MeasuredStep(Seen):
    """A measured step of one rank, forward and backward. Get one from `par.timeline(*inputs)`.

    A collective's span begins when the last rank of its group has come to it and ends with the
    collective, in the lane of its group, whose collectives run in the order of issue. `exposed` is
    how long the computing thread stood in the wait for it, which includes waking up, but not the
    time in which no collective of this rank was under way, as other ranks had not come yet: that is
    skew. `hidden` is how long it was under way while no wait was on.
    """

    measured_spans: tuple[Span, ...]
    step_seconds: float
    rank: int = 0

    @property
    def title(self) -> str:
        return f"a measured step of rank {self.rank}, forward and backward"

    @property
    def process(self) -> str:
        return f"rank {self.rank}, measured"

    @property
    def spans(self) -> tuple[Span, ...]:
        return self.measured_spans

    @property
    def seconds(self) -> float:
        """The seconds of the step from its begin to its end."""
        return self.step_seconds


def phase(name: str) -> Any:
    """Return a context that marks a part of the step in the profile; "forward" and "backward" are
    known.
    """
    return record_function(f"autopar {name}")


@contextmanager
def restore_after(module: nn.Module) -> Iterator[None]:
    """Restore gradients and buffers after the block to what they were before."""
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


def backward(results: Any) -> None:
    """Run the backward of the first scalar among the outputs, else of all of them; none where no
    output requires a gradient.
    """
    leaves = [x for x in tensors_in(results) if x.requires_grad]
    leaves = next(([x] for x in leaves if not x.dim()), leaves)
    if leaves:
        torch.autograd.backward(leaves, [torch.ones_like(x) for x in leaves])


def profile_step(step: Callable[[], None]) -> list[Any]:
    """Run the step once, from the same moment on all ranks, and return the events of
    torch.profiler.
    """
    profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    with profiler:
        ranks.meet()
        with record_function(STEP):
            step()
    return list(profiler.events())


def measure_step(
    run: Callable[..., Any],
    step: Callable[[Callable[..., Any]], None],
    times: int,
) -> list[MeasuredStep]:
    """Measure `times` steps of the running ranks, after two steps that are not measured.
    Collective. `step` runs the callable that it gets in the place of `run`, which runs the module,
    and then the backward. Raises PlanError where a compiler runs the graphs.
    """

    compiled = isinstance(run, Scheduled) and run.backend not in (None, "aot_eager")
    if compiled or not isinstance(run, Scheduled | fx.GraphModule):
        raise PlanError(
            "a timeline is measured of graphs that run as they are: apply the plan with "
            "backend=None"
        )

    def run_marked(*values: Any) -> Any:
        with record_function(GRAPH):
            return run(*values)

    for _ in range(2):
        ranks.together("running a step", lambda: step(run))
    log = ranks.together("listing what a step runs", lambda: _op_log(run, step))
    ranks.together(
        "running a step again", lambda: step(run)
    )  # as listing the ops slows a step down
    return [_profile_once(lambda: step(run_marked), log) for _ in range(times)]


def _profile_once(step: Callable[[], None], log: OpLog) -> MeasuredStep:
    events = ranks.together("profiling a step", lambda: profile_step(step))
    replay = ranks.together("reading the profile", lambda: read_profile(events, log))
    return timeline(replay, ranks.rank(), ranks.all_of(replay.durations))


def _op_log(run: Scheduled | fx.GraphModule, step: Callable[[Callable[..., Any]], None]) -> OpLog:
    if isinstance(run, fx.GraphModule):
        return log_of_run(run, step)
    if run.forward is None or run.backward is None:  # nothing wants gradients
        return log_of_run(run.module, step)
    return log_of_graphs([run.forward.graph, run.backward.graph])


class _Op(NamedTuple):
    """An op that ran; `entry` is its index in the op log, -1 where that is not known."""

    name: str
    start: float  # microseconds
    end: float
    phase: str
    entry: int


class ReplayedStep(NamedTuple):
    """One rank's profile, read next to the op log: the ops that ran, the collectives among them,
    and when each collective ran; in microseconds. The step began at `begin`.
    """

    entries: Sequence[Entry]
    ops: list[_Op]
    issued: list[_Op]
    collectives: list[IssuedCollective]
    periods: list[tuple[float, float]]
    begin: float
    seconds: float

    @property
    def waits(self) -> list[_Op]:
        return [op for op in self.ops if _is_wait(op, self.entries)]

    @property
    def durations(self) -> Durations:
        return durations_by_group(self.collectives, self.periods)


def read_profile(events: Sequence[Any], log: OpLog) -> ReplayedStep:
    """Read a profile next to the op log. Raises PlanError where other collectives ran than the log
    has.
    """
    entries = log.entries
    step_event = next(event for event in events if event.name == STEP)
    begin = step_event.time_range.start
    ops = list(_Reader(log).read(step_event, "", False))
    until = {entries[op.entry].waits_for: op.end for op in reversed(ops) if _is_wait(op, entries)}
    issued = [op for op in ops if op.entry >= 0 and entries[op.entry].kind]
    collectives = [
        _issued_collective(op, entries[op.entry], until.get(op.entry, op.end)) for op in issued
    ]
    periods = collective_periods(collectives, events, begin)
    seconds = step_event.time_range.elapsed_us() / 1e6
    return ReplayedStep(entries, ops, issued, collectives, periods, begin, seconds)


def _issued_collective(op: _Op, entry: Entry, until: float) -> IssuedCollective:
    return IssuedCollective(entry.kind, entry.group, entry.numbers, op.start, max(op.end, until))


def timeline(replay: ReplayedStep, rank: int, everywhere: Sequence[Durations]) -> MeasuredStep:
    """Return this rank's measured step. `everywhere`: how long the collectives of every rank
    lasted.
    """
    durations = seconds_sending(replay.collectives, rank, everywhere)
    sent = [
        (end - duration, end) for (_, end), duration in zip(replay.periods, durations, strict=True)
    ]
    waited = list(_wait_spans(replay, sent))
    spans = [*_compute_spans(replay.ops, replay.entries), *(span for _, span in waited)]
    spans += _collective_spans(replay, sent, waited)
    begin = replay.begin
    shifted = [s._replace(start=(s.start - begin) / 1e6, end=(s.end - begin) / 1e6) for s in spans]
    return MeasuredStep(tuple(shifted), replay.seconds, rank)


def _is_wait(op: _Op, entries: Sequence[Entry]) -> bool:
    return op.entry >= 0 and entries[op.entry].communicates and not entries[op.entry].kind


# -- the profile next to the op log ----------------------------------------------------------------
class _Reader:
    """Walks through a profile and the op log together. Collectives and waits must be the same in
    both; between two of them, an op is the next one of its name.
    """

    def __init__(self, log: OpLog) -> None:
        self.entries, self.within = log
        self.anchors = [i for i, entry in enumerate(self.entries) if entry.communicates]
        self.met, self.at = 0, 0  # anchors passed; next entry

    def read(self, event: Any, now: str, within: bool) -> Iterator[_Op]:
        """Yield the outermost ops below an event; those `within` belong to the log."""
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
        limit = self.anchors[self.met] if self.met < len(self.anchors) else len(self.entries)
        for number in range(self.at, limit):
            if self.entries[number].op == event.name:
                self.at = number + 1
                return number
        below = [self._entry(child) for child in event.cpu_children]
        return next((number for number in below if number >= 0), -1)

    def _anchor(self, name: str) -> int:
        number = self.anchors[self.met] if self.met < len(self.anchors) else -1
        if number < 0 or self.entries[number].op.rstrip("_") != name.rstrip("_"):
            self._refuse(number, name)
        self.met, self.at = self.met + 1, number + 1
        return number

    def _refuse(self, number: int, actual: str) -> None:
        expected = (
            "nothing" if number < 0 else f"{self.entries[number].op} of {self.entries[number].node}"
        )
        raise PlanError(
            f"the step that ran is not the one of the graph: collective {self.met + 1} is "
            f"{actual}, the graph has {expected}; a timeline is measured of what runs with "
            "backend=None"
        )


# -- spans, in microseconds of the profile ---------------------------------------------------------
def _compute_spans(ops: Sequence[_Op], entries: Sequence[Entry]) -> Iterator[Span]:
    for op in ops:
        if _is_wait(op, entries):
            continue
        entry = entries[op.entry] if op.entry >= 0 else Entry(op.name, op.name, "")
        kind = "issue" if entry.kind else "compute"
        name = entry.node or op.name
        yield Span(name, kind, COMPUTE, op.start, op.end, op.phase, entry.module)


def _wait_spans(
    replay: ReplayedStep, sent: Sequence[tuple[float, float]]
) -> Iterator[tuple[int, Span]]:
    """Yield the spans of waiting, each with the entry of the collective: "skew" while no collective
    of this rank is under way, as other ranks have not come yet; "wait" else, and while this thread
    wakes up after the collective has ended.
    """
    places = {op.entry: place for place, op in enumerate(replay.issued)}
    for op in replay.waits:
        number = replay.entries[op.entry].waits_for
        entry = replay.entries[number if number >= 0 else op.entry]
        place = places.get(number)
        awake = op.start if place is None else sent[place][1]
        for start, end, still in _split_time(op.start, op.end, [*sent, (awake, op.end)]):
            kind = "skew" if still else "wait"
            yield number, Span(entry.node, kind, WAITS, start, end, op.phase, entry.module)


def _split_time(
    start: float, end: float, busy: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float, bool]]:
    """Yield the time from start to end in pieces: (from, to, whether nothing was busy).

    >>> list(_split_time(0, 9, [(5, 12), (1, 2), (4, 6)]))
    [(0, 1, True), (1, 2, False), (2, 4, True), (4, 9, False)]
    """
    now = since = start  # the end of what is done; the begin of a busy piece
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


def _collective_spans(
    replay: ReplayedStep, sent: Sequence[tuple[float, float]], waited: Sequence[tuple[int, Span]]
) -> Iterator[Span]:
    waits = [(number, span) for number, span in waited if span.kind == "wait"]
    exposed: dict[int, float] = defaultdict(float)
    for number, span in waits:
        exposed[number] += span.seconds
    for op, collective, (start, end) in zip(replay.issued, replay.collectives, sent, strict=True):
        entry = replay.entries[op.entry]
        waited_us = sum(max(0.0, min(end, w.end) - max(start, w.start)) for _, w in waits)
        yield Span(
            entry.node,
            entry.kind,
            collective.group.removeprefix("autopar/").partition("/")[2] or collective.group,
            start,
            end,
            op.phase,
            entry.module,
            entry.bytes,
            exposed[op.entry] / 1e6,
            (end - start - waited_us) / 1e6,
        )
