"""The reshard from one layout to another: a path of single steps, in order, all legal.

Example: on one axis, from P to S(1, 4) the path is one step "P->S", a reduce-scatter.

passes/rewrite.py puts these steps into the graph; the planner counts their seconds.
"""

from __future__ import annotations

from functools import lru_cache

from autopar.ir.layout import ORDER, Layout, R, State, Step
from autopar.ir.mesh import Mesh

_PRIORITY = {tuple(kind.split("->")): place for place, kind in enumerate(ORDER)}
# Changes that all axes take together; with digits, only axes whose digits are jointly one digit do.
_JOINT = frozenset(kind for kind in ORDER if "S" not in kind)

States = tuple[State, ...]
Places = tuple[int, ...]  # positions of axes, in mesh order


@lru_cache(maxsize=1 << 20)
def reshard_steps(source: Layout, target: Layout) -> tuple[Step, ...]:
    """Return the steps from one layout to another of the same shape and mesh; every layout on the
    path is legal.

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
    """Return the first step: the first legal change in ORDER, else a gather that makes room."""
    for kind, places in _steps_by_kind(current.states, target.states):
        if kind in _JOINT:
            return _step(kind, places, current, target.states)
        for run in [places] if len(places) == 1 else _joint_runs(current, target, places):
            if _is_legal(current, target.states, run):
                return _step(kind, run, current, target.states)
    return _make_room(current, target)


def _steps_by_kind(before: States, after: States) -> list[tuple[str, Places]]:
    """Return the changes and the axes that take each, sorted by ORDER."""
    places_by_order: dict[int, Places] = {}
    for place, (old, new) in enumerate(zip(before, after, strict=True)):
        # No step leads to another digit of the same dim: the digit is gathered, then sliced again.
        if old != new and not (old.kind == new.kind == "S" and old.dim == new.dim):
            order = _PRIORITY[old.kind, new.kind]
            places_by_order[order] = (*places_by_order.get(order, ()), place)
    return [(ORDER[order], places_by_order[order]) for order in sorted(places_by_order)]


def _step(kind: str, places: Places, current: Layout, states: States) -> Step:
    """Return the step in which these axes take their states in `states`, which must be legal."""
    changed = list(current.states)
    for place in places:
        changed[place] = states[place]
    axes = tuple(current.mesh.names[place] for place in places)
    return Step(kind, axes, current, _legal_layout(current.mesh, current.shape, tuple(changed)))


def _joint_runs(current: Layout, target: Layout, places: Places) -> list[Places]:
    """Group axes that take the same change: the digits of a group are jointly one digit in mesh
    order, before the change and after it.
    """
    sides = (current.states, target.states)
    runs: list[Places] = []
    for place in sorted(places, key=lambda p: [(s[p].dim, -s[p].stride) for s in sides]):
        last = runs[-1][-1] if runs else place
        size = current.mesh.axes[place].size
        if last < place and all(_is_adjacent(s[last], s[place], size) for s in sides):
            runs[-1] = (*runs[-1], place)
        else:
            runs.append((place,))
    return sorted(runs)


def _is_adjacent(outer: State, inner: State, size: int) -> bool:
    """Whether the inner digit, of `size`, directly follows the outer one; true without digits."""
    if outer.kind != "S" or inner.kind != "S":
        return outer.kind == inner.kind
    return outer.dim == inner.dim and outer.stride == inner.stride * size


def _is_legal(current: Layout, states: States, changed: Places) -> bool:
    """Whether these axes may take their states in `states`. Only a new digit can be illegal."""
    dims = {states[place].dim for place in changed if states[place].kind == "S"}
    if not dims:
        return True
    after = [*current.states]
    for place in changed:
        after[place] = states[place]
    for dim in dims:
        digits = [
            (state.stride, axis.size)
            for axis, state in zip(current.mesh.axes, after, strict=True)
            if state.dim == dim
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
def _legal_layout(mesh: Mesh, shape: tuple[int, ...], states: States) -> Layout:
    """Return a layout that is known to be legal, unchecked; the same object each time."""
    layout = Layout.__new__(Layout)
    layout.__dict__.update(mesh=mesh, shape=shape, states=states)
    return layout


def _make_room(current: Layout, target: Layout) -> Step:
    """Return a step that gathers a blocking shard: the first that cannot change directly, with
    those that are jointly one digit with it and change to the same kind of state.
    """
    blocking = [
        place
        for place, (old, new) in enumerate(zip(current.states, target.states, strict=True))
        if old.kind == "S" and old != new
    ]
    assert blocking, f"no way from {current} to {target} of shape {current.shape}"
    replicated = _legal_layout(current.mesh, current.shape, (R,) * len(current.states))
    same_kind = tuple(
        p for p in blocking if target.states[p].kind == target.states[blocking[0]].kind
    )
    run = next(run for run in _joint_runs(current, replicated, same_kind) if blocking[0] in run)
    return _step("S->R", run, current, replicated.states)
