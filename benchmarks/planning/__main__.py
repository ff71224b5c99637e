"""What planning takes.

    python -m benchmarks.planning                    # all cases: about ten minutes of one core
    python -m benchmarks.planning --only 70b --json planning.json

Models are on the meta device, each case runs in a process of its own, for its peak of memory. CPU
seconds count all threads; where the machine is shared they say more than the wall. What the plans
move, beside those of others, is in benchmarks/planning/quality.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from autopar import World
from autopar.cost.memory import Budget
from autopar.cost.summary import rematerialization_seconds
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.passes import annotate, emit_program, recompute, trace
from autopar.planner import solve
from autopar.planner.constraint import Constraint
from autopar.planner.planner import search_plan
from autopar.planner.request import PlanRequest
from autopar.planner.solve import best
from autopar.tools.decoders import Sizes
from autopar.tools.targets import NAMED, Batch, resolve
from benchmarks.step_time import cells

ModelAndInputs = tuple[nn.Module, tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """A model to plan for a world, on one mesh or (None) on every mesh of up to four axes.

    `most`: what each figure may be at most. `fits`: as `autopar plan` does it, by the step in which
    communication runs under computation, within the devices' memory.
    """

    make: Callable[[], ModelAndInputs]
    world: Callable[[], World]
    mesh: str | None = None
    most: tuple[tuple[str, float], ...] = ()
    fits: bool = False


# -- the cases -------------------------------------------------------------------------------------
def named(
    model: str, batch: int, layers: int = 0, sequence: int = 4096
) -> Callable[[], ModelAndInputs]:
    """A named model in bfloat16, of fewer or more layers than it has where `layers` is given."""

    def make() -> ModelAndInputs:
        sizes: Sizes = replace(NAMED[model], layers=layers or NAMED[model].layers)
        NAMED["benchmark"] = sizes
        target = resolve("benchmark", Batch(batch, sequence), batch)
        return target.model, target.inputs

    return make


def h100(ranks: int) -> Callable[[], World]:
    return lambda: World.preset("dgx-h100", ranks=ranks)


MESH = "x32.y8"
CASES = {
    "8b on (32,8)": Case(
        named("llama3-8b", 64), h100(256), MESH,
        (("trace and choose s", 8.0), ("choose s", 0.5), ("GB", 1.5)),
    ),
    "70b on 1024": Case(
        named("llama3-70b", 1024), h100(1024), None, (("gap", 0.01), ("choose s", 10.0))
    ),
    "70b on 1024 that fits": Case(
        named("llama3-70b", 1024), h100(1024), None, (("choose s", 60.0),), fits=True
    ),
    "405b on 16384": Case(
        named("llama3-405b", 16384), h100(16384), None, (("gap", 0.03), ("choose s", 60.0))
    ),
    **{
        f"8b of {layers} layers on (32,8)": Case(named("llama3-8b", 64, layers), h100(256), MESH)
        for layers in (8, 16, 32, 64)
    },
    "8b of 4 layers on (32,8)": Case(named("llama3-8b", 64, 4), h100(256), MESH),
    "8b of 32 layers on (8)": Case(named("llama3-8b", 64, 32), h100(8), "x8"),
    "gpt2 on (2,4)": Case(named("gpt2", 32, sequence=1024), h100(8), "x2.y4"),
    **{
        f"8b on {ranks}": Case(named("llama3-8b", 4096), h100(ranks))
        for ranks in (64, 256, 1024, 4096)
    },
}  # fmt: skip


# -- one case, in its own process ------------------------------------------------------------------
def run(case: Case) -> dict[str, float | str]:
    """Its figures by name."""
    figures: dict[str, float | str] = {}
    world = case.world()
    model, inputs = case.make()
    with timed(figures, "trace"):
        program = trace.trace(model, inputs, {})
        program = annotate.chains(annotate.annotate(program))
    figures["GB after trace"] = peak()
    with timed(figures, "choose"):
        program = (
            plan_within_memory(program, world) if case.fits else chosen(program, world, case.mesh)
        )
    figures["GB"] = peak()
    plan = program.plan
    assert plan is not None
    if case.fits:  # what runs twice is not part of what was searched
        plan = replace(plan, seconds=plan.seconds + twice(program, world))
    figures["trace and choose s"] = float(figures["trace s"]) + float(figures["choose s"])
    figures.update(mesh=str(plan.mesh), meshes=max(1, len(plan.meshes)), gap=plan.gap)
    figures["modelled ms"] = 1e3 * plan.seconds
    return figures


@contextmanager
def timed(figures: dict[str, float | str], name: str) -> Any:
    cpu, wall = time.process_time(), time.perf_counter()
    yield
    figures[f"{name} s"] = time.process_time() - cpu
    figures[f"{name} wall s"] = time.perf_counter() - wall


def peak() -> float:
    """GB that this process has held at most. Not `ru_maxrss`: across exec, it keeps the peak of the
    process that forked this one.
    """
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024 / 1e9


def chosen(program: Program, world: World, mesh: str | None) -> Program:
    """With its plan."""
    if mesh is None:
        return solve.search_meshes(program, world, PlanRequest("auto"))
    return replace(program, plan=best(program, [(Mesh.parse(mesh), Constraint("auto"))], world))


def plan_within_memory(program: Program, world: World) -> Program:
    """With the plan that `autopar plan` gives for the devices' own memory."""
    budget = Budget.of(world, "auto", "adamw", "auto")
    return search_plan(program, world, PlanRequest("auto", budget=budget, overlap=True))


