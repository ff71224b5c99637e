"""The 2.5D matmul of linear layers, panel by panel. The pass summa emits it.

Both factors are split on the dim that is summed, and panels of them are broadcast one after the
other in place of a gather (SUMMA; arXiv 2105.14500). On q × q ranks (row, column) of one depth,
rank (i, j) has X[i, j] (m/q, k/q) and W[i, j] (k/q, n/q) and computes

    Y[i, j]  = sum over t of X[i, t] · W[t, j]
    dX[i, t] = sum over j of dY[i, j] · W[t, j]ᵀ
    dW[t, j] = sum over i of X[i, t]ᵀ · dY[i, j]

The sum over t is local; the other two are reduces to the owner of the block. While matmul t runs,
panel t + 1 and the reduce of matmul t - 1 are under way. Elements that a rank receives in
broadcasts or sends in reduces, for d depths and X of m × k in all: (q-1)/q² · (mk/d + kn) forward,
and twice that backward. A rank holds two panels of X and two of W at a time, copies of its own
among them; a gather would hold q.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from autopar.ops import comm
from autopar.ops.autograd import widen_for_sum


def summa_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row: str,
    column: str,
    mesh: str,
    coordinates: Sequence[Tensor],
    transposed: bool = False,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x · weightᵀ + bias on blocks: x (..., k/q), weight (n/q, k/q), bias (n/q), result
    (..., n/q).

    `row` and `column` are two axes of q ranks each. k of x and n lie on `column`, k of weight on
    `row`, in contiguous blocks. The leading dims of x lie on `row`, and on any axes other than
    `column`. `coordinates` are the rank's own on `row` and on `column`. `transposed`: weight is
    (k/q, n/q), as addmm and GPT-2's Conv1D have it. `reduce_dtype` is the dtype that the gradient
    of weight is summed in, if it is wider than its own.

    The gradients of x and weight are complete over `row` and `column`. That of weight is still to
    be summed over further axes that the leading dims lie on, that of bias over these and `row`.
    Sums between panels are in x's dtype, so half types round q times.

    On "row2.column2", x (6, 8) and weight (10, 8) in all: a rank has x (3, 4), weight (5, 4) and
    gets (3, 5).
    """
    size = comm.size_of(column, mesh)
    assert comm.size_of(row, mesh) == size, f"panels need {row} and {column} of one size: {mesh}"
    groups = comm.group_of(row, mesh), comm.group_of(column, mesh)
    facts = size, *groups, transposed, reduce_dtype
    return _PanelLinear.apply(x, weight, bias, *coordinates, *facts)


class _PanelLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        row_place: Tensor,
        column_place: Tensor,
        size: int,
        row: str,
        column: str,
        transposed: bool,
        wide: torch.dtype | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, row_place, column_place)
        ctx.facts = size, row, column, transposed
        ctx.wide = wide
        y = _summa_forward([(_matrix(x), column), (weight, row)], bias, size, transposed)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, row_place, column_place = ctx.saved_tensors
        size, row, column, transposed = ctx.facts
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        dy = _matrix(grad)
        lanes = []
        if of_x:
            lanes.append(_Lane(weight, row, column, column_place, _x_part, None))
        if of_weight:
            lanes.append(_Lane(_matrix(x), column, row, row_place, _weight_part, ctx.wide))
        gradients = _summa_gradients(lanes, dy, size, transposed)
        grad_weight = gradients.pop() if of_weight else None
        grad_x = gradients.pop().reshape(x.shape) if of_x else None
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_x, grad_weight, dy.sum(0) if of_bias else None, *[None] * 7


class _Lane(NamedTuple):
    """One of the two gradients: panels of `block` are received, and parts of all blocks are reduced
    to their owners.
    """

    block: Tensor
    incoming: str  # the group that shares panels of `block`
    outgoing: str  # the group that shares the sum
    place: Tensor  # the own coordinate in it: the block that this rank keeps
    multiply: Callable[[Tensor, Tensor, bool], Tensor]
    wide: torch.dtype | None  # the dtype that the parts are summed in


def _summa_forward(
    blocks: list[tuple[Tensor, str]], bias: Tensor | None, size: int, transposed: bool
) -> Tensor:
    """Return the local block of the forward matmul, panel by panel."""
    y, next_panels = None, _issue_panels(blocks, 0, size)
    for t in range(size):
        panels = next_panels  # frees panel t - 1 before a third panel is allocated
        next_panels = _issue_panels(blocks, t + 1, size)
        y = _add_matmul(y, panels, bias, transposed)
    assert y is not None
    return y


def _add_matmul(
    y: Tensor | None, panels: list[Tensor], bias: Tensor | None, transposed: bool
) -> Tensor:
    """Return y plus the matmul of these panels once they have arrived; the first one adds the
    bias.
    """
    x, weight = [comm.wait(panel) for panel in panels]
    weight = weight if transposed else weight.t()
    if y is not None:
        return y.addmm_(x, weight)
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


def _summa_gradients(lanes: list[_Lane], dy: Tensor, size: int, transposed: bool) -> list[Tensor]:
    """Return the rank's own block of each lane's gradient. One loop serves all lanes: each panel
    comes once.
    """
    blocks = [(lane.block, lane.incoming) for lane in lanes]
    own_blocks: list[Tensor] = []
    leaving: list[Tensor] = []
    next_panels = _issue_panels(blocks, 0, size)
    for t in range(size):
        panels = next_panels
        next_panels = _issue_panels(blocks, t + 1, size)
        parts = [
            comm.issue_reduce(
                widen_for_sum(lane.multiply(dy, comm.wait(panel), transposed), lane.wide),
                t,
                size,
                lane.outgoing,
            )
            for lane, panel in zip(lanes, panels, strict=True)
        ]
        own_blocks = _keep_own_blocks(lanes, own_blocks, leaving, t - 1) if t else own_blocks
        leaving = parts
    return _keep_own_blocks(lanes, own_blocks, leaving, size - 1)


def _keep_own_blocks(
    lanes: list[_Lane], own: list[Tensor], leaving: list[Tensor], t: int
) -> list[Tensor]:
    """Return the rank's own blocks: `own`, or the arrived sums on the ranks at place t. At t = 0
    the blocks of other ranks are undefined, and replaced when their turn comes.
    """
    arrived = [comm.wait(part) for part in leaving]
    if t == 0:
        return arrived
    return [
        torch.where(lane.place == t, new, old)
        for lane, old, new in zip(lanes, own, arrived, strict=True)
    ]


def _issue_panels(blocks: list[tuple[Tensor, str]], t: int, size: int) -> list[Tensor]:
    """Start the broadcast of panel t of each (own block, group); after the last panel there is
    none.
    """
    if t == size:
        return []
    return [comm.issue_broadcast(block, t, size, group) for block, group in blocks]


def _x_part(dy: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    """Return the part of the gradient of x for one panel of weight."""
    return dy @ (weight.t() if transposed else weight)


def _weight_part(dy: Tensor, x: Tensor, transposed: bool) -> Tensor:
    """Return the part of the gradient of weight for one panel of x."""
    return x.t() @ dy if transposed else dy.t() @ x


def _matrix(x: Tensor) -> Tensor:
    """Return x (..., features) with all dims but the last flattened."""
    return x.reshape(-1, x.shape[-1])
