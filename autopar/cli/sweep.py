"""`autopar sweep`: a target planned for several numbers of ranks and batches, and what each costs.

Example: autopar sweep llama3-8b --world dgx-h100 --ranks 64,128 --batch 64x4096,128x4096 is four
plans of two traces (tools/sweep.py). The table goes to stdout, the points to --csv, a page with
curves to --plot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.markup import escape
from rich.table import Table

from autopar.cli.command import build_target, report_errors, require_folder
from autopar.cli.options import (
    JsonOption,
    LayoutOption,
    MemoryOption,
    OptimizerOption,
    RecomputeOption,
    SchemaOption,
    TargetArgument,
    WorldOption,
    read_layout,
    read_memory,
    read_optimizer,
    read_world,
)
from autopar.cli.terminal import print_json, watch_progress
from autopar.cost.memory import Budget, Recompute
from autopar.errors import PlanError, WorldError
from autopar.ir.plan_table import format_bytes, format_count, format_ranks, format_seconds
from autopar.planner.request import PlanRequest
from autopar.tools import sweep_plot
from autopar.tools.console import console, print_line
from autopar.tools.sweep import Sweep, SweepPoint, plan_each, sweep_point, write_csv
from autopar.tools.targets import Batch, Target
from autopar.world import World

RanksListOption = Annotated[
    str | None,
    typer.Option("--ranks", metavar="N,N,…", help="Devices, as 64,128,256; left out: the world's."),
]
BatchListOption = Annotated[
    str | None,
    typer.Option(
        "--batch", metavar="SAMPLESxSEQUENCE,…", help="Global batches, as 64x4096,128x4096."
    ),
]
PriceOption = Annotated[
    float | None, typer.Option(min=0.0, help="Of one device for an hour: adds the cost of tokens.")
]
CsvOption = Annotated[
    Path | None,
    typer.Option("--csv", metavar="FILE", dir_okay=False, help="Write the points there, as CSV."),
]
PlotOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", dir_okay=False, help="Write curves there, as one HTML page (needs plotly)."
    ),
]


def sweep(
    target: TargetArgument,
    world: WorldOption = None,
    ranks: RanksListOption = None,
    batch: BatchListOption = None,
    layout: LayoutOption = "auto",
    memory: MemoryOption = "auto",
    optimizer: OptimizerOption = "adamw",
    recompute: RecomputeOption = "auto",
    price: PriceOption = None,
    csv_file: CsvOption = None,
    plot: PlotOption = None,
    as_json: JsonOption = False,
    json_schema: SchemaOption = False,
) -> None:
    """Plan TARGET for several numbers of ranks and batches: step, tokens/s, utilisation, memory and
    what a million tokens cost. The model is traced once a batch.

    Example: autopar sweep gpt2 --world dgx-h100 --ranks 8,16,32 --batch 64x1024 --price 2.5
    """
    with report_errors(as_json):
        for path, option in ((csv_file, "--csv"), (plot, "--plot")):
            require_folder(path, option)
        if plot is not None:
            sweep_plot.require_plotly()
        worlds = [_world(world, count) for count in read_ranks(ranks)]
        batches = [None] if batch is None else [str(Batch.parse(b)) for b in batch.split(",")]
        limits = read_memory(memory), read_optimizer(optimizer), cast(Recompute, recompute)

        def request(machines: World) -> PlanRequest:
            budget = Budget.of(machines, *limits)
            return PlanRequest(read_layout(layout), budget, None, True, "replicated")

        result = _sweep(target, worlds, batches, request, price, as_json)
        if csv_file is not None:
            write_csv(csv_file, result.points)
        if plot is not None:
            sweep_plot.write_page(plot, result.target, result.points, price is not None)
        if all(point.refused for point in result.points):
            if not as_json:
                _print(result, price, csv_file, plot)
            reasons = "; ".join(dict.fromkeys(point.refused for point in result.points))
            raise PlanError(f"there is no plan of any point: {reasons}")
        if as_json:
            print_json(dataclasses.asdict(result))
        else:
            _print(result, price, csv_file, plot)


def read_ranks(text: str | None) -> list[int | None]:
    """Return the numbers of ranks of "64,128,256"; [None], the world's own, for None. Raises
    WorldError.

    >>> read_ranks("64, 128"), read_ranks(None)
    ([64, 128], [None])
    """
    if text is None:
        return [None]
    numbers = [word.strip() for word in text.split(",")]
    wrong = [n for n in numbers if not n.isdigit() or not int(n)]
    if wrong:
        raise WorldError(f"--ranks {text}: {wrong[0]!r} is no number of ranks; write 64,128,256")
    return [int(n) for n in dict.fromkeys(numbers)]


def _world(name: str | None, ranks: int | None) -> World | tuple[int, str]:
    """Return the world of so many ranks; (ranks, why) where this world cannot have so many."""
    try:
        return read_world(name, ranks)
    except WorldError as error:
        if ranks is None:
            raise
        return ranks, str(error)


def _sweep(
    text: str,
    worlds: Sequence[World | tuple[int, str]],
    batches: Sequence[str | None],
    request: Callable[[World], PlanRequest],
    price: float | None,
    quiet: bool,
) -> Sweep:
    """Return a sweep of all worlds and batches. Raises WorldError where no world can be."""
    real = [world for world in worlds if isinstance(world, World)]
    if not real:
        raise WorldError(next(w[1] for w in worlds if isinstance(w, tuple)))
    points: list[SweepPoint] = []
    for batch in batches:
        target = build_target(text, batch, max(world.ranks for world in real))

        def plan_all(report: Callable[[str], None], target: Target = target) -> list[SweepPoint]:
            plans = plan_each(target, worlds, request, report)
            return [sweep_point(target, where, plan, price) for where, plan in zip(worlds, plans)]

        doing = f"planning {target.name} on {len(worlds)} worlds"
        points += watch_progress(doing, plan_all, quiet)
    name = target.name if len(batches) == 1 else text
    return Sweep(name, target.parameters, str(real[0]), len(batches), tuple(points))


def _print(result: Sweep, price: float | None, csv_file: Path | None, plot: Path | None) -> None:
    out = console()
    traces = f"{result.traces} trace{'s' if result.traces > 1 else ''}"
    print_line(out, "model", f"{result.target}: {format_count(result.parameters)} parameters")
    out.print(_table(result, price is not None))
    for point in result.points:
        if point.refused:
            where = format_ranks(point.ranks) + (f", {point.batch}" if point.batch else "")
            print_line(out, "refused", f"{where}: {point.refused}")
    files = [str(path) for path in (csv_file, plot) if path is not None]
    plans = sum(not point.refused for point in result.points)
    saved = f", saved as {' and '.join(files)}" if files else ""
    print_line(out, "planned", f"{plans} of {len(result.points)} points, {traces}{saved}")


def _table(result: Sweep, priced: bool) -> Table:
    unit = next((point.unit for point in result.points if point.unit), "tokens")
    table = Table(caption="modelled; memory: at the peak on each device", caption_justify="left")
    table.add_column("ranks", justify="right")
    for name in ("batch", "layout", "mesh"):
        table.add_column(name, overflow="fold")
    for name in ("step", f"{unit}/s", "MFU", "memory", *(["per M " + unit] if priced else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for point in result.points:
        table.add_row(*_cells(point, priced))
    return table


def _cells(point: SweepPoint, priced: bool) -> list[str]:
    first = [f"{point.ranks:,}", point.batch or "its own"]
    if point.refused:
        return [*first, "refused"]
    assert point.seconds is not None and point.peak_bytes is not None
    rate = "-" if point.rate is None else format_count(round(point.rate))
    share = "-" if point.utilization is None else f"{point.utilization:.0%}"
    cost = "-" if point.price_per_million is None else f"{point.price_per_million:.4g}"
    figures = [format_seconds(point.seconds), rate, share, format_bytes(point.peak_bytes)]
    names = escape(point.layout or ""), escape(point.mesh or "")
    return [*first, *names, *figures, *([cost] if priced else [])]
