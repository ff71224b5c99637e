"""What is said of deep models by shorter ones (ir/deep_models.py), held against the whole.

    python -m benchmarks.planning.depth                #  about a minute of one core
    python -m benchmarks.planning.depth --model llama3-8b --layers 8 --layouts fsdp --json d.json

A row is a layout with so many blocks recomputed: the plan as it is, half of them, all of them. The
step is the simulated one, of the plan as it is alone. Models are on the meta device.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from autopar import World
from autopar.cost.memory import Budget
from autopar.cost.simulator import timeline
from autopar.ir.deep_models import DeepModel
from autopar.ir.program import Program
from autopar.passes import annotate, emit_program, trace
from autopar.planner import solve
from autopar.planner.rematerialize import Estimated, RematerializationSteps, Rematerialized
from autopar.planner.request import PlanRequest
from autopar.planner.simulate import simulate_plan
from autopar.tools.targets import NAMED, Batch, resolve

LAYOUTS = ("auto", "fsdp", "megatron", "megatron-sp")
SHARES = {"none": 0.0, "half": 0.5, "all": 1.0}


@dataclass(frozen=True)
class Row:
    """Relative errors of what shorter models say; the step's is that of the plan as it is."""

    layout: str
    mesh: str
    recompute: str
    left_out: int  # blocks
    step: float | None
    peak: float


def rows(program: Program, world: World, layout: str) -> Iterator[Row]:
    chosen = solve.search_meshes(program, world, PlanRequest(layout))
    assert chosen.plan is not None
    deep, budget = DeepModel(chosen), Budget(None, "adamw", "auto")
    emitted = emit_program(chosen, world)
    estimate, whole = Estimated(deep, world, budget), RematerializationSteps(emitted, world, budget)
    left_out = len(repeated(chosen)) - len(repeated(deep.shorter()))
    step = simulate_plan(chosen, world) / timeline(emitted, world).seconds - 1
    for name, part in SHARES.items():
        rung = Rematerialized(whole.names[: round(part * len(whole.names))], ())
        peak = estimate.memory_of(rung).peak / whole.memory_of(rung).peak - 1
        mesh = str(chosen.plan.mesh)
        yield Row(layout, mesh, name, left_out, None if part else step, peak)


def repeated(program: Program) -> set[tuple[str, int]]:
    """The repeated blocks that a program has."""
    return set(DeepModel(program).blocks)


def analysed(model: str, layers: int, ranks: int) -> Program:
    """A named model of so many layers, one sample of 4096 tokens a rank."""
    NAMED["benchmark"] = replace(NAMED[model], layers=layers)
    target = resolve("benchmark", Batch(ranks, 4096), ranks)
    return annotate.chains(annotate.annotate(trace.trace(target.model, target.inputs, {})))


def table(compared: list[Row], title: str) -> Table:
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("layout", "mesh", "recomputed"):
        shown.add_column(heading)
    for heading in ("blocks left out", "error of the step", "of the peak"):
        shown.add_column(heading, justify="right")
    for row in compared:
        step = "" if row.step is None else f"{row.step:+.1e}"
        shown.add_row(
            row.layout, row.mesh, row.recompute, str(row.left_out), step, f"{row.peak:+.4%}"
        )
    return shown


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="llama3-70b", choices=[*NAMED])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--layouts", nargs="+", default=[*LAYOUTS])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    options = parser.parse_args(arguments)
    program = analysed(options.model, options.layers, options.ranks)
    world = World.preset("dgx-h100", ranks=options.ranks)
    compared = [row for layout in options.layouts for row in rows(program, world, layout)]
    title = f"{options.model}, {options.layers} layers, on {world}"
    Console(width=None if sys.stdout.isatty() else 118).print(table(compared, title))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in compared], indent=1) + "\n")


if __name__ == "__main__":
    main()
