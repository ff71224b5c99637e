"""`autopar explain`: why a saved plan is as it is, and what one of its nodes or subgraphs is, costs
and could be. reasons.py finds that, this file prints it.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autopar.cli.command import build_target, report_errors
from autopar.cli.options import MODEL_HELP, BatchOption, JsonOption, PlanArgument, SchemaOption
from autopar.cli.reasons import (
    CollectiveSum,
    Explanation,
    NodeStates,
    Selection,
    SelectionSum,
    explain_plan,
)
from autopar.cli.terminal import console, print_json, print_line, watch_progress
from autopar.errors import PlanError
from autopar.ir.plan import Plan
from autopar.ir.plan_table import Row, format_seconds
from autopar.runtime.apply import renew_plan

_MOST_NODES, _MOST_STORED, _MOST_NAMES = 12, 8, 3  # lines of each kind; names in a line

NodeArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="NODE",
        help="A node's name, a parameter's, or a subgraph's: linear_3, 'blocks.*.mlp'.",
    ),
]
TracedOption = Annotated[
    str | None,
    typer.Option(
        metavar="TARGET",
        help=f"Trace it again, for closed forms and alternatives: {MODEL_HELP}.",
    ),
]


def explain(
    path: PlanArgument,
    node: NodeArgument = None,
    target: TracedOption = None,
    batch: BatchOption = None,
    as_json: JsonOption = False,
    json_schema: SchemaOption = False,
) -> None:
    """Say why a saved plan is as it is; with NODE, its states, collectives, bytes and seconds, and
    with --target its closed form and the alternatives, too.

    Example: autopar explain plan.json 'blocks.*.up' --target gpt2 --batch 64x1024
    """
    with report_errors(as_json):
        plan = Plan.load(path)
        if batch is not None and target is None:
            raise PlanError(f"--batch {batch}: it is the target's; name that too, with --target")
        if target is not None:
            built = build_target(target, batch, plan.world.ranks)
            renewing = f"tracing {built.name}"
            plan = watch_progress(renewing, lambda _: renew_plan(built.model, plan, built.inputs))
        asking = f"explaining {node or path}"
        explanation = watch_progress(asking, lambda _: explain_plan(plan, node), as_json)
        if as_json:
            print_json(dataclasses.asdict(explanation))
        else:
            _print(explanation, plan)


# -- for people ------------------------------------------------------------------------------------
def _print(explanation: Explanation, plan: Plan) -> None:
    out = console()
    step = explanation.seconds if explanation.overlapped is None else explanation.overlapped
    print_line(out, "plan", f"layout {explanation.layout}, mesh {explanation.mesh}, "
                            f"{format_seconds(step)} a step on {explanation.world}")  # fmt: skip
    if explanation.selection is not None:
        _print_selection(out, explanation.selection, plan)
        return
    for reason in explanation.reasons:
        print_line(out, "because", reason)
    for mesh in explanation.meshes:
        print_line(out, "mesh", f"{mesh.mesh}: no plan sums up to less than "
                                f"{format_seconds(mesh.seconds)}")  # fmt: skip
    _print_costs(out, explanation.costliest, explanation.collectives)


def _print_selection(out: Console, selection: Selection, plan: Plan) -> None:
    groups: dict[tuple[object, ...], list[NodeStates]] = {}
    for states in selection.nodes:
        key = tuple(states.splits.items()), states.operands, states.results
        groups.setdefault(key, []).append(states)
    for alike in list(groups.values())[:_MOST_NODES]:
        print_line(out, "node", _node_text(alike))
    _print_rest(out, "node", len(groups) - _MOST_NODES)
    if selection.sum is not None:
        print_line(out, "sum", _sum_text(selection.sum))
    for name, layout in list(selection.stored.items())[:_MOST_STORED]:
        print_line(out, "stored", f"{name} {layout}")
    _print_rest(out, "stored", len(selection.stored) - _MOST_STORED)
    _print_costs(out, selection.rows, selection.collectives)
    if plan.context is None:
        print_line(out, "more", "closed form, alternatives and the nodes of a module: add --target")
        return
    if selection.formula is not None:
        out.print(escape(selection.formula), soft_wrap=True)
    if selection.why is not None:
        runners = selection.why["runners"]
        print_line(out, "chosen", str(selection.why["chosen"]))
        for runner in runners:
            milliseconds, mebibytes = runner["more_seconds"] * 1e3, runner["more_bytes"] / 2**20
            more = f"{milliseconds:+.3f} ms a step, {mebibytes:+,.2f} MiB"
            print_line(out, "instead", f"{runner['layout']}: {more}")
        if not runners:
            print_line(out, "instead", "the layout leaves no other choice here on this mesh")


def _node_text(alike: list[NodeStates]) -> str:
    """Return nodes with the same states in words: their names, what they split, their states."""
    states = alike[0]
    names = ", ".join(
        f"{node.node} in {node.module}" if node.module else node.node
        for node in alike[:_MOST_NAMES]
    )
    more = f" and {len(alike) - _MOST_NAMES} more" if len(alike) > _MOST_NAMES else ""
    splits = " ".join(f"{axis}→{what}" for axis, what in states.splits.items()) or "one rank"
    operands = ", ".join(text or "-" for text in states.operands)
    took = ""
    if states.seconds is not None:
        each = " in all" if len(alike) > 1 else ""
        took = f"; computes for {format_seconds(sum(node.seconds or 0.0 for node in alike))}{each}"
    return f"{names}{more}: {splits}; ({operands}) → ({', '.join(states.results)}){took}"


def _sum_text(total: SelectionSum) -> str:
    """Return a sum of seconds in words: "computes for 1.00 ms + sends for 0.50 ms = …"."""
    return (
        f"computes for {format_seconds(total.computation)} + collectives of "
        f"{format_seconds(total.communication)} = {format_seconds(total.seconds)}, overlap not "
        f"counted: {total.share:.1%} of the step's sum"
    )


def _print_rest(out: Console, name: str, count: int) -> None:
    if count > 0:
        print_line(out, name, f"and {count} more: --json has all")


def _print_costs(
    out: Console, rows: tuple[Row, ...], collectives: tuple[CollectiveSum, ...]
) -> None:
    if not rows and not collectives:
        return
    table = Table(caption="states: I the same on all ranks, S(dim) a slice, P a part of a sum, "
                          "R the same with partial gradients", caption_justify="left")  # fmt: skip
    for name in ("subgraph or collective", "layout", "collectives"):
        table.add_column(name, overflow="fold")
    for name in ("MB sent", "ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = map(escape, (row.subgraph, row.layout, row.collectives))
        table.add_row(*cells, f"{row.bytes / 1e6:,.2f}", f"{row.step_seconds * 1e3:.3f}")
    table.add_section()
    for each in collectives:
        which = "backward" if each.backward else "forward"
        name = f"{each.count} {each.kind} over {'.'.join(each.axes)}"
        table.add_row(name, which, "", f"{each.bytes / 1e6:,.2f}", f"{each.seconds * 1e3:.3f}")
    out.print(table)
