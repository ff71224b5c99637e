"""Conversions of one kind of value as arrays: what it costs at least to bring it from every joint
state to every other, on many meshes at once.

An array over joint states has one dim per axis and, last, one for the mesh: numpy works on rows of
meshes. What a change moves depends on into how many parts the other axes have cut the value, not on
which dims they cut. The changes are relaxed one after the other in an order in which every path of
changes.steps can be found again at no higher cost, so no conversion of changes.steps costs less. It
may cost more, where the order in which axes share a dim is in the way.

Why that order is enough. Of two neighbouring changes of a path, on different axes, a slice costs no
more before than after one that gathers or leaves the number of parts as it is, and makes the other
one cheaper; likewise what leaves the number of parts costs no more before a gather. So any path may
be sorted: slices, then what leaves the number of parts (in any order, it makes no difference), then
gathers. Slices may have had to wait until another axis had left the dim that they split, so they
are relaxed in every order of the axes. Nothing is ever in the way of a gather: they go by kind and
first axis. A shard that makes room, gathered and sliced again, leaves the number of parts as it is
if its slice is moved up to its gather, which makes both cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.ir.layout import ORDER, TRAFFIC
from autopar.planner.bounds.arrays import BIG, Meshes
from autopar.planner.bounds.factor_graph import FIRST_SLOT, PARTIAL, REPLICATED, WHOLE, Kind

Floats = NDArray[np.float32]
Places = tuple[int, ...]
_LETTER = {WHOLE: "I", REPLICATED: "R", PARTIAL: "P"}
_SLICES = tuple(kind for kind in ORDER if kind in ("I->S", "R->S", "P->S"))
_GATHERS = tuple(kind for kind in ORDER if kind in ("S->P", "S->I", "S->R"))
_STEPS = {"S->R->S": ("S->R", "R->S")}
# By the number of axes: a sequence in which every order of them can be found.
_EVERY_ORDER = {2: (0, 1, 0), 3: (0, 1, 0, 2, 0, 1, 0), 4: (0, 1, 2, 3, 0, 1, 2, 0, 3, 1, 0, 2)}
_NEUTRAL = tuple(kind for kind in ORDER if "S" not in kind)
_FEW = 700  # joint states


class _Joint(NamedTuple):
    """A change of some axes jointly: its seconds by the states of the others, [state, …, mesh]; and
    those in which one more axis (a dim of that array) takes part.
    """

    seconds: Floats
    further: tuple[tuple[int, _Joint], ...]


class _Change(NamedTuple):
    """Of axis `axis` and perhaps later ones, each from any of `sources` to any of `targets` (places
    of states).
    """

    axis: int
    sources: Places
    targets: Places
    joint: _Joint

    def turned(self) -> _Change:
        return self._replace(sources=self.targets, targets=self.sources)


class _Together(NamedTuple):
    """Changes of one axis that are relaxed from the same costs; `least`: places of states, and the
    changes (by number) that lead there.
    """

    axis: int
    changes: tuple[_Change, ...]
    least: tuple[tuple[Places, Places], ...]

    @staticmethod
    def of(changes: Sequence[_Change]) -> _Together:
        targets = sorted({place for change in changes for place in change.targets})
        least: dict[Places, Places] = {}
        for place in targets:
            leading = tuple(n for n, change in enumerate(changes) if place in change.targets)
            least[leading] = (*least.get(leading, ()), place)
        pairs = tuple((places, leading) for leading, places in least.items())
        return _Together(changes[0].axis, tuple(changes), pairs)

    def relax(self, found: Floats) -> None:
        reached = [_reached(_lowest(found, self.axis, c.sources), c, c.joint) for c in self.changes]
        for places, (first, *others) in self.least:
            least = reached[first]
            for other in others:
                least = np.minimum(least, reached[other])
            _enter(found, self.axis, places, least)


class ReshardBounds:
    """Of one kind of value, from `sources` to `targets`; `states` are these.
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

    def push(self, given: Floats) -> Floats:
        """From costs of source states to costs of target states."""
        if self._between is not None:
            return (self._between + given.reshape(-1)).min(axis=1).reshape(given.shape)
        return _relaxed(self._forwards, given)

    def pull(self, wanted: Floats) -> Floats:
        """From costs of target states to costs of source states."""
        if self._between is not None:
            return (self._between + wanted.reshape(-1, 1)).min(axis=0).reshape(wanted.shape)
        return _relaxed(self._backwards, wanted)

    @cached_property
    def _between(self) -> Floats | None:
        """[joint target, joint source]: what any state costs from any other, where that is a small
        table on one mesh: one look there is a tenth of all changes one after the other.
        """
        shape = (len(self.states),) * self.meshes.count
        states = math.prod(shape)
        if len(self.meshes) > 1 or states > _FEW:
            return None
        apart = np.full((states, states), BIG, np.float32)
        np.fill_diagonal(apart, 0.0)
        found = _relaxed(self._forwards, apart.reshape(*shape, states))  # every source is a mesh
        return np.minimum(found, BIG).reshape(states, states)

    # -- which changes, in which order -------------------------------------------------------------
    def _in_order(self) -> Iterator[list[_Change]]:
        everywhere = range(self.meshes.count)
        for axis in _EVERY_ORDER.get(self.meshes.count, tuple(everywhere) * self.meshes.count):
            yield [change for kind in _SLICES for change in self._of(kind, axis)]
        for kind in _NEUTRAL:
            yield from self._one_by_one(kind)
        for axis in everywhere:
            yield [*self._of("S->S", axis), *self._room(axis)]
        for kind in _GATHERS:
            yield from self._one_by_one(kind)

    def _one_by_one(self, kind: str) -> Iterator[list[_Change]]:
        for axis in range(self.meshes.count):
            yield list(self._of(kind, axis))

    def _of(self, kind: str, axis: int) -> Iterator[_Change]:
        """Changes of `axis` and perhaps later ones: from one dim (or I, R, P) to one other."""
        for sources, targets in self._groups(kind):
            yield self._change(kind, axis, sources, targets)

    def _room(self, axis: int) -> Iterator[_Change]:
        """Gathered and sliced again. (Axes of several dims would not do so in one step.)"""
        sources, targets = (self._of_letter("S", states) for states in (self.sources, self.targets))
        if sources and targets and not (sources == targets and len(sources) == 1):
            yield self._change("S->R->S", axis, sources, targets)

    def _change(self, kind: str, axis: int, sources: Places, targets: Places) -> _Change:
        others = tuple(range(axis + 1, self.meshes.count))
        return _Change(axis, sources, targets, self._joint(kind, (axis,), others))

    def _groups(self, kind: str) -> Iterator[tuple[Places, Places]]:
        """Sources and targets of a kind, on every axis that changes jointly."""
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
        found = enumerate(self.states)
        return tuple(n for n, s in found if s in states and _LETTER.get(s, "S") == letter)

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
        """Of the axes' joint change: [states of the other axes, mesh]."""
        if (kind, axes) not in self._known:
            total: NDArray[np.float64] = sum(  # type: ignore[assignment]
                self._of_step(step, axes) for step in _STEPS.get(kind, (kind,))
            )
            found = np.ascontiguousarray(np.moveaxis(total, 0, -1), dtype=np.float32)
            splits = [int(state >= FIRST_SLOT) for state in self.states]
            for dim in range(self.meshes.count - len(axes)):
                found = found.take(splits, axis=dim)
            self._known[kind, axes] = found
        return self._known[kind, axes]

    def _of_step(self, kind: str, axes: Places) -> NDArray[np.float64]:
        """[mesh, whether each of the other axes cuts the value (0 or 1)]."""
        elements, element = self._cut_by_others(axes), self.kind.element
        whole = elements * element.bytes
        group = self.meshes.sizes[:, list(axes)].prod(axis=1)
        moved = whole / group.reshape((-1,) + (1,) * (whole.ndim - 1)) if kind == "S->S" else whole
        total = moved / self.meshes.world.device.memory_bytes_per_s
        forward, backward = TRAFFIC[kind]
        for name, late in ((forward, False), (backward if element.gradient else None, True)):
            if name is not None:
                size, times = element.of(name, late), 2 if element.again and not late else 1
                seconds = self.meshes.seconds(name, axes, elements * size)
                total = total + times * element.share * seconds
        return total

    def _cut_by_others(self, axes: Places) -> NDArray[np.float64]:
        """Elements that a rank has where these axes cut nothing: as `_of_step`."""
        others = [a for a in range(self.meshes.count) if a not in axes]
        found = np.full((len(self.meshes),) + (1,) * len(others), float(math.prod(self.kind.shape)))
        for place, axis in enumerate(others):
            parts = np.stack([np.ones(len(self.meshes)), self.meshes.sizes[:, axis]], axis=1)
            shape = [len(self.meshes)] + [1] * len(others)
            shape[1 + place] = 2
            found = found / parts.reshape(shape)
        return found


def _relaxed(changes: Sequence[_Together], given: Floats) -> Floats:
    found = given.copy()
    for together in changes:
        together.relax(found)
    return found


def _reached(least: Floats, change: _Change, joint: _Joint) -> Floats:
    """What any of the targets costs, given the lowest costs of the sources, on the axes that have
    changed; others may have changed with them: [states of the other axes, mesh].
    """
    found = least + joint.seconds
    for axis, further in joint.further:
        deeper = _reached(_lowest(least, axis, change.sources), change, further)
        _enter(found, axis, change.targets, deeper)
    return found


def _lowest(seconds: Floats, axis: int, places: Places) -> Floats:
    """The least over these states of an axis: a view where it is one."""
    first, *others = (seconds[_at(axis, place)] for place in places)
    if not others:
        return first
    found = np.minimum(first, others[0])
    for other in others[1:]:
        np.minimum(found, other, out=found)
    return found


def _enter(seconds: Floats, axis: int, places: Places, least: Floats) -> None:
    for place in places:
        into = seconds[_at(axis, place)]
        np.minimum(into, least, out=into)


def _at(axis: int, place: int) -> Any:
    return (*(slice(None),) * axis, place)
