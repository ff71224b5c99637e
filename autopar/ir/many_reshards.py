"""The reshards between many layouts at once, as arrays: step by step those of `reshard_steps`.

Example: from 400 layouts to 300 others there are 120,000 paths of up to some eight steps. Here the
first step of all of them is one array, their second one the next: kinds, axes and elements, which
is all that a price depends on.

A state is a number here, and what two axes' states allow is a table of numbers: whether two digits
are jointly one (`adjoin`), whether they fit one dim (`agree`). Layouts enter, `ManySteps` leave.
Used by cost/communication.py, for the tables of the exact search.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.ir.layout import ORDER, Layout, R, State
from autopar.ir.mesh import Mesh

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]

_NONE = len(ORDER)  # no change, or one that no single step makes: to another digit of a dim
_LETTERS = "IRPS"
_SHARD = _LETTERS.index("S")
# the place in ORDER of a change from one kind of state to another
_PLACES = np.array(
    [
        [ORDER.index(f"{a}->{b}") if f"{a}->{b}" in ORDER else _NONE for b in _LETTERS]
        for a in _LETTERS
    ]
)
_JOINT = np.array([*("S" not in kind for kind in ORDER), False])
_TO_SHARD = np.array([*(kind.endswith("S") for kind in ORDER), False])
_GATHER = ORDER.index("S->R")


class ManySteps(NamedTuple):
    """One step of each of these pairs of layouts: numbers of ORDER, the axes that take it as bits,
    and the elements that a rank holds at most, before the step or after it.
    """

    pairs: Numbers
    kinds: Numbers
    axes: Numbers
    elements: Numbers


def steps_between(sources: Sequence[Layout], targets: Sequence[Layout]) -> Iterator[ManySteps]:
    """Yield the first step of every pair of layouts that has one, then the second ones, and so on.
    Pair i * len(targets) + j leads from source i to target j; all have one shape and mesh.
    """
    first = sources[0]
    mesh, states = first.mesh, [R, *{s: None for x in (*sources, *targets) for s in x.states}]
    numbers = {state: number for number, state in reversed([*enumerate(states)])}
    rules = _Rules(mesh, first.shape, states)

    def numbered(layouts: Sequence[Layout]) -> Numbers:
        return np.array([[numbers[s] for s in x.states] for x in layouts]).reshape(
            len(layouts), len(mesh.axes)
        )

    before = np.repeat(numbered(sources), len(targets), axis=0)
    after = np.tile(numbered(targets), (len(sources), 1))
    pairs = np.arange(len(before))
    while True:
        left = (before != after).any(axis=1)
        pairs, before, after = pairs[left], before[left], after[left]
        if not len(pairs):
            return
        kinds, axes, reached = rules.next_steps(before, after)
        elements = np.maximum(rules.local_sizes(before), rules.local_sizes(reached))
        yield ManySteps(pairs, kinds, axes, elements)
        before = reached


class _Rules:
    """What states allow, as tables by their numbers; the number of R is 0. Arrays of layouts are
    [pair, axis].

    `change`: the place in ORDER of a change of one axis. `fits`: whether an axis may hold a digit
    of its dim. `adjoin`: whether the digit of axis q directly follows that of axis p, true of equal
    states without digits. `agree`: whether the digits of two axes overlap in no dim.
    """

    def __init__(self, mesh: Mesh, shape: tuple[int, ...], states: Sequence[State]) -> None:
        sizes, self.axes = [axis.size for axis in mesh.axes], range(len(mesh.axes))
        self.sizes, self.total = np.array(sizes, dtype=np.int64), math.prod(shape)
        letters = np.array([_LETTERS.index(state.kind) for state in states])
        dims = np.array([state.dim for state in states])
        strides = np.array([max(1, state.stride) for state in states])
        self.kind, self.shard = letters, letters == _SHARD
        shards = self.shard[:, None] & self.shard
        one_dim = shards & (dims[:, None] == dims)
        same = one_dim | ((letters[:, None] == letters) & ~shards)
        self.change = np.where(same, _NONE, _PLACES[letters[:, None], letters])
        extents = np.array([*shape, 1])[dims]  # of other states than shards that of no dim
        self.fits = [~self.shard | (extents % (strides * n) == 0) for n in sizes]
        self.adjoin = {
            (p, q): np.where(shards, one_dim & (strides[:, None] == strides * sizes[q]), same)
            for p, q in itertools.combinations(self.axes, 2)
        }
        self.agree = {
            (p, q): ~one_dim
            | (strides[:, None] % (strides * sizes[q]) == 0)
            | (strides % (strides[:, None] * sizes[p]) == 0)
            for p, q in itertools.permutations(self.axes, 2)
        }

    def local_sizes(self, layouts: Numbers) -> Numbers:
        """Return the elements of one rank's part in each layout."""
        shards = np.where(self.shard[layouts], self.sizes, 1).prod(axis=1)
        return np.asarray(self.total // shards)

    def next_steps(self, before: Numbers, after: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Return of each pair the kind of its next step, its axes as bits, and the layout after."""
        steps = self.change[before, after]
        runs, starts = self._runs(before, after, steps)
        rank = np.where(starts & self._legal(before, after, steps, runs), steps, _NONE)
        place = rank.argmin(axis=1)  # the first of equal ones
        every = np.arange(len(before))
        kinds, axes, reached = rank[every, place], runs[every, place], after.copy()
        stuck = np.flatnonzero(kinds == _NONE)
        if len(stuck):
            kinds[stuck] = _GATHER
            axes[stuck] = self._blocking_axes(before[stuck], after[stuck])
            reached[stuck] = 0
        for axis in self.axes:
            stays = axes >> axis & 1 == 0
            reached[stays, axis] = before[stays, axis]
        return kinds, axes, reached

    def _runs(self, before: Numbers, after: Numbers, steps: Numbers) -> tuple[Numbers, Flags]:
        """Return for each axis the axes, as bits, that would change together from it on, and
        whether it is the first of them.
        """
        joint = _JOINT[steps]

        def together(p: int, q: int) -> Flags:
            adjoin = self.adjoin[p, q]
            digits = adjoin[before[:, p], before[:, q]] & adjoin[after[:, p], after[:, q]]
            return np.asarray((steps[:, p] == steps[:, q]) & (joint[:, p] | digits))

        return self._chains(together, steps != _NONE)

    def _chains(self, together: object, taken: Flags) -> tuple[Numbers, Flags]:
        """Return the runs of axes, as bits, and their first axes, where `together(p, q)` says
        whether axis q follows axis p in a run.
        """
        assert callable(together)
        runs = np.where(taken, 1 << np.arange(len(self.axes)), 0)
        starts = taken.copy()
        for p, q in sorted(itertools.combinations(self.axes, 2), reverse=True):
            follows = together(p, q) & taken[:, p] & taken[:, q]
            runs[:, p] |= np.where(follows, runs[:, q], 0)
            starts[:, q] &= ~follows
        return runs, starts

    def _legal(self, before: Numbers, after: Numbers, steps: Numbers, runs: Numbers) -> Flags:
        """Return for each axis whether its run may take the states of `after`: only a new digit can
        be one that does not fit its dim or overlaps another.
        """
        legal = np.ones(steps.shape, dtype=bool)
        for start in self.axes:
            rows = np.flatnonzero(_TO_SHARD[steps[:, start]])
            run, old, new = runs[rows, start], before[rows], after[rows]
            changed = (run[:, None] >> np.arange(len(self.axes)) & 1).astype(bool)
            mixed = np.where(changed, new, old)
            fine = np.ones(len(rows), dtype=bool)
            for p in self.axes:
                own = self.fits[p][mixed[:, p]]
                for q in self.axes:
                    if q != p:
                        own = own & self.agree[p, q][mixed[:, p], mixed[:, q]]
                fine &= own | ~changed[:, p]
            legal[rows, start] = fine
        return legal

    def _blocking_axes(self, before: Numbers, after: Numbers) -> Numbers:
        """Return the axes, as bits, whose shards are gathered to make room: the first that cannot
        change directly, with those that are jointly one digit with it and change to the same kind
        of state.
        """
        blocking = self.shard[before] & (before != after)
        first, every = blocking.argmax(axis=1), np.arange(len(before))
        kinds = self.kind[after]
        taken = blocking & (kinds == kinds[every, first][:, None])

        def together(p: int, q: int) -> Flags:
            return np.asarray(self.adjoin[p, q][before[:, p], before[:, q]])

        runs, _ = self._chains(together, taken)
        return np.asarray(runs[every, first])
