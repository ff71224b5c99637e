"""The facts of a report, gathered from a plan: words and numbers, no HTML.

Example: `gather(plan, "gpt2").cards` is what the first screen shows. A plan of this process has
all of them; one from a file has what the file holds. page.py calls `gather`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autopar.cost.formula import Formula
from autopar.cost.throughput import throughput
from autopar.errors import PlanError
from autopar.ir.graph import module_path
from autopar.ir.layout import Layout
from autopar.ir.plan import Plan
from autopar.ir.plan_table import (
    Row,
    format_bytes,
    format_count,
    format_ranks,
    format_seconds,
    subgraphs_of,
)
from autopar.ir.plan_view import how_fast
from autopar.tools.report.alternatives import Alternative, alternatives

_MOST_FORMULAS = 40  # subgraphs with a closed form: each takes a moment


@dataclass(frozen=True)
class Card:
    """A figure of the first screen: its name, its value, and what else there is to say of it."""

    name: str
    value: str
    more: str = ""


@dataclass
class Module:
    """A module of the tree: the line of the table that it is, if any, and the modules in it."""

    name: str
    row: Row | None = None
    inside: dict[str, Module] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds of the step in this module and all within: computing, and exposed."""
        own = 0.0 if self.row is None else self.row.step_seconds
        return own + sum(module.seconds for module in self.inside.values())


@dataclass(frozen=True)
class Subgraph:
    """What is known of a line of the table beside the line itself: the layouts of its main product
    (X, W, Y), if it has one, and what it moves as a closed form.
    """

    matrices: tuple[tuple[str, Layout], ...] = ()
    formula: Formula | None = None


@dataclass(frozen=True)
class Facts:
    """All facts of a report. `load`: bytes that a rank sends over each level of links in a step."""

    name: str
    plan: Plan
    cards: tuple[Card, ...]
    why: str
    others: tuple[Alternative, ...]
    tree: Module
    subgraphs: dict[str, Subgraph]
    load: tuple[float, ...]


