"""The timeline of a training step: every op and collective of a rewritten program, with what hides
under what.

With communication under computation small sums of gradients and gathers of weights go as one where
that is faster, as in the graphs that run (buckets.py).

What a timeline is made of, a modelled or a measured one: spans of time on tracks, what they add
up to, and the file that ui.perfetto.dev shows.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from rich.table import Table

from autopar.cost.simulator import buckets
from autopar.cost.simulator.engine import Run, in_order, simulate_overlap
from autopar.cost.simulator.links import Event
from autopar.cost.simulator.step_events import Events
from autopar.ir.program import Program
from autopar.world import World

COMPUTE, WAITS = "compute", "waits"  # the tracks that are no lanes
_OWN = ("compute", "issue", "wait", "skew")  # the kinds that are no collectives


class Span(NamedTuple):
    """Something that took from `start` to `end`, in seconds from where the step began.

    `kind`: "compute"; "issue", the thread that computes starting a collective; "wait", it stands
    still for one; "skew", it stands still for a rank that is late; or the collective's own kind, as
    "all_gather". `name`: the node's. `module`: the path of the subgraph that it belongs to,
    "blocks.0.mlp". `track`: "compute", "waits", or the lane, which is the process group. `bytes`:
    what this rank sends. Of a collective, `exposed` are the seconds that computing stood still for
    it, or of a modelled one lost beside it; `hidden` those that it ran meanwhile.
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
    """What the collectives of one kind add up to, in bytes and seconds."""

    kind: str
    number: int
    bytes: float
    communication: float
    hidden: float
    exposed: float


class Seen(ABC):
    """The face of every timeline: `spans`, their totals, `table()` and `save(path)`.

    A step takes `computing` + `exposed_seconds` + `skew_seconds` + `issuing` + `other_seconds`; the
    last three are 0 where it was modelled, and else the waits for ranks that were late, what the
    start of collectives took, and Python and autograd.
    """

    @property
    @abstractmethod
    def title(self) -> str:
        """What the table says it is of."""

    @property
    @abstractmethod
    def process(self) -> str:
        """What the trace calls it."""

    @property
    @abstractmethod
    def spans(self) -> Sequence[Span]:
        """What the step is made of."""

    @property
    @abstractmethod
    def seconds(self) -> float:
        """Of the whole step."""

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
        """For how long the compute stream stands still for collectives that run."""
        return sum(span.seconds for span in self.spans if span.kind == "wait")

    @cached_property
    def skew_seconds(self) -> float:
        """For how long it stands still while no collective runs, as other ranks are late."""
        return sum(span.seconds for span in self.spans if span.kind == "skew")

    @cached_property
    def hidden_seconds(self) -> float:
        """Of the communication, what runs while the compute stream does not stand still."""
        return sum(total.hidden for total in self.totals())

    @cached_property
    def issuing(self) -> float:
        """Seconds that the thread which computes takes to start collectives."""
        return sum(span.seconds for span in self.spans if span.kind == "issue")

    @property
    def other_seconds(self) -> float:
        known = self.computing + self.exposed_seconds + self.skew_seconds + self.issuing
        return self.seconds - known

    def totals(self) -> list[Total]:
        """One for each kind of collective, by name."""
        spans = [span for span in self.spans if span.kind not in _OWN]
        return [
            _total(kind, [span for span in spans if span.kind == kind])
            for kind in sorted({span.kind for span in spans})
        ]

    def table(self) -> Table:
        """The totals for people; print it with rich."""
        shown = Table("collectives", title=f"{self.title}, {self.seconds * 1e3:,.2f} ms")
        for heading in ("number", "MB sent", "ms", "hidden ms", "exposed ms"):
            shown.add_column(heading, justify="right")
        totals = self.totals()
        everything = Total("all", *(sum(column) for column in list(zip(*totals, strict=True))[1:]))
        for total in [*totals, everything] if totals else []:
            times = (total.communication, total.hidden, total.exposed)
            size = f"{total.bytes / 1e6:,.2f}"
            shown.add_row(
                total.kind, str(total.number), size, *(f"{time * 1e3:,.2f}" for time in times)
            )
        parts = {"computation": self.computing, "exposed": self.exposed_seconds}
        if self.issuing:
            parts |= {"late ranks": self.skew_seconds, "issuing": self.issuing}
            parts["neither"] = self.other_seconds
        shown.caption = " + ".join(f"{name} {part * 1e3:,.2f}" for name, part in parts.items())
        return shown

    def trace(self) -> dict[str, Any]:
        """The timeline in Chrome's trace format: one track for what is computed, one for the waits,
        one for every lane.
        """
        lanes = {span.track for span in self.spans} - {COMPUTE, WAITS}
        rows = {track: row for row, track in enumerate((COMPUTE, WAITS, *sorted(lanes)))}
        named = [_entry("M", 0, name="process_name", args={"name": self.process})]
        for track, row in rows.items():
            named.append(_entry("M", row, name="thread_name", args={"name": track}))
            named.append(_entry("M", row, name="thread_sort_index", args={"sort_index": row}))
        shown = [_shown(span, rows[span.track]) for span in self.spans]
        return {"traceEvents": [*named, *shown], "displayTimeUnit": "ms"}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `trace()` as JSON; open it at ui.perfetto.dev."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.trace(), file)


