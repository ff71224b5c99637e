"""The changes of state that emitted graphs call: differentiable functions on the rank's local
tensor.

On a mesh axis a tensor is I (invariant), R (replicated), S (sharded) or P (partial); the state
fixes its gradient's: I has I, R has P, S has S, P has R. CHANGES lists what each function does to
the value and to the gradient:

| function | from → to | forward | backward |
|---|---|---|---|
| replicate | I → R | nothing | all-reduce |
| take_slice(of="I") | I → S | take own slice | all-gather |
| take_slice(of="R") | R → S | take own slice | pad with zeros |
| all_gather(to="R") | S → R | all-gather | reduce-scatter |
| all_gather(to="I") | S → I | all-gather | take own slice |
| all_to_all | S → S | all-to-all | all-to-all |
| all_reduce(to="I") | P → I | all-reduce | nothing |
| all_reduce(to="R") | P → R | all-reduce | all-reduce |
| reduce_scatter | P → S | reduce-scatter | all-gather |
| invariant | R → I | nothing | divide by the axis size |
| partial(of="I") | I → P | divide by the axis size | nothing |
| place | S → P | place into zeros | take own slice |
| partial(of="R") | R → P | divide by the axis size | divide by the axis size |

Arguments that mean the same everywhere:
    axis        the name of a mesh axis, or a tuple of names: then the change is a joint one over
                their common group, whose ranks count in mesh order, whatever the order of the tuple
    mesh        the mesh as `str(mesh)`, such as "data2.x2"
    dim         the tensor dim
    inner       the axis holds one digit of the dim; `inner` is the number of LOCAL elements of the
                dim to the right of that digit. None: the outermost digit, that is contiguous slices
    coordinate  the rank's own place on the axis: int64 of shape (1,), a tensor so that graphs are
                the same on all ranks; for several axes one of each, in mesh order

Every communication goes through `autopar.wire`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from autopar import wire
from autopar.wire import Axes

Coordinate = Tensor | Sequence[Tensor]

# -- the changes of state --------------------------------------------------------------------------


def all_gather(
    x: Tensor,
    axis: Axes,
    dim: int,
    mesh: str,
    inner: int | None = None,
    coordinate: Coordinate | None = None,
    to: Literal["R", "I"] = "R",
) -> Tensor:
    """S → R or I: the dim grows by the axis size. `coordinate` is needed for I, whose backward
    takes the own slice.

    On "x2", rank 0 with [0, 1] and rank 1 with [2, 3]: both get [0, 1, 2, 3]; with inner=1 both get
    [0, 2, 1, 3].
    """
    size, group, dim = wire.size_of(axis, mesh), wire.group_of(axis, mesh), dim % x.dim()
    inner = x.shape[dim] if inner is None else inner
    if to == "R":
        return _AllGather.apply(x, dim, inner, size, group)
    assert coordinate is not None, (
        "all_gather to I takes its own slice in the backward: pass `coordinate`"
    )
    place = _joint(coordinate, axis, mesh)
    return _AllGatherToInvariant.apply(x, place, dim, inner, size, group)


def reduce_scatter(x: Tensor, axis: Axes, dim: int, mesh: str, inner: int | None = None) -> Tensor:
    """P → S: the dim shrinks by the axis size; it is read as (outer, axis, inner), so `inner`
    counts AFTER the scatter.
    """
    size, group, dim = wire.size_of(axis, mesh), wire.group_of(axis, mesh), dim % x.dim()
    inner = x.shape[dim] // size if inner is None else inner
    return _ReduceScatter.apply(x, dim, inner, size, group)


def all_reduce(x: Tensor, axis: Axes, mesh: str, to: Literal["R", "I"] = "R") -> Tensor:
    """P → R or I: the sum over the ranks of the axis; over several axes at once where `axis` is a
    tuple.
    """
    function = _AllReduce if to == "R" else _AllReduceToInvariant
    return function.apply(x, wire.size_of(axis, mesh), wire.group_of(axis, mesh))


def replicate(x: Tensor, axis: Axes, mesh: str) -> Tensor:
    """I → R: the value stays; the ranks' gradients are summed, over several axes at once where
    `axis` is a tuple.
    """
    return _Replicate.apply(x, wire.size_of(axis, mesh), wire.group_of(axis, mesh))


def invariant(x: Tensor, axis: Axes, mesh: str) -> Tensor:
    """R → I: the value stays; every rank keeps its part, gradient / size, of the whole gradient."""
    return _Scale.apply(x, 1, wire.size_of(axis, mesh))


def partial(x: Tensor, axis: Axes, mesh: str, of: Literal["I", "R"] = "I") -> Tensor:
    """I or R → P: every rank holds x / size; the gradient of I passes as it is, that of R is
    divided too.
    """
    size = wire.size_of(axis, mesh)
    return _Scale.apply(x, size, 1 if of == "I" else size)


def take_slice(
    x: Tensor,
    coordinate: Coordinate,
    axis: Axes,
    dim: int,
    mesh: str,
    inner: int | None = None,
    of: Literal["I", "R"] = "I",
) -> Tensor:
    """I or R → S: the own slice; the dim is read as (outer, axis, inner), so `inner` counts AFTER
    the slicing.
    """
    size, group, dim = wire.size_of(axis, mesh), wire.group_of(axis, mesh), dim % x.dim()
    inner = x.shape[dim] // size if inner is None else inner
    own = _joint(coordinate, axis, mesh)
    if of == "I":
        return _SliceOfInvariant.apply(x, own, dim, inner, size, group)
    return _SliceOfReplicated.apply(x, own, dim, inner, size)


def place(
    x: Tensor, coordinate: Coordinate, axis: Axes, dim: int, mesh: str, inner: int | None = None
) -> Tensor:
    """S → P: zeros but for the own slice; the dim grows by the axis size, `inner` as for
    `all_gather`.
    """
    dim = dim % x.dim()
    inner = x.shape[dim] if inner is None else inner
    own = _joint(coordinate, axis, mesh)
    return _Place.apply(x, own, dim, inner, wire.size_of(axis, mesh))


def all_to_all(
    x: Tensor,
    axis: Axes,
    mesh: str,
    from_dim: int,
    to_dim: int,
    from_inner: int | None = None,
    to_inner: int | None = None,
) -> Tensor:
    """S(from_dim) → S(to_dim), two different dims: from_dim grows by the axis size, to_dim shrinks
    by it.

    `from_inner` is `inner` as for `all_gather`, `to_inner` as for `reduce_scatter`.
    """
    size, group = wire.size_of(axis, mesh), wire.group_of(axis, mesh)
    from_dim, to_dim = from_dim % x.dim(), to_dim % x.dim()
    assert from_dim != to_dim, f"all_to_all within dim {from_dim}"
    from_inner = x.shape[from_dim] if from_inner is None else from_inner
    to_inner = x.shape[to_dim] // size if to_inner is None else to_inner
    return _AllToAll.apply(x, from_dim, to_dim, from_inner, to_inner, size, group)


def _joint(coordinate: Coordinate, axis: Axes, mesh: str) -> Tensor:
    """The place in the common group of several axes, from that on each."""
    if isinstance(coordinate, Tensor):
        return coordinate
    own, *others = coordinate
    for place, size in zip(others, wire.sizes_of(axis, mesh)[1:], strict=True):
        own = own * size + place
    return own


# -- autograd --------------------------------------------------------------------------------------
# One class per row of the table: dynamo traces these as they are, and the names show in profiles.


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, inner: int, size: int, group: str) -> Tensor:
        ctx.facts = dim, inner, size, group
        return _gather(x, dim, inner, size, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _scatter(grad, *ctx.facts), None, None, None, None


class _AllGatherToInvariant(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, coordinate: Tensor, dim: int, inner: int, size: int, group: str
    ) -> Tensor:
        ctx.facts = dim, inner, size
        ctx.save_for_backward(coordinate)
        return _gather(x, dim, inner, size, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (coordinate,) = ctx.saved_tensors
        return _take(grad, coordinate, *ctx.facts), None, None, None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, inner: int, size: int, group: str) -> Tensor:
        ctx.facts = dim, inner, size, group
        return _scatter(x, dim, inner, size, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(grad, *ctx.facts), None, None, None, None


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str) -> Tensor:
        ctx.facts = size, group
        return wire.all_reduce(x, size, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return wire.all_reduce(grad, *ctx.facts), None, None


class _AllReduceToInvariant(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str) -> Tensor:
        return wire.all_reduce(x, size, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None


class _Replicate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str) -> Tensor:
        ctx.facts = size, group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return wire.all_reduce(grad, *ctx.facts), None, None


class _Scale(Function):
    """Divides the value by one number and the gradient by another; by 1 is nothing at all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value_by: int, gradient_by: int) -> Tensor:
        ctx.by = gradient_by
        return x.view_as(x) if value_by == 1 else x / value_by

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad if ctx.by == 1 else grad / ctx.by, None, None


