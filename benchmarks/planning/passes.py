"""What the passes over a model's graphs take, by its number of layers.

    python -m benchmarks.planning.passes                      # 10 to 80 layers of Llama-3-70B
    python -m benchmarks.planning.passes --layers 80 --layout fsdp

CPU seconds of one core: of those from the plan to the emitted graph (rewrite, pipeline, forms,
emit) with their contracts, and of those over the graphs that AOTAutograd derives (chunk, bucket,
schedule, what is written in place, with what is counted of memory in between). What torch takes to
derive these graphs and to cut them is apart. No tensor has storage; each number of layers runs in a
process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import fx

import autopar
from autopar import _compat
from autopar.cost.memory import Budget
from autopar.cost.simulator.graph_events import Phase
from autopar.cost.simulator.liveness import StepMemory
from autopar.ir.program import Input, Program
from autopar.passes import OPTIONS
from autopar.passes.overlap import DerivedGraph
from autopar.passes.pass_manager import PassManager
from autopar.planner.confirm import finish_plan
from autopar.planner.planner import analyse, choose_plan
from autopar.planner.request import PlanRequest
from autopar.planner.tracing import trace_model
from autopar.runtime.backends import Scheduled
from benchmarks.planning.__main__ import named
from benchmarks.step_time import cells

MODEL, BATCH, SEQUENCE = "llama3-70b", 64, 4096
EMITTING = ("rewrite", "summa", "kernel_choice", "finalize", "recompute")
MOST = 20.0  # CPU s: what all passes over 80 layers may take


class Counted(PassManager):
    """Notes the CPU seconds of every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu: dict[str, float] = {}

    def run(self, name: str, *arguments: Any) -> Any:
        started = time.process_time()
        program = super().run(name, *arguments)
        self.cpu[name] = time.process_time() - started
        return program


class Timed(Scheduled):
    """Notes the CPU seconds of what it does to derived graphs, and their nodes."""

    seconds = 0.0
    nodes = 0

    def _scheduled(self, graph: fx.Graph, phase: Phase, step: StepMemory) -> DerivedGraph:
        started = time.process_time()
        derived = super()._scheduled(graph, phase, step)
        self.seconds += time.process_time() - started
        self.nodes += len(derived.graph.nodes)
        return derived


def measured(layers: int, layout: str, ranks: int) -> dict[str, float]:
    model, inputs = named(MODEL, BATCH, layers, SEQUENCE)()
    world = autopar.World.preset("dgx-h100", ranks=ranks)
    request = PlanRequest(layout, Budget.of(world, 1e15, "adamw", "auto"), overlap=True)
    pipeline = Counted()
    source = trace_model(model, inputs, pipeline)
    chose = choose_plan(pipeline, analyse(pipeline, source), world, request)
    plan = finish_plan(pipeline, source, chose, world, request)
    assert plan.context is not None
    program = plan.context.program
    run = Timed(program, world, OPTIONS)
    started = time.process_time()
    with _compat.fake_mode():
        run.derived([stand_in(entry, program) for entry in program.signature.inputs])
    whole = time.process_time() - started
    emitting = sum(pipeline.cpu.get(name, 0.0) for name in EMITTING)
    seconds = {"emitted": emitting, "derived": run.seconds, "torch": whole - run.seconds}
    return {**seconds, "nodes": float(run.nodes), "passes": emitting + run.seconds}


def stand_in(entry: Input, program: Program) -> torch.Tensor:
    """An input without storage."""
    if entry.kind in ("coordinate", "seed"):
        return torch.empty((1,) if entry.kind == "coordinate" else (), dtype=torch.int64)
    shape, dtype = program.layouts[entry.node].local_shape, program.dtypes[entry.node]
    return torch.empty(shape, dtype=dtype, requires_grad=entry.trainable)


def table(results: dict[int, dict[str, float]], layout: str) -> Table:
    shown = Table(title=f"passes over {MODEL}, layout {layout}, CPU s", title_justify="left")
    for heading in ("layers", "nodes", "to emit", "derived graphs", "all", "ms a layer", "torch"):
        shown.add_column(heading, justify="right")
    for layers, figures in results.items():
        shown.add_row(
            str(layers), f"{figures['nodes']:,.0f}", f"{figures['emitted']:.2f}",
            f"{figures['derived']:.2f}", f"{figures['passes']:.2f}",
            f"{1e3 * figures['passes'] / layers:.0f}", f"{figures['torch']:.2f}",
        )  # fmt: skip
    return shown


def apart(layers: int, layout: str, ranks: int) -> dict[str, float]:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.planning.passes",
        "--child",
        str(layers),
    ]
    command += ["--layout", layout, "--ranks", str(ranks)]
    done = subprocess.run(command, env=dict(os.environ), stdout=subprocess.PIPE, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", nargs="+", type=int, default=[10, 20, 40, 80])
    parser.add_argument("--layout", default="4d")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(measured(options.child, options.layout, options.ranks)))
        return 0
    results = {n: apart(n, options.layout, options.ranks) for n in options.layers}
    Console(highlight=False, width=None if sys.stdout.isatty() else 110).print(
        table(results, options.layout)
    )
    if options.json:
        facts = {"date": cells.now(), "machine": cells.machine(), "layout": options.layout}
        options.json.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")
    return int(any(figures["passes"] > MOST for n, figures in results.items() if n <= 80))


if __name__ == "__main__":
    sys.exit(main())
