"""`autopar compare`: what differs between two saved plans, and what that costs.

Example: compare_plans(Plan.load("a.json"), Plan.load("b.json")).figures[0] is the step's seconds in
both. Subgraphs are compared by their names without layer numbers, so that "blocks.0-3.mlp" and
"blocks.0-11.mlp" are one line. Two plans enter, a `Comparison` leaves.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable

from rich.markup import escape
from rich.table import Table

from autopar.cli.command import report_errors
from autopar.cli.options import JsonOption, PlanArgument, SchemaOption
from autopar.cli.terminal import console, print_json, print_line
from autopar.ir.plan import Plan
from autopar.ir.plan_table import Row, format_bytes, format_seconds

_PARTS = ("parameters", "gradients", "optimizer", "activations", "transient", "in_flight")
_MOST_STORED = 12  # lines of parameters that are stored otherwise
_SAME = 1e-9  # relative difference below which two figures are equal


@dataclasses.dataclass(frozen=True)
class Setting:
    """A property, such as the mesh, that the plans do not share, as text."""

    name: str
    first: str
    second: str


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure of both plans, of one rank in one step: `unit` is "s" or "bytes"; None where a plan
    does not have it.
    """

    name: str
    unit: str
    first: float | None
    second: float | None

    @property
    def more(self) -> float:
        """The second less the first."""
        return (self.second or 0.0) - (self.first or 0.0)


@dataclasses.dataclass(frozen=True)
class SubgraphFigures:
    """The layers of one name in one plan: what they split, their collectives, the bytes that a rank
    sends and the seconds that they take: of the overlapped step where the plan has one.
    """

    layout: str
    collectives: str
    bytes: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class SubgraphDifference:
    """A subgraph, "blocks.*.mlp", that differs; None where a plan does not have it."""

    subgraph: str
    first: SubgraphFigures | None
    second: SubgraphFigures | None


@dataclasses.dataclass(frozen=True)
class StoredDifference:
    """Parameters of one name, without layer numbers, that are stored otherwise, and how many."""

    parameter: str
    count: int
    first: str
    second: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What differs between two plans. `same_graph`: they are for the same traced graph. `verdict`:
    one sentence. `equal_subgraphs`: how many subgraphs are not listed.
    """

    first: str
    second: str
    same_graph: bool
    verdict: str
    settings: tuple[Setting, ...]
    figures: tuple[Figure, ...]
    subgraphs: tuple[SubgraphDifference, ...]
    equal_subgraphs: int
    stored: tuple[StoredDifference, ...]


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


def compare_plans(
    first: Plan, second: Plan, names: tuple[str, str] = ("first", "second")
) -> Comparison:
    """Return what differs between two plans, which `names` call.

    >>> import autopar, torch
    >>> model, inputs = torch.nn.Linear(8, 16), (torch.ones(4, 8),)
    >>> plans = [autopar.plan(model, 4, inputs, name) for name in ("ddp", "fsdp")]
    >>> [(s.name, s.first, s.second) for s in compare_plans(*plans).settings]
    [('layout', 'ddp', 'fsdp')]
    """
    subgraphs, equal = _subgraph_differences(first, second)
    figures = tuple(_figures(first, second))
    same_graph = first.fingerprint == second.fingerprint
    verdict = _verdict(figures, names, same_graph)
    settings = tuple(_settings(first, second))
    stored = tuple(_stored_differences(first, second))
    return Comparison(*names, same_graph, verdict, settings, figures, subgraphs, equal, stored)


def _settings(first: Plan, second: Plan) -> Iterable[Setting]:
    for name in ("layout", "mesh", "world", "optimizer", "limit", "reduce_dtype", "recompute",
                 "regather", "rerun", "groups", "replicated_outputs"):  # fmt: skip
        texts = [_text(getattr(plan, name)) for plan in (first, second)]
        if texts[0] != texts[1]:
            yield Setting(name, *texts)
    counts = [len(plan.unsplit) for plan in (first, second)]
    if counts[0] != counts[1]:
        yield Setting("unsplit", *(f"{count} nodes" for count in counts))


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value) or "one rank"


def _figures(first: Plan, second: Plan) -> Iterable[Figure]:
    yield Figure("step", "s", _step(first), _step(second))
    yield Figure("summed step", "s", first.seconds, second.seconds)
    yield Figure("sent", "bytes", first.comm_bytes, second.comm_bytes)
    yield Figure("peak memory", "bytes", first.peak_bytes, second.peak_bytes)
    for name in _PARTS:
        values = [getattr(p.memory, name) if p.memory is not None else None
                  for p in (first, second)]  # fmt: skip
        yield Figure(f"memory: {name.replace('_', ' ')}", "bytes", *values)


def _step(plan: Plan) -> float:
    return plan.seconds if plan.overlapped is None else plan.overlapped


def _verdict(figures: tuple[Figure, ...], names: tuple[str, str], same_graph: bool) -> str:
    """Return who is faster, sends less and holds less, in one sentence."""
    words = {"step": ("faster", "slower"), "sent": ("less sent", "more sent"),
             "peak memory": ("less memory", "more memory")}  # fmt: skip
    parts = []
    for figure in figures:
        if figure.name in words:
            amount = _amount(abs(figure.more), figure.unit)
            share = f" ({abs(figure.more) / figure.first:.1%})" if figure.first else ""
            less, more = words[figure.name]
            parts.append(
                f"as much {figure.name}" if _same(figure.first, figure.second)
                else f"{amount}{share} {less if figure.more < 0 else more}"
            )  # fmt: skip
    other = "" if same_graph else "; they are for different graphs: another model, batch or mode"
    return f"{names[1]} against {names[0]}: {', '.join(parts)}{other}"


def _subgraph_differences(first: Plan, second: Plan) -> tuple[tuple[SubgraphDifference, ...], int]:
    """Return the subgraphs that differ, those that differ most in seconds first, and how many do
    not.
    """
    sums = _sums(first), _sums(second)
    differences = [
        SubgraphDifference(name, sums[0].get(name), sums[1].get(name))
        for name in dict.fromkeys([*sums[0], *sums[1]])
    ]
    differing = [d for d in differences if not _alike(d.first, d.second)]
    differing.sort(key=lambda d: -abs(_seconds_of(d.second) - _seconds_of(d.first)))
    return tuple(differing), len(differences) - len(differing)


def _sums(plan: Plan) -> dict[str, SubgraphFigures]:
    """Return the rows of a plan's table, those of equal names without layer numbers as one."""
    groups: dict[str, list[Row]] = {}
    for row in plan.rows:
        groups.setdefault(_pattern(row.subgraph), []).append(row)
    return {
        name: SubgraphFigures(
            "; ".join(dict.fromkeys(row.layout for row in rows)),
            "; ".join(dict.fromkeys(row.collectives for row in rows)),
            sum(row.bytes for row in rows),
            sum(row.step_seconds for row in rows),
        )
        for name, rows in groups.items()
    }