def twice(program: Program, world: World) -> float:
    """Seconds of what a chosen program makes again in the backward."""
    return rematerialization_seconds(recompute.recompute(emit_program(program, world)), world)


# -- all cases -------------------------------------------------------------------------------------
def apart(name: str, timeout: float) -> dict[str, Any]:
    """A case in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.planning"]
    environment = {**os.environ, "AUTOPAR_PLANNING": name}
    started = os.getloadavg()[0]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1:] or [str(done.returncode)]}
    return {**json.loads(done.stdout.splitlines()[-1]), "load": started}


def verdicts(case: Case, figures: dict[str, Any]) -> str:
    """Each limit with what was found."""
    texts = []
    for name, most in case.most:
        missed = "" if figures[name] <= most else "[bold]missed: [/]"
        texts.append(f"{missed}{name} {figures[name]:.4g} of {most:.4g}")
    for name in ("GB sent", "GB over the link"):
        if name in figures and name not in dict(case.most):
            texts.append(f"{name} {figures[name]:.4g}")
    return "\n".join(texts)


def table(results: dict[str, dict[str, Any]]) -> Table:
    shown = Table(title="planning, CPU s (wall s)", title_justify="left")
    for heading in ("case", "mesh", "of", "trace", "choose", "GB", "gap", "load", "limits"):
        shown.add_column(heading, justify="left" if heading in ("case", "limits") else "right")
    for name, figures in results.items():
        if "failed" in figures:
            shown.add_row(name, "[bold red]failed[/]", *[""] * 6, *figures["failed"])
            continue
        seconds = (f"{figures[f'{p} s']:.1f} ({figures[f'{p} wall s']:.1f})" for p in PARTS)
        shown.add_row(
            name, figures["mesh"], str(figures["meshes"]), *seconds, f"{figures['GB']:.2f}",
            f"{figures['gap']:.3%}", f"{figures['load']:.1f}", verdicts(CASES[name], figures),
        )  # fmt: skip
    return shown


PARTS = ("trace", "choose")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names of cases")
    parser.add_argument("--timeout", type=float, default=900.0, help="of a case, in seconds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    names = [name for name in CASES if any(part in name for part in options.only)]
    if not names:
        parser.error(f"no case has {' or '.join(options.only)} in its name: {', '.join(CASES)}")
    results = {name: apart(name, options.timeout) for name in names}
    Console(highlight=False, width=None if sys.stdout.isatty() else 150).print(table(results))
    if options.json:
        facts = {"date": cells.now(), "machine": cells.machine()}
        options.json.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")
    return int(any("failed" in figures for figures in results.values()))


if __name__ == "__main__":
    if "AUTOPAR_PLANNING" in os.environ:
        warnings.simplefilter("ignore")
        print(json.dumps(run(CASES[os.environ["AUTOPAR_PLANNING"]])))
    else:
        sys.exit(main())
