"""The terminal: consoles, progress on stderr, and what the commands print of plans.

Results go to stdout; `watch_progress` says what long work is
doing and for how long, `bar` how far it is. The other modules of autopar.cli call them.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from autopar.cost.memory import limit_text
from autopar.cost.throughput import throughput
from autopar.ir.plan import Plan
from autopar.ir.plan_table import format_amount, format_bytes, format_count, format_seconds
from autopar.ir.plan_view import microbatches_text
from autopar.ir.progress import PATIENCE_S, Work, show_bar, step, watch
from autopar.planner.why import Why
from autopar.tools.console import console, print_line
from autopar.tools.targets import Target
from autopar.world import PRESETS, World
from autopar.world.world import CALIBRATED

T = TypeVar("T")

QUIET_S = 30.0  # between two lines of progress in a file or a pipe
_QUARTERS = 4  # lines of progress in a file or a pipe


@contextmanager
def bar(console: Console) -> Iterator[Callable[[float, str], None]]:
    """Yield a function to call with (share that is done, what is being done), which moves a
    progress bar. A file or a pipe gets a line for each quarter and each new thing that is done.
    """
    if not console.is_terminal:
        yield _line_reporter(console)
        return
    columns = (
        TextColumn("{task.description:22}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda share, doing: progress.update(task, completed=share, description=doing)


def _line_reporter(console: Console) -> Callable[[float, str], None]:
    reported: set[tuple[str, int]] = set()

    def report(share: float, doing: str) -> None:
        quarter = int(share * _QUARTERS)
        if (doing, quarter) not in reported:
            reported.add((doing, quarter))
            console.print(f"{doing} … {share:.0%}", soft_wrap=True)

    return report


def watch_progress(
    doing: str, work: Callable[[Callable[[str], None]], T], quiet: bool = False
) -> T:
    """Return the result of `work`, which is called with a function to report the name of a pass.

    After two seconds stderr says what is being done, in which pass, and how far it is: a terminal
    shows a bar, a file or a pipe gets a line for each pass; nothing where `quiet`. What a model
    prints goes to stderr, too: stdout is for results.
    """
    stop, now = threading.Event(), Work(doing)
    arguments = (now, stop, console(stderr=True))
    watcher = threading.Thread(target=_watch, args=arguments, daemon=True)
    if not quiet:
        watcher.start()
    try:
        with redirect_stdout(sys.stderr), watch(now):
            return work(step)
    finally:
        stop.set()
        if not quiet:
            watcher.join()


def _watch(now: Work, stop: threading.Event, console: Console) -> None:
    start = time.perf_counter()
    if console.is_terminal:
        show_bar(now, stop, console)
        return
    if stop.wait(PATIENCE_S):
        return
    reported, reported_at = "", start
    while not stop.wait(0.1):
        seconds = time.perf_counter()
        if now.text != reported or seconds - reported_at > QUIET_S:
            reported, reported_at = now.text, seconds
            console.print(f"{escape(reported)} … {reported_at - start:.0f} s", soft_wrap=True)


# -- what is printed -------------------------------------------------------------------------------
def print_plan(target: Target, world: World, plan: Plan, answer: Why | None) -> None:
    """Print the plan, and why, where that was asked."""
    out = console()
    print_line(out, "model", model_text(target))
    print_summary(out, plan, world)
    rate = throughput(plan, target.inputs)
    if rate is not None:
        print_line(out, "training", str(rate))
    if answer is not None:
        out.print(answer)


def print_files(
    seconds: float, save: Path | None, timeline: Path | None, report: Path | None
) -> None:
    """Print how long planning took, and which files were written."""
    out = console()
    print_line(out, "planned", f"in {seconds:.1f} s" + (f", saved as {save}" if save else ""))
    if timeline is not None:
        print_line(
            out, "timeline", f"of the modelled step as {timeline}: open it at ui.perfetto.dev"
        )
    if report is not None:
        print_line(out, "report", f"as {report}: open it in a browser")


def print_summary(out: Console, plan: Plan, world: World | None) -> None:
    """Print the plan with its world, and a warning where a step does not fit the memory of a
    device.
    """
    machines = plan.world if world is None else world
    sent = f"{format_amount(plan.comm_bytes)}B"
    print_line(out, "step", f"{format_seconds(plan.step_seconds)} modelled; a rank sends {sent}")
    print_line(out, "world", str(machines))
    if not plan.measured:
        print_line(out, "rates", _assumed_text(machines))
    print_line(out, "layout", plan.layout)
    out.print(plan.table())
    if plan.groups:
        groups = f"{len(plan.groups)} process group{'s' if len(plan.groups) > 1 else ''}"
        print_line(out, "groups", f"{groups}, named by their axes: {', '.join(plan.groups)}")
    memory = f"{format_bytes(plan.peak_bytes)} at the peak on each device"
    if plan.memory is not None:
        memory = f"{plan.memory} at the peak on each device"
    if plan.device_limit is not None:
        memory += f", which may hold {limit_text(plan.device_limit, plan.world)}"
    if plan.microbatches > 1:
        memory += f"; {microbatches_text(plan)}"
    for names, what in plan.dropped:
        memory += escape(f"; {what} again in the backward: {names}")
    if world is not None and plan.peak_bytes > world.device.memory_bytes:
        memory += f", [red]which has {format_bytes(world.device.memory_bytes)}: too little[/]"
    out.print(f"[bold]memory  [/] {memory}", soft_wrap=True)


def _assumed_text(world: World) -> str:
    """Return in words where rates are from that were not measured, and how to measure them."""
    if world.name in PRESETS:
        return (
            f"published figures of {world.name}, not measured; there, `torchrun … -m autopar "
            f"calibrate` measures them in two minutes and writes {CALIBRATED}, for --world"
        )
    start = f"torchrun --nproc-per-node {world.levels[0].ranks} -m " if world.levels else ""
    return (
        f"assumed, not measured; `{start}autopar calibrate` measures this machine in two minutes "
        f"and writes {CALIBRATED}, which plans made in this folder then use"
    )


def model_text(target: Target) -> str:
    return f"{target.name}: {format_count(target.parameters)} parameters"


def plan_facts(plan: Plan) -> dict[str, Any]:
    """Return what a program needs to know of a plan; the file of --save has every layout, too."""
    names = ("layout", "fingerprint", "seconds", "overlapped", "comm_bytes", "peak_bytes")
    facts = {name: getattr(plan, name) for name in names}
    return facts | {
        "world": str(plan.world),
        "measured": plan.measured,
        "memory": None if plan.memory is None else dataclasses.asdict(plan.memory),
        "recompute": list(plan.recompute),
        "regather": list(plan.regather),
        "rerun": list(plan.rerun),
        "microbatches": plan.microbatches,
        "sums_once": plan.sums_once,
        "gathers_once": plan.gathers_once,
        "interleaved": plan.interleaved,
        "groups": list(plan.groups),
        "mesh": plan.mesh.sizes,
        "ranks": plan.ranks,
        "rows": [dataclasses.asdict(row) for row in plan.rows],
        "unsplit": list(plan.unsplit),
        "smaller": plan.smaller,
        "meshes": [{"mesh": mesh, "seconds": seconds} for mesh, seconds in plan.meshes],
        "seconds_by_pass": plan.seconds_by_pass,
    }


def throughput_facts(plan: Plan, target: Target) -> dict[str, Any]:
    rate = throughput(plan, target.inputs)
    return {"throughput": None if rate is None else dataclasses.asdict(rate)}


def target_facts(target: Target) -> dict[str, Any]:
    return {"target": target.name, "parameters": target.parameters}


def print_json(facts: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(facts, indent=1) + "\n")
