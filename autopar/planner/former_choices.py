"""Plans a further call of a model with the choices of its first call, without a search for others.

Example: 16 rows were planned on x2.y4, with the batch split over x. A last batch of 6 rows takes
every choice as it was. One of 5 rows is padded to 6, as x divides no 5; one of 1 row is searched.

A choice names what each axis splits at a node, and no size. So it is carried over to the node of
the same name, operator and rule, where the axes divide the new sizes; its layouts are then those of
the new sizes, from the same table of strategies that a search chooses from. Nodes that only the
further call has, such as those that pad, and the copies of values are searched among all that they
may be. An annotated program and the first call's plan enter; the program with its plan leaves, or
None where a choice is not legal. planner.py calls `with_former_choices`, and searches then.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from torch import fx

from autopar.errors import PlanError
from autopar.ir.dim_roles import dim_kinds
from autopar.ir.graph import carries_gradient, remember
from autopar.ir.layout import I, R
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Choice, Plan
from autopar.ir.program import Annotations, Program
from autopar.ir.sharding_rule import (
    OpShardingRule,
    operand_shapes,
    result_shapes,
)
from autopar.ir.strategy import (
    Atoms,
    AxisChoice,
    axes_by_slot,
    axis_choices,
    rule_key,
    split_of,
    strategies,
)
from autopar.planner.constraint import Constraint
from autopar.planner.exact_search import search
from autopar.planner.padding import searched_in_paddings
from autopar.world import World

NOTE = "the choices are those of the first call; these sizes were not searched, so no gap is known"

Joint = tuple[AxisChoice, ...]  # one choice for each axis
_MOST = 256  # joint choices of a node that only the further call has


def with_former_choices(program: Program, world: World, plan: Plan) -> Program | None:
    """Return the annotated program of a further call with the choices of `plan`, whose stored
    layouts are by the placeholders of this program; its rows padded where axes then divide them.
    None where a choice is not legal here. The plan has no bound: no others were compared.
    """
    former = None if plan.context is None else plan.context.source
    if former is None or former.annotations is None or not plan.mesh.axes:
        return None
    source: Program = former

    def choices() -> Mapping[str, Joint] | None:
        return _choices_by_node(source, plan)

    by_node = remember(source.module.graph, "joint choices", (source.annotations,), choices)
    if by_node is None:
        return None
    known: Mapping[str, Joint] = by_node

    def carried(program: Program) -> Program | None:
        near = _choices_to_search(program, source, known, plan)
        if near is None:
            return None
        constraint = Constraint(plan.layout, stored=plan.stored)
        try:
            best = search(program, plan.mesh, world, constraint, near)
        except PlanError:  # of tables that are too large
            return None
        return dataclasses.replace(program, plan=dataclasses.replace(best, bound=0.0))

    return searched_in_paddings(carried, program, plan, _split_of_rows(source, known, plan.mesh))


def _split_of_rows(former: Program, known: Mapping[str, Joint], mesh: Mesh) -> int:
    """Return among how many ranks at most a node of the first call splits the rows of the batch."""
    assert former.annotations is not None
    batch, factors = dim_kinds(former).batch, former.annotations.factors
    return max(
        (
            math.prod(mesh.sizes[axis] for axis in axes)
            for name, joint in known.items()
            for slot, axes in axes_by_slot(joint, mesh).items()
            if factors[name][slot.factor][slot.position].number in batch
        ),
        default=1,
    )


# -- the choices of the first call, as a search takes them -----------------------------------------
def _choices_by_node(former: Program, plan: Plan) -> Mapping[str, Joint] | None:
    """Return the joint choice of every node of the first call; None where a layout of the plan is
    of no strategy, as after an edit of its context.
    """
    assert former.annotations is not None
    notes, known = former.annotations, dict[object, Joint | None]()
    by_node: dict[str, Joint] = {}
    for node in former.module.graph.nodes:
        choice = plan.choices.get(node.name)
        if choice is None:
            continue
        key = _node_key(notes, node), choice
        if key not in known:
            known[key] = _joint_choice(notes, node, choice, plan.mesh)
        joint = known[key]
        if joint is None:
            return None
        by_node[node.name] = joint
    return by_node


def _joint_choice(notes: Annotations, node: fx.Node, choice: Choice, mesh: Mesh) -> Joint | None:
    """Return the joint choice of the axes whose strategy has the layouts of `choice`."""
    rule, factors = notes.specs[node.name], notes.factors[node.name]
    every = axis_choices(rule, factors, mesh, carries_gradient(notes, node))
    named = [
        [option for option in options if split_of(option) == split]
        for options, split in zip(every, choice.splits, strict=True)
    ]
    shapes = operand_shapes(node), result_shapes(node)
    for joint in itertools.product(*named):
        for strategy in strategies(rule, factors, mesh, *shapes, [joint], True, True):
            if (strategy.operands, strategy.results) == (choice.operands, choice.results):
                return joint
    return None


def _node_key(notes: Annotations, node: fx.Node) -> object:
    """Return a key of all that the strategies of a node depend on."""
    key = rule_key(notes.specs[node.name], notes.factors[node.name])
    return key, operand_shapes(node), result_shapes(node), carries_gradient(notes, node)


# -- the same choices at other sizes ---------------------------------------------------------------
def _choices_to_search(
    program: Program, former: Program, known: Mapping[str, Joint], plan: Plan
) -> dict[str, tuple[Joint, ...]] | None:
    """Return the joint choices to search of every node and stored tensor: that of the first call,
    or all where it had no such node. None where that one is not legal, or they are too many.
    """
    notes, before = program.annotations, former.annotations
    assert notes is not None and before is not None
    nodes = {node.name: node for node in former.module.graph.nodes}
    parameters = {e.node for e in program.signature.inputs if e.kind == "parameter"}
    legal: dict[object, tuple[Joint, ...]] = {}
    near: dict[str, tuple[Joint, ...]] = {}
    for node in program.module.graph.nodes:
        name = node.name
        if name not in notes.searched:
            continue
        if node.op == "placeholder":
            if name in parameters and name not in plan.stored:
                return None
            unsplit = I if (name, 0) in notes.gradient else R  # a stored one is as it is
            near[name] = (tuple(unsplit for _ in plan.mesh.axes),)
            continue
        if name not in notes.specs:
            continue
        joint = known.get(name)
        if joint is not None and not _same_op(node, nodes[name], notes, before):
            return None
        key = _node_key(notes, node), joint
        if key not in legal:
            legal[key] = _legal(notes, node, joint, plan.mesh)
        if not legal[key]:
            return None
        near[name] = legal[key]
    return near


def _same_op(node: fx.Node, other: fx.Node, notes: Annotations, before: Annotations) -> bool:
    """Whether a node runs the operator of the first call's node, and its factors mean the same."""

    def facts(rule: OpShardingRule, own: Annotations, name: str) -> object:
        atoms = {factor: len(chain) for factor, chain in own.factors[name].items()}
        sums = rule.sum, rule.linear, rule.added, rule.product
        return rule.operands, rule.results, rule.shared, sums, atoms

    rule, old = notes.specs[node.name], before.specs[node.name]
    same = facts(rule, notes, node.name) == facts(old, before, node.name)
    return node.target == other.target and same


