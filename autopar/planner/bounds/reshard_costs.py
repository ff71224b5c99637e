"""Lower bounds of reshards: what it costs at least to bring a kind of value from every joint state
to every other, on many meshes at once.

Arrays have one dim per axis and, last, the mesh: numpy works on rows of meshes. The bytes a change
moves depend on the number of parts the other axes cut the value into, not on the dims they cut. The
changes are relaxed in an order in which every path of `reshard_steps` can be found at no higher
cost, so the bound holds; a path may cost more, where the order in which axes share a dim is in the
way.

The order is sufficient: of two neighbouring changes on different axes, a slice before one that
gathers or keeps the parts costs no more and makes the other cheaper; likewise one that keeps the
parts before a gather. So any path sorts into slices (in every order of the axes, as one may wait
for another to leave its dim), then changes that keep the parts, then gathers (nothing is in their
way). A shard gathered and sliced again keeps the parts if its slice moves up to its gather. Used by
message passing in __init__.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.cost.many_meshes import BIG, Meshes
from autopar.ir.layout import ORDER, TRAFFIC
from autopar.planner.bounds.factor_graph import FIRST_SLOT, INVARIANT, PARTIAL, REPLICATED, Kind

Floats = NDArray[np.float32]
Places = tuple[int, ...]
_LETTER = {INVARIANT: "I", REPLICATED: "R", PARTIAL: "P"}
_SLICES = tuple(kind for kind in ORDER if kind in ("I->S", "R->S", "P->S"))
_GATHERS = tuple(kind for kind in ORDER if kind in ("S->P", "S->I", "S->R"))
_STEPS = {"S->R->S": ("S->R", "R->S")}
# By the number of axes: a sequence that contains every order of them as a subsequence.
_EVERY_ORDER = {2: (0, 1, 0), 3: (0, 1, 0, 2, 0, 1, 0), 4: (0, 1, 2, 3, 0, 1, 2, 0, 3, 1, 0, 2)}
_NEUTRAL = tuple(kind for kind in ORDER if "S" not in kind)
_FEW = 700  # joint states: up to this many, a table is used


class _Joint(NamedTuple):
    """A change of several axes at once: its seconds by the states of the others, [state, …, mesh];
    `further`: the changes in which one more axis (a dim of that array) takes part.
    """

    seconds: Floats
    further: tuple[tuple[int, _Joint], ...]


class _Change(NamedTuple):
    """A change of axis `axis` and perhaps later axes, each from any of `sources` to any of
    `targets` (indices of states).
    """

    axis: int
    sources: Places
    targets: Places
    joint: _Joint

    def turned(self) -> _Change:
        """Return the change in the opposite direction."""
        return self._replace(sources=self.targets, targets=self.sources)


class _Together(NamedTuple):
    """Changes of one axis that are relaxed from the same costs; `least`: indices of states, and the
    numbers of the changes that lead there.
    """

    axis: int
    members: tuple[_Change, ...]
    least: tuple[tuple[Places, Places], ...]

    @staticmethod
    def of(reshards: Sequence[_Change]) -> _Together:
        """Return these changes, with the states they lead to grouped by the changes that do."""
        targets = sorted({place for change in reshards for place in change.targets})
        least: dict[Places, Places] = {}
        for place in targets:
            leading = tuple(n for n, change in enumerate(reshards) if place in change.targets)
            least[leading] = (*least.get(leading, ()), place)
        pairs = tuple((places, leading) for leading, places in least.items())
        return _Together(reshards[0].axis, tuple(reshards), pairs)

    def relax(self, costs: Floats) -> None:
        """Lower the costs by these changes, in place."""
        reached = [
            _target_costs(_lowest_over(costs, self.axis, c.sources), c, c.joint)
            for c in self.members
        ]
        for places, (first, *others) in self.least:
            lowest = reached[first]
            for other in others:
                lowest = np.minimum(lowest, reached[other])
            _enter_lower(costs, self.axis, places, lowest)


class ReshardBounds:
    """Bounds for one kind of value, from `sources` to `targets`; `states` is their union.

    Arrays are float32 [state of axis 0, state of axis 1, …, mesh], in seconds.
    """

    def __init__(
        self, kind: Kind, sources: frozenset[int], targets: frozenset[int], meshes: Meshes
    ) -> None:
        self.kind, self.meshes = kind, meshes
        self.sources, self.targets = sources, targets
        self.states = tuple(sorted(sources | targets))
        self._known: dict[tuple[str, Places], Floats] = {}
        in_order = [changes for changes in self._in_order() if changes]
        self._forwards = [_Together.of(changes) for changes in in_order]
        self._backwards = [_Together.of([c.turned() for c in cs]) for cs in reversed(in_order)]

    def push(self, costs: Floats) -> Floats:
        """Return the least costs of target states, given the costs of source states."""
        if self._between is not None:
            return (self._between + costs.reshape(-1)).min(axis=1).reshape(costs.shape)
        return _relax_all(self._forwards, costs)

    def pull(self, wanted: Floats) -> Floats:
        """Return the least costs of source states, given the costs of target states."""
        if self._between is not None:
            return (self._between + wanted.reshape(-1, 1)).min(axis=0).reshape(wanted.shape)
        return _relax_all(self._backwards, wanted)

    @cached_property
    def _between(self) -> Floats | None:
        """The table [joint target, joint source] of the cost between any two states, where it is
        small and there is one mesh: one look-up takes a tenth of the time of all changes in turn.
        Else None.
        """
        shape = (len(self.states),) * self.meshes.axis_count
        states = math.prod(shape)
        if self.meshes.mesh_count > 1 or states > _FEW:
            return None
        start = np.full((states, states), BIG, np.float32)
        np.fill_diagonal(start, 0.0)
        costs = _relax_all(self._forwards, start.reshape(*shape, states))  # a source is a mesh
        return np.minimum(costs, BIG).reshape(states, states)

    # -- which changes, in which order -------------------------------------------------------------
    def _in_order(self) -> Iterator[list[_Change]]:
        """Yield groups of changes in the order in which they are relaxed."""
        everywhere = range(self.meshes.axis_count)
        count = self.meshes.axis_count
        for axis in _EVERY_ORDER.get(count, tuple(everywhere) * count):
            yield [change for kind in _SLICES for change in self._of(kind, axis)]
        for kind in _NEUTRAL:
            yield from self._steps_of_axes(kind)
        for axis in everywhere:
            yield [*self._of("S->S", axis), *self._room(axis)]
        for kind in _GATHERS:
            yield from self._steps_of_axes(kind)

    def _steps_of_axes(self, kind: str) -> Iterator[list[_Change]]:
        for axis in range(self.meshes.axis_count):
            yield list(self._of(kind, axis))

    def _of(self, kind: str, axis: int) -> Iterator[_Change]:
        """Yield changes of `axis` and perhaps later ones: from one dim (or I, R, P) to one
        other.
        """
        for sources, targets in self._groups(kind):
            yield self._change(kind, axis, sources, targets)

    def _room(self, axis: int) -> Iterator[_Change]:
        """Yield the change that gathers and slices again. (Several axes at once would not do so in
        one step.)
        """
        sources, targets = (self._of_letter("S", states) for states in (self.sources, self.targets))
        if sources and targets and not (sources == targets and len(sources) == 1):
            yield self._change("S->R->S", axis, sources, targets)

    def _change(self, kind: str, axis: int, sources: Places, targets: Places) -> _Change:
        others = tuple(range(axis + 1, self.meshes.axis_count))
        return _Change(axis, sources, targets, self._joint(kind, (axis,), others))

    def _groups(self, kind: str) -> Iterator[tuple[Places, Places]]:
        """Yield sources and targets of a kind of change, the same on every axis that changes
        jointly.
        """
        before, after = kind.split("->")
        sources, targets = (
            self._of_letter(before, self.sources),
            self._of_letter(after, self.targets),
        )
        if kind != "S->S":
            yield from [(sources, targets)] if sources and targets else ()
            return
        for dim in sorted({self._dim(place) for place in targets}):
            there = tuple(place for place in targets if self._dim(place) == dim)
            elsewhere = tuple(place for place in sources if self._dim(place) != dim)
            if elsewhere:
                yield elsewhere, there

    def _of_letter(self, letter: str, states: frozenset[int]) -> Places:
        numbered_states = enumerate(self.states)
        return tuple(n for n, s in numbered_states if s in states and _LETTER.get(s, "S") == letter)

    def _dim(self, place: int) -> int:
        return self.kind.slots[self.states[place] - FIRST_SLOT][0]

    # -- what they cost ----------------------------------------------------------------------------
    def _joint(self, kind: str, axes: Places, others: Places) -> _Joint:
        further = tuple(
            (b - len(axes), self._joint(kind, (*axes, b), others[i + 1 :]))
            for i, b in enumerate(others)
        )
        return _Joint(self._seconds(kind, axes), further)

    def _seconds(self, kind: str, axes: Places) -> Floats:
        """Return the seconds of the axes' joint change: [states of the other axes, mesh]."""
        if (kind, axes) not in self._known:
            total: NDArray[np.float64] = sum(  # type: ignore[assignment]
                self._of_step(step, axes) for step in _STEPS.get(kind, (kind,))
            )
            seconds = np.ascontiguousarray(np.moveaxis(total, 0, -1), dtype=np.float32)
            splits = [int(state >= FIRST_SLOT) for state in self.states]
            for dim in range(self.meshes.axis_count - len(axes)):
                seconds = seconds.take(splits, axis=dim)
            self._known[kind, axes] = seconds
        return self._known[kind, axes]

    def _of_step(self, kind: str, axes: Places) -> NDArray[np.float64]:
        """Return the seconds of one step: [mesh, whether each of the other axes cuts the value (0
        or 1)].
        """
        key = kind, axes, math.prod(self.kind.shape), self.kind.element
        if key not in self.meshes.steps:
            self.meshes.steps[key] = self._computed(kind, axes)
        return self.meshes.steps[key]

    def _computed(self, kind: str, axes: Places) -> NDArray[np.float64]:
        elements, element = self._cut_by_others(axes), self.kind.element
        local_bytes = elements * element.bytes
        group = self.meshes.sizes[:, list(axes)].prod(axis=1)
        moved = (
            local_bytes / group.reshape((-1,) + (1,) * (local_bytes.ndim - 1))
            if kind == "S->S"
            else local_bytes
        )
        total = moved / self.meshes.world.device.memory_bytes_per_s
        forward, backward = TRAFFIC[kind]
        for name, late in ((forward, False), (backward if element.gradient else None, True)):
            if name is not None:
                size, times = element.of(name, late), 2 if element.again and not late else 1
                seconds = self.meshes.seconds(name, axes, elements * size)
                total = total + times * self._share(seconds.ndim) * seconds
        return total

    def _share(self, dims: int) -> float | NDArray[np.float64]:
        """Return the part of the collectives' seconds that counts, on each mesh: [mesh, 1, …]."""
        if self.kind.element.share == 1 or not self.meshes.shares:
            return self.kind.element.share
        return np.array(self.meshes.shares).reshape((-1,) + (1,) * (dims - 1))

    def _cut_by_others(self, axes: Places) -> NDArray[np.float64]:
        """Return the elements that a rank holds where these axes cut nothing, with the dims of
        `_of_step`.
        """
        others = [a for a in range(self.meshes.axis_count) if a not in axes]
        elements = np.full(
            (self.meshes.mesh_count,) + (1,) * len(others), float(math.prod(self.kind.shape))
        )
        for place, axis in enumerate(others):
            parts = np.stack([np.ones(self.meshes.mesh_count), self.meshes.sizes[:, axis]], axis=1)
            shape = [self.meshes.mesh_count] + [1] * len(others)
            shape[1 + place] = 2
            elements = elements / parts.reshape(shape)
        return elements


