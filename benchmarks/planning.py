"""What planning takes, and what it gives beside what is known of others.

    python -m benchmarks.planning                    # all cases: about ten minutes of one core
    python -m benchmarks.planning --only 70b --json planning.json

Models are on the meta device, each case runs in a process of its own, for its peak of memory. CPU
seconds count all threads; where the machine is shared they say more than the wall. "quality" cases
count the wire bytes of the emitted graph: a rank sends (n-1)/n of the whole in an all-gather or a
reduce-scatter, twice that in an all-reduce, (n-1)/n of its part in an all-to-all.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
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
from autopar.constraint import Constraint
from autopar.cost.moves import moves
from autopar.cost.pattern import halves, pattern, size
from autopar.cost.ways import flat_ways, ways
from autopar.mesh import Mesh
from autopar.passes import annotate, chains, choose, emit, pipeline, rewrite, trace
from autopar.plan import Plan
from autopar.program import Program
from autopar.rating.rate import best
from autopar.report.summary import summarised
from autopar.targets import NAMED, Batch, Sizes, resolve
from autopar.world import Device, Level
from autopar.world.presets import (
    CPU_BYTES_PER_S,
    CPU_FLOP_PER_S,
    GLOO_BYTES_PER_S,
    GLOO_LAUNCH_S,
    GLOO_NETWORK_S,
    GLOO_S,
)
from benchmarks import cells
from examples.gpt import GPT, Block, Config

Made = tuple[nn.Module, tuple[torch.Tensor, ...]]
LINK_BYTES_PER_S = 400e6 / 8


@dataclass(frozen=True)
class Case:
    """A model to plan for a world, on one mesh or (None) on every mesh of up to four axes.

    `most`: what each figure may be at most; `counted`: how the bytes of the emitted graph are.
    """

    make: Callable[[], Made]
    world: Callable[[], World]
    mesh: str | None = None
    most: tuple[tuple[str, float], ...] = ()
    counted: str = ""


# -- the cases -------------------------------------------------------------------------------------
def named(model: str, batch: int, layers: int = 0, sequence: int = 4096) -> Callable[[], Made]:
    """A named model in bfloat16, of fewer or more layers than it has where `layers` is given."""

    def make() -> Made:
        sizes: Sizes = replace(NAMED[model], layers=layers or NAMED[model].layers)
        NAMED["benchmark"] = sizes
        target = resolve("benchmark", Batch(batch, sequence), batch)
        return target.model, target.inputs

    return make


def gpt2_block() -> Made:
    """One layer at GPT-2's width in float32."""
    with torch.device("meta"):
        return Block(Config(width=768, heads=12)), (torch.zeros(32, 1024, 768),)


def small_gpt() -> Made:
    """The GPT of the step-time benchmark: 17 M parameters, 67 MB of gradients."""
    with torch.device("meta"):
        tokens = torch.zeros(16, 128, dtype=torch.int64)
        model = GPT(Config(vocabulary=4096, context=128, width=512, heads=8, layers=4))
        return model, (tokens, tokens.clone())


def h100(ranks: int) -> Callable[[], World]:
    return lambda: World.preset("dgx-h100", ranks=ranks)


def cluster(link: float = LINK_BYTES_PER_S, node: float = GLOO_BYTES_PER_S) -> World:
    """2 nodes × 2 ranks with gloo."""
    levels = Level(2, node, GLOO_S), Level(2, link, GLOO_NETWORK_S)
    memory = CPU_BYTES_PER_S if node == GLOO_BYTES_PER_S else node
    device = Device("cpu", {"float32": CPU_FLOP_PER_S}, 4e9, memory)
    return World(levels, device, "gloo", "2x2", GLOO_LAUNCH_S)


GIVEN = "x32.y8"
CASES = {
    "8b on (32,8)": Case(
        named("llama3-8b", 64), h100(256), GIVEN,
        (("trace and choose s", 8.0), ("choose s", 0.5), ("GB", 1.5)),
    ),
    "70b on 1024": Case(
        named("llama3-70b", 1024), h100(1024), None, (("gap", 0.01), ("choose s", 10.0))
    ),
    "405b on 16384": Case(
        named("llama3-405b", 16384), h100(16384), None, (("gap", 0.03), ("choose s", 60.0))
    ),
    **{
        f"8b of {layers} layers on (32,8)": Case(named("llama3-8b", 64, layers), h100(256), GIVEN)
        for layers in (8, 16, 32, 64)
    },
    **{
        f"8b on {ranks}": Case(named("llama3-8b", 4096), h100(ranks))
        for ranks in (64, 256, 1024, 4096)
    },
    "quality: 4 layers of 8b on (32,8)": Case(
        named("llama3-8b", 64, 4), h100(256), GIVEN,
        (("GB sent", 3.338), ("GB sent, sums in float32", 3.338)), "rank",
    ),
    "quality: GPT-2 block on 4": Case(
        gpt2_block, h100(4), None, (("GB sent", 0.04255),), "rank"  # published: 42.5 MB
    ),
    "quality: GPT on 2x2 at 400 Mbit/s": Case(
        small_gpt, cluster, None, (("GB over the link", 0.067),), "link"
    ),
}  # fmt: skip


