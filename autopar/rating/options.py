"""What every joint option of a variable costs by itself, and which are allowed, on many meshes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from ..constraint import Constraint, goes_with_weight, has_weight, letter
from ..cost.compute import optimizer_seconds_of, product_seconds
from ..cost.inside import HAVE_INSIDE, inside
from ..cost.kept import Price
from ..graphs import carries_gradient, module_path
from ..layout import Digit
from ..mesh import Mesh
from ..program import Annotations
from ..rules import Spec, operands_of, results_of, shape_of, value_of
from ..strategies import Choice, Slot
from .frame import FIRST_SLOT, AxisOption, Frame, Variable
from .prices import BIG, HALF, Meshes

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


class Rated(NamedTuple):
    """The options of a variable that some mesh allows, and the seconds of every joint one: [mesh,
    option of axis 0, option of axis 1, …], BIG where it is not allowed. `number`: an identity.
    """

    number: int
    options: tuple[int, ...]
    seconds: Floats


class OptionCosts:
    """Rates the variables of a frame on meshes, each under its own constraint."""

    def __init__(
        self,
        frame: Frame,
        meshes: Meshes,
        constraints: Sequence[Constraint],
        redundant: bool = False,
        price: Price | None = None,
    ) -> None:
        assert frame.program.annotations is not None
        self.frame, self.meshes, self.constraints = frame, meshes, constraints
        self.notes: Annotations = frame.program.annotations
        self.redundant, self.price = redundant, price
        self._known: dict[Hashable, Rated] = {}
        self._axis_known: dict[Hashable, Bools] = {}

    def rated(self, variable: Variable) -> Rated:
        """Variables that look alike, to the constraint too, share the object."""
        key = (variable.look, self._rules(variable), self._shares(variable))
        if key not in self._known:
            made = self._region if variable.region is not None else self._stored
            options, seconds = made(variable)
            self._known[key] = Rated(len(self._known) + 1, options, seconds)
        return self._known[key]

    def _shares(self, variable: Variable) -> Hashable:
        """What a region's nodes keep, where that has a price."""
        if self.price is None or variable.region is None:
            return None
        return tuple(self.price.kept.of(self.frame.nodes[n]) for n in variable.region.nodes)

    def _rules(self, variable: Variable) -> Hashable:
        """What the constraints say of a variable."""
        if variable.is_hub or all(constraint.free for constraint in self.constraints):
            return None
        names = [variable.name] if variable.region is None else variable.region.nodes
        paths = {self.path(name) for name in names}
        letters = self.constraints[0].letters.get(variable.name)
        roles = tuple(c.roles(path) for c in self.constraints for path in sorted(paths))
        bound = tuple(self._of_weight(name) for name in names)
        return roles, letters, bound, tuple(self._marks(name) for name in names)

    def _of_weight(self, name: str) -> bool:
        return goes_with_weight(self.notes, self.frame.nodes[name])

    def _marks(self, name: str) -> Hashable:
        """Which of a node's atoms are the batch, the sequence, the residual stream."""
        kinds = self.constraints[0].kinds
        return tuple(
            tuple(
                (a.number in kinds.batch, a.number in kinds.sequence, a.number in kinds.residual)
                for a in chain
            )
            for chain in self.notes.factors.get(name, {}).values()
        )

    def path(self, name: str) -> str:
        node = self.frame.nodes[name]
        return module_path(node) if node.op == "call_function" else self.frame.owner.get(name, "")

    # -- regions -----------------------------------------------------------------------------------
    def _region(self, variable: Variable) -> tuple[tuple[int, ...], Floats]:
        for eased in (False, True):  # where a mesh leaves none, its axes may be idle
            options, seconds = self._under_rules(variable, eased)
            stuck = seconds.reshape(len(self.meshes), -1).min(axis=1) >= HALF
            if not stuck.any():
                break
            if not eased:
                narrow, narrow_seconds = options, seconds
        else:
            return options, seconds
        if eased:  # only those meshes are eased
            place = [options.index(o) for o in narrow]
            firm = np.full_like(seconds, BIG)
            firm[np.ix_(range(len(self.meshes)), *[place] * self.meshes.count)] = narrow_seconds
            was = narrow_seconds.reshape(len(self.meshes), -1).min(axis=1) >= HALF
            seconds = np.where(was.reshape((-1,) + (1,) * self.meshes.count), seconds, firm)
        return options, seconds

    def _under_rules(self, variable: Variable, eased: bool) -> tuple[tuple[int, ...], Floats]:
        assert variable.region is not None
        allowed = self._singly(variable, eased)
        options = tuple(np.flatnonzero(allowed.any(axis=(0, 1))).tolist())
        options = self._possible(variable, options)
        items = [variable.options[i] for i in options]
        total: Any = self._sum_over_axes(np.where(allowed[:, :, options], 0.0, BIG))
        for position, name in enumerate(variable.region.nodes):
            node, found = self.frame.nodes[name], [item[position] for item in items]
            total = np.where(self._legal(node, found), total + self._node(node, found), BIG)
        return options, np.minimum(total, BIG).astype(np.float32)

    def _possible(self, variable: Variable, options: tuple[int, ...]) -> tuple[int, ...]:
        """Without those that are idle where a product is not to be on any mesh."""
        assert variable.region is not None
        found = options
        for position, name in enumerate(variable.region.nodes):
            node = self.frame.nodes[name]
            if self.notes.specs[name].product and not self.redundant:
                single = [variable.options[i][position] for i in found]
                legal = self._legal(node, single)
                legal = np.broadcast_to(
                    legal, (len(self.meshes),) + (len(single),) * self.meshes.count
                )
                alive = [
                    any(np.take(legal, n, axis=1 + a).any() for a in range(self.meshes.count))
                    for n in range(len(single))
                ]
                found = tuple(i for i, live in zip(found, alive, strict=True) if live)
        return found or options

    def _singly(self, variable: Variable, eased: bool) -> Bools:
        """Which options every axis may take by itself: [mesh, axis, option]."""
        assert variable.region is not None
        shape = (len(self.meshes), self.meshes.count, len(variable.options))
        allowed = np.ones(shape, dtype=bool)
        for m, (mesh, constraint) in enumerate(
            zip(self.meshes.meshes, self.constraints, strict=True)
        ):
            for a, axis in enumerate(mesh.axes):
                for position, name in enumerate(variable.region.nodes):
                    allowed[m, a] &= self._on_axis(
                        variable, position, name, axis.size, a, mesh, constraint, eased
                    )
        return allowed

    def _on_axis(
        self,
        variable: Variable,
        position: int,
        name: str,
        size: int,
        axis: int,
        mesh: Mesh,
        constraint: Constraint,
        eased: bool,
    ) -> Bools:
        roles = None if self._of_weight(name) else constraint.roles(self.path(name))
        role = None if roles is None else roles[axis]
        marks = None if role is None else self._marks(name)
        key = (variable.look, position, size, role, marks, eased)
        if key not in self._axis_known:
            spec, factors = self.notes.specs[name], self.notes.factors[name]
            choices = [item[position].choice for item in variable.options]
            fitting: list[Choice] = [
                c
                for c in dict.fromkeys(choices)
                if not isinstance(c, Slot) or factors[c.factor][c.position].size % size == 0
            ]
            kept: list[Choice] = fitting
            if role is not None:
                kept = constraint.narrow_one(role, spec, factors, fitting) or fitting
                if eased:
                    kept = [*kept, *(c for c in fitting if not isinstance(c, Slot))]
            self._axis_known[key] = np.array([c in kept for c in choices])
        return self._axis_known[key]

    # -- which options go together -----------------------------------------------------------------
    def _legal(self, node: fx.Node, found: list[AxisOption]) -> Bools:
        """By the choices alone, so it is worked out for different ones only."""
        classes = [f.choice if isinstance(f.choice, Slot) else None for f in found]
        unique = list(dict.fromkeys(classes))
        legal = self._legal_classes(node, unique)
        index = np.array([unique.index(c) for c in classes])
        for a in range(self.meshes.count):
            legal = np.take(legal, index, axis=1 + a)
        return legal

    def _legal_classes(self, node: fx.Node, unique: list[Slot | None]) -> Bools:
        spec, factors = self.notes.specs[node.name], self.notes.factors[node.name]
        shape = (len(self.meshes),) + (len(unique),) * self.meshes.count
        legal = np.ones(shape, dtype=bool)
        for slot in unique:
            if slot is not None:
                atom = factors[slot.factor][slot.position]
                legal &= atom.size % self._parts([slot == other for other in unique]) == 0
        if spec.product and not self.redundant and None in unique:
            legal &= ~(self._wasteful(spec, factors, unique) & self._free(node))
        if has_weight(spec):
            legal = self._kept_apart(node, spec, unique, legal)
        return legal

    def _free(self, node: fx.Node) -> Bools:
        free = np.array([c.roles(self.path(node.name)) is None for c in self.constraints])
        return free.reshape((-1,) + (1,) * self.meshes.count)

    def _wasteful(self, spec: Spec, factors: Any, unique: list[Slot | None]) -> Any:
        """Whether an axis is idle on which some factor of the product could still be split."""
        idle = np.array([[slot is None for slot in unique]])
        wasteful: Any = np.False_
        for factor in filter(spec.splittable, spec.sizes):
            for position, atom in enumerate(factors[factor]):
                if atom.opaque:
                    continue
                taken = self._parts([slot == (factor, position) for slot in unique])
                for a in range(self.meshes.count):
                    size = self._along(self.meshes.sizes[:, a, None], a)
                    fits = atom.size % (taken * size) == 0
                    wasteful = wasteful | (fits & self._along(idle, a))
        return wasteful

    def _kept_apart(
        self, node: fx.Node, spec: Spec, unique: list[Slot | None], legal: Bools
    ) -> Bools:
        """Without those in which an axis that shall stay apart shares its loop dim; as it is on
        meshes that this would leave nothing.
        """
        path = self.path(node.name)
        apart = np.array(
            [
                [bool(roles and roles[a].apart) for a in range(self.meshes.count)]
                for roles in (c.roles(path) for c in self.constraints)
            ]
        ).reshape(len(self.meshes), self.meshes.count)
        if not apart.any():
            return legal
        letters = [None if slot is None else letter(spec, slot.factor) for slot in unique]
        kept = legal
        for one in {x for x in letters if x}:
            here = np.array([[x == one for x in letters]])
            count: Any = 0
            shy: Any = np.False_
            for a in range(self.meshes.count):
                mine = self._along(here, a)
                count = count + mine
                shy = shy | (mine & self._along(apart[:, a, None], a))
            kept = kept & ~((count > 1) & shy)
        left = kept.reshape(len(self.meshes), -1).any(axis=1)
        return np.where(left.reshape((-1,) + (1,) * self.meshes.count), kept, legal)

    # -- what they cost ----------------------------------------------------------------------------
    def _node(self, node: fx.Node, found: list[AxisOption]) -> Any:
        spec = self.notes.specs[node.name]
        gradient = carries_gradient(self.notes, node)
        results = [v for v in results_of(node) if isinstance(v, torch.Tensor)]
        dtype = results[0].dtype
        elements: Any = 0.0
        for index, operand in enumerate(operands_of(node)):
            if operand is not None and spec.operands[index] is not None:
                states = [f.operands[index] for f in found]
                elements = elements + self._local(shape_of(value_of(operand)), states)
        for index, value in enumerate(results):
            elements = elements + self._local(shape_of(value), [f.results[index] for f in found])
        flops = spec.flops / self._parts([isinstance(f.choice, Slot) for f in found])
        once = product_seconds(flops, elements * dtype.itemsize, dtype, self.meshes.world.device)
        total = once * (3 if gradient else 1)
        if node.target in HAVE_INSIDE:
            total = total + self._inside(node, found, gradient)
        if self.price is not None:
            total = total + self.price.seconds_per_byte * self._kept(node, found, self.price)
        return total

    def _kept(self, node: fx.Node, found: list[AxisOption], price: Price) -> Any:
        """Bytes that a rank keeps of the node for the backward."""
        share, operands = price.kept.of(node), operands_of(node)
        spec = self.notes.specs[node.name]
        results = [v for v in results_of(node) if isinstance(v, torch.Tensor)]
        total: Any = share.inside / self._parts([isinstance(f.choice, Slot) for f in found])
        for index, each in share.operands:
            operand = operands[index]
            if operand is not None and spec.operands[index] is not None:
                states = [f.operands[index] for f in found]
                total = total + each * self._local(shape_of(value_of(operand)), states)
        for index, each in share.results:
            states = [f.results[index] for f in found]
            total = total + each * self._local(shape_of(results[index]), states)
        return total

    def _inside(self, node: fx.Node, found: list[AxisOption], gradient: bool) -> Any:
        """The collectives inside a sharded implementation, by the dim that each axis splits."""
        source = operands_of(node)[0]
        assert source is not None
        slots = self.notes.dims[self.frame.producer(source)]
        numbers = [dim for dim, atoms in enumerate(slots) for a in atoms if not a.opaque]
        states = [f.operands[0] for f in found]
        held = [
            numbers[s - FIRST_SLOT] if s is not None and s >= FIRST_SLOT else -1 for s in states
        ]
        dims, count = sorted(set(held)), self.meshes.count
        table = np.zeros((len(self.meshes),) + (len(dims),) * count)
        for pattern in itertools.product(range(len(dims)), repeat=count):
            stub = _cut(shape_of(value_of(source)), [dims[i] for i in pattern], self.meshes.sizes)
            for one in inside(node.target, [stub]):
                if gradient or not one.backward:
                    whole = np.asarray(one.traffic.elements * one.element_bytes, dtype=np.float64)
                    axes = tuple(int(a) for a in one.axes)
                    cell: Any = (slice(None), *pattern)
                    table[cell] += self.meshes.seconds(
                        one.traffic.collective, axes, np.broadcast_to(whole, len(self.meshes)), True
                    )
        index = np.array([dims.index(h) for h in held])
        for a in range(count):
            table = np.take(table, index, axis=1 + a)
        return table

    # -- stored tensors and layouts in which a value is kept ---------------------------------------
    def _stored(self, variable: Variable) -> tuple[tuple[int, ...], Floats]:
        kind, states = variable.kind, variable.options
        count, meshes = self.meshes.count, len(self.meshes)
        legal = np.ones((meshes,) + (len(states),) * count, dtype=bool)
        for number, (_, _, size) in enumerate(kind.slots):
            parts = self._parts([state == number + FIRST_SLOT for state in states])
            legal &= size % parts == 0
        total: Any = 0.0
        if variable.trained:
            each = optimizer_seconds_of(1, kind.element_bytes, self.meshes.world)
            total = each * self._local(kind.shape, states)
        if self.price is not None and variable.parameter is not None:
            each = self.price.kept.stored(kind.element_bytes, variable.trained)
            total = total + self.price.seconds_per_byte * each * self._local(kind.shape, states)
        if variable.parameter is not None:
            legal = self._as_ruled(variable, legal)
        seconds = np.broadcast_to(np.where(legal, total, BIG), legal.shape)
        return tuple(range(len(states))), seconds.astype(np.float32)

    def _as_ruled(self, variable: Variable, legal: Bools) -> Bools:
        """What the constraints' roles leave of the ways to store a parameter."""
        found = legal.copy()
        path, kind = self.path(variable.name), variable.kind
        dims = [None if s < FIRST_SLOT else kind.slots[s - FIRST_SLOT][0] for s in variable.options]
        for m, constraint in enumerate(self.constraints):
            for a, role in enumerate(constraint.roles(path) or ()):
                letters = constraint.letters.get(variable.name, ("",) * len(kind.shape))
                fits = role.stores(
                    len(kind.shape), [None if d is None else letters[d] for d in dims]
                )
                kept = found[m] & self._along(np.array([fits]), a)[0]
                found[m] = kept if kept.any() else found[m]
        return found

    # -- arrays ------------------------------------------------------------------------------------
    def _along(self, column: NDArray[Any], axis: int) -> NDArray[Any]:
        """[mesh, option] of one axis as [mesh, 1, …, option, …, 1]."""
        shape = [column.shape[0]] + [1] * self.meshes.count
        shape[1 + axis] = column.shape[1]
        return column.reshape(shape)

    def _sum_over_axes(self, per_axis: NDArray[Any]) -> Any:
        return sum(self._along(per_axis[:, a], a) for a in range(self.meshes.count))

    def _parts(self, split: Sequence[bool]) -> NDArray[np.int64]:
        """Into how many parts the axes cut what these options split: [mesh, option, …]."""
        found: Any = np.ones((len(self.meshes),) + (1,) * self.meshes.count, dtype=np.int64)
        for a in range(self.meshes.count):
            sizes = np.where(np.array(split)[None, :], self.meshes.sizes[:, a, None], 1)
            found = found * self._along(sizes, a)
        return found

    def _local(self, shape: tuple[int, ...], states: Sequence[int | None]) -> NDArray[np.float64]:
        return math.prod(shape) / self._parts([s is not None and s >= FIRST_SLOT for s in states])


def _cut(shape: tuple[int, ...], held: list[int], sizes: NDArray[np.int64]) -> Any:
    """What `inside` asks of a layout in which axis a holds a digit of dim held[a] (-1: none), with
    arrays over meshes for numbers.
    """
    local: list[Any] = [np.full(len(sizes), float(n)) for n in shape]
    for axis, dim in enumerate(held):
        if dim >= 0:
            local[dim] = local[dim] / sizes[:, axis]
    axes = [str(axis) for axis, dim in enumerate(held) if dim >= 0]
    return SimpleNamespace(
        shape=shape,
        local_shape=local,
        local_size=math.prod(local),
        digits=lambda dim: tuple(Digit(str(a), 0, 0) for a, d in enumerate(held) if d == dim),
        axes_of=lambda letter: tuple(axes),
    )
