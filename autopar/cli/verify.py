"""`autopar verify`: a layout proved on one machine, every rank in lockstep, in float64.

Example: autopar verify mine:make --ranks 8 --layout megatron. runtime/verify.py compares the ranks.
"""

from __future__ import annotations

import dataclasses

from rich.markup import escape

from autopar import api
from autopar.cli.command import build_target, ranks_text, report_errors
from autopar.cli.options import (
    BatchOption,
    JsonOption,
    LayoutOption,
    RanksOption,
    SchemaOption,
    TargetArgument,
    WorldOption,
    read_layout,
    read_world,
)
from autopar.cli.targets import Target
from autopar.cli.terminal import (
    console,
    model_text,
    print_json,
    print_line,
    target_facts,
    watch_progress,
)
from autopar.errors import AutoparError

LOCKSTEP_RANKS = 8  # where none are named


def verify(
    target: TargetArgument,
    world: WorldOption = None,
    ranks: RanksOption = None,
    batch: BatchOption = None,
    layout: LayoutOption = "auto",
    as_json: JsonOption = False,
    json_schema: SchemaOption = False,
) -> None:
    """Prove a layout of TARGET: every rank in this one process, in float64, against the original.

    A named model is cut down to two layers of all its heads, but narrow ones. Exit status 1 where
    they differ.

    Example: autopar verify gpt2 --ranks 8 --layout 4d
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


def _refuse_meta(target: Target) -> None:
    if any(p.is_meta for p in target.model.parameters()):
        raise AutoparError(
            f"{target.name} has parameters on the meta device: verify computes, so let the "
            "function return a model with values, a small one"
        )
