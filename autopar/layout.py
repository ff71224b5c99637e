"""The state of a tensor on every axis of a mesh, and the changes from one layout to another.

On one axis a value is invariant (I), replicated (R), partial (P) or sharded (S); the state fixes
the gradient's as well: I has an invariant gradient, R a partial one, P a replicated one, S a
sharded one. A shard is a digit of a dim: S(dim, stride) gives the axis of size p the digit (i //
stride) % p of the global index i of that dim; contiguous sharding is the outermost digit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import torch

from .errors import LayoutError
from .mesh import Mesh


class State(NamedTuple):
    """What one mesh axis holds of a tensor: kind "I", "R", "P", or "S" with the dim and the stride
    of the digit.
    """

    kind: Literal["I", "R", "P", "S"]
    dim: int = -1
    stride: int = 0

    def __str__(self) -> str:
        return f"S({self.dim})" if self.kind == "S" else self.kind


I = State("I")  # noqa: E741  (the letter that the literature uses)
R = State("R")
P = State("P")


def S(dim: int, stride: int) -> State:
    return State("S", dim, stride)


class Digit(NamedTuple):
    """The part of a dim's index that one axis holds: (i // stride) % size."""

    axis: str
    stride: int
    size: int


@dataclass(frozen=True)
class Layout:
    """How a tensor of global `shape` lies on `mesh`: one state per axis, in the order of the mesh.

    Raises LayoutError where a digit does not divide its dim or two digits of one dim overlap.
    Example: Layout(Mesh.parse("data2.x2"), (8, 6), (S(0, 4), I)) puts four rows on each half of the
    data axis.
    """

    mesh: Mesh
    shape: tuple[int, ...]
    states: tuple[State, ...]

    def __post_init__(self) -> None:
        assert len(self.states) == len(self.mesh.axes), (self.states, str(self.mesh))
        for dim in self._digits:
            self._check_dim(dim)

    def _check_dim(self, dim: int) -> None:
        unit = 1
        for axis, stride, size in reversed(self.digits(dim)):
            if stride % unit or self.shape[dim] % (stride * size):
                raise LayoutError(
                    f"axis {axis} of size {size} cannot hold the digit of stride {stride} of dim "
                    f"{dim}, which has "
                    f"{self.shape[dim]} entries and inner digits up to {unit}: digits of one dim "
                    "must be disjoint "
                    f"members of one divisor chain"
                )
            unit = stride * size

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.shape, self.states))

    def digits(self, dim: int) -> tuple[Digit, ...]:
        """The digits that axes hold of `dim`, outermost first."""
        return self._digits.get(dim, ())

    @cached_property
    def _digits(self) -> dict[int, tuple[Digit, ...]]:
        found: dict[int, list[Digit]] = {}
        for axis, state in zip(self.mesh.axes, self.states, strict=True):
            if state.kind == "S":
                found.setdefault(state.dim, []).append(Digit(axis.name, state.stride, axis.size))
        return {
            dim: tuple(sorted(digits, key=lambda digit: (-digit.stride, -digit.size)))
            for dim, digits in found.items()
        }

    def state(self, axis: str) -> State:
        return self.states[self.mesh.names.index(axis)]

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        shape = list(self.shape)
        for axis, state in zip(self.mesh.axes, self.states, strict=True):
            if state.kind == "S":
                shape[state.dim] //= axis.size
        return tuple(shape)

    @cached_property
    def local_size(self) -> int:
        return math.prod(self.local_shape)

    def inner(self, axis: str) -> int:
        """The number of local elements right of the digit that `axis` holds: the stride less the
        digits inside it.
        """
        state = self.state(axis)
        stride = state.stride
        for digit in self.digits(state.dim):
            if digit.stride < state.stride:
                stride //= digit.size
        return stride

    def with_state(self, axis: str, state: State) -> Layout:
        index = self.mesh.names.index(axis)
        return Layout(
            self.mesh, self.shape, (*self.states[:index], state, *self.states[index + 1 :])
        )

    def __str__(self) -> str:
        held = [
            f"{a.name}:{s}"
            for a, s in zip(self.mesh.axes, self.states, strict=True)
            if s.kind != "I"
        ]
        return " ".join(held) if held else "whole"

    def axes_of(self, kind: str) -> tuple[str, ...]:
        return tuple(
            a.name for a, s in zip(self.mesh.axes, self.states, strict=True) if s.kind == kind
        )

    # -- numbers -----------------------------------------------------------------------------------
    def cut(self, whole: torch.Tensor, coordinate: dict[str, int]) -> torch.Tensor:
        """The local part of `whole` at `coordinate` (axis -> index); a P axis holds all of it at
        index 0, else zeros.
        """
        part = whole
        for dim in range(len(self.shape)):
            for axis, stride, size in reversed(self.digits(dim)):
                inner = stride // math.prod(d.size for d in self.digits(dim) if d.stride < stride)
                blocks = part.unflatten(dim, (-1, size, inner)).select(dim + 1, coordinate[axis])
                part = blocks.flatten(dim, dim + 1)
        if any(coordinate[axis] for axis in self.axes_of("P")):
            part = torch.zeros_like(part)
        return part.clone(memory_format=torch.contiguous_format)

    def join(self, locals_: list[torch.Tensor]) -> torch.Tensor:
        """The global value, from the local ones in the order of the ranks; where an axis repeats
        the value, index 0's.
        """
        parts = dict(enumerate(locals_))
        current = self
        while held := [
            (a, s) for a, s in zip(self.mesh.axes, current.states, strict=True) if s.kind in "SP"
        ]:
            axis, state = held[0]
            joined = {}
            for rank in parts:
                group = self.mesh.group((axis.name,), rank)
                if state.kind == "P":
                    joined[rank] = torch.stack([parts[r] for r in group]).sum(0)
                else:
                    joined[rank] = _interleave(
                        [parts[r] for r in group], state.dim, current.inner(axis.name)
                    )
            parts, current = joined, current.with_state(axis.name, R)
        return parts[0]


