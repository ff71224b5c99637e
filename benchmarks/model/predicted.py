"""Modelled against measured: many layouts forced on one emulated cluster.

    python -m benchmarks.model.predicted --rates 200mbit 1gbit

Prints for each rate every layout with both times, the median error, Kendall's rank correlation, and
where the layout that `auto` picks stands among the measured; and the same of forward and backward
as they were scheduled, which knows more than a plan: the pieces that are communicated. The rank
correlation of every other step with the rest says how far measured ranks can be told at all.
Layouts are timed in groups, so that their weights fit in memory; `auto` and ddp are in each. What
the machine did meanwhile met all steps of a round alike, so a step counts by what those two took in
its round: times of different minutes are never compared. All as timed is in the JSON.
"""

from __future__ import annotations

import argparse
import itertools
import math
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cluster import (
    Failed,
    Shape,
    Unavailable,
    rate_text,
    read_shapes,
    stop_on_signals,
)
from benchmarks.models import SUBJECTS
from benchmarks.step_time import cells
from benchmarks.step_time.cells import Cell, Settings
from benchmarks.step_time.forced import FORCED

ALWAYS = ("autopar auto", "autopar ddp")
STEPS = ("seconds", "forward_backward")  # a figure a step
ERROR, RANKS, NEAR = 0.12, 0.85, 1.05  # wanted: median error, Kendall's tau, auto over the fastest


@dataclass(frozen=True)
class Pair:
    """A layout's modelled and measured step in s."""

    name: str
    modelled: float
    measured: float

    @property
    def error(self) -> float:
        return abs(self.modelled - self.measured) / self.measured


def kendall(pairs: Sequence[Pair]) -> float:
    """Kendall's tau-b of modelled and measured: 1 where they order all alike, ties allowed for."""
    agreeing, modelled_apart, measured_apart = 0, 0, 0
    for a, b in itertools.combinations(pairs, 2):
        modelled, measured = _sign(a.modelled - b.modelled), _sign(a.measured - b.measured)
        agreeing += modelled * measured
        modelled_apart += abs(modelled)
        measured_apart += abs(measured)
    return agreeing / math.sqrt(modelled_apart * measured_apart) if agreeing else 0.0


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)


def pairs(cell: Cell, modelled: str = "modelled", measured: str = "seconds") -> list[Pair]:
    """By name, without auto; of a layout that was timed in several groups, the median."""
    return [
        Pair(timed["name"].removeprefix("autopar "), timed[modelled], cells.median(timed, measured))
        for timed in cells.standing(cell)
        if timed["name"] != "autopar auto"
    ]


def graph_pairs(cell: Cell) -> list[Pair]:
    """Of the graphs that run: the plan knows nothing of the pieces they are cut into."""
    return pairs(cell, "scheduled", "forward_backward")


def repeated(cell: Cell) -> float:
    """Kendall's tau of the medians of every other step against those of the steps in between."""
    return kendall(
        [
            Pair(timed["name"], statistics.median(steps[::2]), statistics.median(steps[1::2]))
            for timed in cells.standing(cell)
            if timed["name"] != "autopar auto" and len(steps := timed["seconds"]) > 1
        ]
    )


def joined(groups: Sequence[Cell]) -> Cell:
    """The groups of one cell as one; the steps of a contestant of several groups together."""
    contestants: dict[str, dict[str, Any]] = {}
    for timed in itertools.chain.from_iterable(group["contestants"] for group in groups):
        known = contestants.setdefault(timed["name"], {**timed, **{key: [] for key in STEPS}})
        for what in STEPS:
            known[what] = known[what] + timed[what]
        known["reason"] = known["reason"] or timed["reason"]
    return {**groups[0], "contestants": list(contestants.values())}


def levelled(groups: Sequence[Cell]) -> list[Cell]:
    """With every round's steps as if `auto` and ddp had taken in it, in the geometric mean, what
    they do in the middle over all rounds of all groups.
    """
    paces = [{what: _pace(group, what) for what in STEPS} for group in groups]
    levelled_groups = []
    for group, pace in zip(groups, paces, strict=True):
        contestants = [dict(timed) for timed in group["contestants"]]
        for what in STEPS:
            usual = statistics.median(
                itertools.chain.from_iterable(round_pace[what] for round_pace in paces)
            )
            for timed in contestants:
                timed[what] = [x * usual / there for x, there in zip(timed[what], pace[what])]
        levelled_groups.append({**group, "contestants": contestants})
    return levelled_groups


def _pace(group: Cell, what: str) -> list[float]:
    """Of every round, in s. Raises Failed where neither of the two stands."""
    always = [timed[what] for timed in cells.standing(group) if timed["name"] in ALWAYS]
    if not always:
        raise Failed(f"neither of {ALWAYS} came through in one group: {cells.title(group)}")
    return [statistics.geometric_mean(steps) for steps in zip(*always)]


def drift(groups: Sequence[Cell]) -> float:
    """The largest over the smallest median of ddp among the groups: what is no layout's doing."""
    medians = [
        cells.median(timed)
        for group in groups
        for timed in cells.standing(group)
        if timed["name"] == "autopar ddp"
    ]
    return max(medians) / min(medians) if medians else float("nan")


