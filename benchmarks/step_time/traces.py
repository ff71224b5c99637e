"""Where a step's time goes, of each contestant: from the profiles that step_time --trace left.

    python -m benchmarks.step_time --models gpt --rates 400mbit --shapes 2x2 --trace out/trace
    python -m benchmarks.step_time.traces out/trace

Of rank 0: computing is when one of torch's operators runs, communicating when gloo is in a
collective; what is both is hidden, the rest of the communication exposed; neither is Python,
autograd and waiting for a turn on a core.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Span = tuple[float, float]  # from, to


@dataclass(frozen=True)
class Account:
    """Seconds of a step, and how many collectives of each kind it had."""

    name: str
    step: float
    computing: float
    communicating: float
    hidden: float
    collectives: Counter[str]

    @property
    def exposed(self) -> float:
        return self.communicating - self.hidden

    @property
    def neither(self) -> float:
        return self.step - self.computing - self.exposed


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same instants, as spans in order that do not touch.

    >>> merged([(3, 4), (0, 1), (1, 2), (0.5, 0.6)])
    [(0, 2), (3, 4)]
    """
    combined: list[Span] = []
    for start, end in sorted(spans):
        if combined and start <= combined[-1][1]:
            combined[-1] = (combined[-1][0], max(end, combined[-1][1]))
        else:
            combined.append((start, end))
    return combined


def total(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def common(a: list[Span], b: list[Span]) -> list[Span]:
    """The instants of both, of merged spans.

    >>> common([(0, 2), (3, 5)], [(1, 4)])
    [(1, 2), (3, 4)]
    """
    overlaps, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            overlaps.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return overlaps


def account(name: str, events: Iterable[dict[str, Any]]) -> Account:
    """Of one step's trace; its times are in µs."""
    computing, communicating, everything = [], [], []
    kinds: Counter[str] = Counter()
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in ("cpu_op", "user_annotation"):
            continue
        span = (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        everything.append(span)
        kind = event["name"].removeprefix("gloo:")
        if kind != event["name"]:
            communicating.append(span)
            kinds[kind] += 1
        elif event["name"].startswith("aten::"):
            computing.append(span)
    first, last = min(s for s, _ in everything), max(e for _, e in everything)
    compute, transfers = merged(computing), merged(communicating)
    hidden = total(common(compute, transfers))
    return Account(name, last - first, total(compute), total(transfers), hidden, kinds)


def accounts(folder: Path) -> list[Account]:
    """Of every contestant that has a trace of rank 0 there, by step time."""
    results = []
    for path in folder.glob("*.0.json"):
        events = json.loads(path.read_text())["traceEvents"]
        results.append(account(path.name.removesuffix(".0.json").replace("_", " "), events))
    return sorted(results, key=lambda result: result.step)


def table(results: list[Account]) -> Table:
    shown = Table("contestant", title="a profiled step of rank 0, forward and backward, in s")
    for heading in ("step", "computing", "communicating", "hidden", "exposed", "neither"):
        shown.add_column(heading, justify="right")
    shown.add_column("collectives")
    for result in results:
        figures = (
            result.step, result.computing, result.communicating, result.hidden, result.exposed,
            result.neither,
        )  # fmt: skip
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(result.collectives.items()))
        shown.add_row(result.name, *(f"{figure:.3f}" for figure in figures), kinds)
    return shown


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="what step_time --trace was given")
    folder = parser.parse_args(arguments).folder
    results = accounts(folder)
    if not results:
        print(f"{folder} has no traces: run benchmarks.step_time --trace {folder}", file=sys.stderr)
        return 2
    Console(highlight=False, width=None if sys.stdout.isatty() else 130).print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
