"""The timeline of a training step: spans of time on tracks, modelled or measured, with what is
hidden by computation and what is exposed.

step_events.py derives events from an emitted program, graph_events.py from the graphs that
AOTAutograd derived; engine.py simulates them on one compute stream and shared links, under
contention (cost/contention.py); liveness.py says how many bytes a derived graph holds.

`timeline` simulates a rewritten program; the planner shows it as `plan.timeline()` and compares
layouts with `bucket_seconds`, summary.py adds its figures to a plan's table. With overlapped
communication, small sums of gradients and gathers of weights are fused where that is faster, as in
the graphs that run (buckets.py).

`Seen` is what modelled and measured timelines (runtime/) share: their totals, a table for people,
and the file that ui.perfetto.dev shows.
"""

from __future__ import annotations

import dataclasses
import json
import os
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from rich.table import Table

from autopar.cost.simulator import buckets
from autopar.cost.simulator.engine import Event, Run, in_order, simulate_overlap
from autopar.cost.simulator.step_events import Events
from autopar.ir.program import Program
from autopar.world import World

COMPUTE, WAITS = "compute", "waits"  # the tracks that are not lanes
_NOT_COLLECTIVES = ("compute", "issue", "wait", "skew", "send")  # kinds of span


class Span(NamedTuple):
    """Something that took from `start` to `end`, in seconds since the step began.

    `kind`: "compute"; "issue", the computing thread starts a collective; "wait", it stands still
    for one; "skew", it stands still for a rank that is late; "send", a tensor goes to another
    stage; or the collective's own kind, as "all_gather". `name`: the node's. `module`: the path of
    the subgraph that it belongs to, "blocks.0.mlp". `track`: "compute", "waits", or the lane, which
    is the process group. `bytes`: what this rank sends. For a collective, `exposed` are the seconds
    that computing stood still for it, or for a modelled one was slowed down by it; `hidden` are the
    other seconds of its run.
    """

    name: str
    kind: str
    track: str
    start: float
    end: float
    phase: str = ""
    module: str = ""
    bytes: float = 0.0
    exposed: float = 0.0
    hidden: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Total(NamedTuple):
    """The sum over the collectives of one kind, in bytes and seconds."""

    kind: str
    number: int
    bytes: float
    communication: float
    hidden: float
    exposed: float


class Seen(ABC):
    """The interface of every timeline: `spans`, their totals, `table()` and `save(path)`.

    A step takes `computing` + `exposed_seconds` + `skew_seconds` + `issuing` + `other_seconds`. The
    last three are 0 for a modelled step. For a measured one they are the waits for ranks that were
    late, the time that starting collectives took, and Python and autograd.
    """

    @property
    @abstractmethod
    def title(self) -> str:
        """The title of the table."""

    @property
    @abstractmethod
    def process(self) -> str:
        """The name of the process in the trace."""

    @property
    @abstractmethod
    def spans(self) -> Sequence[Span]:
        """The spans of the step."""

    @property
    @abstractmethod
    def seconds(self) -> float:
        """Seconds of the step."""

    @cached_property
    def computing(self) -> float:
        """Seconds in which the compute stream computes."""
        return sum(span.seconds for span in self.spans if span.kind == "compute")

    @cached_property
    def communication(self) -> float:
        """Seconds in which collectives run, added up over the lanes."""
        return sum(total.communication for total in self.totals())

    @cached_property
    def exposed_seconds(self) -> float:
        """Seconds in which the compute stream stands still for collectives that run."""
        return sum(span.seconds for span in self.spans if span.kind == "wait")

    @cached_property
    def skew_seconds(self) -> float:
        """Seconds in which it stands still while no collective runs, as other ranks are late."""
        return sum(span.seconds for span in self.spans if span.kind == "skew")

    @cached_property
    def hidden_seconds(self) -> float:
        """Seconds of communication that run while the compute stream does not stand still."""
        return sum(total.hidden for total in self.totals())

    @cached_property
    def issuing(self) -> float:
        """Seconds that the computing thread takes to start collectives."""
        return sum(span.seconds for span in self.spans if span.kind == "issue")

    @property
    def other_seconds(self) -> float:
        """Seconds of the step that are none of the others: Python and autograd."""
        accounted = self.computing + self.exposed_seconds + self.skew_seconds + self.issuing
        return self.seconds - accounted

    def totals(self) -> list[Total]:
        """Return one total for each kind of collective, by name."""
        spans = [span for span in self.spans if span.kind not in _NOT_COLLECTIVES]
        return [
            _total(kind, [span for span in spans if span.kind == kind])
            for kind in sorted({span.kind for span in spans})
        ]

    def table(self) -> Table:
        """Return the totals for people; print the table with rich."""
        table = Table("collectives", title=f"{self.title}, {self.seconds * 1e3:,.2f} ms")
        for heading in ("number", "MB sent", "ms", "hidden ms", "exposed ms"):
            table.add_column(heading, justify="right")
        totals = self.totals()
        everything = Total("all", *(sum(column) for column in list(zip(*totals, strict=True))[1:]))
        for total in [*totals, everything] if totals else []:
            times = (total.communication, total.hidden, total.exposed)
            size = f"{total.bytes / 1e6:,.2f}"
            table.add_row(
                total.kind, str(total.number), size, *(f"{time * 1e3:,.2f}" for time in times)
            )
        terms = {"computation": self.computing, "exposed": self.exposed_seconds}
        if self.issuing:
            terms |= {"late ranks": self.skew_seconds, "issuing": self.issuing}
            terms["neither"] = self.other_seconds
        table.caption = " + ".join(
            f"{name} {seconds * 1e3:,.2f}" for name, seconds in terms.items()
        )
        return table

    def trace(self) -> dict[str, Any]:
        """Return the timeline in Chrome's trace format: one track for computation, one for the
        waits, one for every lane.
        """
        lanes = {span.track for span in self.spans} - {COMPUTE, WAITS}
        rows = {track: row for row, track in enumerate((COMPUTE, WAITS, *sorted(lanes)))}
        metadata = [_entry("M", 0, name="process_name", args={"name": self.process})]
        for track, row in rows.items():
            metadata.append(_entry("M", row, name="thread_name", args={"name": track}))
            metadata.append(_entry("M", row, name="thread_sort_index", args={"sort_index": row}))
        span_events = [_trace_event(span, rows[span.track]) for span in self.spans]
        return {"traceEvents": [*metadata, *span_events], "displayTimeUnit": "ms"}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `trace()` as JSON; open it at ui.perfetto.dev."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.trace(), file)


