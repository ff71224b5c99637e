"""Sharded ops: differentiable functions on the rank's local tensors that emitted graphs call where
the dim that an op reduces is split; and, for the cost model, the collectives that run inside them.

Example: `layer_norm` of x (..., 64) where the last dim of 256 lies on four ranks. ops/local.py
emits these calls, except `linear` and `summa_linear`, which the passes kernel_choice and summa put
in place of a matmul.

Where a dim lies on several axes, each holds one digit of its index: `digits` is a sequence of
(axis, stride, size), which says that the axis holds (i // stride) % size of the GLOBAL index i.
`coordinates` is a sequence of int64 tensors of shape (1,), the rank's own coordinates on those
axes, in the same order. Digits may come in any order; nothing here takes mesh order for stride
order.

A layer norm of (512, 768) whose last dim is split runs two all-reduces of 512 numbers forward and
one of 1024 backward. `inner_collectives` lists them for a node and the layouts of its operands. The
planner, cost/communication.py and the passes call it; passes/summa.py describes the broadcasts and
reduces of SUMMA with `Part` and `moving`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.ir.layout import Layout, Traffic
from autopar.ir.sharding_rule import bound
from autopar.ops.rules.reductions import reduced_dims
from autopar.ops.sharded.attention import attention
from autopar.ops.sharded.draws import draw
from autopar.ops.sharded.dropout import dropout
from autopar.ops.sharded.experts import experts
from autopar.ops.sharded.matmul import linear
from autopar.ops.sharded.norms import (
    batch_norm,
    group_norm,
    layer_norm,
    log_softmax,
    rms_norm,
    softmax,
    vector_norm,
)
from autopar.ops.sharded.summa import summa_linear
from autopar.ops.sharded.vocabulary import (
    Digit,
    cross_entropy,
    embedding,
    mask_padding,
    nll_loss,
)

__all__ = [
    "HAVE_INNER_COLLECTIVES",
    "Digit",
    "InnerCollective",
    "Part",
    "attention",
    "batch_norm",
    "cross_entropy",
    "draw",
    "dropout",
    "embedding",
    "experts",
    "group_norm",
    "inner_collectives",
    "layer_norm",
    "linear",
    "log_softmax",
    "mask_padding",
    "moving",
    "nll_loss",
    "rms_norm",
    "softmax",
    "summa_linear",
    "vector_norm",
]

aten = torch.ops.aten


class Part(NamedTuple):
    """The elements of a collective: `times` · the product of the local sizes of these dims of an
    operand in this layout; cost formulas are derived from it.
    """

    operand: int
    layout: Layout
    dims: tuple[int, ...]
    times: int = 1

    @staticmethod
    def all(operand: int, layout: Layout) -> Part:
        """Return the part that is a full local operand."""
        return Part(operand, layout, tuple(range(len(layout.shape))))

    @property
    def elements(self) -> int:
        """The number of elements on one rank."""
        return self.times * math.prod(self.layout.local_shape[dim] for dim in self.dims)


class InnerCollective(NamedTuple):
    """One collective inside an op: its traffic, its axes, forward or backward, and the part of an
    operand that it sends. Sharded ops compute in float32 (ops/sharded/norms.py): 4 bytes an
    element.
    """

    traffic: Traffic
    axes: tuple[str, ...]
    backward: bool
    part: Part
    element_bytes: int = 4


Finder = Callable[[fx.Node, Layout], list[InnerCollective]]


def moving(
    kind: Any, part: Part, axes: tuple[str, ...], backward: bool, element_bytes: int = 4
) -> InnerCollective:
    """Return the collective of this kind that sends this part over these axes."""
    return InnerCollective(Traffic(kind, part.elements), axes, backward, part, element_bytes)


def inner_collectives(node: fx.Node, operands: Sequence[Layout | None]) -> list[InnerCollective]:
    """Return the collectives that a node runs inside when its operands have these layouts; none
    where the dims that it reduces are unsharded.
    """
    find = _INNER_COLLECTIVES.get(node.target)
    layout = operands[0] if operands else None
    return find(node, layout) if find is not None and layout is not None else []


def _all_reduces(
    layout: Layout, reduced: Collection[int], forward: Sequence[int], backward: Sequence[int]
) -> list[InnerCollective]:
    """Return one all-reduce over the axes of the `reduced` dims for each number in `forward` and
    `backward`, of that many numbers for each place in the other dims.
    """
    axes = tuple(digit.axis for dim in reduced for digit in layout.digits(dim))
    others = tuple(dim for dim in range(len(layout.shape)) if dim not in reduced)
    return (
        [
            moving("all_reduce", Part(0, layout, others, numbers), axes, late)
            for late, each in ((False, forward), (True, backward))
            for numbers in each
        ]
        if axes
        else []
    )


def _last_dim(forward: Sequence[int], backward: Sequence[int]) -> Finder:
    """Return the finder of a norm over the last dim."""
    return lambda node, layout: _all_reduces(layout, {len(layout.shape) - 1}, forward, backward)


def _group_norm(node: fx.Node, layout: Layout) -> list[InnerCollective]:
    """Return the all-reduces of a group norm of one group: those of a layer norm."""
    return _all_reduces(layout, range(1, len(layout.shape)), (1, 1), (2,))


def _instance_norm(node: fx.Node, layout: Layout) -> list[InnerCollective]:
    """Return the all-reduces of an instance norm: those of a layer norm."""
    return _all_reduces(layout, range(2, len(layout.shape)), (1, 1), (2,))


def _batch_norm(node: fx.Node, layout: Layout) -> list[InnerCollective]:
    """Return the all-reduces of two numbers a channel in each direction."""
    others = [dim for dim in range(len(layout.shape)) if dim != 1]
    return _all_reduces(layout, others, (1, 1), (2,))


def _vector_norm(node: fx.Node, layout: Layout) -> list[InnerCollective]:
    """Return the all-reduce of the powers' sums."""
    return _all_reduces(layout, reduced_dims(node), (1,), ())


def _cross_entropy(node: fx.Node, layout: Layout) -> list[InnerCollective]:
    """Return the all-reduces over the class axes, and that of the mean over the token axes."""
    class_dim = 1 if len(layout.shape) > 1 else 0
    over_classes = _all_reduces(layout, {class_dim}, (1, 2), ())
    classes = {digit.axis for digit in layout.digits(class_dim)}
    tokens = tuple(axis for axis in layout.axes_of("S") if axis not in classes)
    over_tokens = moving("all_reduce", Part(0, layout, (), 2), tokens, False)
    return [*over_classes, over_tokens] if tokens else over_classes


def _softmax(node: fx.Node, layout: Layout) -> list[InnerCollective]:
    """Return the all-reduces of maxima and sums, and of the backward's sums."""
    return _all_reduces(layout, {bound(node)["dim"] % len(layout.shape)}, (1, 1), (1,))


_INNER_COLLECTIVES: dict[Any, Finder] = {
    aten.layer_norm.default: _last_dim((1, 1), (2,)),
    aten.group_norm.default: _group_norm,
    aten.instance_norm.default: _instance_norm,
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten._native_batch_norm_legit.no_stats: _batch_norm,
    aten.rms_norm.default: _last_dim((1,), (1,)),
    aten.linalg_vector_norm.default: _vector_norm,
    aten.softmax.int: _softmax,
    aten._softmax.default: _softmax,
    aten.log_softmax.int: _softmax,
    aten._log_softmax.default: _softmax,
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.nll_loss_nd.default: _cross_entropy,
}
HAVE_INNER_COLLECTIVES = frozenset(_INNER_COLLECTIVES)
