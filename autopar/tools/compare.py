"""What differs between two plans, and what that costs. `autopar compare` prints it.

Example: compare_plans(Plan.load("a.json"), Plan.load("b.json")).figures[0] is the step's seconds in
both. Subgraphs are compared by their names without layer numbers, so that "blocks.0-3.mlp" and
"blocks.0-11.mlp" are one line. Two plans enter, a `Comparison` leaves.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable

from autopar.ir.plan import Plan
from autopar.ir.plan_table import Row, format_bytes, format_seconds

_PARTS = ("parameters", "gradients", "optimizer", "activations", "transient", "in_flight")
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
    yield Figure("step", "s", first.step_seconds, second.step_seconds)
    yield Figure("summed step", "s", first.seconds, second.seconds)
    yield Figure("sent", "bytes", first.comm_bytes, second.comm_bytes)
    yield Figure("peak memory", "bytes", first.peak_bytes, second.peak_bytes)
    for name in _PARTS:
        values = [getattr(p.memory, name) if p.memory is not None else None
                  for p in (first, second)]  # fmt: skip
        yield Figure(f"memory: {name.replace('_', ' ')}", "bytes", *values)


def _verdict(figures: tuple[Figure, ...], names: tuple[str, str], same_graph: bool) -> str:
    """Return who is faster, sends less and holds less, in one sentence."""
    words = {"step": ("faster", "slower"), "sent": ("less sent", "more sent"),
             "peak memory": ("less memory", "more memory")}  # fmt: skip
    texts = []
    for figure in figures:
        if figure.name in words:
            amount = amount_text(abs(figure.more), figure.unit)
            share = f" ({abs(figure.more) / figure.first:.1%})" if figure.first else ""
            less, more = words[figure.name]
            texts.append(
                f"as much {figure.name}" if _same(figure.first, figure.second)
                else f"{amount}{share} {less if figure.more < 0 else more}"
            )  # fmt: skip
    other = "" if same_graph else "; they are for different graphs: another model, batch or mode"
    return f"{names[1]} against {names[0]}: {', '.join(texts)}{other}"


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
    differing.sort(key=lambda d: -abs(seconds_of(d.second) - seconds_of(d.first)))
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
    left, right = first or 0.0, second or 0.0
    return abs(left - right) <= _SAME * max(abs(left), abs(right))


def seconds_of(figures: SubgraphFigures | None) -> float:
    """Return the seconds of a subgraph, 0 where a plan does not have it."""
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
    for (name, own, other), count in pairs.items():
        yield StoredDifference(name, count, own, other)


def amount_text(value: float, unit: str) -> str:
    """Return a figure with its unit, "s" or "bytes", as people read it."""
    return format_seconds(value) if unit == "s" else format_bytes(value)
