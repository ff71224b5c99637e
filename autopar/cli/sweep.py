"""`autopar sweep`: a target planned for several numbers of ranks and batches, and what each costs.

Example: autopar sweep llama3-8b --world dgx-h100 --ranks 64,128 --batch 64x4096,128x4096 is four
plans of two traces: the model is traced once for each batch. A `SweepPoint` is one of them. The
table goes to stdout, the points to --csv, a page with curves to --plot (sweep_plot.py).
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.markup import escape
from rich.table import Table

from autopar.cli import sweep_plot
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
from autopar.cli.targets import Batch, Target
from autopar.cli.terminal import console, print_json, print_line, watch_progress
from autopar.cost.memory import Budget, Recompute
from autopar.cost.throughput import throughput
from autopar.errors import AutoparError, PlanError, WorldError
from autopar.ir.plan import Plan
from autopar.ir.plan_table import format_bytes, format_count, format_ranks, format_seconds
from autopar.ir.program import Program
from autopar.passes.pass_manager import PassManager
from autopar.planner.confirm import finish_plan
from autopar.planner.planner import analyse, choose_plan
from autopar.planner.request import PlanRequest
from autopar.planner.tracing import trace_model
from autopar.runtime.arguments import check_room
from autopar.world import World

_MILLION = 1e6
_HOUR_S = 3600.0


@dataclasses.dataclass(frozen=True)
class SweepPoint:
    """One plan of a sweep, or why there is none (`refused`; the figures are then None).

    `seconds`: of a step, with communication hidden where the plan hides it. `rate`: of `unit`
    ("tokens" or "samples") a second on all ranks. `utilization`: model FLOPs, as a fraction.
    `peak_bytes`: on each device. `price_per_million`: of so many tokens or samples, in the currency
    of --price.
    """

    ranks: int
    batch: str | None
    layout: str | None = None
    mesh: str | None = None
    seconds: float | None = None
    rate: float | None = None
    unit: str | None = None
    utilization: float | None = None
    peak_bytes: float | None = None
    price_per_million: float | None = None
    refused: str = ""


@dataclasses.dataclass(frozen=True)
class Sweep:
    """All points of a sweep of one target, by batch and then by ranks."""

    target: str
    parameters: int
    world: str
    traces: int
    points: tuple[SweepPoint, ...]


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
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not part.isdigit() or not int(part)]
    if wrong:
        raise WorldError(f"--ranks {text}: {wrong[0]!r} is no number of ranks; write 64,128,256")
    return [int(part) for part in dict.fromkeys(parts)]


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
            return [_point(target, where, plan, price) for where, plan in zip(worlds, plans)]

        doing = f"planning {target.name} on {len(worlds)} worlds"
        points += watch_progress(doing, plan_all, quiet)
    name = target.name if len(batches) == 1 else text
    return Sweep(name, target.parameters, str(real[0]), len(batches), tuple(points))


def plan_each(
    target: Target,
    worlds: Sequence[World | tuple[int, str]],
    request: Callable[[World], PlanRequest],
    report: Callable[[str], None],
) -> Iterator[Plan | AutoparError]:
    """Yield the plan of a target on each world, or the error with which it is refused. The model is
    traced and annotated once. `request` gives the request on a world; `report` is called with what
    is done. Raises TraceError for a model that is no one graph.
    """
    source: Program | None = None
    for world in worlds:
        if isinstance(world, tuple):
            yield WorldError(world[1])
            continue
        ranks = format_ranks(world.ranks)
        manager = PassManager(lambda name, ranks=ranks: report(f"{ranks}: {name}"))  # type: ignore[misc]
        wanted = request(world)
        try:
            check_room(target.model, world, wanted.budget)
        except AutoparError as error:
            yield error
            continue
        if source is None:
            source = trace_model(target.model, target.inputs, manager)
            annotated = analyse(manager, source, wanted)
        try:
            chosen = choose_plan(manager, annotated, world, wanted)
            yield finish_plan(manager, source, chosen, world, wanted)
        except AutoparError as error:
            yield error


def _point(
    target: Target, world: World | tuple[int, str], plan: Plan | AutoparError, price: float | None
) -> SweepPoint:
    ranks = world.ranks if isinstance(world, World) else world[0]
    _, comma, batch = target.name.rpartition(", batch ")
    name = batch if comma else None
    if isinstance(plan, AutoparError):
        return SweepPoint(ranks, name, refused=str(plan))
    step = plan.step_seconds
    figures = throughput(plan, target.inputs)
    point = SweepPoint(
        ranks, name, plan.layout, str(plan.mesh) or "one rank", step, peak_bytes=plan.peak_bytes
    )
    if figures is None:
        return point
    cost = None if price is None else price * ranks / _HOUR_S / figures.rate * _MILLION
    return dataclasses.replace(
        point, rate=figures.rate, unit=figures.unit, utilization=figures.utilization,
        price_per_million=cost,
    )  # fmt: skip


def write_csv(path: Path, points: Sequence[SweepPoint]) -> None:
    """Write the points to a file, one a line, with the names of `SweepPoint`'s fields on top."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(SweepPoint)])
        writer.writeheader()
        writer.writerows(map(dataclasses.asdict, points))


# -- for people ------------------------------------------------------------------------------------
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