def _total(kind: str, spans: Sequence[Span]) -> Total:
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


def _shown(span: Span, row: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"node": span.name, "module": span.module, "phase": span.phase}
    facts["seconds"] = span.seconds
    if span.kind not in _OWN:
        facts |= {"bytes": span.bytes, "exposed_s": span.exposed, "hidden_s": span.hidden}
    moment = {"ts": span.start * 1e6, "dur": span.seconds * 1e6}
    short = span.name if span.kind == "compute" else f"{span.kind} {span.name}"
    shown = f"{short} ({span.module})" if span.module else short
    return _entry("X", row, name=shown, cat=span.kind, args=facts, **moment)


@dataclass(frozen=True)
class Timeline(Seen):
    """A simulated step: events with their start and end in seconds. Get one from `plan.timeline()`
    or `simulate`.
    """

    events: tuple[Event, ...]
    run: Run
    title = "a modelled step"
    process = "modelled"

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.run.seconds

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        waits = (self._wait(*wait) for wait in self.run.waits)
        return (*(span for span in self._ran if span.seconds or span.track != COMPUTE), *waits)

    @cached_property
    def by_chain(self) -> dict[str, list[float]]:
        """Of every chain: seconds of computation, of communication as it ran, and exposed; of a
        bucket each chain has as much as it has of its bytes.
        """
        found: dict[str, list[float]] = defaultdict(lambda: [0.0] * 3)
        for event, span in zip(self.events, self._ran, strict=True):
            if not event.lane and span.seconds:
                found[event.chain][0] += span.seconds
            for part in (event.parts or (event,)) if event.lane else ():
                share = part.bytes / event.bytes if event.parts else 1.0
                found[part.chain][1] += share * span.seconds
                found[part.chain][2] += share * span.exposed
        return dict(found)

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
    """Run the events: one after the other, or with communication under computation as the
    scheduler orders it.
    """
    listed = tuple(events)
    return Timeline(listed, simulate_overlap(listed) if overlap else in_order(listed))


def timeline(program: Program, world: World, overlap: bool = True) -> Timeline:
    """The modelled step of a program after `rewrite` or a later pass; with communication under
    computation that with the buckets which make it the shortest, none among them.
    """
    step = Events(program, world)
    if not overlap:
        return simulate(step.run(), overlap=False)
    return min(_in_buckets(step), key=lambda found: found.seconds)


def bucket_seconds(program: Program, world: World) -> tuple[float, ...]:
    """What `timeline` compares: the step without buckets, and with those of each size that is
    tried.
    """
    return tuple(found.seconds for found in _in_buckets(Events(program, world)))


def _in_buckets(step: Events) -> Iterator[Timeline]:
    apart = tuple(step.run())
    run = simulate_overlap(apart)
    first = Timeline(apart, run)
    yield first
    keys = [step.joinable.get(index, (None,))[0] for index in range(len(apart))]
    leads = buckets.leading(apart, step.products)
    known: dict[Hashable, Timeline] = {(): first}
    for size in buckets.SIZES:
        found = buckets.together(apart, keys, leads, run, size)
        looks = tuple(tuple(members) for members in found)
        if looks not in known:
            events = buckets.joined(apart, found, step.joint)
            known[looks] = first  # what stays where buckets wait for one another
            if events is not None:
                known[looks] = Timeline(events, simulate_overlap(events, defers=(run.defer,)))
        yield known[looks]
