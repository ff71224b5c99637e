"""The commands plan, verify, show, calibrate and doctor, for people or (--json) for programs."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.markup import escape
from torch import nn

from autopar import api
from autopar.cli import compare, explain, graph, sweep, trace
from autopar.cli.command import build_target, ranks_text, report_errors, require_folder
from autopar.cli.doctor import examination as doctoring
from autopar.cli.doctor.machine import facts as facts_of_machine
from autopar.cli.options import (
    MODEL_HELP,
    AnywayOption,
    BatchOption,
    JsonOption,
    LayoutOption,
    MemoryOption,
    OptimizerOption,
    OutOption,
    OutputsOption,
    OverlapOption,
    PlanArgument,
    RanksOption,
    RecomputeOption,
    ReduceOption,
    RunOption,
    SaveOption,
    TargetArgument,
    TimelineOption,
    WhyOption,
    WorldOption,
    read_layout,
    read_memory,
    read_optimizer,
    read_world,
)
from autopar.cli.targets import Batch, Target, resolve
from autopar.cli.terminal import (
    bar,
    console,
    model_text,
    plan_facts,
    print_files,
    print_json,
    print_line,
    print_plan,
    print_summary,
    target_facts,
    throughput_facts,
    watch_progress,
)
from autopar.cost.memory import Recompute
from autopar.errors import AutoparError, PlanError
from autopar.ir.plan import Plan
from autopar.ir.plan_table import format_bytes
from autopar.planner.request import Outputs
from autopar.planner.why import Why
from autopar.runtime import calibrate_on_ranks
from autopar.world import World
from autopar.world import ranks as running
from autopar.world.world import CALIBRATED

ABSURD_S = 600.0  # a plan whose step takes longer is refused without --anyway
LOCKSTEP_RANKS = 8  # the ranks of verify where none are named

app = typer.Typer(
    name="autopar",
    help="The fastest layout of a PyTorch model on many devices, planned and proved on one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
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
    why: WhyOption = None,
    save: SaveOption = None,
    timeline: TimelineOption = None,
    anyway: AnywayOption = False,
    as_json: JsonOption = False,
) -> None:
    """Choose a mesh and a layout for TARGET and say what a step costs. Needs no GPU, no memory for
    the parameters.

    Example: autopar plan llama3-8b --world dgx-h100 --ranks 64 --batch 64x4096
    """
    with report_errors(as_json):
        for path, option in ((save, "--save"), (timeline, "--timeline")):
            require_folder(path, option)
        machines, layouts = read_world(world, ranks), read_layout(layout)
        built = build_target(target, batch, machines.ranks)
        limits = read_memory(memory), read_optimizer(optimizer), cast(Recompute, recompute)
        planning = partial(
            api.plan, built.model, machines, built.inputs, layouts, *limits,
            reduce_dtype=reduce_dtype, overlap=overlap, outputs=cast(Outputs, outputs),
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
        answer = _answer_why(best_plan, why, as_json)
        if as_json:
            reasons = {} if answer is None else {"why": answer.facts()}
            rate = throughput_facts(best_plan, built)
            print_json(plan_facts(best_plan) | target_facts(built) | rate | reasons)
        else:
            print_plan(built, machines, best_plan, answer)
            print_files(seconds, save, timeline)


@app.command()
def verify(
    target: TargetArgument,
    world: WorldOption = None,
    ranks: RanksOption = None,
    batch: BatchOption = None,
    layout: LayoutOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Prove a layout of TARGET: every rank in this one process, in float64, against the original.

    A named model is cut down to two layers of all its heads, but narrow ones. Example: autopar
    verify gpt2 --ranks 8 --layout 4d
    """
    with report_errors(as_json):
        rank_count = LOCKSTEP_RANKS if world is None and ranks is None else ranks
        machines, layouts = read_world(world, rank_count), read_layout(layout)
        built = build_target(target, batch, max(16, machines.ranks), real=True)
        _refuse_meta(built)
        doing = f"verifying {built.name} on {ranks_text(machines)}"
        check = watch_progress(
            doing,
            lambda report: api.verify(
                built.model, machines, built.inputs, layouts, progress=report
            ),
            as_json,
        )
        if as_json:
            facts = dataclasses.asdict(check) | {"layout": layout, "verified": True}
            print_json(facts | target_facts(built))
            return
        out = console()
        print_line(out, "model", model_text(built))
        print_line(out, "layout", layout)
        out.print(f"[bold green]equal[/]    {escape(str(check))}", soft_wrap=True)


