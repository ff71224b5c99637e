"""What a timeline is made of, a modelled or a measured one: spans of time on tracks, what they add
up to, and the file that ui.perfetto.dev shows.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from rich.table import Table

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
