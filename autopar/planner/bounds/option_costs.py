"""The costs of options: what every joint option of a variable takes by itself, and which are
allowed, on many meshes.

Example: for a matmul on a 2-axis mesh, an array [mesh, option of axis 0, option of axis 1] of
seconds, BIG where both axes cannot split so. The constraint of each mesh narrows what an axis may
do, as planner/constraint.py says. A frame, meshes and constraints enter, `Rated` options leave.
`NodeCosts` has what a node takes by the joint options of its axes: computation, the collectives
inside it, and the price of the bytes it saves. Used by bound.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Hashable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from autopar.cost.activations import Price
from autopar.cost.compute import optimizer_seconds_of, rule_seconds
from autopar.cost.many_meshes import BIG, HALF, Bools, Floats, Meshes
from autopar.ir.dim_roles import goes_with_weight, has_weight, loop_dim_of
from autopar.ir.graph import carries_gradient, module_path, producer
from autopar.ir.layout import Digit
from autopar.ir.program import Annotations
from autopar.ir.sharding_rule import (
    Dims,
    OpShardingRule,
    operands_of,
    results_of,
    shape_of,
    value_of,
)
from autopar.ir.strategy import AxisChoice, Slot
from autopar.ops.sharded import HAVE_INNER_COLLECTIVES, inner_collectives
from autopar.planner.bounds.factor_graph import FIRST_SLOT, AxisOption, Frame, Kind, Variable
from autopar.planner.constraint import Constraint, Role

Roles = tuple[Role, ...] | None  # of a mesh's axes; None: anything goes


class Rated(NamedTuple):
    """The options of a variable that some mesh allows, and the seconds of every joint option:
    [mesh, option of axis 0, option of axis 1, …], BIG where it is not allowed. `number`: an
    identity.
    """

    number: int
    options: tuple[int, ...]
    seconds: Floats


def along(column: NDArray[Any], axis: int, count: int) -> NDArray[Any]:
    """Return the column [mesh, option] of one of `count` axes as [mesh, 1, …, option, …, 1]."""
    shape = [column.shape[0]] + [1] * count
    shape[1 + axis] = column.shape[1]
    return column.reshape(shape)


def over_axes(per_axis: NDArray[Any]) -> Any:
    """Return the sum of what every axis costs by itself: from [mesh, axis, option] to joint
    options.
    """
    count = per_axis.shape[1]
    return sum(along(per_axis[:, a], a, count) for a in range(count))


def shard_counts(meshes: Meshes, split: Sequence[bool]) -> NDArray[np.int64]:
    """Return the number of shards into which the axes cut what these options split: [mesh, option,
    …].
    """
    counts: Any = np.ones((meshes.mesh_count,) + (1,) * meshes.axis_count, dtype=np.int64)
    for a in range(meshes.axis_count):
        sizes = np.where(np.array(split)[None, :], meshes.sizes[:, a, None], 1)
        counts = counts * along(sizes, a, meshes.axis_count)
    return counts


def local(
    meshes: Meshes, shape: tuple[int, ...], states: Sequence[int | None]
) -> NDArray[np.float64]:
    """Return the number of elements that a rank holds of a tensor of this shape: [mesh,
    option, …].
    """
    return math.prod(shape) / shard_counts(
        meshes, [s is not None and s >= FIRST_SLOT for s in states]
    )


class OptionCosts:
    """The seconds of a frame's variables on meshes, each mesh under its own constraint."""

    def __init__(
        self,
        frame: Frame,
        meshes: Meshes,
        constraints: Sequence[Constraint],
        price: Price | None = None,
    ) -> None:
        self.frame, self.meshes, self.constraints = frame, meshes, constraints
        self.notes: Annotations = frame.notes
        self.price = price
        self.nodes = NodeCosts(frame, meshes, price)
        self._known: dict[Hashable, Rated] = {}
        self._roles_of_path: dict[str, tuple[Roles, ...]] = {}
        self._number_of_path: dict[str, int] = {}  # equal numbers: equal roles
        self._numbers: dict[Hashable, int] = {}
        self._axis_known: dict[Hashable, Bools] = {}

    def rated(self, variable: Variable) -> Rated:
        """Return the options of a variable with their seconds. Variables that look alike, to the
        constraint too, share the object.
        """
        key = (variable.key, self._rules(variable), self._shares(variable))
        if key not in self._known:
            rate = self._region if variable.region is not None else self._stored
            options, seconds = rate(variable)
            self._known[key] = Rated(len(self._known) + 1, options, seconds)
        return self._known[key]

    def _shares(self, variable: Variable) -> Hashable:
        """Return what a region's nodes save for the backward, where that has a price."""
        if self.price is None or variable.region is None:
            return None
        return tuple(self.price.memory.of(self.frame.nodes[n]) for n in variable.region.nodes)

    def _rules(self, variable: Variable) -> Hashable:
        """Return what the constraints say of a variable."""
        if variable.is_hub or all(constraint.free for constraint in self.constraints):
            return None
        names = [variable.name] if variable.region is None else variable.region.nodes
        paths = {self.path(name) for name in names}
        letters = self.constraints[0].letters.get(variable.name)
        role_numbers = tuple(self._number(path) for path in sorted(paths))
        follow_weight = tuple(self._of_weight(name) for name in names)
        return role_numbers, letters, follow_weight, tuple(self._marks(name) for name in names)

    def _number(self, path: str) -> int:
        """Return a number for the roles that the constraints give to a path, as roles are slow to
        compare.
        """
        if path not in self._number_of_path:
            number = self._numbers.setdefault(self._roles(path), len(self._numbers))
            self._number_of_path[path] = number
        return self._number_of_path[path]

    def _roles(self, path: str) -> tuple[Roles, ...]:
        """Return for each mesh the roles of its axes in the module at this path."""
        if path not in self._roles_of_path:
            self._roles_of_path[path] = tuple(c.roles(path) for c in self.constraints)
        return self._roles_of_path[path]

    def _of_weight(self, name: str) -> bool:
        """Whether the node follows a weight, whatever the constraint of its module."""
        return goes_with_weight(self.notes, self.frame.nodes[name])

    def _marks(self, name: str) -> Hashable:
        """Return which of a node's atoms are the batch, the sequence, the residual stream."""
        kinds = self.constraints[0].kinds
        return tuple(
            tuple(
                (a.number in kinds.batch, a.number in kinds.sequence, a.number in kinds.residual)
                for a in chain
            )
            for chain in self.notes.factors.get(name, {}).values()
        )

    def path(self, name: str) -> str:
        """Return the module path of a node, or of the owner of a stored tensor."""
        node = self.frame.nodes[name]
        return module_path(node) if node.op == "call_function" else self.frame.owner.get(name, "")

    # -- regions -----------------------------------------------------------------------------------
    def _region(self, variable: Variable) -> tuple[tuple[int, ...], Floats]:
        """Return the options of a region and their seconds; a mesh on which none is allowed may
        leave axes idle.
        """
        for eased in (False, True):  # a mesh without any option may leave axes idle
            options, seconds = self._under_rules(variable, eased)
            stuck = seconds.reshape(self.meshes.mesh_count, -1).min(axis=1) >= HALF
            if not stuck.any():
                break
            if not eased:
                narrow, narrow_seconds = options, seconds
        else:
            return options, seconds
        if eased:  # only meshes without any option are eased
            indices = [options.index(o) for o in narrow]
            narrow_only = np.full_like(seconds, BIG)
            narrow_only[
                np.ix_(range(self.meshes.mesh_count), *[indices] * self.meshes.axis_count)
            ] = narrow_seconds
            none_allowed = narrow_seconds.reshape(self.meshes.mesh_count, -1).min(axis=1) >= HALF
            seconds = np.where(
                none_allowed.reshape((-1,) + (1,) * self.meshes.axis_count), seconds, narrow_only
            )
        return options, seconds

    def _under_rules(self, variable: Variable, eased: bool) -> tuple[tuple[int, ...], Floats]:
        assert variable.region is not None
        allowed = self._singly(variable, eased)
        options = tuple(np.flatnonzero(allowed.any(axis=(0, 1))).tolist())
        options = self._possible(variable, options)
        items = [variable.options[i] for i in options]
        total: Any = over_axes(np.where(allowed[:, :, options], 0.0, BIG))
        for position, name in enumerate(variable.region.nodes):
            node, node_options = self.frame.nodes[name], [item[position] for item in items]
            total = np.where(
                self._legal(node, node_options), total + self.nodes.seconds(node, node_options), BIG
            )
        return options, np.minimum(total, BIG).astype(np.float32)

    def _possible(self, variable: Variable, options: tuple[int, ...]) -> tuple[int, ...]:
        """Return the options without those that leave an axis idle where no mesh allows that for a
        matmul.
        """
        assert variable.region is not None
        remaining = options
        for position, name in enumerate(variable.region.nodes):
            node = self.frame.nodes[name]
            if self.notes.specs[name].product:
                single = [variable.options[i][position] for i in remaining]
                legal = self._legal(node, single)
                legal = np.broadcast_to(
                    legal, (self.meshes.mesh_count,) + (len(single),) * self.meshes.axis_count
                )
                possible = [
                    any(np.take(legal, n, axis=1 + a).any() for a in range(self.meshes.axis_count))
                    for n in range(len(single))
                ]
                remaining = tuple(i for i, able in zip(remaining, possible, strict=True) if able)
        return remaining or options

    def _singly(self, variable: Variable, eased: bool) -> Bools:
        """Return which options every axis may take by itself: [mesh, axis, option]."""
        assert variable.region is not None
        shape = (self.meshes.mesh_count, self.meshes.axis_count, len(variable.options))
        allowed = np.ones(shape, dtype=bool)
        for position, name in enumerate(variable.region.nodes):
            free = (None,) * self.meshes.mesh_count
            roles = free if self._of_weight(name) else self._roles(self.path(name))
            for m, mesh in enumerate(self.meshes.meshes):
                of_mesh = roles[m]
                for a, axis in enumerate(mesh.axes):
                    role = None if of_mesh is None else of_mesh[a]
                    allowed[m, a] &= self._on_axis(
                        variable, position, name, axis.size, role, self.constraints[m], eased
                    )
        return allowed

    def _on_axis(
        self,
        variable: Variable,
        position: int,
        name: str,
        size: int,
        role: Role | None,
        constraint: Constraint,
        eased: bool,
    ) -> Bools:
        """Return which options an axis of this size and role may take at one node of a region."""
        marks = None if role is None else self._marks(name)
        key = (variable.key, position, size, role, marks, eased)
        if key not in self._axis_known:
            rule, factors = self.notes.specs[name], self.notes.factors[name]
            choices = [item[position].choice for item in variable.options]
            possible: list[AxisChoice] = [
                c
                for c in dict.fromkeys(choices)
                if not isinstance(c, Slot) or factors[c.factor][c.position].size % size == 0
            ]
            narrowed: list[AxisChoice] = possible
            if role is not None:
                narrowed = constraint.narrow_axis(role, rule, factors, possible) or possible
                if eased:
                    narrowed = [*narrowed, *(c for c in possible if not isinstance(c, Slot))]
            self._axis_known[key] = np.array([c in narrowed for c in choices])
        return self._axis_known[key]

    # -- which options go together -----------------------------------------------------------------
    def _legal(self, node: fx.Node, options: list[AxisOption]) -> Bools:
        """Return which joint options go together. That depends on the choices alone, so it is
        computed once for each different one.
        """
        classes = [f.choice if isinstance(f.choice, Slot) else None for f in options]
        unique = list(dict.fromkeys(classes))
        legal = self._legal_classes(node, unique)
        index = np.array([unique.index(c) for c in classes])
        for a in range(self.meshes.axis_count):
            legal = np.take(legal, index, axis=1 + a)
        return legal

    def _legal_classes(self, node: fx.Node, unique: list[Slot | None]) -> Bools:
        rule, factors = self.notes.specs[node.name], self.notes.factors[node.name]
        shape = (self.meshes.mesh_count,) + (len(unique),) * self.meshes.axis_count
        legal = np.ones(shape, dtype=bool)
        for slot in unique:
            if slot is not None:
                atom = factors[slot.factor][slot.position]
                legal &= (
                    atom.size % shard_counts(self.meshes, [slot == other for other in unique]) == 0
                )
        if rule.product and None in unique:
            legal &= ~(self._wasteful(rule, factors, unique) & self._free(node))
        if has_weight(rule):
            legal = self._only_apart(node, rule, unique, legal)
        return legal

    def _free(self, node: fx.Node) -> Bools:
        free = np.array([roles is None for roles in self._roles(self.path(node.name))])
        return free.reshape((-1,) + (1,) * self.meshes.axis_count)

    def _wasteful(self, rule: OpShardingRule, factors: Any, unique: list[Slot | None]) -> Any:
        """Return whether an axis is idle on which a factor of the matmul could still be split."""
        idle = np.array([[slot is None for slot in unique]])
        wasteful: Any = np.False_
        for factor in filter(rule.splittable, rule.sizes):
            for position, atom in enumerate(factors[factor]):
                if atom.opaque:
                    continue
                taken = shard_counts(self.meshes, [slot == (factor, position) for slot in unique])
                for a in range(self.meshes.axis_count):
                    size = along(self.meshes.sizes[:, a, None], a, self.meshes.axis_count)
                    fits = atom.size % (taken * size) == 0
                    wasteful = wasteful | (fits & along(idle, a, self.meshes.axis_count))
        return wasteful

    def _only_apart(
        self, node: fx.Node, rule: OpShardingRule, unique: list[Slot | None], legal: Bools
    ) -> Bools:
        """Return the joint options without those in which an axis that must stay apart shares its
        loop dim; on meshes that this would leave without any, all of them.
        """
        apart = np.array(
            [
                [bool(roles and roles[a].apart) for a in range(self.meshes.axis_count)]
                for roles in self._roles(self.path(node.name))
            ]
        ).reshape(self.meshes.mesh_count, self.meshes.axis_count)
        if not apart.any():
            return legal
        letters = [None if slot is None else loop_dim_of(rule, slot.factor) for slot in unique]
        apart_options = legal
        for letter in {x for x in letters if x}:
            takes_letter = np.array([[x == letter for x in letters]])
            count: Any = 0
            shy: Any = np.False_
            for a in range(self.meshes.axis_count):
                mine = along(takes_letter, a, self.meshes.axis_count)
                count = count + mine
                shy = shy | (mine & along(apart[:, a, None], a, self.meshes.axis_count))
            apart_options = apart_options & ~((count > 1) & shy)
        some_left = apart_options.reshape(self.meshes.mesh_count, -1).any(axis=1)
        return np.where(
            some_left.reshape((-1,) + (1,) * self.meshes.axis_count), apart_options, legal
        )

    # -- stored tensors and layouts in which a value is kept ---------------------------------------
    def _stored(self, variable: Variable) -> tuple[tuple[int, ...], Floats]:
        """Return the options of a stored tensor or hub, and their seconds: the optimizer's and the
        price of its bytes.
        """
        kind, states = variable.kind, variable.options
        count, meshes = self.meshes.axis_count, self.meshes.mesh_count
        legal = np.ones((meshes,) + (len(states),) * count, dtype=bool)
        for number, (_, _, size) in enumerate(kind.slots):
            legal &= (
                size % shard_counts(self.meshes, [s == number + FIRST_SLOT for s in states]) == 0
            )
        total: Any = 0.0
        numbers = local(self.meshes, kind.shape, states)
        if variable.trained:
            each = optimizer_seconds_of(1, kind.element.bytes, self.meshes.world)
            total = each * numbers
        if self.price is not None and variable.parameter is not None:
            each = self.price.memory.bytes_per_element(kind.element.bytes, variable.trained)
            total = total + self.price.seconds_per_byte * each * numbers
        if variable.parameter is not None:
            legal = self._as_ruled(variable, legal & self._plain(kind, states))
        seconds = np.broadcast_to(np.where(legal, total, BIG), legal.shape)
        return tuple(range(len(states))), seconds.astype(np.float32)

    def _plain(self, kind: Kind, states: Sequence[int]) -> Bools:
        """Return which joint states plain Shards in storage order can express
        (`Layout.is_plain`).
        """
        orders = [mesh.storage_order for mesh in self.meshes.meshes]
        plain = np.zeros(
            (self.meshes.mesh_count,) + (len(states),) * self.meshes.axis_count, dtype=bool
        )
        for order in set(orders):
            rows = np.array([own == order for own in orders])
            plain[rows] = self._plain_in_order(order, kind, states)[rows]
        return plain

    def _plain_in_order(
        self, order: Sequence[int], kind: Kind, states: Sequence[int]
    ) -> NDArray[np.bool_]:
        """Return which joint states are plain if axes are applied in this order: an axis whose
        digit lies in an atom follows axes that hold everything outside the atom.
        """
        dims = [None if s < FIRST_SLOT else kind.slots[s - FIRST_SLOT][0] for s in states]
        plain: Any = np.ones(
            (self.meshes.mesh_count,) + (len(states),) * self.meshes.axis_count, dtype=bool
        )
        for number, (dim, unit, size) in enumerate(kind.slots):
            here = np.array([[s == number + FIRST_SLOT for s in states]])
            outside = kind.shape[dim] // (unit * size)
            before: Any = 1  # product of the sizes of earlier axes on this dim
            for a in order:
                sizes = self.meshes.sizes[:, a, None]
                through = before * along(sizes, a, self.meshes.axis_count)
                fits = (before % outside == 0) & (outside * size % through == 0)
                plain &= fits | ~along(here, a, self.meshes.axis_count)
                taken = np.where(np.array(dims)[None, :] == dim, sizes, 1)
                before = before * along(taken, a, self.meshes.axis_count)
        return np.asarray(plain)

    def _as_ruled(self, variable: Variable, legal: Bools) -> Bools:
        """Return what the roles leave of the ways to store a parameter."""
        allowed = legal.copy()
        path, kind = self.path(variable.name), variable.kind
        dims = [None if s < FIRST_SLOT else kind.slots[s - FIRST_SLOT][0] for s in variable.options]
        for m, constraint in enumerate(self.constraints):
            for a, role in enumerate(self._roles(path)[m] or ()):
                letters = constraint.letters.get(variable.name, ("",) * len(kind.shape))
                fits = role.stores(
                    len(kind.shape), [None if d is None else letters[d] for d in dims]
                )
                narrowed = allowed[m] & along(np.array([fits]), a, self.meshes.axis_count)[0]
                allowed[m] = narrowed if narrowed.any() else allowed[m]
        return allowed