class _SliceOfInvariant(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, coordinate: Tensor, dim: int, inner: int, size: int, group: str
    ) -> Tensor:
        ctx.facts = dim, inner, size, group
        return _take(x, coordinate, dim, inner, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(grad, *ctx.facts), None, None, None, None, None


class _SliceOfReplicated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, coordinate: Tensor, dim: int, inner: int, size: int) -> Tensor:
        ctx.facts = dim, inner, size
        ctx.save_for_backward(coordinate)
        return _take(x, coordinate, dim, inner, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (coordinate,) = ctx.saved_tensors
        return _pad(grad, coordinate, *ctx.facts), None, None, None, None


class _Place(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, coordinate: Tensor, dim: int, inner: int, size: int) -> Tensor:
        ctx.facts = dim, inner, size
        ctx.save_for_backward(coordinate)
        return _pad(x, coordinate, dim, inner, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (coordinate,) = ctx.saved_tensors
        return _take(grad, coordinate, *ctx.facts), None, None, None, None


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        from_dim: int,
        to_dim: int,
        from_inner: int,
        to_inner: int,
        size: int,
        group: str,
    ) -> Tensor:
        ctx.facts = to_dim, from_dim, to_inner, from_inner, size, group
        return _swap(x, from_dim, to_dim, from_inner, to_inner, size, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _swap(grad, *ctx.facts), None, None, None, None, None, None


# -- digits of a dim: (outer, inner) ↔ (outer, axis, inner) ----------------------------------------


def _expose(x: Tensor, dim: int, inner: int, size: int) -> Tensor:
    """x (..., outer·size·inner, ...) with the axis in front: (size, ..., outer, inner, ...)."""
    return x.unflatten(dim, (-1, size, inner)).movedim(dim + 1, 0)


def _absorb(x: Tensor, dim: int, inner: int) -> Tensor:
    """The inverse: x (size, ..., outer·inner, ...) to (..., outer·size·inner, ...)."""
    return x.unflatten(dim + 1, (-1, inner)).movedim(0, dim + 1).flatten(dim, dim + 2)


def _gather(x: Tensor, dim: int, inner: int, size: int, group: str) -> Tensor:
    return _absorb(wire.all_gather(x.unsqueeze(0), size, group), dim, inner)


def _scatter(x: Tensor, dim: int, inner: int, size: int, group: str) -> Tensor:
    return (
        wire.reduce_scatter(_expose(x, dim, inner, size), size, group)
        .squeeze(0)
        .flatten(dim, dim + 1)
    )


def _swap(
    x: Tensor, from_dim: int, to_dim: int, from_inner: int, to_inner: int, size: int, group: str
) -> Tensor:
    outgoing = _expose(x, to_dim, to_inner, size).flatten(to_dim + 1, to_dim + 2)
    return _absorb(wire.all_to_all(outgoing, group), from_dim, from_inner)


def _take(x: Tensor, coordinate: Tensor, dim: int, inner: int, size: int) -> Tensor:
    return (
        x.unflatten(dim, (-1, size, inner)).index_select(dim + 1, coordinate).flatten(dim, dim + 2)
    )


def _pad(x: Tensor, coordinate: Tensor, dim: int, inner: int, size: int) -> Tensor:
    outer = x.shape[dim] // inner
    zeros = x.new_zeros((*x.shape[:dim], outer, size, inner, *x.shape[dim + 1 :]))
    return zeros.index_copy(dim + 1, coordinate, x.unflatten(dim, (outer, 1, inner))).flatten(
        dim, dim + 2
    )
