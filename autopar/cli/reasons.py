"""Why a saved plan is as it is, and what one of its nodes or subgraphs is, costs and could be.

Example: explain_plan(Plan.load("plan.json"), "blocks.*.mlp").selection.collectives are the
collectives of those subgraphs. What needs the graph (closed form, alternatives, nodes by their
module) is there where the plan's target was traced again. A plan enters, an `Explanation` leaves;
explain.py prints it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from autopar.cli.options import GRIDS, read_layout
from autopar.cost.communication import sent_collectives
from autopar.cost.formula import Formula
from autopar.cost.summary import compute_seconds_by_node
from autopar.errors import LayoutError, PlanError
from autopar.ir.graph import chain_name, module_path
from autopar.ir.layout import Layout
from autopar.ir.plan import Choice, Plan
from autopar.ir.plan_table import (
    Collective,
    Row,
    format_bytes,
    format_ranks,
    format_seconds,
    subgraphs_of,
)
from autopar.ir.plan_view import how_fast
from autopar.planner.space import candidates
from autopar.planner.why import Why

_MOST_MESHES, _MOST_ROWS = 6, 5  # lines of each kind


@dataclasses.dataclass(frozen=True)
class MeshBound:
    """A mesh that was considered: no plan on it has a smaller sum of seconds than `seconds`."""

    mesh: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class CollectiveSum:
    """Equal collectives of a step: `count` of them over `axes`, the bytes that a rank sends in all
    of them and their seconds, overlap not counted.
    """

    kind: str
    axes: tuple[str, ...]
    backward: bool
    count: int
    bytes: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class NodeStates:
    """A node: its module, what each axis splits, the states of its operands and results, one an
    axis (None for an operand without one), and the seconds of its computation, backward included.
    Where the target was not traced, `module` is "" and `seconds` None.
    """

    node: str
    module: str
    splits: dict[str, str]
    operands: tuple[str | None, ...]
    results: tuple[str, ...]
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class SelectionSum:
    """The seconds of a selection, forward and backward, overlap not counted: those of its nodes'
    computation, of its collectives, both, and their share of the sum of the step.
    """

    computation: float
    communication: float
    seconds: float
    share: float


@dataclasses.dataclass(frozen=True)
class Selection:
    """What a pattern names: nodes, stored parameters, and the lines of the table that they are in,
    with the collectives of these; of one node alone, by its name, those of its operands and
    results. `sum`, `formula` (text) and `why` (`planner.why.Why.facts`) are None
    where the target was not traced, or the pattern names no subgraph or no choice.
    """

    pattern: str
    nodes: tuple[NodeStates, ...]
    stored: dict[str, str]
    rows: tuple[Row, ...]
    collectives: tuple[CollectiveSum, ...]
    sum: SelectionSum | None = None
    formula: str | None = None
    why: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Why a plan is as it is, in sentences (`reasons`); the meshes with the least bounds, the
    costliest lines of its table, its collectives, and what the pattern names.
    """

    layout: str
    mesh: str
    world: str
    seconds: float
    overlapped: float | None
    reasons: tuple[str, ...]
    meshes: tuple[MeshBound, ...]
    costliest: tuple[Row, ...]
    collectives: tuple[CollectiveSum, ...]
    selection: Selection | None = None


def explain_plan(plan: Plan, pattern: str | None = None) -> Explanation:
    """Return why a plan is as it is, and what the pattern names. Raises PlanError where it names
    nothing.

    >>> import autopar, torch
    >>> plan = autopar.plan(torch.nn.Linear(8, 16), 4, (torch.ones(4, 8),), "megatron")
    >>> explain_plan(plan, "linear").selection.nodes[0].splits
    {'tp': 'n'}
    """
    costliest = sorted(plan.rows, key=lambda row: row.step_seconds, reverse=True)[:_MOST_ROWS]
    meshes = [MeshBound(*pair) for pair in sorted(plan.meshes, key=lambda pair: pair[::-1])]
    return Explanation(
        plan.layout, str(plan.mesh) or "one rank", str(plan.world), plan.seconds, plan.overlapped,
        tuple(_reasons(plan)), tuple(meshes[:_MOST_MESHES]), tuple(costliest),
        _collective_sums(plan.collectives), None if pattern is None else _selection(plan, pattern),
    )  # fmt: skip


