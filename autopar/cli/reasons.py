"""Why a saved plan is as it is, and what one of its nodes or subgraphs is, costs and could be.

Example: explain_plan(Plan.load("plan.json"), "blocks.*.mlp").part.collectives are the collectives
of those subgraphs. What needs the graph (closed form, alternatives, nodes by their module) is there
where the plan's target was traced again. A plan enters, an `Explanation` leaves; explain.py prints
it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable
from typing import Any

from autopar.cli.options import GRIDS, read_layout
from autopar.cost.formula import Formula
from autopar.errors import LayoutError, PlanError
from autopar.ir.graph import chain_name, module_path
from autopar.ir.layout import Layout
from autopar.ir.plan import Choice, Plan
from autopar.ir.plan_table import Row, format_bytes, format_seconds
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
    """A node: its module ("" where the target was not traced), what each axis splits, and the
    states of its operands and results, one an axis; None for an operand without one.
    """

    node: str
    module: str
    splits: dict[str, str]
    operands: tuple[str | None, ...]
    results: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """What a pattern names: nodes, stored parameters, and the lines of the table that they are in,
    with the collectives of these. `formula` (text) and `why` (`planner.why.Why.facts`) are None
    where the target was not traced, or the pattern names no subgraph or no choice.
    """

    pattern: str
    nodes: tuple[NodeStates, ...]
    stored: dict[str, str]
    rows: tuple[Row, ...]
    collectives: tuple[CollectiveSum, ...]
    formula: str | None = None
    why: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Why a plan is as it is, in sentences (`reasons`); the meshes with the least bounds, the
    costliest lines of its table, its collectives, and the part that was asked about.
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
    part: Part | None = None


def explain_plan(plan: Plan, pattern: str | None = None) -> Explanation:
    """Return why a plan is as it is, and what the pattern names. Raises PlanError where it names
    nothing.

    >>> import autopar, torch
    >>> plan = autopar.plan(torch.nn.Linear(8, 16), 4, (torch.ones(4, 8),), "megatron")
    >>> explain_plan(plan, "linear").part.nodes[0].splits
    {'tp': 'n'}
    """
    costliest = sorted(plan.rows, key=row_seconds, reverse=True)[:_MOST_ROWS]
    meshes = [MeshBound(*pair) for pair in sorted(plan.meshes, key=lambda pair: pair[1])]
    return Explanation(
        plan.layout, str(plan.mesh) or "one rank", str(plan.world), plan.seconds, plan.overlapped,
        tuple(_reasons(plan)), tuple(meshes[:_MOST_MESHES]), tuple(costliest),
        _collective_sums(plan), None if pattern is None else _part(plan, pattern),
    )  # fmt: skip


def _reasons(plan: Plan) -> Iterable[str]:
    """Yield what decided this plan, one sentence each."""
    if len(plan.meshes) > 1:
        proof = "no other plan of this layout has a smaller sum of seconds"
        if plan.gap >= 1e-6:
            proof = f"another plan of this layout could save {plan.gap:.2%} of the sum at most"
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
        yield f"{ranks} ranks would be as fast: {format_seconds(seconds)} a step"
    for reason in plan.unsplit[:_MOST_ROWS]:
        yield f"not split: {reason}"
    if len(plan.unsplit) > _MOST_ROWS:
        yield f"not split: {len(plan.unsplit) - _MOST_ROWS} more nodes (show prints all)"
    yield from (*plan.notes, *plan.changed_figures)


def _collective_sums(plan: Plan, chains: Iterable[str] | None = None) -> tuple[CollectiveSum, ...]:
    """Return the plan's collectives, those of these subgraphs, equal ones together, by seconds."""
    sums: dict[tuple[str, tuple[str, ...], bool], list[tuple[float, float]]] = {}
    wanted = None if chains is None else set(chains)
    for each in plan.collectives:
        if wanted is None or each.chain in wanted:
            key = each.kind, each.axes, each.backward
            sums.setdefault(key, []).append((each.bytes, each.seconds))
    lines = [
        CollectiveSum(*key, len(parts), *(float(sum(column)) for column in zip(*parts)))
        for key, parts in sums.items()
    ]
    return tuple(sorted(lines, key=lambda line: -line.seconds))