# -- one case, in its own process ------------------------------------------------------------------
def run(case: Case) -> dict[str, float | str]:
    """Its figures by name."""
    found: dict[str, float | str] = {}
    world = case.world()
    model, inputs = case.make()
    with timed(found, "trace"):
        program = trace.trace(model, inputs, {})
        program = chains.chains(annotate.annotate(program))
    found["GB after trace"] = peak()
    with timed(found, "choose"):
        program = chosen(program, world, case.mesh)
    found["GB"] = peak()
    plan = program.plan
    assert plan is not None
    found["trace and choose s"] = float(found["trace s"]) + float(found["choose s"])
    found.update(mesh=str(plan.mesh), meshes=max(1, len(plan.meshes)), gap=plan.gap)
    found["modelled ms"] = 1e3 * plan.seconds
    if case.counted:
        found.update(sent(program, world, case.counted))
    return found


@contextmanager
def timed(found: dict[str, float | str], name: str) -> Any:
    cpu, wall = time.process_time(), time.perf_counter()
    yield
    found[f"{name} s"] = time.process_time() - cpu
    found[f"{name} wall s"] = time.perf_counter() - wall


def peak() -> float:
    """GB that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def chosen(program: Program, world: World, mesh: str | None) -> Program:
    """With its plan."""
    if mesh is None:
        return choose.choose(program, world, "auto")
    found = best(program, [(Mesh.parse(mesh), Constraint("auto"))], world)
    return replace(program, plan=replace(found.plan, bound=found.bound))


# -- bytes of the emitted graph --------------------------------------------------------------------
def sent(program: Program, world: World, counted: str) -> dict[str, float]:
    """Per step, read off the rewritten graph: GB that a rank sends, or GB over a node's link."""
    program = emit.emit(pipeline.pipeline(rewrite.rewrite(program, world)))
    plan = summarised(program, world)
    found = {"GB sent": plan.comm_bytes / 1e9}
    if counted == "link":
        return {**found, "GB over the link": over_the_link(program, plan, world) / 1e9}
    return {**found, "GB sent, sums in float32": (plan.comm_bytes + widened(program, plan)) / 1e9}


def widened(program: Program, plan: Plan) -> float:
    """What a rank would send more if sums of weights' gradients were of four bytes a number."""
    more = 0.0
    for move, collective in zip(moves(program), plan.collectives, strict=True):
        of_weight = not move.inside and move.node.meta["value"][0] in plan.stored
        if of_weight and collective.backward and not move.again and move.element_bytes < 4:
            more += collective.bytes * (4 / move.element_bytes - 1)
    return more


def over_the_link(program: Program, plan: Plan, world: World) -> float:
    """Bytes that leave a node of `cluster`, by the ways that the collectives run in: seconds on one
    where a byte over the link takes a second and all else nothing.
    """
    counting = cluster(1.0, 1e30)
    total = 0.0
    for move in moves(program):
        kind, digits = move.traffic.collective, pattern(plan.mesh, move.axes)
        whole = move.traffic.elements * move.element_bytes
        several = (flat_ways if move.inside else ways)(world, kind, digits)
        way = min(several, key=lambda way: way.seconds(whole))
        if way.inside:  # what a rank has once its node has scattered goes across
            digits = next(b for a, b in halves(digits) if size(a) == way.inside[0])
            whole /= way.inside[0]
        if digits:
            total += flat_ways(counting, kind, digits)[0].s_per_byte * whole
    return total


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


def verdicts(case: Case, found: dict[str, Any]) -> str:
    """Each limit with what was found."""
    texts = []
    for name, most in case.most:
        missed = "" if found[name] <= most else "[bold]missed: [/]"
        texts.append(f"{missed}{name} {found[name]:.4g} of {most:.4g}")
    for name in ("GB sent", "GB over the link"):
        if name in found and name not in dict(case.most):
            texts.append(f"{name} {found[name]:.4g}")
    return "\n".join(texts)


def table(results: dict[str, dict[str, Any]]) -> Table:
    shown = Table(title="planning, CPU s (wall s)", title_justify="left")
    for heading in ("case", "mesh", "of", "trace", "choose", "GB", "gap", "load", "limits"):
        shown.add_column(heading, justify="left" if heading in ("case", "limits") else "right")
    for name, found in results.items():
        if "failed" in found:
            shown.add_row(name, "[bold red]failed[/]", *[""] * 6, *found["failed"])
            continue
        seconds = (f"{found[f'{p} s']:.1f} ({found[f'{p} wall s']:.1f})" for p in PARTS)
        shown.add_row(
            name, found["mesh"], str(found["meshes"]), *seconds, f"{found['GB']:.2f}",
            f"{found['gap']:.3%}", f"{found['load']:.1f}", verdicts(CASES[name], found),
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
    return int(any("failed" in found for found in results.values()))


if __name__ == "__main__":
    if "AUTOPAR_PLANNING" in os.environ:
        warnings.simplefilter("ignore")
        print(json.dumps(run(CASES[os.environ["AUTOPAR_PLANNING"]])))
    else:
        sys.exit(main())
