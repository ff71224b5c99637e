"""The strategies of a node on a mesh: every joint choice of a factor (or none) for each axis, with
the layouts of operands and results that follow.

Example: for a matmul "m k, k n -> m n" on one axis of size 2, splitting n leaves the left operand
replicated and shards the right one and the result; splitting k makes the result partial.

Axes are chosen together: two axes may share an atom only if both digits fit, and then in either
order. The planner's searches choose among these strategies; planner/edit.py checks edits by them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.ir.layout import I, Layout, P, R, S, State
from autopar.ir.mesh import Mesh
from autopar.ir.program import Atom
from autopar.ir.sharding_rule import Dims, OpShardingRule


class Slot(NamedTuple):
    """An atom that an axis may split: the `position`-th (outer first) of a factor, or of a dim of a
    stored tensor.
    """

    factor: str
    position: int


class PartialPassThrough(NamedTuple):
    """The choice of an axis to pass partial values through this group of operands."""

    operands: frozenset[int]


AxisChoice = (
    State | Slot | PartialPassThrough
)  # for one axis: I or R for all operands and results, a slot to split, or partial values


def split_of(choice: AxisChoice) -> str:
    """Return the factor that a choice splits, or its state: "I", "R", or "P" for partial values."""
    return choice.factor if isinstance(choice, Slot) else getattr(choice, "kind", "P")


@dataclass(frozen=True)
class Strategy:
    """One way to run a node: a choice for each mesh axis and the layouts of its operands and
    results (None: an absent operand).
    """

    choices: tuple[AxisChoice, ...]
    operands: tuple[Layout | None, ...]
    results: tuple[Layout, ...]
    ranks: int  # ranks among which the work is divided

    @property
    def splits(self) -> tuple[str, ...]:
        """What each axis splits, as a plan has it (`split_of`)."""
        return tuple(split_of(choice) for choice in self.choices)

    @property
    def slots(self) -> tuple[Slot | None, ...]:
        """The slot that each axis splits; None for an axis that splits nothing."""
        return tuple(choice if isinstance(choice, Slot) else None for choice in self.choices)


# the orders to try of the axes on a slot, given in the order of the mesh; None: all of them
AxisOrders = Callable[[Slot, tuple[str, ...]], Iterable[tuple[str, ...]]] | None

_ALL_ORDERS = 2  # on more axes than this, axes that share an atom keep the order of the mesh

Atoms = dict[str, tuple[Atom, ...]]  # of every factor of a node
Shapes = tuple[tuple[int, ...] | None, ...]


def strategies(
    rule: OpShardingRule,
    factors: Atoms,
    mesh: Mesh,
    operand_shapes: Shapes,
    result_shapes: tuple[tuple[int, ...], ...],
    joint: Iterable[tuple[AxisChoice, ...]],
    may_idle: bool,
    all_orders: bool = False,
    axis_orders: AxisOrders = None,
) -> list[Strategy]:
    """Return every legal strategy of a node on a mesh, in a fixed order.

    `joint` lists the joint choices of the axes, one each (see `axis_choices`). Unless `may_idle`,
    no matmul is replicated over an axis that could split it. `all_orders`: axes that share an atom
    come in every order; else only on meshes of up to two axes. `axis_orders`: those of a slot, in
    place of all.
    """
    legal: list[Strategy] = []
    few_axes = len(mesh.axes) <= _ALL_ORDERS
    for choices in joint:
        taken = axes_by_slot(choices, mesh)
        if not _digits_fit(taken, factors, mesh):
            continue
        if rule.product and not may_idle and _is_wasteful(rule, choices, taken, factors, mesh):
            continue
        ranks = math.prod(
            a.size for a, c in zip(mesh.axes, choices, strict=True) if isinstance(c, Slot)
        )
        every_order = all_orders or few_axes
        for order in _axis_orders(taken, axis_orders) if every_order else (taken,):
            operands = tuple(
                None
                if dims is None or shape is None
                else _operand_layout(rule, i, dims, shape, choices, order, factors, mesh)
                for i, (dims, shape) in enumerate(zip(rule.operands, operand_shapes, strict=True))
            )
            results = tuple(
                _result_layout(rule, dims, shape, choices, order, factors, mesh)
                for dims, shape in zip(rule.results, result_shapes, strict=True)
            )
            legal.append(Strategy(choices, operands, results, ranks))
    return legal


def rule_key(rule: OpShardingRule, factors: Atoms) -> Hashable:
    """Return a key of all in a node's rule that its strategies and their cost depend on."""
    atoms = tuple((f, tuple((a.size, a.opaque) for a in chain)) for f, chain in factors.items())
    return (
        rule.operands,
        rule.results,
        tuple(rule.sizes.items()),
        rule.sum,
        rule.whole,
        rule.shared,
        rule.added,
        rule.linear,
        rule.product,
        rule.flops,
        rule.attends,
        rule.band,
        rule.nonlinear,
        rule.uneven,
        rule.skew,
        rule.inside,
        atoms,
    )