def _total(kind: str, spans: Sequence[Span]) -> Total:
    """Return the sum over spans of one kind."""

    def summed(values: Iterable[float]) -> float:
        return float(sum(values))

    return Total(
        kind,
        len(spans),
        summed(span.bytes for span in spans),
        summed(span.seconds for span in spans),
        summed(span.hidden for span in spans),
        summed(span.exposed for span in spans),
    )


def _entry(phase: str, row: int, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "pid": 0, "tid": row, **more}


def _trace_event(span: Span, row: int) -> dict[str, Any]:
    """Return a span as an event of Chrome's trace format."""
    facts: dict[str, Any] = {"node": span.name, "module": span.module, "phase": span.phase}
    facts["seconds"] = span.seconds
    if span.kind not in _NOT_COLLECTIVES:
        facts |= {"bytes": span.bytes, "exposed_s": span.exposed, "hidden_s": span.hidden}
    moment = {"ts": span.start * 1e6, "dur": span.seconds * 1e6}
    short = span.name if span.kind == "compute" else f"{span.kind} {span.name}"
    label = f"{short} ({span.module})" if span.module else short
    return _entry("X", row, name=label, cat=span.kind, args=facts, **moment)


@dataclass(frozen=True)
class Timeline(Seen):
    """A simulated step: events with their start and end in seconds. `plan.timeline()` and
    `simulate` return one. Of a step in micro-batches it shows one that gathers all weights and sums
    all gradients: the first does the former, the last the latter.
    """

    events: tuple[Event, ...]
    run: Run
    before: Timeline | None = None  # a micro-batch between the first and the last
    times: float = 0  # how often that runs besides this one
    title = "a modelled step"
    process = "modelled"

    @property
    def seconds(self) -> float:
        """Seconds of the step, of all its micro-batches."""
        before = 0.0 if self.before is None else self.times * self.before.seconds
        return before + self.run.seconds

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        waits = (self._wait(*wait) for wait in self.run.waits)
        return (*(span for span in self._ran if span.seconds or span.track != COMPUTE), *waits)

    @cached_property
    def by_chain(self) -> dict[str, list[float]]:
        """For every chain the seconds of computation, of communication as it ran, and exposed. What
        a collective takes from computation that it runs beside is exposed, so that computation and
        exposed add up to the step. A bucket's seconds are divided among chains by their bytes in
        it.
        """
        by_chain: dict[str, list[float]] = defaultdict(lambda: [0.0] * 3)
        for event, span in zip(self.events, self._ran, strict=True):
            if not event.lane and event.seconds:
                by_chain[event.chain][0] += event.seconds
            for member in (event.members or (event,)) if event.lane else ():
                share = member.bytes / event.bytes if event.members else 1.0
                by_chain[member.chain][1] += share * span.seconds
                by_chain[member.chain][2] += share * span.exposed
        for chain, seconds in ({} if self.before is None else self.before.by_chain).items():
            by_chain[chain] = [
                a + self.times * b for a, b in zip(by_chain[chain], seconds, strict=True)
            ]
        return dict(by_chain)

    @cached_property
    def _ran(self) -> tuple[Span, ...]:
        return tuple(self._span(index) for index in range(len(self.events)))

    def _span(self, index: int) -> Span:
        event, start, end = self.events[index], self.run.start[index], self.run.end[index]
        exposed = self.run.exposed.get(index, 0.0)
        hidden = max(0.0, end - start - exposed) if event.lane else 0.0
        name = event.name.removeprefix(f"{event.kind} ")
        facts = event.phase, event.chain, event.bytes, exposed, hidden
        return Span(name, event.kind, event.lane or COMPUTE, start, end, *facts)

    def _wait(self, index: int, since: float, until: float) -> Span:
        event = self.events[index]
        name = event.name.removeprefix(f"{event.kind} ")
        return Span(name, "wait", WAITS, since, until, event.phase, event.chain)


