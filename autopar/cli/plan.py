"""`autopar plan`: a mesh and a layout for a model, and what a step costs.

Example: autopar plan llama3-8b --world dgx-h100 --ranks 64 --save plan.json. api.plan searches,
this file prints and writes what it finds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

from autopar import api
from autopar.cli.command import build_target, ranks_text, report_errors, require_folder
from autopar.cli.options import (
    AnywayOption,
    BatchOption,
    JsonOption,
    LayoutOption,
    MemoryOption,
    MicrobatchesOption,
    OptimizerOption,
    OutputsOption,
    OverlapOption,
    RanksOption,
    RecomputeOption,
    ReduceOption,
    ReportOption,
    SaveOption,
    SchemaOption,
    TargetArgument,
    TimelineOption,
    WhyOption,
    WorldOption,
    read_layout,
    read_memory,
    read_microbatches,
    read_optimizer,
    read_world,
)
from autopar.cli.terminal import (
    plan_facts,
    print_files,
    print_json,
    print_plan,
    target_facts,
    throughput_facts,
    watch_progress,
)
from autopar.cost.memory import Recompute
from autopar.errors import PlanError
from autopar.ir.plan import Plan
from autopar.ir.plan_table import format_bytes
from autopar.planner.request import Outputs
from autopar.planner.why import Why
from autopar.tools.report import figures, page
from autopar.tools.targets import Target
from autopar.world import World

ABSURD_S = 600.0  # a plan whose step takes longer is refused without --anyway


def plan(
    target: TargetArgument,
    world: WorldOption = None,
    ranks: RanksOption = None,
    batch: BatchOption = None,
    layout: LayoutOption = "auto",
    memory: MemoryOption = "auto",
    optimizer: OptimizerOption = "adamw",
    recompute: RecomputeOption = "auto",
    reduce_dtype: ReduceOption = None,
    overlap: OverlapOption = True,
    outputs: OutputsOption = "replicated",
    microbatches: MicrobatchesOption = "1",
    why: WhyOption = None,
    save: SaveOption = None,
    timeline: TimelineOption = None,
    report: ReportOption = None,
    anyway: AnywayOption = False,
    as_json: JsonOption = False,
    json_schema: SchemaOption = False,
) -> None:
    """Choose a mesh and a layout for TARGET and say what a step costs. Needs no GPU, no memory for
    the parameters.

    Example: autopar plan llama3-8b --world dgx-h100 --ranks 64 --batch 64x4096
    """
    with report_errors(as_json):
        for path, option in ((save, "--save"), (timeline, "--timeline"), (report, "--report")):
            require_folder(path, option)
        if report is not None:
            figures.require_libraries()  # before the search
        machines, layouts = read_world(world, ranks), read_layout(layout)
        built = build_target(target, batch, machines.ranks)
        limits = read_memory(memory), read_optimizer(optimizer), cast(Recompute, recompute)
        planning = partial(
            api.plan, built.model, machines, built.inputs, layouts, *limits,
            reduce_dtype=reduce_dtype, overlap=overlap, outputs=cast(Outputs, outputs),
            microbatches=read_microbatches(microbatches),
        )  # fmt: skip
        start = time.perf_counter()
        doing = f"planning {built.name} on {ranks_text(machines)}"
        best_plan = watch_progress(doing, lambda report: planning(progress=report), as_json)
        seconds = time.perf_counter() - start
        if not anyway:
            _refuse_absurd(best_plan, machines, named=world is not None)
        if save is not None:
            best_plan.save(save)
        if timeline is not None:
            best_plan.timeline(overlap).save(timeline)
        if report is not None:
            _write_report(best_plan, built, report, as_json)
        answer = _answer_why(best_plan, why, as_json)
        if as_json:
            reasons = {} if answer is None else {"why": answer.facts()}
            rate = throughput_facts(best_plan, built)
            print_json(plan_facts(best_plan) | target_facts(built) | rate | reasons)
        else:
            print_plan(built, machines, best_plan, answer)
            print_files(seconds, save, timeline, report)


def _write_report(plan: Plan, target: Target, path: Path, as_json: bool) -> None:
    """Write the page of the plan, with progress: the named layouts are planned for it, too."""

    def write(progress: Callable[[str], None]) -> None:
        page.write_page(plan, path, target.name, target.inputs, progress=progress)

    watch_progress(f"writing {path}", write, as_json)


def _answer_why(plan: Plan, why: str | None, as_json: bool) -> Why | None:
    if why is None:
        return None
    return watch_progress(f"asking why {why}", lambda report: plan.why(why), as_json)


def _refuse_absurd(plan: Plan, world: World, named: bool) -> None:
    """Raise PlanError for a step of hours, or one that does not fit the memory of a device."""
    step = plan.step_seconds
    available_bytes = world.device.memory_bytes
    faults = []
    if step > ABSURD_S:
        faults.append(f"takes {step:,.0f} s")
    if plan.peak_bytes > available_bytes:
        needs = format_bytes(plan.peak_bytes)
        faults.append(f"needs {needs} on each device, which has {format_bytes(available_bytes)}")
    if faults:
        whose, other = ", which are like this machine", "name your machines, as by --world dgx-h100"
        if named:
            whose, other = "", "name other machines"
        raise PlanError(
            f"on {world}{whose}, a step {' and '.join(faults)}: {other}, or take more of them or a "
            "smaller --batch; --anyway prints this plan all the same"
        )
