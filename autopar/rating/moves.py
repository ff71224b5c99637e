"""Conversions of one kind of value as arrays: the least cost from every joint state to every other,
on many meshes at once.

An array over joint states has one dim per axis and, last, one for the mesh: numpy works on rows of
meshes. What a change moves depends on into how many parts the other axes have cut the value, not on
which dims they cut. Relaxing all changes once, in the order in which layout.steps takes them, gives
least costs: no conversion of layout.steps costs less. It may cost more, where the order in which
axes share a dim is in the way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..layout import ORDER, TRAFFIC
from .frame import FIRST_SLOT, PARTIAL, REPLICATED, WHOLE, Kind
from .prices import Meshes

Floats = NDArray[np.float32]
Index = tuple[slice | int, ...]
_LETTER = {WHOLE: "I", REPLICATED: "R", PARTIAL: "P"}


class _Move(NamedTuple):
    """Any of these joint states to any of those, at one cost."""

    sources: tuple[Index, ...]
    targets: tuple[Index, ...]
    cost: Floats


class Moves:
    """Of one kind of value, from `sources` to `targets`; `states` are these and what lies between.
    Arrays are float32 [state of axis 0, state of axis 1, …, mesh], in seconds.
    """

    def __init__(
        self, kind: Kind, sources: frozenset[int], targets: frozenset[int], meshes: Meshes
    ) -> None:
        self.kind, self.meshes = kind, meshes
        reshuffled = any(self._dim(s) == self._dim(t) for s in sources for t in targets if s != t)
        self.sources = sources | {REPLICATED}
        self.targets = targets | ({REPLICATED} if reshuffled else set())
        self.states = tuple(sorted(self.sources | self.targets))
        # A digit of the same dim is gathered and sliced again.
        order = [*ORDER, *(("R->S", "R->I", "R->P") if reshuffled else ())]
        self._moves = [move for kind in order for move in self._of(kind)]

    def push(self, given: Floats) -> Floats:
        """From costs of source states to costs of target states."""
        found = given.copy()
        for sources, targets, cost in self._moves:
            _relax(found, sources, targets, cost)
        return found

    def pull(self, wanted: Floats) -> Floats:
        """From costs of target states to costs of source states."""
        found = wanted.copy()
        for sources, targets, cost in reversed(self._moves):
            _relax(found, targets, sources, cost)
        return found

    def _dim(self, state: int) -> int | None:
        return self.kind.slots[state - FIRST_SLOT][0] if state >= FIRST_SLOT else None

    def _of(self, kind: str) -> Iterator[_Move]:
        groups = list(self._groups(kind))
        count = self.meshes.count
        for length in range(count, 0, -1) if groups else ():
            for axes in itertools.combinations(range(count), length):
                cost = self._cost(kind, axes)
                for sources, targets in groups:
                    yield _Move(self._places(axes, sources), self._places(axes, targets), cost)

    def _groups(self, kind: str) -> Iterator[tuple[list[int], list[int]]]:
        """Sources and targets of a kind, each source with each target: such a change costs the same
        for all of them. (Where a state is in both, it is given to itself, at a cost.)
        """
        targets: dict[tuple[int, ...], list[int]] = {}
        for target in sorted(self.targets):
            sources = tuple(s for s in sorted(self.sources) if self._is(kind, s, target))
            if kind == "S->S" and sources and target in self.sources:
                sources = tuple(sorted({*sources, target}))
            if sources:
                targets.setdefault(sources, []).append(target)
        for sources, those in targets.items():
            yield list(sources), those

    def _is(self, kind: str, source: int, target: int) -> bool:
        if source == target or kind != f"{_LETTER.get(source, 'S')}->{_LETTER.get(target, 'S')}":
            return False
        return kind != "S->S" or self._dim(source) != self._dim(target)

    def _places(self, axes: tuple[int, ...], states: Sequence[int]) -> tuple[Index, ...]:
        several = range(self.meshes.count)
        numbers = [self.states.index(state) for state in states]
        return tuple(tuple(n if a in axes else slice(None) for a in several) for n in numbers)

    def _cost(self, kind: str, axes: tuple[int, ...]) -> Floats:
        """Of the axes' joint change: [states of the other axes, mesh]."""
        elements, element = self._cut_by_others(axes), self.kind.element
        whole = elements * element.bytes
        group = self.meshes.sizes[:, list(axes)].prod(axis=1)
        moved = whole / group.reshape((-1,) + (1,) * (whole.ndim - 1)) if kind == "S->S" else whole
        total = moved / self.meshes.world.device.memory_bytes_per_s
        forward, backward = TRAFFIC[kind]
        for name, late in ((forward, False), (backward if element.gradient else None, True)):
            if name is not None:
                size = element.of(name, late)
                seconds = self.meshes.seconds(name, axes, elements * size)
                total = total + element.share * seconds
        return np.ascontiguousarray(np.moveaxis(total, 0, -1), dtype=np.float32)

    def _cut_by_others(self, axes: tuple[int, ...]) -> NDArray[np.float64]:
        """Elements that a rank has where these axes cut nothing: [mesh, states of the others]."""
        others = [a for a in range(self.meshes.count) if a not in axes]
        split = np.array([state >= FIRST_SLOT for state in self.states])
        found = np.full((len(self.meshes),) + (1,) * len(others), float(math.prod(self.kind.shape)))
        for place, axis in enumerate(others):
            parts = np.where(split[None, :], self.meshes.sizes[:, axis, None], 1)
            shape = [len(self.meshes)] + [1] * len(others)
            shape[1 + place] = len(self.states)
            found = found / parts.reshape(shape)
        return np.broadcast_to(found, (len(self.meshes),) + (len(self.states),) * len(others))


def _relax(
    found: Floats, sources: tuple[Index, ...], targets: tuple[Index, ...], cost: Floats
) -> None:
    least = found[sources[0]]
    if len(sources) > 1:
        least = np.minimum(least, found[sources[1]])
        for source in sources[2:]:
            np.minimum(least, found[source], out=least)
        least += cost
    else:
        least = least + cost
    for target in targets:
        into = found[target]
        np.minimum(into, least, out=into)
