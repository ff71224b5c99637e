"""Lower bounds of reshards: what it costs at least to bring a kind of value from every joint state
to every other, on many meshes at once.

Example: to bring a value from (P, S0) to (S1, R) on two axes, axis 0 is sliced while axis 1 still
cuts the value, then axis 1 is gathered; the bound is the least over such paths.

Arrays have one dim per axis and, last, the mesh: numpy works on rows of meshes. The bytes a change
moves depend on the number of parts the other axes cut the value into, not on the dims they cut. The
changes are relaxed in an order in which every path of `reshard_steps` can be found at no higher
cost, so the bound holds; a path may cost more, where the order in which axes share a dim is in the
way.

The order is sufficient: of two neighbouring changes on different axes, a slice before one that
gathers or keeps the parts costs no more and makes the other cheaper; likewise one that keeps the
parts before a gather. So any path sorts into slices, then changes that keep the parts, then
gathers. A shard gathered and sliced again keeps the parts if its slice moves up to its gather. The
slices of a set of axes, in whichever order and however many at once, are one step here, and so are
gathers and changes among I, R and P: what they take is worked out once (`_Closures`).
Used by message passing in bound.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.cost.many_meshes import BIG, Meshes
from autopar.ir.layout import ORDER, TRAFFIC
from autopar.planner.bounds.factor_graph import FIRST_SLOT, INVARIANT, PARTIAL, REPLICATED, Kind

Floats = NDArray[np.float32]
Seconds = NDArray[np.float64]
Places = tuple[int, ...]
Index = tuple[slice, ...]
_LETTERS = {INVARIANT: "I", REPLICATED: "R", PARTIAL: "P"}
_CUT, _UNCUT = slice(1, 2), slice(0, 1)  # whether an axis splits the value, in an array of both
_ALL = slice(None)
_STEPS = {"S->R->S": ("S->R", "R->S")}
_FEW = 700  # joint states: up to this many, a table is used


class _Step(Protocol):
    """Changes that lower the costs of joint states, in place."""

    def relax(self, costs: Floats) -> None: ...


# -- axes that change from I, R or P to a shard, back, and among these three -----------------------
class _LettersAndSlots:
    """Changes of every set of axes between letters (I, R, P) and slots: `seconds` by the letters of
    these axes and the states of the others. `beyond`: BIG for slots that are out of reach.
    """

    def __init__(
        self, letters: slice, slots: slice, beyond: Floats, seconds: Mapping[Places, Floats]
    ) -> None:
        self.reshards: list[tuple[Places, Floats, Index, Index, Floats | None]] = []
        for axes, table in seconds.items():
            last, count = axes[-1], table.ndim - 1
            out_of_reach = beyond.reshape((1,) * last + (-1,) + (1,) * (count - last))
            self.reshards.append(
                (
                    axes,
                    table,
                    tuple(letters if a in axes else _ALL for a in range(count)),
                    tuple(slots if a == last else _ALL for a in range(count)),
                    out_of_reach if beyond.any() else None,
                )
            )


class _FromLetters(_LettersAndSlots):
    """Axes change from letters to any slot."""

    def relax(self, costs: Floats) -> None:
        """Lower the costs, in place."""
        least: dict[Places, Floats] = {(): costs}  # by axes: any slot of these, which have no dim
        for axes, seconds, letters, _, _ in self.reshards:
            least[axes] = np.minimum.reduce(costs[letters] + seconds, axis=axes, keepdims=True)
        for axes, _, _, slots, out_of_reach in reversed(self.reshards):  # the largest sets first
            reached = least[axes]
            if out_of_reach is not None:
                reached = reached + out_of_reach
            into = least[axes[:-1]][slots]
            np.minimum(into, reached, out=into)


class _ToLetters(_LettersAndSlots):
    """Axes change from any slot to letters."""

    def relax(self, costs: Floats) -> None:
        """Lower the costs, in place."""
        least: dict[Places, Floats] = {(): costs.copy()}
        for axes, seconds, letters, slots, out_of_reach in self.reshards:  # the smallest sets first
            before = least[axes[:-1]][slots]
            if out_of_reach is not None:
                before = before + out_of_reach
            least[axes] = np.minimum.reduce(before, axis=axes[-1], keepdims=True)
            into = costs[letters]
            np.minimum(into, least[axes] + seconds, out=into)


class _AmongLetters(NamedTuple):
    """Axes go from letters to letters, or stay, while all others are cut. For every set of axes:
    these, an index of the states before and one of those after, the `seconds` by the letters after
    (one dim for all axes) and before, and how the result is shaped and transposed.
    """

    reshards: tuple[tuple[Places, Index, Index, Floats, Places, Places], ...]

    def relax(self, costs: Floats) -> None:
        """Lower the costs, in place."""
        for axes, before, after, seconds, shape, order in self.reshards:
            dims = tuple(axis + 1 for axis in axes)
            least = np.minimum.reduce(seconds + costs[before], axis=dims)
            into = costs[after]
            np.minimum(into, least.reshape(*shape, -1).transpose(order), out=into)


class _Closures:
    """The least seconds of several changes of one kind of value, over the orders that these may
    have and over how many axes go at once. `step`: the seconds of one change of some axes, over
    [whether an axis cuts the value (0 or 1; one entry for the axes that change), …, mesh].
    """

    def __init__(self, meshes: Meshes, step: Callable[[str, Places], Seconds]) -> None:
        self.count, self.mesh_count, self.step = meshes.axis_count, meshes.mesh_count, cache(step)

    def slices(self, kinds: Sequence[str | None]) -> dict[Places, Seconds]:
        """Return for every set of axes what it takes to slice them, in any order, by the letters
        that they have; `kinds`: the change from each letter, None where it has none. Arrays over
        [letter of axis 0, …, mesh]; for an axis that does not change, whether it cuts the value.
        """
        tables: dict[Places, Seconds] = {(): np.zeros((1,) * (self.count + 1))}
        for axes in _subsets(range(self.count)):
            table = tables[axes] = self._table(axes, len(kinds))
            for first in _subsets(axes):
                rest = tuple(a for a in axes if a not in first)
                later = tables[rest][self._at(first, _CUT)] if rest else tables[rest]
                for letter, kind in enumerate(kinds):
                    if kind is not None:
                        now = self.step(kind, first)[self._at(rest, _UNCUT)]
                        into = table[self._at(first, slice(letter, letter + 1))]
                        np.minimum(into, now + later, out=into)
        del tables[()]
        return tables

    def gathers(self, kinds: Sequence[str | None]) -> dict[Places, Seconds]:
        """Return what `slices` does for gathers, by the letters that the axes get. These go in
        ORDER, then from the first axis on.
        """
        ordered = sorted(filter(None, kinds), key=ORDER.index)
        tables: dict[Places, Seconds] = {(): np.zeros((1,) * (self.count + 1))}
        for axes in _subsets(range(self.count)):
            table = tables[axes] = self._table(axes, len(ordered))
            for first in _subsets(axes):
                rest = tuple(a for a in axes if a not in first)
                later = tables[rest][self._at(first, _UNCUT)] if rest else tables[rest]
                for letter, kind in enumerate(ordered):
                    index = [_ALL] * self.count
                    for a in rest:  # these get a letter that comes later, or this one after `first`
                        index[a] = slice(letter if a > first[0] else letter + 1, None)
                    now = self.step(kind, first)[self._at(rest, _CUT)] + later[tuple(index)]
                    for a in first:
                        index[a] = slice(letter, letter + 1)
                    into = table[tuple(index)]
                    np.minimum(into, now, out=into)
        del tables[()]
        places = [ordered.index(kind) if kind else len(ordered) for kind in kinds]
        return {axes: self._reordered(table, axes, places) for axes, table in tables.items()}

    def among(
        self, kinds: Mapping[tuple[int, int], str], counts: tuple[int, int], axes: Places
    ) -> Seconds:
        """Return what it takes these axes to go from letters to letters while all others are cut:
        [letters after together, letters before together, mesh]. Axes of the same kind of change
        change at once. `kinds`: by the places of the letters before and after, "" for no change;
        `counts`: how many letters there are before and after.
        """
        cut = tuple(a for a in range(self.count) if a not in axes)
        before, after = counts
        pairs = np.arange(before * after).reshape(before, after)
        shape = [before] * len(axes) + [after] * len(axes)
        grids = [
            pairs.reshape([n if i % len(axes) == place else 1 for i, n in enumerate(shape)])
            for place in range(len(axes))
        ]
        allowed = [before_place * after + after_place for before_place, after_place in kinds]
        legal: Any = True
        for grid in grids:
            legal = legal & np.isin(grid, allowed)
        total: Any = np.where(np.broadcast_to(legal, shape), 0.0, float(BIG))[..., None]
        for (before_place, after_place), kind in kinds.items():
            if not kind:
                continue
            changing: Any = 0  # a bit for every axis that takes this change
            for place, grid in enumerate(grids):
                changing = changing + ((grid == before_place * after + after_place) << place)
            seconds = np.zeros((1 << len(axes), self.mesh_count))
            for some in _subsets(range(len(axes))):
                own = tuple(axes[place] for place in some)
                rest = tuple(a for a in axes if a not in own)
                index = tuple(
                    _CUT if a in cut else _UNCUT if a in rest else _ALL for a in self._all
                )
                seconds[sum(1 << place for place in some)] = self.step(kind, own)[index].reshape(-1)
            total = total + seconds[np.broadcast_to(changing, shape)]
        rows = before ** len(axes)
        return np.swapaxes(np.asarray(total).reshape(rows, -1, self.mesh_count), 0, 1)

    def _table(self, axes: Places, letters: int) -> Seconds:
        shape = (*(letters if a in axes else 2 for a in self._all), self.mesh_count)
        return np.full(shape, float(BIG))

    def _reordered(self, table: Seconds, axes: Places, places: Sequence[int]) -> Seconds:
        """Return a table with the letters at these places; one beyond them has BIG."""
        for a in axes if list(places) != list(range(table.shape[axes[0]])) else ():
            absent = np.full((*table.shape[:a], 1, *table.shape[a + 1 :]), float(BIG))
            table = np.concatenate([table, absent], axis=a).take(places, axis=a)
        return table

    @property
    def _all(self) -> range:
        return range(self.count)

    def _at(self, axes: Places, place: slice) -> tuple[slice, ...]:
        return tuple(place if a in axes else _ALL for a in self._all)


def _subsets(axes: Sequence[int]) -> Iterator[Places]:
    """Yield every set of these axes but the empty one, small ones first."""
    for count in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, count)


# -- axes that change from one dim to another ------------------------------------------------------
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
        slices = list(self._letters_and_slots("{}->S", sources, targets))
        gathers = list(self._letters_and_slots("S->{}", targets, sources))
        dims = [of_axis for of_axis in self._between_dims() if of_axis]
        self._forwards: list[_Step] = [
            *(_FromLetters(*each) for each in slices),
            _AmongLetters(tuple(self._among_letters(turned=False))),
            *map(_Together.of, dims),
            *(_ToLetters(*each) for each in gathers),
        ]
        self._backwards: list[_Step] = [
            *(_FromLetters(*each) for each in gathers),
            *(_Together.of([change.turned() for change in of_axis]) for of_axis in reversed(dims)),
            _AmongLetters(tuple(self._among_letters(turned=True))),
            *(_ToLetters(*each) for each in slices),
        ]

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

    # -- which changes -----------------------------------------------------------------------------
    def _letters_and_slots(
        self, form: str, letters: frozenset[int], slots: frozenset[int]
    ) -> Iterator[tuple[slice, slice, Floats, dict[Places, Floats]]]:
        """Yield the changes between these letters and slots if there are any, slices or gathers as
        `form` says: what `_LettersAndSlots` takes.
        """
        places, all_slots = self._letter_places(letters), self.states[self._first_slot :]
        if places is None or not slots & set(all_slots):
            return
        kinds = tuple(
            form.format(_LETTERS[state]) if state in letters else None
            for state in self.states[places]
        )
        splits = tuple(int(state >= FIRST_SLOT) for state in self.states)
        key = (form, kinds, splits, self._size)
        if key not in self.meshes.closures:
            closures = _Closures(self.meshes, self._step)
            find = closures.slices if form == "{}->S" else closures.gathers
            self.meshes.closures[key] = {
                axes: self._by_state(table, axes, splits) for axes, table in find(kinds).items()
            }
        beyond = np.array([0.0 if slot in slots else BIG for slot in all_slots], np.float32)
        yield places, slice(self._first_slot, None), beyond, self.meshes.closures[key]

    def _among_letters(
        self, turned: bool
    ) -> Iterator[tuple[Places, Index, Index, Floats, Places, Places]]:
        """Yield the changes from letters to letters of every set of axes, all others being cut."""
        sources, targets = self._letter_places(self.sources), self._letter_places(self.targets)
        if sources is None or targets is None:
            return
        kinds = {
            (i, j): "" if before == after else f"{_LETTERS[before]}->{_LETTERS[after]}"
            for i, before in enumerate(self.states[sources])
            for j, after in enumerate(self.states[targets])
            if before in self.sources and after in self.targets
        }
        if not any(kinds.values()):
            return
        counts = (sources.stop - sources.start, targets.stop - targets.start)
        first, last = (targets, sources) if turned else (sources, targets)
        slots = len(self.states) - self._first_slot
        for axes in _subsets(self._axes):
            if not slots and len(axes) < len(self._axes):
                continue
            key = (tuple(kinds.items()), axes, turned, self._size)
            if key not in self.meshes.closures:
                closures = _Closures(self.meshes, self._step)
                table = closures.among(kinds, counts, axes)
                table = np.swapaxes(table, 0, 1) if turned else table
                letters = counts[1 if turned else 0]
                shape = (-1, *(letters if a in axes else 1 for a in self._axes), table.shape[-1])
                table = np.ascontiguousarray(table.reshape(shape), dtype=np.float32)
                self.meshes.closures[key] = table
            cut = [a for a in self._axes if a not in axes]
            places = [*axes, *cut]
            yield (
                axes,
                self._index(axes, first),
                self._index(axes, last),
                self.meshes.closures[key],
                (*[counts[0 if turned else 1]] * len(axes), *[slots] * len(cut)),
                (*(places.index(a) for a in self._axes), len(places)),
            )

    def _between_dims(self) -> Iterator[list[_Change]]:
        """Yield the changes of each axis from one dim to another: directly or by a gather and a
        slice, perhaps with later axes.
        """
        sources, targets = (self._shards(states) for states in (self.sources, self.targets))
        for axis in self._axes:
            later = tuple(self._axes)[axis + 1 :]
            of_axis = []
            for dim in sorted({self._dim(place) for place in targets}):
                there = tuple(place for place in targets if self._dim(place) == dim)
                elsewhere = tuple(place for place in sources if self._dim(place) != dim)
                if elsewhere:
                    joint = self._joint("S->S", (axis,), later)
                    of_axis.append(_Change(axis, elsewhere, there, joint))
            if sources and targets and not (sources == targets and len(sources) == 1):
                joint = self._joint("S->R->S", (axis,), later)
                of_axis.append(_Change(axis, sources, targets, joint))
            yield of_axis

    # -- which states ------------------------------------------------------------------------------
    @property
    def _axes(self) -> range:
        return range(self.meshes.axis_count)

    @property
    def _size(self) -> Hashable:
        """What the seconds of a change depend on."""
        return math.prod(self.kind.shape), self.kind.element

    @property
    def _first_slot(self) -> int:
        """The place of the first state that is no letter."""
        return sum(state < FIRST_SLOT for state in self.states)

    def _letter_places(self, states: frozenset[int]) -> slice | None:
        """Return the places from the first to the last of these states that are letters."""
        places = [n for n, s in enumerate(self.states) if s in states and s < FIRST_SLOT]
        return slice(places[0], places[-1] + 1) if places else None

    def _index(self, axes: Places, letters: slice) -> Index:
        """Return an index of the states in which these axes have letters, the others slots."""
        slots = slice(self._first_slot, None)
        return tuple(letters if a in axes else slots for a in self._axes)

    def _by_state(self, table: Seconds, axes: Places, splits: Places) -> Floats:
        """Return seconds by whether other axes cut the value as seconds by their states; `splits`:
        whether a state does.
        """
        for axis in self._axes:
            if axis not in axes:
                table = table.take(splits, axis=axis)
        return np.minimum(table, BIG).astype(np.float32)

    def _shards(self, states: frozenset[int]) -> Places:
        return tuple(n for n, s in enumerate(self.states) if s in states and s >= FIRST_SLOT)

    def _dim(self, place: int) -> int:
        return self.kind.slots[self.states[place] - FIRST_SLOT][0]

    # -- what they cost ----------------------------------------------------------------------------
    def _step(self, kind: str, axes: Places) -> Seconds:
        """Return the seconds of one step: [1 for each of its axes, whether another axis cuts the
        value (0 or 1), …, mesh].
        """
        seconds = np.moveaxis(self._of_step(kind, axes), 0, -1)
        return np.expand_dims(seconds, axes)

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
            shards = np.stack([np.ones(self.meshes.mesh_count), self.meshes.sizes[:, axis]], axis=1)
            shape = [self.meshes.mesh_count] + [1] * len(others)
            shape[1 + place] = 2
            elements = elements / shards.reshape(shape)
        return elements


def _relax_all(steps: Sequence[_Step], before: Floats) -> Floats:
    """Return the costs after all steps in order."""
    costs = before.copy()
    for step in steps:
        step.relax(costs)
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
