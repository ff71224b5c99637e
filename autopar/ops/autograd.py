"""The reshards as autograd functions: each changes the value forward and applies the adjoint change
to the gradient backward.

Example: `AllGather` gathers the shards of a dim forward and reduce-scatters the gradient backward.
There is one class for each row of the table in collectives.py, which calls them, except that
`Scale` serves both `invariant` and `partial`. Dynamo traces these classes as they are, and their
names show in profiles. A `Route` lists the process groups that a collective goes through.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from autopar.ops import comm
from autopar.ops.comm import Route

Wide = torch.dtype | None  # the dtype that a gradient is summed in; None: its own dtype


class AllGather(Function):
    """S → R: all-gather forward, reduce-scatter backward, summed in `wide`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, inner: int, there: Route, back: Route, wide: Wide
    ) -> Tensor:
        ctx.facts = dim, inner, back
        ctx.wide = wide
        return _gather(x, dim, inner, there)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        summed = _scatter(widen_for_sum(grad, ctx.wide), *ctx.facts).to(grad.dtype)
        return summed, None, None, None, None, None


class AllGatherToInvariant(Function):
    """S → I: all-gather forward, own slice backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, coordinate: Tensor, dim: int, inner: int, there: Route
    ) -> Tensor:
        ctx.facts = dim, inner, comm.route_size(there)
        ctx.save_for_backward(coordinate)
        return _gather(x, dim, inner, there)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (coordinate,) = ctx.saved_tensors
        return _take(grad, coordinate, *ctx.facts), None, None, None, None


class ReduceScatter(Function):
    """P → S: reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, inner: int, there: Route, back: Route) -> Tensor:
        ctx.facts = dim, inner, back
        return _scatter(x, dim, inner, there)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(grad, *ctx.facts), None, None, None, None


class AllReduce(Function):
    """P → R: all-reduce forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Route, back: Route, wide: Wide) -> Tensor:
        ctx.facts = back, wide
        return comm.hierarchical_all_reduce(x, there)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _sum(grad, *ctx.facts), None, None, None


class AllReduceToInvariant(Function):
    """P → I: all-reduce forward, nothing backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Route) -> Tensor:
        return comm.hierarchical_all_reduce(x, there)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class Replicate(Function):
    """I → R: nothing forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, back: Route, wide: Wide) -> Tensor:
        ctx.facts = back, wide
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _sum(grad, *ctx.facts), None, None


class Scale(Function):
    """Divide the value by one number and the gradient by another; division by 1 is left out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value_by: int, gradient_by: int) -> Tensor:
        ctx.by = gradient_by
        return x.view_as(x) if value_by == 1 else x / value_by

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad if ctx.by == 1 else grad / ctx.by, None, None


class SliceOfInvariant(Function):
    """I → S: own slice forward, all-gather backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, coordinate: Tensor, dim: int, inner: int, size: int, back: Route
    ) -> Tensor:
        ctx.facts = dim, inner, back
        return _take(x, coordinate, dim, inner, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(grad, *ctx.facts), None, None, None, None, None


class SliceOfReplicated(Function):
    """R → S: own slice forward, padding with zeros backward."""

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


class Place(Function):
    """S → P: placing into zeros forward, own slice backward."""

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


class AllToAll(Function):
    """S → S: all-to-all forward and backward."""

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


# -- sums of gradients -----------------------------------------------------------------------------


def _sum(grad: Tensor, route: Route, wide: Wide) -> Tensor:
    """Return the sum of the gradients over the ranks of the route, in the dtype of `grad`."""
    return comm.hierarchical_all_reduce(widen_for_sum(grad, wide), route).to(grad.dtype)


def widen_for_sum(grad: Tensor, wide: Wide) -> Tensor:
    """Return `grad` in the dtype that it is summed in: `wide`, or its own dtype if that is
    wider.
    """
    return grad if wide is None else grad.to(torch.promote_types(grad.dtype, wide))


# -- digits of a dim: (outer, inner) ↔ (outer, axis, inner) ----------------------------------------


def _expose(x: Tensor, dim: int, inner: int, size: int) -> Tensor:
    """Return x (..., outer·size·inner, ...) with the axis in front, (size, ..., outer, inner,
    ...).
    """
    return x.unflatten(dim, (-1, size, inner)).movedim(dim + 1, 0)


def _absorb(x: Tensor, dim: int, inner: int) -> Tensor:
    """Undo `_expose`: take x (size, ..., outer·inner, ...) to (..., outer·size·inner, ...)."""
    return x.unflatten(dim + 1, (-1, inner)).movedim(0, dim + 1).flatten(dim, dim + 2)


def _gather(x: Tensor, dim: int, inner: int, route: Route) -> Tensor:
    """Return the shards of all ranks joined on `dim`."""
    return _absorb(comm.hierarchical_all_gather(x.unsqueeze(0), route), dim, inner)


def _scatter(x: Tensor, dim: int, inner: int, route: Route) -> Tensor:
    """Return the rank's own slice on `dim` of the sum over all ranks."""
    exposed = _expose(x, dim, inner, comm.route_size(route))
    return comm.hierarchical_reduce_scatter(exposed, route).squeeze(0).flatten(dim, dim + 1)


def _swap(
    x: Tensor, from_dim: int, to_dim: int, from_inner: int, to_inner: int, size: int, group: str
) -> Tensor:
    """Return x gathered on `from_dim` and split on `to_dim` by one all-to-all."""
    outgoing = _expose(x, to_dim, to_inner, size).flatten(to_dim + 1, to_dim + 2)
    return _absorb(comm.all_to_all(outgoing, group), from_dim, from_inner)


def _take(x: Tensor, coordinate: Tensor, dim: int, inner: int, size: int) -> Tensor:
    """Return the rank's own slice of a dim: the digit of the axis at `coordinate`."""
    return (
        x.unflatten(dim, (-1, size, inner)).index_select(dim + 1, coordinate).flatten(dim, dim + 2)
    )


def _pad(x: Tensor, coordinate: Tensor, dim: int, inner: int, size: int) -> Tensor:
    """Return a tensor of zeros, `size` times as long on the dim, with x in the rank's own slice."""
    outer = x.shape[dim] // inner
    zeros = x.new_zeros((*x.shape[:dim], outer, size, inner, *x.shape[dim + 1 :]))
    return zeros.index_copy(dim + 1, coordinate, x.unflatten(dim, (outer, 1, inner))).flatten(
        dim, dim + 2
    )