# -- one part --------------------------------------------------------------------------------------
def _part(plan: Plan, pattern: str) -> Part:
    """Return what a pattern names. Raises PlanError where it names nothing."""
    nodes = _nodes(plan, pattern)
    chains = _chains(plan, pattern, nodes)
    rows = tuple(row for row in plan.rows if chains & set(expand(row.subgraph)))
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
    states = tuple(_states(plan, name, module) for name, module in nodes.items())
    collectives = _collective_sums(plan, chains)
    formula, answer = _formula(plan, chains), _why(plan, pattern) if nodes else None
    facts = None if answer is None else answer.facts()
    text = None if formula is None else str(formula)
    return Part(pattern, states, stored, rows, collectives, text, facts)


def _nodes(plan: Plan, pattern: str) -> dict[str, str]:
    """Return the nodes that a pattern names, by name or by module, with their modules."""
    if plan.context is None:
        return {name: "" for name in plan.choices if fnmatch.fnmatch(name, pattern)}
    nodes = [n for n in plan.context.source.module.graph.nodes if n.name in plan.choices]
    return {
        node.name: module_path(node)
        for node in nodes
        if fnmatch.fnmatch(node.name, pattern)
        or fnmatch.fnmatch(module_path(node), pattern)
        or fnmatch.fnmatch(module_path(node), pattern + ".*")
    }


def _chains(plan: Plan, pattern: str, nodes: dict[str, str]) -> set[str]:
    """Return the subgraphs that a pattern names, and those of these nodes."""
    names = {name for row in plan.rows for name in expand(row.subgraph)}
    chains = {
        name
        for name in names
        if fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(name, pattern + ".*")
    }
    if plan.context is not None and not chains:
        graph = plan.context.source.module.graph
        chains = {chain_name(n) for n in graph.nodes if n.name in nodes} & names
    return chains


def expand(subgraph: str) -> list[str]:
    """Return the subgraphs that a line of the table is about.

    >>> expand("blocks.0-2.mlp"), expand("head")
    (['blocks.0.mlp', 'blocks.1.mlp', 'blocks.2.mlp'], ['head'])
    """
    match = re.search(r"(?<![^.])(\d+)-(\d+)(?![^.])", subgraph)
    if match is None:
        return [subgraph]
    before, after = subgraph[: match.start()], subgraph[match.end() :]
    return [f"{before}{number}{after}" for number in range(int(match[1]), int(match[2]) + 1)]


def _states(plan: Plan, name: str, module: str) -> NodeStates:
    choice: Choice = plan.choices[name]
    operands = tuple(None if layout is None else _text(layout) for layout in choice.operands)
    splits = dict(zip(plan.mesh.names, choice.splits))
    return NodeStates(name, module, splits, operands, tuple(map(_text, choice.results)))


def _text(layout: Layout) -> str:
    pairs = zip(layout.mesh.names, layout.states, strict=True)
    return " ".join(f"{axis}:{state}" for axis, state in pairs) or "unsharded"


def _formula(plan: Plan, chains: set[str]) -> Formula | None:
    """Return the closed form of what the subgraphs move, where one pattern names just them."""
    if plan.context is None or not chains:
        return None
    pattern = next(iter(chains))
    if len(chains) > 1:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", pattern)
    return plan.formula(pattern)


def _why(plan: Plan, pattern: str) -> Why | None:
    """Return the alternatives, where the plan's layout is known and the search can be made."""
    if plan.context is None:
        return None
    try:
        layout = read_layout(_grid_text(plan.layout))
    except LayoutError:
        return None
    return dataclasses.replace(plan.context, layout=layout).why(pattern)


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


def row_seconds(row: Row) -> float:
    return row.seconds if row.computation is None else row.computation + (row.exposed or 0.0)
