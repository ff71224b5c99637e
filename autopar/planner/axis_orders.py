"""Orders of the axes that share an atom, and which of them a search may leave out.

Example: on w2.x4.y2.z4 four axes split the batch, in any of 24 orders, so four joint choices of a
region are 42 options, and a table over five regions has 42⁵ entries. Where attention splits the
batch on w, x and z, and a matmul on w and x, the orders (w, x, z, y) and (w, x, y, z) will do: an
axis keeps its digit between two layouts if both have the same axes outside of it.

Joint choices of all nodes enter, `NestingOrders` leave. exact_search.py makes them where solve.py
says that the tables of all orders would be large.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from autopar.ir.mesh import Mesh
from autopar.ir.program import Annotations
from autopar.ir.strategy import AxisChoice, Slot, axes_by_slot

Axes = tuple[str, ...]  # on an atom, in the order of the mesh
JointChoices = Mapping[str, Sequence[tuple[AxisChoice, ...]]]  # by node and stored tensor


class NestingOrders:
    """The orders that are kept of every set of axes that splits an atom in one of these joint
    choices: that of the mesh, that of stored tensors, and as many that each other set of axes on
    the atom is outside in one, as far as the two share axes.
    """

    def __init__(self, notes: Annotations, mesh: Mesh, joint_choices: JointChoices) -> None:
        self._notes, self._mesh = notes, mesh
        self._uses: dict[int, Counter[Axes]] = defaultdict(Counter)
        for name, joint in joint_choices.items():
            for choices in joint:
                for slot, axes in axes_by_slot(choices, mesh).items():
                    self._uses[self._atom(name, slot)][axes] += 1
        self._known: dict[tuple[int, Axes], tuple[Axes, ...]] = {}

    def of_node(self, name: str) -> Callable[[Slot, Axes], tuple[Axes, ...]]:
        """Return the function that gives the orders of axes on a slot of a node, or of a stored
        tensor, whose slots are named by the number of their dim.
        """
        return lambda slot, axes: self._orders(self._atom(name, slot), axes)

    def key(self, name: str, joint: Sequence[tuple[AxisChoice, ...]]) -> Hashable:
        """Return a key of all orders of a node's joint choices."""
        orders = self.of_node(name)
        taken = [axes_by_slot(choices, self._mesh) for choices in joint]
        return tuple(orders(slot, axes) for each in taken for slot, axes in each.items())

    def _atom(self, name: str, slot: Slot) -> int:
        factors = self._notes.factors.get(name)
        dims = self._notes.dims[name, 0] if factors is None else ()
        atoms = dims[int(slot.factor)] if factors is None else factors[slot.factor]
        return atoms[slot.position].number

    def _orders(self, atom: int, axes: Axes) -> tuple[Axes, ...]:
        if (atom, axes) not in self._known:
            self._known[atom, axes] = tuple(_orders(axes, self._uses[atom], self._mesh))
        return self._known[atom, axes]


def _orders(axes: Axes, used: Mapping[Axes, int], mesh: Mesh) -> Iterator[Axes]:
    """Yield the orders of these axes, given how often each set of axes splits the same atom."""
    shared: Counter[Axes] = Counter()
    for others, count in used.items():
        part = tuple(axis for axis in axes if axis in others)
        if 0 < len(part) < len(axes):
            shared[part] += count
    by_use = [part for part, _ in sorted(shared.items(), key=lambda item: (-item[1], item[0]))]
    stored = tuple(mesh.names[place] for place in mesh.storage_order if mesh.names[place] in axes)
    orders = list(dict.fromkeys((axes, stored)))
    reached = {part for order in orders for part in _outer_parts(order, axes)}
    yield from orders
    for part in by_use:
        if part not in reached:
            order = _order_through(part, by_use, axes)
            reached |= _outer_parts(order, axes)
            yield order


def _outer_parts(order: Axes, axes: Axes) -> set[Axes]:
    """Return the sets of axes that are outside of all others in an order of `axes`."""
    return {tuple(a for a in axes if a in order[:count]) for count in range(1, len(order))}


def _order_through(part: Axes, by_use: Sequence[Axes], axes: Axes) -> Axes:
    """Return the order with `part` outside of the other axes, and with as many further sets, the
    most used ones first, as contain one another.
    """
    chain = [set(part)]
    for other in map(set, by_use):
        if all(other <= known or known <= other for known in chain):
            chain.append(other)

    def sets_without(axis: str) -> int:
        return sum(axis not in each for each in chain)

    return tuple(sorted(axes, key=sets_without))  # a stable sort: else in the order of the mesh