# -- output ----------------------------------------------------------------------------------------
def table(cell: Cell) -> Table:
    shown = Table("layout", title=cells.title(cell), title_justify="left")
    for heading in ("modelled s", "measured s", "÷", "its graphs s", "measured s", "÷"):
        shown.add_column(heading, justify="right")
    both = zip(pairs(cell), graph_pairs(cell), strict=True)
    for step, graphs in sorted(both, key=lambda both: both[0].measured):
        shown.add_row(step.name, *_figures(step), *_figures(graphs))
    for timed in cell["contestants"]:
        if timed["reason"]:
            shown.add_row(timed["name"], "", "", timed["reason"])
    return shown


def _figures(pair: Pair) -> tuple[str, str, str]:
    ratio = pair.modelled / pair.measured
    return f"{pair.modelled:.3f}", f"{pair.measured:.3f}", f"{ratio:.2f}"


def summary(cell: Cell) -> dict[str, float]:
    """Median error and Kendall's tau, of steps as planned and of the graphs that run; auto's time
    over the fastest's, by steps of one round.
    """
    step_pairs, graphs = pairs(cell), graph_pairs(cell)
    fastest = min(step_pairs, key=lambda pair: pair.measured)
    auto = next((t for t in cells.standing(cell) if t["name"] == "autopar auto"), None)
    return {
        "layouts": len(step_pairs),
        "median_error": statistics.median(pair.error for pair in step_pairs),
        "kendall": kendall(step_pairs),
        "graphs_median_error": statistics.median(pair.error for pair in graphs),
        "graphs_kendall": kendall(graphs),
        "repeated": repeated(cell),
        "auto_over_fastest": cells.median(auto) / fastest.measured if auto else float("nan"),
    }


def sentence(figures: dict[str, float], drifted: float) -> str:
    def said(met: bool) -> str:
        return "met" if met else "[bold red]missed[/]"

    error, tau, auto = (figures[k] for k in ("median_error", "kendall", "auto_over_fastest"))
    graphs = f"{figures['graphs_median_error']:.1%} and {figures['graphs_kendall']:.2f}"
    return (
        f"{figures['layouts']} layouts: median error {error:.1%} (wanted {ERROR:.0%}: "
        f"{said(error <= ERROR)}); Kendall {tau:.2f} (wanted {RANKS}: {said(tau >= RANKS)}); auto "
        f"{auto:.2f} × the fastest (wanted {NEAR}: {said(auto <= NEAR)}); of the graphs "
        f"that run, error and Kendall {graphs}; of every other measured step with the rest, "
        f"Kendall {figures['repeated']:.2f}; ddp differed by {drifted:.2f} × between groups"
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", choices=SUBJECTS, default="gpt")
    add("--shape", default="2x2", help="nodes x ranks a node; the grids are for four ranks")
    add("--rates", nargs="+", default=("200mbit", "1gbit"))
    add("--layouts", nargs="+", choices=FORCED, default=list(FORCED), metavar="NAME")
    add("--group", type=int, default=7, help="layouts in memory at once, beside auto and ddp")
    add("--steps", type=int, default=5)
    add("--warmups", type=int, default=2)
    add("--timeout", type=float, default=1800.0, help="seconds a group")
    add("--calibrate", type=float, default=90.0, help="seconds; 0: the world is written by hand")
    add("--world", type=Path, help="of an earlier run at this one rate: it is not measured again")
    add("--out", type=Path, default=Path("out/predicted"))
    options = parser.parse_args(arguments)
    try:
        options.shapes = read_shapes(options.shape, options.rates)
    except ValueError as error:
        parser.error(str(error))
    if options.world is not None and (len(options.shapes) > 1 or not options.world.is_file()):
        parser.error("--world names the file of a world that was measured at the one rate given")
    return options


def groups_of(layouts: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """The contestants of each group."""
    named = [f"autopar {name}" for name in layouts if f"autopar {name}" not in ALWAYS]
    cut = [named[i : i + size] for i in range(0, len(named), size)] or [[]]
    return [(*ALWAYS, *group) for group in cut]


def run(shape: Shape, options: argparse.Namespace, console: Console) -> None:
    """One rate: its groups one after the other, on one world."""
    options.out.mkdir(parents=True, exist_ok=True)
    world = (options.world or options.out / f"world-{rate_text(shape.rate)}.json").absolute()
    if options.world is None:
        world.unlink(missing_ok=True)
    done = []
    for group in groups_of(options.layouts, options.group):
        settings = Settings(
            group, options.steps, options.warmups, options.timeout, options.calibrate,
            world=str(world),
        )  # fmt: skip
        done.append(cells.measured(options.model, shape, settings))
    cell = joined(levelled(done))
    figures = {**summary(cell), "drift": drift(done)}
    command = "python -m benchmarks.model.predicted " + shlex.join(sys.argv[1:])
    cells.keep(options.out / "results.json", {**cell, "groups": done, "summary": figures}, command)
    console.print(table(cell), sentence(figures, figures["drift"]), sep="\n")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    stop_on_signals()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    for shape in options.shapes:
        try:
            run(shape, options, console)
        except (Failed, Unavailable) as error:
            console.print(f"[bold red]{shape}: failed[/]: {error}", soft_wrap=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
