"""`autopar compare`: what differs between two saved plans, and what that costs, as tables."""

from __future__ import annotations

import dataclasses

from rich.markup import escape
from rich.table import Table

from autopar.cli.command import report_errors
from autopar.cli.options import JsonOption, PlanArgument, SchemaOption
from autopar.cli.terminal import print_json
from autopar.ir.plan import Plan
from autopar.tools.compare import (
    Comparison,
    SubgraphFigures,
    amount_text,
    compare_plans,
    seconds_of,
)
from autopar.tools.console import console, print_line

_MOST_STORED = 12  # lines of parameters that are stored otherwise


def compare(
    first: PlanArgument,
    second: PlanArgument,
    as_json: JsonOption = False,
    json_schema: SchemaOption = False,
) -> None:
    """Say what differs between two saved plans, and what it costs in seconds and bytes.

    Example: autopar compare fsdp.json auto.json
    """
    with report_errors(as_json):
        plans = Plan.load(first), Plan.load(second)
        difference = compare_plans(*plans, (str(first), str(second)))
        if as_json:
            print_json(dataclasses.asdict(difference))
        else:
            _print(difference)


def _print(difference: Comparison) -> None:
    out = console()
    print_line(out, "first", difference.first)
    print_line(out, "second", difference.second)
    out.print(_figures_table(difference))
    if difference.subgraphs:
        out.print(_subgraph_table(difference))
    for stored in difference.stored[:_MOST_STORED]:
        times = f" ({stored.count} of them)" if stored.count > 1 else ""
        print_line(out, "stored", f"{stored.parameter}{times}: {stored.first} | {stored.second}")
    more = len(difference.stored) - _MOST_STORED
    if more > 0:
        print_line(out, "stored", f"and {more} more kinds of parameters: --json has all")
    out.print(f"[bold green]verdict [/] {escape(difference.verdict)}", soft_wrap=True)


def _figures_table(difference: Comparison) -> Table:
    table = Table()
    table.add_column("", no_wrap=True)
    for name in ("first", "second", "second - first"):
        table.add_column(name, overflow="fold", justify="right")
    for setting in difference.settings:
        table.add_row(*map(escape, (setting.name.replace("_", " "), setting.first, setting.second)))
    if difference.settings:
        table.add_section()
    for figure in difference.figures:
        cells = ["-" if x is None else amount_text(x, figure.unit)
                 for x in (figure.first, figure.second)]  # fmt: skip
        table.add_row(figure.name, *cells, _signed_amount(figure.more, figure.unit))
    return table


def _subgraph_table(difference: Comparison) -> Table:
    table = Table(caption=f"{difference.equal_subgraphs} subgraphs are alike and not listed",
                  caption_justify="left")  # fmt: skip
    table.add_column("subgraph", no_wrap=True)
    for name in ("first", "second"):
        table.add_column(name, overflow="fold")
    for name in ("sent", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in difference.subgraphs:
        sides = line.first, line.second
        sent = [0.0 if side is None else side.bytes for side in sides]
        more_seconds = seconds_of(line.second) - seconds_of(line.first)
        more = _signed_amount(sent[1] - sent[0], "bytes"), _signed_amount(more_seconds, "s")
        table.add_row(escape(line.subgraph), *map(_side_text, sides), *more)
    return table


def _side_text(figures: SubgraphFigures | None) -> str:
    if figures is None:
        return "not there"
    return escape(": ".join(text for text in (figures.layout, figures.collectives) if text))


def _signed_amount(value: float, unit: str) -> str:
    return f"{'-' if value < 0 else '+'}{amount_text(abs(value), unit)}" if value else "0"
