"""A target planned for several numbers of ranks and batches, and what each costs.

The model is traced once for each batch (`plan_each`); a `SweepPoint` is one plan, or why there is
none. `autopar sweep` prints them, `write_csv` and sweep_plot.py write them to files.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from autopar.cost.throughput import throughput
from autopar.errors import AutoparError, WorldError
from autopar.ir.plan import Plan
from autopar.ir.plan_table import format_ranks
from autopar.ir.program import Program
from autopar.passes.pass_manager import PassManager
from autopar.planner.confirm import finish_plan
from autopar.planner.planner import analyse, choose_plan
from autopar.planner.request import PlanRequest
from autopar.planner.tracing import trace_model
from autopar.runtime.arguments import check_room
from autopar.tools.targets import Target
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


def sweep_point(
    target: Target, world: World | tuple[int, str], plan: Plan | AutoparError, price: float | None
) -> SweepPoint:
    """Return the point of a target on a world, whose device costs `price` an hour."""
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