def axis_choices(
    rule: OpShardingRule, factors: Atoms, mesh: Mesh, gradient: bool
) -> list[list[AxisChoice]]:
    """Return the choices of each axis at a node. `gradient`: a value of the node carries one (else
    I and R are the same, and only R is listed).
    """
    return [_choices_of_axis(rule, factors, axis.size, gradient) for axis in mesh.axes]


def free_choices(rule: OpShardingRule, factors: Atoms, gradient: bool) -> list[AxisChoice]:
    """Return the choices at a node of an axis whose size divides every atom."""
    return _choices_of_axis(rule, factors, 1, gradient)


def _choices_of_axis(
    rule: OpShardingRule, factors: Atoms, size: int, gradient: bool
) -> list[AxisChoice]:
    """Return the choices at a node of an axis of this size."""
    choices: list[AxisChoice] = [R]
    if gradient:
        choices = [I] if rule.nonlinear else [I, R]
    for factor in rule.sizes:
        if rule.splittable(factor):
            choices.extend(
                Slot(factor, position)
                for position, atom in enumerate(factors[factor])
                if not atom.opaque and atom.size % size == 0
            )
    present = frozenset(i for i, dims in enumerate(rule.operands) if dims is not None)
    for group in rule.linear:
        if group & present:
            choices.append(PartialPassThrough(group & present))
    return choices


Taken = dict[Slot, tuple[str, ...]]  # the axes on each slot, outer digit first


def axes_by_slot(choices: Sequence[AxisChoice], mesh: Mesh) -> Taken:
    """Return the axes on each slot, in the order of the mesh."""
    taken: dict[Slot, tuple[str, ...]] = {}
    for axis, choice in zip(mesh.axes, choices, strict=True):
        if isinstance(choice, Slot):
            taken[choice] = (*taken.get(choice, ()), axis.name)
    return taken


def _digits_fit(taken: Taken, factors: Atoms, mesh: Mesh) -> bool:
    """Whether the axes on each slot together divide its atom."""
    return all(
        factors[slot.factor][slot.position].size % math.prod(mesh.sizes[a] for a in axes) == 0
        for slot, axes in taken.items()
    )


def _axis_orders(taken: Taken, axis_orders: AxisOrders = None) -> Iterator[Taken]:
    """Yield every order of the axes that share an atom, or each of `axis_orders`."""
    slots = list(taken)
    orders_of = axis_orders or (lambda _, axes: itertools.permutations(axes))
    for arrangement in itertools.product(*(orders_of(slot, taken[slot]) for slot in slots)):
        yield dict(zip(slots, arrangement, strict=True))


def _is_wasteful(
    rule: OpShardingRule, choices: Sequence[AxisChoice], taken: Taken, factors: Atoms, mesh: Mesh
) -> bool:
    """Whether an idle axis could still split some factor of the matmul."""
    for axis, choice in zip(mesh.axes, choices, strict=True):
        if isinstance(choice, Slot):
            continue
        for slot in _choices_of_axis(rule, factors, axis.size, gradient=False):
            if isinstance(slot, Slot) and _digits_fit(
                {**taken, slot: (*taken.get(slot, ()), axis.name)}, factors, mesh
            ):
                return True
    return False


