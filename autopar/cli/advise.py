"""`autopar advise`: the best degrees for another tool, in its own words, and what it leaves.

Example: `autopar advise gpt2 --world dgx-h100 --ranks 16 --batch 64x1024 --for torchtitan`. The
search and the exporters are in tools/advise; this file prints what they find.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from autopar.cli.command import build_target, ranks_text, report_errors, require_folder
from autopar.cli.options import (
    BatchOption,
    JsonOption,
    MemoryOption,
    OptimizerOption,
    RanksOption,
    SchemaOption,
    TargetArgument,
    WorldOption,
    read_memory,
    read_optimizer,
    read_world,
)
from autopar.cli.terminal import (
    console,
    model_text,
    print_json,
    print_line,
    target_facts,
    watch_progress,
)
from autopar.ir.plan_table import format_bytes, format_seconds
from autopar.tools.advise import TOOLS, Advice
from autopar.tools.advise import advise as search
from autopar.world import json_file

ToolOption = Annotated[str, typer.Option("--for", metavar="TOOL", help=f"{', '.join(TOOLS)}.")]
WriteOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", dir_okay=False, help="Write the tool's options there."),
]
CompareOption = Annotated[
    bool, typer.Option(help="Plan without the tool's limits, too, and say what that saves.")
]


def advise(
    target: TargetArgument,
    tool: ToolOption,
    world: WorldOption = None,
    ranks: RanksOption = None,
    batch: BatchOption = None,
    memory: MemoryOption = "auto",
    optimizer: OptimizerOption = "adamw",
    compare: CompareOption = True,
    out: WriteOption = None,
    as_json: JsonOption = False,
    json_schema: SchemaOption = False,
) -> None:
    """Choose the best degrees that another tool has for TARGET, and write them as its own options.

    Example: autopar advise gpt2 --world dgx-h100 --ranks 16 --batch 64x1024 --for torchtitan
    """
    with report_errors(as_json):
        require_folder(out, "--out")
        machines = read_world(world, ranks)
        built = build_target(target, batch, machines.ranks)
        limits = read_memory(memory), read_optimizer(optimizer)
        advice = watch_progress(
            f"planning {built.name} on {ranks_text(machines)}",
            lambda report: search(
                built.model, machines, built.inputs, tool, *limits, compare, report
            ),
            as_json,
        )
        if out is not None:
            json_file.write(out, advice.text)
        if as_json:
            print_json(facts(advice) | target_facts(built))
        else:
            _print(advice, model_text(built), out)


def facts(advice: Advice) -> dict[str, Any]:
    """Return what a program needs to know of an advice."""
    plans = {"plan": advice.plan, "own": advice.own}
    figures = {
        name: None
        if plan is None
        else {
            "mesh": plan.mesh.sizes,
            "layout": plan.layout,
            "seconds": plan.seconds,
            "overlapped": plan.overlapped,
            "peak_bytes": plan.peak_bytes,
        }
        for name, plan in plans.items()
    }
    return figures | {
        "tool": advice.tool.name,
        "version": advice.tool.version,
        "degrees": dataclasses.asdict(advice.degrees),
        "options": advice.text,
        "gain": advice.gain,
        "beyond": list(advice.beyond),
        "tried": [
            dataclasses.asdict(degrees)
            | {"overlapped": None, "why": outcome}
            | ({} if isinstance(outcome, str) else {"overlapped": outcome, "why": ""})
            for degrees, outcome in advice.tried
        ],
    }


def _print(advice: Advice, model: str, out: Path | None) -> None:
    screen, plan, degrees = console(), advice.plan, advice.degrees
    print_line(screen, "model", model)
    print_line(screen, "world", str(plan.world))
    sizes = f"replicate {degrees.replicate} · shard {degrees.shard} · tensor {degrees.tensor}"
    if degrees.pipeline > 1:
        sizes = f"{degrees.pipeline} stages · {sizes}, {degrees.microbatches} micro-batches"
    if degrees.context > 1:
        sizes += f" · context {degrees.context}"
    if degrees.expert > 1:
        sizes += f", {degrees.expert} of the shards split experts"
    weights = "gathered again in the backward" if degrees.regathers else "kept for the backward"
    blocks = "computed again" if degrees.recomputes else "kept"
    print_line(screen, "degrees", f"{sizes}; weights {weights}, activations {blocks}")
    step = plan.step_seconds
    print_line(
        screen,
        "modelled",
        f"{format_seconds(step)} a step, {format_bytes(plan.peak_bytes)} at the peak on each "
        f"device; the best of {len(advice.tried)} tried",
    )
    if advice.own is not None:
        print_line(screen, "autopar", _gain_text(advice))
    for line in advice.beyond:
        screen.print(f"         {escape(line)}", soft_wrap=True)
    if out is not None:
        print_line(screen, "saved", f"as {out}")
        return
    screen.print(f"\n# {advice.tool.version}: {advice.tool.file}", highlight=False)
    screen.print(advice.text, soft_wrap=True, highlight=False, markup=False, end="")


def _gain_text(advice: Advice) -> str:
    """Return what autopar's own plan would gain, in words."""
    own = advice.own
    assert own is not None
    step = format_seconds(own.step_seconds)
    if not advice.gain:
        return f"its own plan takes {step} a step: nothing is left"
    return (
        f"its own plan takes {step} a step, {advice.gain:.1%} less, by what {advice.tool.name} "
        "cannot express:"
    )
