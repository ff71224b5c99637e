"""The layout of a tensor: its state on every axis of a mesh, and what a change of state moves.

Example: on the mesh data2.x2, (S(0, 4), I) puts four of eight rows on each half of the data axis.

On one axis a value is invariant (I), replicated (R), partial (P) or sharded (S); the state fixes
the gradient's as well: I has an invariant gradient, R a partial one, P a replicated one, S a
sharded one. A shard is a digit of a dim: S(dim, stride) gives the axis of size p the digit (i //
stride) % p of the global index i of that dim; contiguous sharding is the outermost digit.

reshard.py makes paths of `Step`s between layouts, cost takes their `traffic`; every pass reads
layouts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch

from autopar.errors import LayoutError
from autopar.ir.mesh import Mesh


class State(NamedTuple):
    """The state of a tensor on one mesh axis: kind "I", "R", "P", or "S" with the dim and the
    stride of the digit.
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
    """Return the state of an axis that holds the digit of this stride of a dim."""
    return State("S", dim, stride)


class Digit(NamedTuple):
    """The digit of a dim's index i that one axis holds: (i // stride) % size."""

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
        """Return the digits of `dim` that axes hold, outermost first."""
        return self._digits.get(dim, ())

    @cached_property
    def _digits(self) -> dict[int, tuple[Digit, ...]]:
        digits_by_dim: dict[int, list[Digit]] = {}
        for axis, state in zip(self.mesh.axes, self.states, strict=True):
            if state.kind == "S":
                digits_by_dim.setdefault(state.dim, []).append(
                    Digit(axis.name, state.stride, axis.size)
                )
        return {
            dim: tuple(sorted(digits, key=lambda digit: (-digit.stride, -digit.size)))
            for dim, digits in digits_by_dim.items()
        }

    def state(self, axis: str) -> State:
        """Return the state on the axis of this name."""
        return self.states[self.mesh.names.index(axis)]

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of one rank's part."""
        shape = list(self.shape)
        for axis, state in zip(self.mesh.axes, self.states, strict=True):
            if state.kind == "S":
                shape[state.dim] //= axis.size
        return tuple(shape)

    @cached_property
    def local_size(self) -> int:
        """The number of elements of one rank's part."""
        return math.prod(self.local_shape)

    def inner(self, axis: str) -> int:
        """Return how many local entries of the dim lie inside one value of the digit that `axis`
        holds: the stride over the sizes of the digits inside it.
        """
        state = self.state(axis)
        stride = state.stride
        for digit in self.digits(state.dim):
            if digit.stride < state.stride:
                stride //= digit.size
        return stride

    @cached_property
    def is_plain(self) -> bool:
        """Whether DTensor's `Shard`s in the mesh's storage order mean exactly this layout: on every
        dim the first of its axes holds the outermost digit, the next one the outermost of what that
        leaves, so that each rank holds one contiguous box.

        Example: on x2.y2, (S(0, 4), S(0, 2)) of 8 rows is plain; (S(0, 2), S(0, 4)) is not.
        """
        return self.plain_part().states == self.states

    def plain_part(self) -> Layout:
        """Return this layout with R in place of the digits that keep it from being plain."""
        remaining, states = list(self.shape), list(self.states)
        for place in self.mesh.storage_order:
            state = states[place]
            if state.kind != "S":
                continue
            if state.stride * self.mesh.axes[place].size == remaining[state.dim]:
                remaining[state.dim] = state.stride
            else:
                states[place] = R
        return Layout(self.mesh, self.shape, tuple(states))

    def with_state(self, axis: str, state: State) -> Layout:
        """Return this layout with another state on one axis."""
        index = self.mesh.names.index(axis)
        return Layout(
            self.mesh, self.shape, (*self.states[:index], state, *self.states[index + 1 :])
        )

    def __str__(self) -> str:
        states = [
            f"{a.name}:{s}"
            for a, s in zip(self.mesh.axes, self.states, strict=True)
            if s.kind != "I"
        ]
        return " ".join(states) if states else "whole"

    def axes_of(self, kind: str) -> tuple[str, ...]:
        """Return the names of the axes whose state is of this kind."""
        return tuple(
            a.name for a, s in zip(self.mesh.axes, self.states, strict=True) if s.kind == kind
        )

    # -- numbers -----------------------------------------------------------------------------------
    def cut(self, unsharded: torch.Tensor, coordinate: dict[str, int]) -> torch.Tensor:
        """Return the local part of the tensor `unsharded` at `coordinate` (axis -> index). On a P
        axis index 0 holds all of it, the others zeros.
        """
        part = unsharded
        for dim in range(len(self.shape)):
            for axis, stride, size in reversed(self.digits(dim)):
                inner = stride // math.prod(d.size for d in self.digits(dim) if d.stride < stride)
                blocks = part.unflatten(dim, (-1, size, inner)).select(dim + 1, coordinate[axis])
                part = blocks.flatten(dim, dim + 1)
        if any(coordinate[axis] for axis in self.axes_of("P")):
            part = torch.zeros_like(part)
        return part.clone(memory_format=torch.contiguous_format)

    def join(self, locals_: list[torch.Tensor]) -> torch.Tensor:
        """Return the global tensor from the local ones, in the order of the ranks. Of replicated
        ones it takes that of index 0.
        """
        parts = dict(enumerate(locals_))
        current = self
        while unjoined := [
            (a, s) for a, s in zip(self.mesh.axes, current.states, strict=True) if s.kind in "SP"
        ]:
            axis, state = unjoined[0]
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
    """Join shards whose blocks of `inner` entries alternate along a dim."""
    blocks = [part.unflatten(dim, (-1, inner)) for part in parts]
    return torch.stack(blocks, dim + 1).flatten(dim, dim + 2)


