"""The path from one layout to another: which single changes of state, on which axes, in order."""

from __future__ import annotations

from functools import lru_cache

from autopar.ir.layout import ORDER, Layout, R, State, Step
from autopar.ir.mesh import Mesh

_PLACE = {kind: place for place, kind in enumerate(ORDER)}
# All axes that take one of these take it together; of digits, those that are one digit jointly.
_JOINT = frozenset(kind for kind in ORDER if "S" not in kind)

States = tuple[State, ...]
Places = tuple[int, ...]  # of axes, in mesh order


@lru_cache(maxsize=1 << 20)
def reshard_steps(source: Layout, target: Layout) -> tuple[Step, ...]:
    """The path of single changes from one layout to another, every layout on the way legal.

    Axes that take the same change take it together, as one collective over their joint group: where
    no digit is involved, all of them; else those whose digits, in mesh order, are one digit, which
    an axis of their joint size would hold. So a mesh data2.z4 moves what an axis of 8 would.
    """
    assert source.shape == target.shape and source.mesh == target.mesh
    if source.states == target.states:
        return ()
    step = _next_step(source, target)
    return (step, *reshard_steps(step.after, target))


def _next_step(current: Layout, target: Layout) -> Step:
    for kind, places in _changes(current.states, target.states):
        if kind in _JOINT:
            return _step(kind, places, current, target.states)
        for run in [places] if len(places) == 1 else _runs(current, target, places):
            if _is_legal(current, target.states, run):
                return _step(kind, run, current, target.states)
    return _make_room(current, target)


def _changes(before: States, after: States) -> list[tuple[str, Places]]:
    """Which axes take which change, what goes first in front."""
    found: dict[str, Places] = {}
    for place, (old, new) in enumerate(zip(before, after, strict=True)):
        # Another digit of the same dim is gathered in the end, and sliced again.
        if old != new and not (old.kind == new.kind == "S" and old.dim == new.dim):
            kind = f"{old.kind}->{new.kind}"
            found[kind] = (*found.get(kind, ()), place)
    return sorted(found.items(), key=lambda pair: _PLACE[pair[0]])


def _step(kind: str, places: Places, current: Layout, states: States) -> Step:
    """The change of these axes to their part of `states`, which are known to be legal."""
    changed = list(current.states)
    for place in places:
        changed[place] = states[place]
    axes = tuple(current.mesh.names[place] for place in places)
    return Step(kind, axes, current, _trusted(current.mesh, current.shape, tuple(changed)))


def _runs(current: Layout, target: Layout, places: Places) -> list[Places]:
    """Axes that take the same change, in groups whose digits are one digit in mesh order, before
    the change and after it.
    """
    sides = (current.states, target.states)
    runs: list[Places] = []
    for place in sorted(places, key=lambda p: [(s[p].dim, -s[p].stride) for s in sides]):
        last = runs[-1][-1] if runs else place
        size = current.mesh.axes[place].size
        if last < place and all(_adjoins(s[last], s[place], size) for s in sides):
            runs[-1] = (*runs[-1], place)
        else:
            runs.append((place,))
    return sorted(runs)


def _adjoins(outer: State, inner: State, size: int) -> bool:
    """Whether the inner digit, of so many, stands right of the outer one; without digits, yes."""
    if outer.kind != "S" or inner.kind != "S":
        return outer.kind == inner.kind
    return outer.dim == inner.dim and outer.stride == inner.stride * size


def _is_legal(current: Layout, states: States, changed: Places) -> bool:
    """Whether these axes may take their part of `states`; only a new digit can be in the way."""
    after = {place: states[place] for place in changed}
    for dim in {state.dim for state in after.values() if state.kind == "S"}:
        digits = [
            (state.stride, axis.size)
            for place, axis in enumerate(current.mesh.axes)
            if (state := after.get(place, current.states[place])).dim == dim
        ]
        if not _is_chain(current.shape[dim], tuple(sorted(digits))):
            return False
    return True


@lru_cache(maxsize=1 << 16)
def _is_chain(size: int, digits: tuple[tuple[int, int], ...]) -> bool:
    """Whether (stride, size) digits, innermost first, are disjoint members of one divisor chain."""
    unit = 1
    for stride, count in digits:
        if stride % unit or size % (stride * count):
            return False
        unit = stride * count
    return True


@lru_cache(maxsize=1 << 18)
def _trusted(mesh: Mesh, shape: tuple[int, ...], states: States) -> Layout:
    """A layout that is known to be legal; the same object each time."""
    layout = Layout.__new__(Layout)
    layout.__dict__.update(mesh=mesh, shape=shape, states=states)
    return layout


def _make_room(current: Layout, target: Layout) -> Step:
    """Gather a shard that stands in the way: the first that cannot move directly, with those that
    are one digit with it and stand in the way as it does.
    """
    stuck = [
        place
        for place, (old, new) in enumerate(zip(current.states, target.states, strict=True))
        if old.kind == "S" and old != new
    ]
    assert stuck, f"no way from {current} to {target} of shape {current.shape}"
    whole = Layout(current.mesh, current.shape, (R,) * len(current.states))
    alike = tuple(p for p in stuck if target.states[p].kind == target.states[stuck[0]].kind)
    run = next(run for run in _runs(current, whole, alike) if stuck[0] in run)
    return _step("S->R", run, current, whole.states)
