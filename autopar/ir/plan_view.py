"""How people read a plan: its table, its figures in ten lines, and both in a notebook.

Example: print(plan.table()) and repr(plan) come from here. plan.py calls this module; plan_table.py
holds the lines.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autopar.ir.plan_table import (
    Row,
    format_amount,
    format_bytes,
    format_ranks,
    format_seconds,
    summed_rows,
)

if TYPE_CHECKING:
    from autopar.ir.plan import Plan

_WIDTH = 118  # columns of a table that goes to no terminal
# The terms of a step that overlaps, with headings that are short to leave room for collectives.
_STEP_PARTS = {
    "computation": "compute",
    "communication": "comm.",
    "hidden": "hidden",
    "exposed": "exposed",
}


class PrintedTable(Table):
    """A table of rich that a plain `print` shows, too."""

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), highlight=False, color_system=None)
        console.width = max(_WIDTH, console.width)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())


def table(plan: Plan) -> PrintedTable:
    """Return the plan as a table for people, one line a subgraph."""
    mesh, step = str(plan.mesh) or "of one rank", plan.step_seconds * 1e3
    title = f"mesh {mesh}: {step:,.2f} ms a step, modelled"
    lines = PrintedTable(title=title, title_justify="left", caption_justify="left")
    lines.add_column("subgraph", no_wrap=True)
    for name in ("layout", "collectives"):
        lines.add_column(name, overflow="fold")
    names = ["MB/rank/step", "ms"]
    if plan.overlapped is not None:
        names = ["MB", *(f"{heading}\nms" for heading in _STEP_PARTS.values())]
    for name in names:
        lines.add_column(name, justify="right", min_width=max(map(len, name.split())))
    for row in plan.rows:
        lines.add_row(*_cells(plan, row))
    if plan.overlapped is not None:
        lines.add_section()
        lines.add_row(*_cells(plan, summed_rows(plan.rows)))
    lines.caption = "\n".join(
        [
            *_legend(plan),
            *_step_terms(plan),
            *_smaller_world(plan),
            *_gap(plan),
            *(f"not split: {escape(reason)}" for reason in plan.unsplit),
            *(escape(f"{what} again in the backward: {names}") for names, what in plan.dropped),
            *(escape(line) for line in (*plan.notes, *plan.changed_figures)),
        ]
    )
    return lines


def _legend(plan: Plan) -> list[str]:
    """Return what the columns of the table mean, a line each; "(model)" and "e" only where the
    table has them.
    """
    own = "; (model): ops in the model's own forward"
    subgraph = "subgraph: a module's ops; equal blocks share a line, which has the sum of theirs"
    subgraph += own if any(row.subgraph == "(model)" for row in plan.rows) else ""
    experts = " (e: experts)" if any(_splits_experts(row.layout) for row in plan.rows) else ""
    return [
        subgraph,
        f"layout: of a matmul Y(m,n) = X(m,k)·W(k,n), the loop dim that each axis splits{experts}; "
        "of another op, the dim of its result, or the result's state where no dim is split: "
        "I whole on every rank, R whole with gradients in parts, P parts of a sum",
        "collectives: those of one block; AG all-gather, RS reduce-scatter, AR all-reduce, A2A "
        "all-to-all, B broadcast",
    ]


def _splits_experts(layout: str) -> bool:
    """Whether a row's layout, as "data→m, expert→m e", gives an axis the experts."""
    return any("e" in axis.partition("→")[2].split() for axis in layout.split(","))


def _cells(plan: Plan, row: Row) -> list[str]:
    """Return the cells of one line of the table."""
    seconds: list[float] = [row.seconds]
    if plan.overlapped is not None:
        seconds = [getattr(row, name) or 0.0 for name in _STEP_PARTS]
    numbers = [_cell(row.bytes / 1e6), *(_cell(x * 1e3) for x in seconds)]
    return [*map(escape, (row.subgraph, row.layout, row.collectives)), *numbers]


def _cell(number: float) -> str:
    """Return a figure with two decimals: "0" is nothing at all, "<0.01" is not.

    >>> _cell(1234.5), _cell(0.004), _cell(0.0)
    ('1,234.50', '<0.01', '0')
    """
    if abs(number) < 1e-9:
        return "0"
    return "<0.01" if 0 < number < 0.005 else f"{number:,.2f}"


