"""What hiding communication gains: layouts with their graphs scheduled, and as they are.

    python -m benchmarks.step_time.overlap
    python -m benchmarks.step_time.overlap --shape 2x2 --models gpt --rates 1gbit --layouts ddp

On the emulated cluster, each model at its own rate; two ranks, as a rank that shares its core with
another leaves it to that one where it waits, and hides little. Every layout takes part with all
passes, with buckets alone, with the order alone, and waiting for every collective at once; they
take turns.
Then three steps with all passes and three that wait are profiled (`par.timeline`): how much of the
communication is hidden, beside what the critical path allows.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cluster import Failed, Unavailable, read_shapes, stop_on_signals
from benchmarks.models import SUBJECTS
from benchmarks.step_time import cells
from benchmarks.step_time.cells import Cell, Settings
from benchmarks.step_time.forced import FORCED

LAYOUTS = ("ddp", "fsdp", "megatron", "megatron-sp")
HOW = ("", "+bucket", "+schedule", "+waiting")  # to all collectives of a step
GAIN, HIDDEN = 1.25, 0.8  # wanted: unscheduled over scheduled, of what can be hidden
WINDOW = (0.5, 1.5)  # of communication over computation: where the gain is asked for


MEANING = (
    "hidden: of the seconds in which a rank has something on the wire (each collective from when "
    "its last rank came; mean of the ranks, median step), those in which it stands in no wait; "
    "could be: what no order of the modelled step must expose, with the seconds of computing and "
    "communication as measured, one op and on each link one collective at a time (products in "
    "pieces may hide more); late: seconds of waits for ranks that come later, which are no "
    "communication"
)


@dataclass(frozen=True)
class Gain:
    """Of one layout. `ratio`: communication over computation, modelled; `gains`: the step that
    waits over the one with each of HOW, by steps of one round; `seen`: what its profiled steps
    showed (`ranks.look`), `waiting`: those of the one that waits.
    """

    name: str
    ratio: float
    gains: dict[str, float]
    spread: tuple[float, float]
    seen: dict[str, float]
    waiting: dict[str, float]

    @property
    def counts(self) -> bool:
        return WINDOW[0] <= self.ratio <= WINDOW[1]

    @property
    def of_possible(self) -> float:
        """At most 1: what could be is of whole products, and pieces may hide more."""
        if self.seen["hidden"] >= self.seen["could"]:
            return 1.0
        return self.seen["hidden"] / self.seen["could"]


def gains(cell: Cell) -> list[Gain]:
    """Of every layout whose four contestants were made and right."""
    by_name = {timed["name"]: timed for timed in cells.standing(cell)}
    collected = []
    for name in [n.removesuffix("+waiting") for n in by_name if n.endswith("+waiting")]:
        waiting, timed = by_name[f"{name}+waiting"], by_name.get(name)
        if timed is None:
            continue
        others = {how: by_name[name + how] for how in HOW[:-1] if name + how in by_name}
        ratios = [b / a for a, b in zip(timed["seconds"], waiting["seconds"], strict=True)]
        seen = timed["seen"]
        collected.append(
            Gain(
                name.removeprefix("autopar "),
                seen["communication_over_computation"],
                {how: cells.paired(other, waiting) for how, other in others.items()},
                (min(ratios), max(ratios)),
                seen,
                waiting["seen"],
            )
        )
    return collected


def table(cell: Cell) -> Table:
    shown = Table("layout", title=cells.title(cell), title_justify="left", caption=MEANING)
    for heading in (
        "comm. ÷ comp.", "waiting ÷ all", "least–most", "÷ buckets", "÷ order", "comm. s",
        "exposed s", "late s", "hidden", "waiting hides", "could be",
    ):  # fmt: skip
        shown.add_column(heading, justify="right")
    for entry in gains(cell):
        buckets, order = (entry.gains.get(how, float("nan")) for how in HOW[1:3])
        least, most = entry.spread
        times = (f"{entry.seen[part]:.2f}" for part in ("communication", "exposed", "skew"))
        parts = entry.seen["hidden"], entry.waiting.get("hidden", float("nan")), entry.seen["could"]
        shown.add_row(
            entry.name, f"{entry.ratio:.2f}", f"{entry.gains['']:.2f}", f"{least:.2f}–{most:.2f}",
            f"{buckets:.2f}", f"{order:.2f}", *times, *(f"{part:.0%}" for part in parts),
        )  # fmt: skip
    for timed in cell["contestants"]:
        if timed["reason"]:
            shown.add_row(timed["name"], *[""] * 10, timed["reason"])
    return shown


def sentence(collected: list[Gain]) -> str:
    """The medians over what counts."""

    def said(what: str, figure: str, met: bool) -> str:
        return f"{what} {figure} ({'met' if met else '[bold red]missed[/]'})"

    counting = [entry for entry in collected if entry.counts]
    if not counting:
        return f"no layout's communication is {WINDOW[0]} to {WINDOW[1]} × its computation"
    gain = statistics.median(entry.gains[""] for entry in counting)
    hidden = statistics.median(entry.of_possible for entry in counting)
    return (
        f"{len(counting)} of {len(collected)} layouts with communication {WINDOW[0]} to "
        f"{WINDOW[1]} × computation: {said(f'gain, wanted {GAIN}:', f'{gain:.2f}', gain >= GAIN)}; "
        f"{said(f'hidden of what can be, wanted {HIDDEN:.0%}:', f'{hidden:.0%}', hidden >= HIDDEN)}"
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=SUBJECTS, default=("gpt", "long"))
    add("--rates", nargs="+", default=("700mbit", "250mbit"), help="one for each model")
    add("--shape", default="2x1", help="nodes x ranks a node")
    add("--layouts", nargs="+", choices=FORCED, default=LAYOUTS, metavar="NAME")
    add("--steps", type=int, default=5)
    add("--warmups", type=int, default=2)
    add("--timeout", type=float, default=1800.0, help="seconds a cell")
    add("--calibrate", type=float, default=60.0, help="seconds; 0: the world is written by hand")
    add("--out", type=Path, default=Path("out/overlap"))
    options = parser.parse_args(arguments)
    if len(options.rates) != len(options.models):
        parser.error(f"{len(options.models)} models, but {len(options.rates)} rates: one for each")
    try:
        options.shapes = read_shapes(options.shape, options.rates)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    stop_on_signals()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    contestants = tuple(f"autopar {name}{how}" for name in options.layouts for how in HOW)
    everything: list[Gain] = []
    for model, shape in zip(options.models, options.shapes, strict=True):
        settings = Settings(
            contestants, options.steps, options.warmups, options.timeout, options.calibrate,
            seen=True,
        )  # fmt: skip
        try:
            cell: dict[str, Any] = cells.measured(model, shape, settings)
        except (Failed, Unavailable) as error:
            console.print(f"[bold red]{model}, {shape}: failed[/]: {error}", soft_wrap=True)
            return 1
        command = "python -m benchmarks.step_time.overlap " + shlex.join(sys.argv[1:])
        cells.keep(options.out / "results.json", cell, command)
        console.print(table(cell))
        everything += gains(cell)
    console.print(sentence(everything))
    return 0


if __name__ == "__main__":
    sys.exit(main())