def _reasons(plan: Plan) -> Iterable[str]:
    """Yield what decided this plan, one sentence each."""
    if len(plan.meshes) > 1:
        proof = "no other plan on them has a smaller sum of seconds"
        if plan.gap >= 1e-6:
            proof = f"another plan on them could save at most {plan.gap:.2%} of the summed seconds"
        yield f"{len(plan.meshes)} meshes were considered: {proof}"
    if plan.overlapped is not None:
        hidden = sum(row.hidden for row in plan.rows)
        exposed = sum(row.exposed or 0.0 for row in plan.rows)
        yield (
            f"communication takes {format_seconds(hidden + exposed)}, of which "
            f"{format_seconds(hidden)} hide under computation and {format_seconds(exposed)} do not"
        )
    if plan.limit is not None:
        yield (
            f"the fastest plan needs more than {format_bytes(plan.limit)} on each device: this is "
            "the fastest that was found within"
        )
    for names, what in plan.dropped:
        yield f"to fit, {what} again in the backward: {names}"
    if plan.smaller is not None:
        ranks, seconds = plan.smaller
        yield f"{format_ranks(ranks)} would be {how_fast(plan)}: {format_seconds(seconds)} a step"
    for reason in plan.unsplit[:_MOST_ROWS]:
        yield f"not split: {reason}"
    if len(plan.unsplit) > _MOST_ROWS:
        yield f"not split: {len(plan.unsplit) - _MOST_ROWS} more nodes (show prints all)"
    yield from (*plan.notes, *plan.changed_figures)


def _collective_sums(collectives: Iterable[Collective]) -> tuple[CollectiveSum, ...]:
    """Return equal collectives together, those that take most seconds first."""
    sums: dict[tuple[str, tuple[str, ...], bool], list[tuple[float, float]]] = {}
    for each in collectives:
        key = each.kind, each.axes, each.backward
        sums.setdefault(key, []).append((each.bytes, each.seconds))
    lines = [
        CollectiveSum(*key, len(amounts), *(float(sum(column)) for column in zip(*amounts)))
        for key, amounts in sums.items()
    ]
    return tuple(sorted(lines, key=lambda line: -line.seconds))


# -- a selection ----------------------------------------------------------------------------------
def _selection(plan: Plan, pattern: str) -> Selection:
    """Return what a pattern names. Raises PlanError where it names nothing."""
    nodes = _nodes(plan, pattern)
    chains = _chains(plan, pattern, nodes)
    rows = tuple(row for row in plan.rows if chains & set(subgraphs_of(row.subgraph)))
    prefixes = [pattern, "p_" + pattern.replace(".", "_"), "p_" + pattern.replace(".", "_") + "_*"]
    stored = {
        name: str(layout)
        for name, layout in plan.stored.items()
        if any(fnmatch.fnmatch(name, prefix) for prefix in prefixes)
    }
    if not nodes and not rows and not stored:
        raise PlanError(
            f"{pattern!r} names no node, parameter or subgraph of the plan; subgraphs are "
            f"{', '.join(row.subgraph for row in plan.rows[:12])}; nodes such as "
            f"{', '.join(list(plan.choices)[:4])}"
        )
    seconds: dict[str, float] = {}
    own = [each for each in plan.collectives if each.chain in chains]
    if plan.context is not None:
        seconds = compute_seconds_by_node(plan.context.program, plan.world)
        own = _at_nodes(plan, {pattern}) if pattern in nodes else own
    states = tuple(_states(plan, name, module, seconds.get(name)) for name, module in nodes.items())
    collectives = _collective_sums(own)
    formula, answer = _formula(plan, pattern, chains), _why(plan, pattern) if nodes else None
    facts = None if answer is None else answer.facts()
    text = None if formula is None else str(formula)
    total = _sum(plan, seconds, nodes, collectives) if nodes and seconds else None
    return Selection(pattern, states, stored, rows, collectives, total, text, facts)


def _sum(
    plan: Plan,
    seconds: Mapping[str, float],
    nodes: Iterable[str],
    collectives: Iterable[CollectiveSum],
) -> SelectionSum:
    """Return the seconds of a selection, by those of its nodes and of its collectives."""
    computation = sum(seconds.get(name, 0.0) for name in nodes)
    communication = sum(each.seconds for each in collectives)
    both = computation + communication
    return SelectionSum(
        computation, communication, both, both / plan.seconds if plan.seconds else 0.0
    )