def _step_terms(plan: Plan) -> list[str]:
    """Return the line on the terms of the overlapped step, if the step overlaps."""
    if plan.overlapped is None:
        return []
    if plan.stage_starts:
        return ["the table has all stages; a rank sends and computes only the lines of its own"]
    total = summed_rows(plan.rows)
    terms = [
        f"{_STEP_PARTS[name]} {getattr(total, name) * 1e3:,.2f}"
        for name in ("computation", "exposed")
    ]
    step = f"{' + '.join(terms)} = {plan.overlapped * 1e3:,.2f} ms a step"
    hidden = "communication that is hidden runs under computation, the step waits for exposed one"
    return [f"MB: sent by a rank in a step; {step}: {hidden}"]


def _gap(plan: Plan) -> list[str]:
    """Return the sentence on how much less the fastest plan may take. With overlap, that is proven
    of the sum of all seconds, in which collectives are neither joined nor hidden.
    """
    if not plan.bound or not plan.mesh.axes:
        return []
    several = " on this mesh under this layout"
    if len(plan.meshes) > 1:
        several = f" on {len(plan.meshes)} meshes"
    verb = "takes" if plan.overlapped is None else "would take"
    gap = max(plan.gap, 1e-4)  # as "0.00%" would say that there is none
    less = f"the fastest plan{several}{_memory_text(plan)} {verb} at most {gap:.2%} less"
    if plan.gap < 1e-6:
        less = f"no plan{several} {verb} less"
    if plan.overlapped is None:
        return [f"gap: {less}"]
    step = f"{plan.seconds * 1e3:,.2f} ms if every collective were sent alone and waited for"
    return [f"gap: this plan would take {step}; {less}"]


def _memory_text(plan: Plan) -> str:
    """Return in words whether the bound holds within the memory limit or without any."""
    if plan.limit is None:
        return ""
    free = min((seconds for _, seconds in plan.meshes), default=plan.bound)
    within = plan.bound > free * (1 + 1e-6)
    return " within this memory" if within else " of unlimited memory"


def _smaller_world(plan: Plan) -> list[str]:
    """Return the line on a smaller world that would be as fast, if there is one."""
    if plan.smaller is None:
        return []
    ranks, seconds = plan.smaller
    how = how_fast(plan)
    return [f"{format_ranks(ranks)} would be {how}: {seconds * 1e3:.1f} ms a step modelled"]


def how_fast(plan: Plan) -> str:
    """Return "faster" or "as fast", by what the step of the smaller world is of the plan's."""
    if plan.smaller is None:
        raise ValueError("the plan has no smaller world")
    return "faster" if plan.smaller[1] < 0.99 * plan.step_seconds else "as fast"


def summary(plan: Plan) -> str:
    """Return the plan in ten lines at most."""
    step = format_seconds(plan.step_seconds)
    total = summed_rows(plan.rows)
    lines = [
        ("layout", plan.layout),
        ("mesh", str(plan.mesh) or "one rank"),
        ("world", str(plan.world)),
        ("step", f"{step} modelled"),
        ("sends", f"{format_amount(plan.comm_bytes)}B from a rank in a step"),
        ("memory", f"{format_bytes(plan.peak_bytes)} at the peak{_limit(plan)}"),
    ]
    if plan.overlapped is not None:
        hidden, exposed = format_seconds(total.hidden), format_seconds(total.exposed or 0.0)
        lines.insert(4, ("hides", f"{hidden} of communication; {exposed} is exposed"))
    if plan.microbatches > 1:
        lines.append(("batches", microbatches_text(plan)))
    lines += [("gap", line.removeprefix("gap: ")) for line in _gap(plan)]
    lines += [("again", f"{what} in the backward: {names}") for names, what in plan.dropped]
    return "\n".join(["Plan", *(f"  {name:7} {text}" for name, text in lines[:9])])


def microbatches_text(plan: Plan) -> str:
    """Return in how many micro-batches a step runs, and when ranks sum gradients, in words."""
    when = "once a step" if plan.sums_once else "once a step, but for scattered ones in each"
    turns = ", two in turns" if plan.interleaved else ""
    gathers = ", weights gathered once a step" if plan.gathers_once else ""
    return f"{plan.microbatches} micro-batches{turns}; gradients are summed {when}{gathers}"


def _limit(plan: Plan) -> str:
    return "" if plan.device_limit is None else f" of {format_bytes(plan.device_limit)}"


def notebook(plan: Plan) -> str:
    """Return the plan as a notebook shows it: its figures and its table, as HTML without script."""
    console = Console(record=True, width=130, file=io.StringIO())
    console.print(summary(plan), highlight=False, markup=False)
    console.print(table(plan))
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