def _interleave(parts: list[torch.Tensor], dim: int, inner: int) -> torch.Tensor:
    blocks = [part.unflatten(dim, (-1, inner)) for part in parts]
    return torch.stack(blocks, dim + 1).flatten(dim, dim + 2)


class Traffic(NamedTuple):
    """One collective of a change: its kind, and the elements of the whole value on its axes (the
    ring formulas' B).
    """

    collective: Literal[
        "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce"
    ]
    elements: int


class Element(NamedTuple):
    """Of a value: the bytes of an element, and of one of its gradient where ranks add it up (0: the
    value carries no gradient). `share`: what part of its collectives' seconds a search counts.
    `again`: what its changes of state move in the forward is moved a second time in the backward.
    """

    bytes: int
    gradient: int
    share: float = 1.0
    again: bool = False

    def of(self, collective: str, backward: bool) -> int:
        """Bytes of an element in a collective of a change of state or of its adjoint."""
        return self.gradient if backward and collective in SUMS else self.bytes


SUMS = ("all_reduce", "reduce_scatter", "reduce")


@dataclass(frozen=True)
class Step:
    """One change of state, on one axis or jointly on several: from `before` to `after`, both legal
    layouts.
    """

    kind: str  # "I->R", "S->S", … in the letters of the states
    axes: tuple[str, ...]
    before: Layout
    after: Layout

    @property
    def group_size(self) -> int:
        return math.prod(self.before.mesh.sizes[axis] for axis in self.axes)

    def traffic(self, grad: bool) -> tuple[Traffic | None, Traffic | None]:
        """What the step moves forward and backward (None: nothing); without a gradient nothing
        moves backward.
        """
        forward, backward = TRAFFIC[self.kind]
        whole = max(self.before.local_size, self.after.local_size)
        if self.kind == "S->S":
            whole *= self.group_size
        return (
            Traffic(forward, whole) if forward else None,
            Traffic(backward, whole) if backward and grad else None,
        )


# Forward and backward collective of every change of state (design.md section 2); None moves
# nothing.
TRAFFIC: dict[str, tuple[Any, Any]] = {
    "I->R": (None, "all_reduce"),
    "I->S": (None, "all_gather"),
    "R->S": (None, None),
    "S->R": ("all_gather", "reduce_scatter"),
    "S->I": ("all_gather", None),
    "S->S": ("all_to_all", "all_to_all"),
    "P->I": ("all_reduce", None),
    "P->R": ("all_reduce", "all_reduce"),
    "P->S": ("reduce_scatter", "all_gather"),
    "R->I": (None, None),
    "I->P": (None, None),
    "S->P": (None, None),
    "R->P": (None, None),
}

# What goes first when several axes change: slice before you gather, reduce before you gather.
ORDER = (
    "I->S",
    "R->S",
    "I->P",
    "R->P",
    "P->S",
    "P->I",
    "P->R",
    "I->R",
    "R->I",
    "S->S",
    "S->P",
    "S->I",
    "S->R",
)
_PLACE = {kind: place for place, kind in enumerate(ORDER)}
# All axes that take one of these take it together; of digits, those that are one digit jointly.
_JOINT = frozenset(kind for kind in ORDER if "S" not in kind)

States = tuple[State, ...]
Places = tuple[int, ...]  # of axes, in mesh order


@lru_cache(maxsize=1 << 20)
def steps(source: Layout, target: Layout) -> tuple[Step, ...]:
    """The path of single changes from one layout to another, every layout on the way legal.

    Axes that take the same change take it together, as one collective over their joint group: where
    no digit is involved, all of them; else those whose digits, in mesh order, are one digit, which
    an axis of their joint size would hold. So a mesh data2.z4 moves what an axis of 8 would.
    """
    assert source.shape == target.shape and source.mesh == target.mesh
    if source.states == target.states:
        return ()
    step = _next_step(source, target)
    return (step, *steps(step.after, target))


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