class Traffic(NamedTuple):
    """One collective of a reshard step: its kind, and the elements of the value that is unsharded
    on its axes (B in the ring formulas).
    """

    collective: Literal[
        "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce"
    ]
    elements: int


class Element(NamedTuple):
    """The sizes that a value's collectives are counted with: `bytes` of an element, and bytes of an
    element of its `gradient` where ranks sum it (0: the value carries none). `share`: the part of
    its collectives' seconds that a search counts. `again`: the value is resharded a second time in
    the backward, so what moves in the forward counts twice. `gathers`: the part of the bytes that
    move in the forward that a search counts.
    """

    bytes: int
    gradient: float
    share: float = 1.0
    again: bool = False
    gathers: float = 1.0

    def of(self, collective: str, backward: bool) -> float:
        """Return the bytes of an element in a collective of a reshard step or of its adjoint."""
        if backward:
            return self.gradient if collective in SUMS else self.bytes
        return self.bytes * (1.0 if self.again else self.gathers)


SUMS = ("all_reduce", "reduce_scatter", "reduce")


@dataclass(frozen=True)
class Step:
    """One step of a reshard: a change of state on one axis or jointly on several, from `before` to
    `after`, both legal layouts.
    """

    kind: str  # "I->R", "S->S", … in the letters of the states
    axes: tuple[str, ...]
    before: Layout
    after: Layout

    @property
    def group_size(self) -> int:
        """The number of ranks in a group over the axes of the step."""
        return math.prod(self.before.mesh.sizes[axis] for axis in self.axes)

    def traffic(self, grad: bool) -> tuple[Traffic | None, Traffic | None]:
        """Return the collectives of the step in the forward and in the backward (None: nothing
        moves); without a gradient nothing moves in the backward.
        """
        forward, backward = TRAFFIC[self.kind]
        elements = max(self.before.local_size, self.after.local_size)
        if self.kind == "S->S":
            elements *= self.group_size
        return (
            Traffic(forward, elements) if forward else None,
            Traffic(backward, elements) if backward and grad else None,
        )


# Forward and backward collective of every change of state; None moves
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

# The order of changes when several axes change: slice before you gather, reduce before you gather.
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