@app.command()
def show(path: PlanArgument, as_json: JsonOption = False) -> None:
    """Print the table of a saved plan.

    Example: autopar show plan.json
    """
    with report_errors(as_json):
        saved_plan = Plan.load(path)
        if as_json:
            print_json(plan_facts(saved_plan))
        else:
            print_summary(console(), saved_plan, None)


@app.command()
def calibrate(
    target: Annotated[str | None, typer.Argument(metavar="[TARGET]", help=MODEL_HELP)] = None,
    save: Annotated[
        Path, typer.Option(metavar="FILE", dir_okay=False, help="The world, for plan --world.")
    ] = Path(CALIBRATED),
    seconds: Annotated[float, typer.Option(min=1.0, help="About how long to measure.")] = 120.0,
    batch: BatchOption = None,
) -> None:
    """Measure collectives, products, memory and launches on the ranks that run, and write them to
    world.json, which plan uses from then on. Start it with torchrun; one process alone measures its
    device. With TARGET, its own products are measured, too.

    Example: torchrun --nproc-per-node 4 -m autopar calibrate
    """
    with (
        calibrate_on_ranks.open_process_group(),
        report_errors(as_json=False, quiet=running.rank() > 0),
    ):
        running.together("looking for the folder", lambda: require_folder(save, "--save"))

        def build() -> tuple[nn.Module, Any]:
            built = resolve(str(target), None if batch is None else Batch.parse(batch), 16)
            return built.model, built.inputs

        with _progress_bar() as progress, redirect_stdout(sys.stderr):
            world = calibrate_on_ranks.calibrate_on_ranks(
                build if target else None, seconds, progress
            )
        if running.rank() == 0:
            world.save(save)
            print_line(console(), "world", str(world))
            print_line(console(), "saved", f"as {save}")


@app.command()
def doctor(
    run: RunOption = False, out: OutOption = Path("out/doctor"), as_json: JsonOption = False
) -> None:
    """Say what is here and what will not work; with --run, or under torchrun, check it on all
    ranks: kernels, links, collectives, layouts against one device, a step as planned and measured.

    Exit status 1 where a check failed. Example: torchrun --standalone --nproc-per-node 4 -m autopar
    doctor
    """
    with report_errors(as_json):
        if run or doctoring.is_started_by_torchrun():
            raise typer.Exit(doctoring.run(out, as_json))
        facts = facts_of_machine()
        if as_json:
            print_json(facts)
        else:
            doctoring.print_facts(facts, console())


# Commands of a file of their own, one line each.
app.command()(compare.compare)
app.command()(explain.explain)
app.command()(sweep.sweep)
app.command()(trace.trace)
app.command()(graph.graph)


def main() -> None:
    """Run the `autopar` command, as `python -m autopar` does."""
    app()


def _answer_why(plan: Plan, why: str | None, as_json: bool) -> Why | None:
    if why is None:
        return None
    return watch_progress(f"asking why {why}", lambda report: plan.why(why), as_json)


def _refuse_meta(target: Target) -> None:
    if any(p.is_meta for p in target.model.parameters()):
        raise AutoparError(
            f"{target.name} has parameters on the meta device: verify computes, so let the "
            "function return a model with values, a small one"
        )


def _refuse_absurd(plan: Plan, world: World, named: bool) -> None:
    """Raise PlanError for a step of hours, or one that does not fit the memory of a device."""
    step = plan.seconds if plan.overlapped is None else plan.overlapped
    available_bytes = world.device.memory_bytes
    faults = []
    if step > ABSURD_S:
        faults.append(f"takes {step:,.0f} s")
    if plan.peak_bytes > available_bytes:
        needs = format_bytes(plan.peak_bytes)
        faults.append(f"needs {needs} on each device, which has {format_bytes(available_bytes)}")
    if faults:
        name = "other machines" if named else "the machines, as --world dgx-h100 does,"
        whose = "" if named else ", machines like this one"
        raise PlanError(
            f"a step {' and '.join(faults)} on {world}{whose}: name {name} or more of them, or a "
            "smaller --batch; --anyway prints this plan all the same"
        )


@contextmanager
def _progress_bar() -> Iterator[Callable[[float, str], None]]:
    """Yield what moves a progress bar on rank 0 and does nothing on others."""
    if running.rank() > 0:
        yield lambda share, doing: None
    else:
        with bar(console(stderr=True)) as progress:
            yield progress
