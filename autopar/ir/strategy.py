"""What a node can do on a mesh: every joint choice of a factor (or none) for each axis, with the
layouts that follow.

Axes are chosen together: two axes may share an atom only if both digits fit, and then in either
order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.ir.layout import I, Layout, P, R, S, State
from autopar.ir.mesh import Mesh
from autopar.ir.program import Atom
from autopar.ir.sharding_rule import Dims, OpShardingRule


class Slot(NamedTuple):
    """Where an axis may be put: the `position`-th atom (outer first) of a factor, or of a dim of a
    stored tensor.
    """

    factor: str
    position: int


class PartialPassThrough(NamedTuple):
    """The axis passes partial values through this group of operands."""

    operands: frozenset[int]


Choice = (
    State | Slot | PartialPassThrough
)  # of one axis: I or R for all operands and results, a slot, or partial values


def split_of(choice: Choice) -> str:
    """The factor that is split, or the state: I, R, or P for partial values."""
    return choice.factor if isinstance(choice, Slot) else getattr(choice, "kind", "P")


@dataclass(frozen=True)
class Strategy:
    """One way to run a node: a choice per mesh axis and the layouts of its operands and results
    (None: absent operand).
    """

    choices: tuple[Choice, ...]
    operands: tuple[Layout | None, ...]
    results: tuple[Layout, ...]
    parts: int  # ranks among which the work is divided

    @property
    def slots(self) -> tuple[Slot | None, ...]:
        return tuple(choice if isinstance(choice, Slot) else None for choice in self.choices)


_ALL_ORDERS = 2  # on more axes than this, axes that share an atom stand in the order of the mesh

Atoms = dict[str, tuple[Atom, ...]]  # of every factor of a node
Shapes = tuple[tuple[int, ...] | None, ...]


def strategies(
    spec: OpShardingRule,
    factors: Atoms,
    mesh: Mesh,
    operand_shapes: Shapes,
    result_shapes: tuple[tuple[int, ...], ...],
    joint: Iterable[tuple[Choice, ...]],
    redundant: bool,
    all_orders: bool = False,
) -> list[Strategy]:
    """Every legal strategy of a node on a mesh, in a fixed order, from the joint choices of its
    axes (see `axis_choices`).

    Unless `redundant`, a matrix product is not computed whole on several ranks of an axis that
    could split it.
    """
    found: list[Strategy] = []
    few = len(mesh.axes) <= _ALL_ORDERS
    for choices in joint:
        taken = _taken(choices, mesh)
        if not _fits(taken, factors, mesh):
            continue
        if spec.product and not redundant and _wasteful(spec, choices, taken, factors, mesh):
            continue
        parts = math.prod(
            a.size for a, c in zip(mesh.axes, choices, strict=True) if isinstance(c, Slot)
        )
        for order in _orders(taken) if all_orders or few else (taken,):
            operands = tuple(
                None
                if dims is None or shape is None
                else _operand(spec, i, dims, shape, choices, order, factors, mesh)
                for i, (dims, shape) in enumerate(zip(spec.operands, operand_shapes, strict=True))
            )
            results = tuple(
                _result(spec, dims, shape, choices, order, factors, mesh)
                for dims, shape in zip(spec.results, result_shapes, strict=True)
            )
            found.append(Strategy(choices, operands, results, parts))
    return found


def rule_look(spec: OpShardingRule, factors: Atoms) -> Hashable:
    """All of a node's rule that its strategies and their cost depend on."""
    atoms = tuple((f, tuple((a.size, a.opaque) for a in chain)) for f, chain in factors.items())
    return (
        spec.operands,
        spec.results,
        tuple(spec.sizes.items()),
        spec.sum,
        spec.whole,
        spec.shared,
        spec.added,
        spec.linear,
        spec.product,
        spec.flops,
        spec.attends,
        spec.nonlinear,
        atoms,
    )


def axis_choices(
    spec: OpShardingRule, factors: Atoms, mesh: Mesh, gradient: bool
) -> list[list[Choice]]:
    """What each axis may do at a node. `gradient`: a value of the node carries one (else I and R
    are the same, only R is listed).
    """
    return [_choices(spec, factors, axis.size, gradient) for axis in mesh.axes]


def free_choices(spec: OpShardingRule, factors: Atoms, gradient: bool) -> list[Choice]:
    """What an axis may do at a node where its size divides everything."""
    return _choices(spec, factors, 1, gradient)


def _choices(spec: OpShardingRule, factors: Atoms, size: int, gradient: bool) -> list[Choice]:
    made: list[Choice] = [R]
    if gradient:
        made = [I] if spec.nonlinear else [I, R]
    for factor in spec.sizes:
        if spec.splittable(factor):
            made.extend(
                Slot(factor, position)
                for position, atom in enumerate(factors[factor])
                if not atom.opaque and atom.size % size == 0
            )
    present = frozenset(i for i, dims in enumerate(spec.operands) if dims is not None)
    for group in spec.linear:
        if group & present:
            made.append(PartialPassThrough(group & present))
    return made