# -- layouts that follow from a choice -------------------------------------------------------------
def _operand_layout(
    rule: OpShardingRule,
    index: int,
    dims: Dims,
    shape: tuple[int, ...],
    choices: Sequence[AxisChoice],
    order: Taken,
    factors: Atoms,
    mesh: Mesh,
) -> Layout:
    """Return the layout of the operand with this index."""
    present = {factor for dim in dims for factor in dim}
    states: list[State] = []
    for axis, choice in zip(mesh.axes, choices, strict=True):
        if isinstance(choice, PartialPassThrough):
            states.append(P if index in choice.operands else R)
        elif isinstance(choice, Slot) and choice.factor in present:
            states.append(_digit_state(axis.name, choice, dims, order, factors, mesh))
        elif isinstance(choice, Slot):
            is_added = index in rule.added and choice.factor in rule.sum
            states.append(P if is_added else R)
        else:
            states.append(choice)
    return Layout(mesh, shape, tuple(states))


def _result_layout(
    rule: OpShardingRule,
    dims: Dims,
    shape: tuple[int, ...],
    choices: Sequence[AxisChoice],
    order: Taken,
    factors: Atoms,
    mesh: Mesh,
) -> Layout:
    """Return the layout of a result with these dims."""
    present = {factor for dim in dims for factor in dim}
    states: list[State] = []
    for axis, choice in zip(mesh.axes, choices, strict=True):
        if isinstance(choice, PartialPassThrough):
            states.append(P)
        elif isinstance(choice, Slot) and choice.factor in present:
            states.append(_digit_state(axis.name, choice, dims, order, factors, mesh))
        elif isinstance(choice, Slot):
            states.append(I if choice.factor in rule.shared else P)
        else:
            states.append(choice)
    return Layout(mesh, shape, tuple(states))


def _digit_state(
    axis: str, slot: Slot, dims: Dims, order: Taken, factors: Atoms, mesh: Mesh
) -> State:
    """Return the state of an axis on a slot in the tensor with these dims: the axes on a slot hold
    the outermost digits of its atom, in order.
    """
    for dim, names in enumerate(dims):
        unit = 1
        for name in reversed(names):
            for position in reversed(range(len(factors[name]))):
                if (name, position) == slot:
                    unit *= factors[name][position].size
                    for other in order[slot]:
                        unit //= mesh.sizes[other]
                        if other == axis:
                            return S(dim, unit)
                unit *= factors[name][position].size
    raise AssertionError(f"slot {slot} is not in {dims}")


# -- tensors that are stored, taken in, or handed out ----------------------------------------------
def placements(
    dims: tuple[tuple[Atom, ...], ...],
    shape: tuple[int, ...],
    mesh: Mesh,
    unsplit: State = I,
    joint: Iterable[tuple[AxisChoice, ...]] | None = None,
    axis_orders: AxisOrders = None,
) -> list[Layout]:
    """Return every layout of a tensor in which each axis is `unsplit` (I or R) or holds a digit.
    `joint`: only layouts of these joint choices, whose slots are named by the number of their dim.
    `axis_orders`: those of the axes on a slot, in place of all.
    """
    slots: Atoms = {str(dim): atoms for dim, atoms in enumerate(dims)}
    dim_names: Dims = tuple((str(dim),) for dim in range(len(dims)))
    per_axis: list[list[AxisChoice]] = []
    for axis in mesh.axes:
        dividing: list[AxisChoice] = [
            Slot(name, position)
            for name, atoms in slots.items()
            for position, atom in enumerate(atoms)
            if not atom.opaque and atom.size % axis.size == 0
        ]
        per_axis.append([unsplit, *dividing])
    rule = OpShardingRule((dim_names,), (), dict.fromkeys(slots, 0))
    layouts: list[Layout] = []
    for choices in itertools.product(*per_axis) if joint is None else joint:
        taken = axes_by_slot(choices, mesh)
        if _digits_fit(taken, slots, mesh):
            layouts.extend(
                _operand_layout(rule, 0, dim_names, shape, choices, order, slots, mesh)
                for order in _axis_orders(taken, axis_orders)
            )
    return layouts


IDLE = ("I", "R", "P")  # of Choice.splits: the axis splits nothing
