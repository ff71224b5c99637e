"""Recorded steps rated anew: what today's cost model says of runs that were timed before, without
running them again.

    python -m benchmarks.model.recorded

predicted.json has cells of `benchmarks.step_time`, each with the world that was calibrated for
it, and for every layout the steps as timed and the modelled step of that day. Every layout is
planned on that world again (about two minutes of one core). One that comes to another mesh today is
another plan than the one that ran, so it counts in neither mean.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

import autopar
from autopar import World
from benchmarks.cluster import rate_text
from benchmarks.model.predicted import Pair
from benchmarks.models import SUBJECTS
from benchmarks.step_time import cells
from benchmarks.step_time.forced import FORCED

RECORDS = Path(__file__).with_name("predicted.json")
Planned = Callable[[str, str, str], tuple[str, float]]  # by model, world and layout: mesh, seconds


class Row(NamedTuple):
    """A layout of one cell: its modelled step of that day and of today, each with the measured one;
    `mesh` is today's, `same` whether it is the recorded one.
    """

    cell: str
    then: Pair
    now: Pair
    mesh: str
    same: bool


def rows(records: dict[str, Any], planned: Planned) -> Iterator[Row]:
    """Yield a row for every layout that stands in every recorded cell."""
    for cell in records["cells"]:
        for timed in cells.standing(cell):
            name, measured = timed["name"].removeprefix("autopar "), cells.median(timed)
            mesh, seconds = planned(cell["model"], cell["world"], name)
            then, now = (Pair(name, s, measured) for s in (timed["modelled"], seconds))
            where = f"{cell['date']}, {rate_text(cell['rate'])}"
            yield Row(where, then, now, mesh, mesh == timed["mesh"])


def means(recorded: list[Row]) -> tuple[float, float]:
    """Return the mean error of the rows that can be compared, as modelled then and now."""
    same = [row for row in recorded if row.same]
    return (
        statistics.mean(row.then.error for row in same),
        statistics.mean(row.now.error for row in same),
    )


def planner(records: dict[str, Any]) -> Planned:
    """Return a function that plans a layout on a recorded world, each once."""
    worlds = {name: World.from_json(data, name) for name, data in records["worlds"].items()}

    @cache
    def planned(model: str, world: str, layout: str) -> tuple[str, float]:
        subject = SUBJECTS[model]
        batch = subject.batches(1)[0]
        plan = autopar.plan(
            subject.model(), worlds[world], batch, layout=FORCED.get(layout, layout)
        )
        return str(plan.mesh), plan.step_seconds

    return planned


def table(recorded: list[Row]) -> Table:
    shown = Table("cell", "layout", "mesh")
    for heading in ("measured s", "then s", "÷", "now s", "÷"):
        shown.add_column(heading, justify="right")
    for row in recorded:
        then, now = row.then, row.now
        figures = [f"{now.measured:.3f}"]
        for pair in (then, now):
            figures += [f"{pair.modelled:.3f}", f"{pair.modelled / pair.measured:.2f}"]
        mesh = row.mesh if row.same else f"{row.mesh}: another plan"
        shown.add_row(row.cell, now.name, mesh, *figures)
    return shown


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.parse_args(arguments)
    records = cells.load(RECORDS)
    recorded = list(rows(records, planner(records)))
    then, now = means(recorded)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 130)
    compared = sum(row.same for row in recorded)
    console.print(
        table(recorded),
        f"{compared} of {len(recorded)} rows: "
        f"mean error {then:.1%} as modelled then, {now:.1%} now",
        sep="\n",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