def simulate(events: Iterable[Event], overlap: bool = True) -> Timeline:
    """Run the events one after the other, or with overlapped communication as the scheduler orders
    it.
    """
    listed = tuple(events)
    return Timeline(listed, simulate_overlap(listed) if overlap else in_order(listed))


def timeline(program: Program, world: World, overlap: bool = True) -> Timeline:
    """Return the modelled step of a program after `rewrite` or a later pass; with overlapped
    communication the shortest one over the sizes of buckets, no buckets among them.
    """
    last = _shortest(Events(program, world), overlap)
    assert program.plan is not None
    if program.plan.microbatches == 1:
        return last
    others = program.plan.microbatches - 1
    events = Events(program, world, between=True)
    if program.plan.interleaved and overlap:
        return dataclasses.replace(last, before=interleave(events.run()), times=others / 2)
    return dataclasses.replace(last, before=_shortest(events, overlap), times=others)


def interleave(events: Sequence[Event]) -> Timeline:
    """Return the timeline of two micro-batches with these events each, turn by turn."""
    both = [
        event._replace(after=tuple(2 * index + number for index in event.after))
        for event in events
        for number in (0, 1)
    ]
    return simulate(both)


def _shortest(step: Events, overlap: bool) -> Timeline:
    if not overlap:
        return simulate(step.run(), overlap=False)
    return min(_bucketed_timelines(step), key=lambda candidate: candidate.seconds)


def halves_of_backward(
    program: Program, world: World, received: Collection[str]
) -> tuple[float, float]:
    """Return the modelled seconds of a micro-batch's backward in two halves: what the gradients of
    the placeholders `received` need, and the rest. Each half hides its own communication alone.
    """
    step = Events(program, world, between=True)
    events = step.run()
    nodes = program.module.graph.find_nodes(op="placeholder")
    names = {node.name for node in nodes if node.name in received}
    wanted = [i for node in step.nodes if node.name in names for i in step.gradients[node]]
    first = set[int]()
    while wanted:
        index = wanted.pop()
        if index not in first:
            first.add(index)
            wanted.extend(events[index].after)
    backward = [i for i, event in enumerate(events) if event.phase == "backward"]
    halves = ([i for i in backward if i in first], [i for i in backward if i not in first])
    inputs, weights = (simulate(_alone(events, half)).seconds for half in halves)
    return inputs, weights


def _alone(events: Sequence[Event], indices: Sequence[int]) -> list[Event]:
    """Return some of the events, which wait for one another alone."""
    places = {index: place for place, index in enumerate(indices)}
    return [
        events[index]._replace(after=tuple(places[i] for i in events[index].after if i in places))
        for index in indices
    ]


def bucket_seconds(program: Program, world: World) -> tuple[float, ...]:
    """Return the seconds that `timeline` compares: the step without buckets, and with those of each
    size.
    """
    return tuple(candidate.seconds for candidate in _bucketed_timelines(Events(program, world)))


def _bucketed_timelines(step: Events) -> Iterator[Timeline]:
    """Yield the step's timeline without buckets, then with those of each size."""
    apart = tuple(step.run())
    run = simulate_overlap(apart)
    first = Timeline(apart, run)
    yield first
    keys = [step.joinable.get(index, (None,))[0] for index in range(len(apart))]
    leads = buckets.leading(apart, step.products)
    timelines: dict[Hashable, Timeline] = {(): first}
    for size in buckets.SIZES:
        fused = buckets.together(apart, keys, leads, run, size)
        key = tuple(tuple(members) for members in fused)
        if key not in timelines:
            events = buckets.fuse_buckets(apart, fused, step.fuse)
            timelines[key] = first  # without buckets, where these wait for one another
            if events is not None:
                timelines[key] = Timeline(events, simulate_overlap(events, defers=(run.defer,)))
        yield timelines[key]