def _legal(notes: Annotations, node: fx.Node, joint: Joint | None, mesh: Mesh) -> tuple[Joint, ...]:
    """Return the joint choice if it is legal at a node of these sizes, without one all that are;
    none where that is none, or too many. What is not split is invariant or replicated as the node
    allows: without a gradient both are one.
    """
    rule, factors = notes.specs[node.name], notes.factors[node.name]
    every = axis_choices(rule, factors, mesh, carries_gradient(notes, node))
    if joint is None:
        count = math.prod(map(len, every))
        candidates = [*itertools.product(*every)] if count <= _MOST else []
    else:
        options = [_matching_options(c, own) for c, own in zip(joint, every, strict=True)]
        candidates = [*itertools.product(*options)]
    return tuple(each for each in candidates if _divides(each, factors, mesh))


def _matching_options(choice: AxisChoice, options: Sequence[AxisChoice]) -> list[AxisChoice]:
    """Return the options that a former choice is."""
    if choice in options:
        return [choice]
    return [each for each in options if each in (I, R)] if choice in (I, R) else []


def _divides(joint: Joint, factors: Atoms, mesh: Mesh) -> bool:
    """Whether the axes on each slot together divide its atom."""
    return all(
        factors[slot.factor][slot.position].size % math.prod(mesh.sizes[a] for a in axes) == 0
        for slot, axes in axes_by_slot(joint, mesh).items()
    )