def _pattern(name: str) -> str:
    """Return a name without layer numbers: "blocks.0-3.mlp" gives "blocks.*.mlp"."""
    return re.sub(r"(?<![^._])\d+(-\d+)?(?![^._])", "*", name)


def _alike(first: SubgraphFigures | None, second: SubgraphFigures | None) -> bool:
    if first is None or second is None:
        return False
    texts = [(f.layout, f.collectives) for f in (first, second)]
    pairs = (first.bytes, second.bytes), (first.seconds, second.seconds)
    return texts[0] == texts[1] and all(_same(*pair) for pair in pairs)


def _same(first: float | None, second: float | None) -> bool:
    one, other = first or 0.0, second or 0.0
    return abs(one - other) <= _SAME * max(abs(one), abs(other))


def _seconds_of(figures: SubgraphFigures | None) -> float:
    return 0.0 if figures is None else figures.seconds


def _stored_differences(first: Plan, second: Plan) -> Iterable[StoredDifference]:
    pairs: Counter[tuple[str, str, str]] = Counter()
    for name in dict.fromkeys([*first.stored, *second.stored]):
        texts = [
            str(plan.stored[name]) or "unsharded" if name in plan.stored else "not there"
            for plan in (first, second)
        ]
        if texts[0] != texts[1]:
            pairs[_pattern(name), texts[0], texts[1]] += 1
    for (name, one, other), count in pairs.items():
        yield StoredDifference(name, count, one, other)


# -- for people ------------------------------------------------------------------------------------
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
        cells = ["-" if x is None else _amount(x, figure.unit)
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
        more_seconds = _seconds_of(line.second) - _seconds_of(line.first)
        more = _signed_amount(sent[1] - sent[0], "bytes"), _signed_amount(more_seconds, "s")
        table.add_row(escape(line.subgraph), *map(_side_text, sides), *more)
    return table


def _side_text(figures: SubgraphFigures | None) -> str:
    if figures is None:
        return "not there"
    return escape(": ".join(text for text in (figures.layout, figures.collectives) if text))


def _amount(value: float, unit: str) -> str:
    return format_seconds(value) if unit == "s" else format_bytes(value)


def _signed_amount(value: float, unit: str) -> str:
    return f"{'-' if value < 0 else '+'}{_amount(abs(value), unit)}" if value else "0"