def _nodes(plan: Plan, pattern: str) -> dict[str, str]:
    """Return the nodes that a pattern names, by name or by module, with their modules."""
    if plan.context is None:
        return {name: "" for name in plan.choices if fnmatch.fnmatch(name, pattern)}
    nodes = [n for n in plan.context.source.module.graph.nodes if n.name in plan.choices]
    return {
        node.name: module_path(node)
        for node in nodes
        if fnmatch.fnmatch(node.name, pattern) or _fits(module_path(node), pattern)
    }


def _chains(plan: Plan, pattern: str, nodes: dict[str, str]) -> set[str]:
    """Return the subgraphs that a pattern names, and those of these nodes."""
    names = {name for row in plan.rows for name in subgraphs_of(row.subgraph)}
    chains = {name for name in names if _fits(name, pattern)}
    if plan.context is not None and not chains:
        graph = plan.context.source.module.graph
        chains = {chain_name(n) for n in graph.nodes if n.name in nodes} & names
    return chains


def _at_nodes(plan: Plan, names: set[str]) -> list[Collective]:
    """Return the collectives within these nodes, of their results, and of their operands."""
    assert plan.context is not None
    sent = sent_collectives(plan.context.program)
    pairs = zip(sent, plan.collectives, strict=True)
    return [collective for each, collective in pairs if _touches(each.node, names)]


def _touches(node: fx.Node, names: set[str]) -> bool:
    """Whether a node of the rewritten graph stands for one of these or reshards for one."""
    readers = [user for user in node.users if "step" in node.meta]
    return node.meta.get("source", node.name) in names or any(
        _touches(reader, names) if "step" in reader.meta else reader.meta.get("source") in names
        for reader in readers
    )


def _states(plan: Plan, name: str, module: str, seconds: float | None) -> NodeStates:
    choice: Choice = plan.choices[name]
    operands = tuple(None if layout is None else _text(layout) for layout in choice.operands)
    splits = dict(zip(plan.mesh.names, choice.splits))
    return NodeStates(name, module, splits, operands, tuple(map(_text, choice.results)), seconds)


def _text(layout: Layout) -> str:
    pairs = zip(layout.mesh.names, layout.states, strict=True)
    return " ".join(f"{axis}:{state}" for axis, state in pairs) or "unsharded"


def _formula(plan: Plan, pattern: str, chains: set[str]) -> Formula | None:
    """Return the closed form of what the subgraphs move: those that the pattern names, else the one
    that its nodes are in.
    """
    if plan.context is None:
        return None
    known = {chain.name for chain in plan.context.program.chains}
    chains = chains & (known | {each.chain for each in plan.collectives})
    if any(_fits(name, pattern) for name in chains):
        return plan.formula(pattern)
    return plan.formula(next(iter(chains))) if len(chains) == 1 else None


def _fits(name: str, pattern: str) -> bool:
    """Whether a pattern names a module or a subgraph, or what that lies below."""
    return fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(name, pattern + ".*")


def _why(plan: Plan, pattern: str) -> Why | None:
    """Return the alternatives, where the plan's layout is known, its mesh is one of that layout's,
    and the pattern is one that `Plan.why` takes.
    """
    if plan.context is None:
        return None
    try:
        layout = read_layout(_grid_text(plan.layout))
        meshes = candidates(layout, plan.world.ranks, plan.context.source)
        if all(mesh != plan.mesh for mesh, _ in meshes):
            return None
        return dataclasses.replace(plan.context, layout=layout).why(pattern)
    except (LayoutError, PlanError):
        return None


def _grid_text(layout: str) -> str:
    """Return a layout as --layout takes it: "Grid4D(x=2, y=1)" is "4d:x=2,y=1". Flags, which it
    does not take, are left out where they are True, as by default.
    """
    kinds = {grid.__name__: name for name, grid in GRIDS.items()}
    match = re.fullmatch(r"(\w+)\((.*)\)", layout)
    if match is None or match[1] not in kinds:
        return layout
    sizes = re.sub(r",\s*\w+=True|[\s']", "", match[2])
    return f"{kinds[match[1]]}:{sizes}"