Taken = dict[Slot, tuple[str, ...]]  # the axes on each slot, outer digit first


def _taken(choices: Sequence[Choice], mesh: Mesh) -> Taken:
    taken: dict[Slot, tuple[str, ...]] = {}
    for axis, choice in zip(mesh.axes, choices, strict=True):
        if isinstance(choice, Slot):
            taken[choice] = (*taken.get(choice, ()), axis.name)
    return taken


def _fits(taken: Taken, factors: Atoms, mesh: Mesh) -> bool:
    return all(
        factors[slot.factor][slot.position].size % math.prod(mesh.sizes[a] for a in axes) == 0
        for slot, axes in taken.items()
    )


def _orders(taken: Taken) -> Iterator[Taken]:
    """Every order of the axes that share an atom."""
    slots = list(taken)
    for arrangement in itertools.product(*(itertools.permutations(taken[slot]) for slot in slots)):
        yield dict(zip(slots, arrangement, strict=True))


def _wasteful(
    spec: OpShardingRule, choices: Sequence[Choice], taken: Taken, factors: Atoms, mesh: Mesh
) -> bool:
    """Whether an axis is idle on which some factor of the product could still be split."""
    for axis, choice in zip(mesh.axes, choices, strict=True):
        if isinstance(choice, Slot):
            continue
        for slot in _choices(spec, factors, axis.size, gradient=False):
            if isinstance(slot, Slot) and _fits(
                {**taken, slot: (*taken.get(slot, ()), axis.name)}, factors, mesh
            ):
                return True
    return False


# -- layouts that follow from a choice -------------------------------------------------------------
def _operand(
    spec: OpShardingRule,
    index: int,
    dims: Dims,
    shape: tuple[int, ...],
    choices: Sequence[Choice],
    order: Taken,
    factors: Atoms,
    mesh: Mesh,
) -> Layout:
    present = {factor for dim in dims for factor in dim}
    states: list[State] = []
    for axis, choice in zip(mesh.axes, choices, strict=True):
        if isinstance(choice, PartialPassThrough):
            states.append(P if index in choice.operands else R)
        elif isinstance(choice, Slot) and choice.factor in present:
            states.append(_digit(axis.name, choice, dims, order, factors, mesh))
        elif isinstance(choice, Slot):
            once = index in spec.added and choice.factor in spec.sum
            states.append(P if once else R)
        else:
            states.append(choice)
    return Layout(mesh, shape, tuple(states))


def _result(
    spec: OpShardingRule,
    dims: Dims,
    shape: tuple[int, ...],
    choices: Sequence[Choice],
    order: Taken,
    factors: Atoms,
    mesh: Mesh,
) -> Layout:
    present = {factor for dim in dims for factor in dim}
    states: list[State] = []
    for axis, choice in zip(mesh.axes, choices, strict=True):
        if isinstance(choice, PartialPassThrough):
            states.append(P)
        elif isinstance(choice, Slot) and choice.factor in present:
            states.append(_digit(axis.name, choice, dims, order, factors, mesh))
        elif isinstance(choice, Slot):
            states.append(I if choice.factor in spec.shared else P)
        else:
            states.append(choice)
    return Layout(mesh, shape, tuple(states))


def _digit(axis: str, slot: Slot, dims: Dims, order: Taken, factors: Atoms, mesh: Mesh) -> State:
    """The digit of an axis on a slot, in the tensor that has these dims: the outermost digits of
    the atom, in order.
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
    whole: State = I,
    joint: Iterable[tuple[Choice, ...]] | None = None,
) -> list[Layout]:
    """Every layout of a tensor in which each axis is `whole` (I or R) or holds a digit; `joint`:
    only those of these joint choices, slots named by the number of their dim.
    """
    slots: Atoms = {str(dim): atoms for dim, atoms in enumerate(dims)}
    named: Dims = tuple((str(dim),) for dim in range(len(dims)))
    per_axis: list[list[Choice]] = []
    for axis in mesh.axes:
        fitting: list[Choice] = [
            Slot(name, position)
            for name, atoms in slots.items()
            for position, atom in enumerate(atoms)
            if not atom.opaque and atom.size % axis.size == 0
        ]
        per_axis.append([whole, *fitting])
    spec = OpShardingRule((named,), (), dict.fromkeys(slots, 0))
    found: list[Layout] = []
    for choices in itertools.product(*per_axis) if joint is None else joint:
        taken = _taken(choices, mesh)
        if _fits(taken, slots, mesh):
            found.extend(
                _operand(spec, 0, named, shape, choices, order, slots, mesh)
                for order in _orders(taken)
            )
    return found


IDLE = ("I", "R", "P")  # of Choice.splits: the axis splits nothing