def _relax_all(reshards: Sequence[_Together], before: Floats) -> Floats:
    """Return the costs after relaxing all groups of changes in order."""
    costs = before.copy()
    for together in reshards:
        together.relax(costs)
    return costs


def _target_costs(least: Floats, change: _Change, joint: _Joint) -> Floats:
    """Return what any target costs, given the least costs of the sources, on the axes that have
    changed; others may have changed with them: [states of the other axes, mesh].
    """
    costs = least + joint.seconds
    for axis, further in joint.further:
        further_costs = _target_costs(_lowest_over(least, axis, change.sources), change, further)
        _enter_lower(costs, axis, change.targets, further_costs)
    return costs


def _lowest_over(seconds: Floats, axis: int, places: Places) -> Floats:
    """Return the least over these states of an axis; a view where there is one state."""
    if len(places) == 1:
        return seconds[_index(axis, places[0])]
    first, second, *others = places
    lowest = np.minimum(seconds[_index(axis, first)], seconds[_index(axis, second)])
    for place in others:
        np.minimum(lowest, seconds[_index(axis, place)], out=lowest)
    return lowest


def _enter_lower(seconds: Floats, axis: int, places: Places, least: Floats) -> None:
    """Lower the costs at these states of an axis to `least`, in place."""
    if len(places) > 1 and places[-1] - places[0] == len(places) - 1:  # at once: they adjoin
        into = seconds[_span(axis, places[0], places[-1])]
        np.minimum(into, least[_index(axis, None)], out=into)
        return
    for place in places:
        into = seconds[_index(axis, place)]
        np.minimum(into, least, out=into)


@cache
def _index(axis: int, place: int | None) -> Any:
    """Return an index that selects one state of an axis; None adds an axis of one state."""
    return (*(slice(None),) * axis, place)


@cache
def _span(axis: int, first: int, last: int) -> Any:
    """Return an index that selects the states of an axis from `first` to `last`."""
    return (*(slice(None),) * axis, slice(first, last + 1))
