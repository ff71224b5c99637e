"""`autopar verify`: a layout proved on one machine, every rank in lockstep, in float64.

Example: autopar verify mine.py:make --ranks 8 --layout megatron, or --layout plan.json for a plan
that `autopar plan --save` wrote. runtime/verify.py compares the ranks.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from rich.markup import escape

from autopar import api
from autopar.cli.command import build_target, ranks_text, report_errors
from autopar.cli.options import (
    LAYOUT_HELP,
    BatchOption,
    JsonOption,
    RanksOption,
    SchemaOption,
    TargetArgument,
    WorldOption,
    read_layout,
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
from autopar.errors import AutoparError, WorldError
from autopar.ir.plan import Plan
from autopar.ir.plan_table import format_ranks
from autopar.planner.named_layouts import NAMES
from autopar.planner.request import Layouts
from autopar.tools.targets import Target, makes_smaller
from autopar.world import World

LOCKSTEP_RANKS = 8  # where none are named

LayoutOrPlanOption = Annotated[
    str,
    typer.Option(
        metavar="LAYOUT",
        autocompletion=lambda: list(NAMES),
        help=f"A file that plan --save wrote, whose plan is proven as it is; or {LAYOUT_HELP}",
    ),
]


def verify(
    target: TargetArgument,
    world: WorldOption = None,
    ranks: RanksOption = None,
    batch: BatchOption = None,
    layout: LayoutOrPlanOption = "auto",
    as_json: JsonOption = False,
    json_schema: SchemaOption = False,
) -> None:
    """Prove a layout or a saved plan of TARGET: every rank in this one process, in float64, against
    the original.

    A named model is cut down to two layers of all its heads, but narrow ones. Exit status 1 where
    they differ.

    Example: autopar verify gpt2 --ranks 8 --layout 4d
    """
    with report_errors(as_json):
        machines, layouts = _what_to_verify(target, world, ranks, layout)
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


def _what_to_verify(
    target: str, world: str | None, ranks: int | None, layout: str
) -> tuple[World, Layouts | Plan]:
    """Return the world and the layout that the options name, or a saved plan and its world. Raises
    WorldError for a plan of other ranks, AutoparError for one of a model that is cut down.
    """
    if not layout.endswith(".json"):
        count = LOCKSTEP_RANKS if world is None and ranks is None else ranks
        return read_world(world, count), read_layout(layout)
    plan = Plan.load(layout)
    if world is not None or ranks not in (None, plan.world.ranks):
        raise WorldError(
            f"{layout} is a plan for {format_ranks(plan.world.ranks)} of its own world: leave "
            "--world and --ranks out"
        )
    if makes_smaller(target):
        raise AutoparError(
            f"{target} is cut down to be verified, and {layout} is a plan for all of it: name a "
            "layout, or verify plans of a function that returns a small model"
        )
    return plan.world, plan


def _refuse_meta(target: Target) -> None:
    if any(p.is_meta for p in target.model.parameters()):
        raise AutoparError(
            f"{target.name} has parameters on the meta device: verify computes, so let the "
            "function return a model with values, a small one"
        )