def gather(
    plan: Plan,
    name: str = "",
    inputs: Any = None,
    compare: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Facts:
    """Return the facts of a plan. `name` of the model; `inputs` give tokens/s; `compare` plans the
    named layouts, too.
    """
    # the named layouts would be planned for the ranks of one stage
    compares = compare and not plan.stage_starts
    others = tuple(alternatives(plan, progress=progress)) if compares else ()
    return Facts(
        name or "the model",
        plan,
        tuple(_cards(plan, name, inputs)),
        why_text(plan, others),
        others,
        module_tree(plan.rows),
        _subgraphs(plan),
        tuple(level_load(plan)),
    )


# -- the first screen ------------------------------------------------------------------------------
def _cards(plan: Plan, name: str, inputs: Any) -> Iterable[Card]:
    rate = None if inputs is None else throughput(plan, inputs)
    error = "" if rate is None or rate.off is None else f" ± {rate.off:.0%}"
    yield Card("model", name or "–", _parameters_text(plan))
    rates = "rates measured" if plan.measured else "rates assumed, not measured"
    of_stage = "one stage: " if plan.stage_starts else ""
    name_of_world = f"{plan.ranks:,} × {plan.world.device.name}"
    yield Card("world", name_of_world, f"{of_stage}{plan.world}; {rates}")
    yield Card("mesh", of_stage + (str(plan.mesh) or "one rank"), f"layout {plan.layout}")
    yield Card("step", format_seconds(plan.step_seconds) + error, _step_text(plan))
    if rate is not None:
        yield Card(f"{rate.unit}/s", format_count(round(rate.rate)), "on all ranks")
        yield Card("model FLOPs utilisation", f"{rate.utilization:.0%}", "of the devices' peak")
    limit = plan.device_limit or plan.world.device.memory_bytes
    part = plan.peak_bytes / limit
    share = f"{f'{part:.0%}' if part >= 0.01 else 'less than 1%'} of {format_bytes(limit)}"
    yield Card("memory", format_bytes(plan.peak_bytes), f"at the peak of each device, {share}")
    if plan.bound:
        more = "the most that another plan could save of the summed seconds"
        yield Card("gap", f"{plan.gap:.2%}", more)


def _parameters_text(plan: Plan) -> str:
    if plan.context is None:
        return f"graph {plan.fingerprint}"
    shapes = {name: layout.shape for name, layout in plan.stored.items()}
    return f"{format_count(sum(map(math.prod, shapes.values())))} parameters"


def _step_text(plan: Plan) -> str:
    if plan.stage_starts:
        return "modelled, with the time that ranks of a pipeline wait"
    if plan.overlapped is None:
        return "modelled; communication is waited for"
    exposed = sum(row.exposed or 0.0 for row in plan.rows)
    hidden = sum(row.hidden for row in plan.rows)
    smaller = ""
    if plan.smaller is not None:
        ranks, seconds = plan.smaller
        smaller = f"; {format_ranks(ranks)} would be {how_fast(plan)}: {format_seconds(seconds)}"
    return (
        f"modelled; communication: {format_seconds(hidden)} hidden, {format_seconds(exposed)} "
        f"exposed{smaller}"
    )


def why_text(plan: Plan, others: Iterable[Alternative]) -> str:
    """Return one sentence that says why this layout."""
    if plan.stage_starts:
        return (
            f"{len(plan.stage_starts) + 1} stages were asked for, each on mesh "
            f"{str(plan.mesh) or 'of one rank'}, whose layout is the fastest that was found; they "
            "are cut where the slowest stage is fastest."
        )
    if not plan.mesh.axes:
        return "There is one rank, so there is nothing to lay out."
    sentence = f"Mesh {plan.mesh} under layout {plan.layout}"
    timed = [other for other in others if other.seconds is not None]
    second = min(timed, key=lambda other: other.seconds or 0.0, default=None)
    mine = plan.step_seconds
    if second is None or second.seconds is None:
        reason = "is the fastest that was found"
        if plan.bound:
            reason += f", and no other plan could save more than {plan.gap:.2%} of the sum"
    elif second.seconds > mine:
        more = f"{format_seconds(second.seconds)}, {second.seconds / mine - 1:.1%} more"
        reason = (
            f"takes {format_seconds(mine)} a step; the best named layout, {second.layout} on "
            f"{second.mesh}, takes {more}"
        )
    else:
        best = f"as the best named layout, {second.layout} on {second.mesh}, does"
        if plan.layout == second.layout:
            best = "the best of the named layouts, and none faster was found"
        reason = f"takes {format_seconds(mine)} a step, {best}"
    unfit = [other.layout for other in others if "fits" in other.why]
    memory = f"; {', '.join(unfit)} do not fit the memory" if unfit else ""
    return f"{sentence} {reason}{memory}."


# -- modules ---------------------------------------------------------------------------------------
def module_tree(rows: Iterable[Row]) -> Module:
    """Return the modules of the rows as a tree: "blocks.0-11.mlp" lies in "blocks.0-11"."""
    root = Module("")
    for row in rows:
        module = root
        for name in row.subgraph.split("."):
            module = module.inside.setdefault(name, Module(name))
        module.row = row
    return _joined(root)


def _joined(module: Module) -> Module:
    """Return a tree in which a module that only holds one other is joined with it."""
    inside = {}
    for child in map(_joined, module.inside.values()):
        if child.row is None and len(child.inside) == 1:
            (only,) = child.inside.values()
            child = Module(f"{child.name}.{only.name}", only.row, only.inside)
        inside[child.name] = child
    return Module(module.name, module.row, inside)


def _subgraphs(plan: Plan) -> dict[str, Subgraph]:
    """Return what is known of every line of the table; nothing for a plan from a file."""
    if plan.context is None:
        return {}
    products = _products(plan)
    subgraphs = {}
    for number, row in enumerate(plan.rows):
        formula = _formula(plan, row) if number < _MOST_FORMULAS and row.bytes else None
        subgraphs[row.subgraph] = Subgraph(products.get(subgraphs_of(row.subgraph)[0], ()), formula)
    return subgraphs


def _products(plan: Plan) -> dict[str, tuple[tuple[str, Layout], ...]]:
    """Return the layouts of X, W and Y of the first product with a weight of each subgraph."""
    assert plan.context is not None
    program = plan.context.source
    products: dict[str, tuple[tuple[str, Layout], ...]] = {}
    specs = program.annotations.specs if program.annotations is not None else {}
    for node in program.module.graph.nodes:
        rule, choice = specs.get(node.name), plan.choices.get(node.name)
        if rule is None or rule.product is None or choice is None or len(choice.operands) < 2:
            continue
        x, w = choice.operands[:2]
        if x is not None and w is not None and _is_parameter(node.args[1]):
            matrices = (("X", x), ("W", w), ("Y", choice.results[0]))
            chain = str(node.meta.get("chain") or module_path(node))
            products.setdefault(chain, matrices)
    return products


def _is_parameter(operand: Any) -> bool:
    return isinstance(operand, fx.Node) and operand.op == "placeholder"


def _formula(plan: Plan, row: Row) -> Formula | None:
    try:
        return plan.formula(subgraphs_of(row.subgraph)[0])
    except PlanError:
        return None


def level_load(plan: Plan) -> list[float]:
    """Return the bytes that a rank sends over each level of links in a step: those of a collective
    count at the outermost level that its group reaches. None for a world of single links.
    """
    load = [0.0] * len(plan.world.levels)
    levels: dict[tuple[str, ...], int] = defaultdict(int)
    for each in plan.collectives:
        if each.axes not in levels:
            group = plan.mesh.group(each.axes, 0)
            inside = 1
            for number, level in enumerate(plan.world.levels):
                if any(rank // inside % level.ranks for rank in group):
                    levels[each.axes] = number
                inside *= level.ranks
        if load:
            load[levels[each.axes]] += each.bytes
    return load
