"""The timeline of a training step: every op and collective of a rewritten program, with what hides
under what.

With communication under computation small sums of gradients and gathers of weights go as one where
that is faster, as in the graphs that run (buckets.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from autopar.cost import buckets
from autopar.cost.events import Events
from autopar.cost.links import Event
from autopar.cost.simulate import Run, in_order, overlapped
from autopar.ir.program import Program
from autopar.spans import COMPUTE, WAITS, Seen, Span
from autopar.world import World


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
    return Timeline(listed, overlapped(listed) if overlap else in_order(listed))


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
    run = overlapped(apart)
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
                known[looks] = Timeline(events, overlapped(events, defers=(run.defer,)))
        yield known[looks]