class NodeCosts:
    """The seconds of a frame's nodes on all meshes."""

    def __init__(self, frame: Frame, meshes: Meshes, price: Price | None) -> None:
        self.frame, self.meshes, self.price = frame, meshes, price
        self.notes: Annotations = frame.notes

    def seconds(self, node: fx.Node, options: list[AxisOption]) -> Any:
        """Return the node's seconds by joint option, [mesh, option of axis 0, …], each axis having
        these options.
        """
        rule = self.notes.specs[node.name]
        gradient = carries_gradient(self.notes, node)
        results = [v for v in results_of(node) if isinstance(v, torch.Tensor)]
        dtype = results[0].dtype
        elements: Any = 0.0
        for index, operand in enumerate(operands_of(node)):
            if operand is not None and rule.operands[index] is not None:
                states = [f.operands[index] for f in options]
                elements = elements + local(self.meshes, shape_of(value_of(operand)), states)
        for index, value in enumerate(results):
            states = [f.results[index] for f in options]
            elements = elements + local(self.meshes, shape_of(value), states)
        flops = rule.flops / shard_counts(
            self.meshes, [isinstance(f.choice, Slot) for f in options]
        )
        inside: Any = 0.0
        if rule.inside:
            flops = flops * np.where(self._rank_counts(rule.uneven, options) > 1, rule.skew, 1.0)
            inside = sum(self._elements(dims, rule, options) for dims in rule.inside)
        total = rule_seconds(
            rule,
            flops,
            elements * dtype.itemsize,
            dtype,
            gradient,
            self.meshes.world.device,
            inside * dtype.itemsize,
        )
        if node.target in HAVE_INNER_COLLECTIVES:
            total = total + self._inside(node, options, gradient)
        if self.price is not None:
            total = total + self.price.seconds_per_byte * self._saved_bytes(
                node, options, self.price
            )
        return total

    def _rank_counts(self, factors: Collection[str], options: list[AxisOption]) -> Any:
        """Return among how many ranks the axes split these factors, by joint option."""
        return shard_counts(
            self.meshes,
            [isinstance(f.choice, Slot) and f.choice.factor in factors for f in options],
        )

    def _elements(self, dims: Dims, rule: OpShardingRule, options: list[AxisOption]) -> Any:
        """Return the elements on one rank of a tensor that a node makes on the way."""
        names = {name for dim in dims for name in dim}
        return math.prod(rule.sizes[name] for name in names) / self._rank_counts(names, options)

    def _saved_bytes(self, node: fx.Node, options: list[AxisOption], price: Price) -> Any:
        """Return the bytes that a rank saves of the node for the backward."""
        share, operands = price.memory.of(node), operands_of(node)
        rule = self.notes.specs[node.name]
        results = [v for v in results_of(node) if isinstance(v, torch.Tensor)]
        total: Any = share.inside / self._rank_counts(rule.sizes.keys() - rule.uneven, options)
        for index, bytes_per_element in share.operands:
            operand = operands[index]
            if operand is not None and rule.operands[index] is not None:
                states = [f.operands[index] for f in options]
                total = total + bytes_per_element * local(
                    self.meshes, shape_of(value_of(operand)), states
                )
        for index, bytes_per_element in share.results:
            states = [f.results[index] for f in options]
            total = total + bytes_per_element * local(self.meshes, shape_of(results[index]), states)
        return total

    def _inside(self, node: fx.Node, options: list[AxisOption], gradient: bool) -> Any:
        """Return the seconds of the collectives inside a sharded implementation, by the dim that
        each axis splits.
        """
        source = operands_of(node)[0]
        assert source is not None
        slots = self.notes.dims[producer(source)]
        numbers = [dim for dim, atoms in enumerate(slots) for a in atoms if not a.opaque]
        states = [f.operands[0] for f in options]
        split_dims = [
            numbers[s - FIRST_SLOT] if s is not None and s >= FIRST_SLOT else -1 for s in states
        ]
        dims, count = sorted(set(split_dims)), self.meshes.axis_count
        table = np.zeros((self.meshes.mesh_count,) + (len(dims),) * count)
        for places in itertools.product(range(len(dims)), repeat=count):
            stub = _stub_layout(
                shape_of(value_of(source)), [dims[i] for i in places], self.meshes.sizes
            )
            for collective in inner_collectives(node, [stub]):
                if gradient or not collective.backward:
                    sent_bytes = np.asarray(
                        collective.traffic.elements * collective.element_bytes, dtype=np.float64
                    )
                    axes = tuple(int(a) for a in collective.axes)
                    cell: Any = (slice(None), *places)
                    table[cell] += self.meshes.seconds(
                        collective.traffic.collective,
                        axes,
                        np.broadcast_to(sent_bytes, self.meshes.mesh_count),
                        True,
                    )
        dim_index = np.array([dims.index(d) for d in split_dims])
        for a in range(count):
            table = np.take(table, dim_index, axis=1 + a)
        return table


def _stub_layout(shape: tuple[int, ...], axes_of_dim: list[int], sizes: NDArray[np.int64]) -> Any:
    """Return a stand-in for a layout in which axis a holds a digit of dim held[a] (-1: none), with
    arrays over meshes as its numbers. `inner_collectives` reads nothing else of a layout.
    """
    local: list[Any] = [np.full(len(sizes), float(n)) for n in shape]
    for axis, dim in enumerate(axes_of_dim):
        if dim >= 0:
            local[dim] = local[dim] / sizes[:, axis]
    axes = [str(axis) for axis, dim in enumerate(axes_of_dim) if dim >= 0]
    return SimpleNamespace(
        shape=shape,
        local_shape=local,
        local_size=math.prod(local),
        digits=lambda dim: tuple(
            Digit(str(a), 0, 0) for a, d in enumerate(axes_of_dim) if d == dim
        ),
        axes_of=lambda letter: tuple(axes),
    )
