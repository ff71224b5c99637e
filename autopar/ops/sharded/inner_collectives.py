"""The small collectives inside the sharded implementations of ops (autopar/sharded), for the cost
model and the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from autopar.ir.layout import Layout, Traffic

aten = torch.ops.aten


class Part(NamedTuple):
    """Where the elements of a collective come from: `times` · the local sizes of these dims of an
    op's operand, as it lies; formulas are read off this.
    """

    operand: int
    layout: Layout
    dims: tuple[int, ...]
    times: int = 1

    @staticmethod
    def all(operand: int, layout: Layout) -> Part:
        return Part(operand, layout, tuple(range(len(layout.shape))))

    @property
    def elements(self) -> int:
        return self.times * math.prod(self.layout.local_shape[dim] for dim in self.dims)


class InnerCollective(NamedTuple):
    """One collective inside an op: what moves, over which axes, forward or backward, and which part
    of an operand that is. Sharded ops reckon in float32 (ops/sharded/norms.py): 4 bytes an element.
    """

    traffic: Traffic
    axes: tuple[str, ...]
    backward: bool
    part: Part
    element_bytes: int = 4


def moving(
    kind: Any, part: Part, axes: tuple[str, ...], backward: bool, element_bytes: int = 4
) -> InnerCollective:
    """A collective of this part."""
    return InnerCollective(Traffic(kind, part.elements), axes, backward, part, element_bytes)


def inner_collectives(target: Any, operands: Sequence[Layout | None]) -> list[InnerCollective]:
    """The collectives that an op runs inside when its operands lie so; none where the dim that it
    works along is whole.
    """
    find = _INSIDE.get(target)
    layout = operands[0] if operands else None
    return find(layout) if find is not None and layout is not None else []


def _rows(
    layout: Layout, dim: int, forward: Sequence[int], backward: Sequence[int]
) -> list[InnerCollective]:
    """All-reduces of so many numbers per row each, over the axes of `dim`."""
    axes = tuple(digit.axis for digit in layout.digits(dim % len(layout.shape)))
    rows = tuple(d for d in range(len(layout.shape)) if d != dim % len(layout.shape))
    return (
        [
            moving("all_reduce", Part(0, layout, rows, numbers), axes, late)
            for late, each in ((False, forward), (True, backward))
            for numbers in each
        ]
        if axes
        else []
    )


def _cross_entropy(layout: Layout) -> list[InnerCollective]:
    class_dim = 1 if len(layout.shape) > 1 else 0
    found = _rows(layout, class_dim, (1, 2), ())
    classes = {digit.axis for digit in layout.digits(class_dim)}
    tokens = tuple(axis for axis in layout.axes_of("S") if axis not in classes)
    mean = moving("all_reduce", Part(0, layout, (), 2), tokens, False)
    return [*found, mean] if tokens else found


def _along(layout: Layout) -> list[InnerCollective]:
    return _rows(layout, -1, (1, 1), (1,))


_INSIDE: dict[Any, Callable[[Layout], list[InnerCollective]]] = {
    aten.layer_norm.default: lambda layout: _rows(layout, -1, (1, 1), (2,)),
    aten.rms_norm.default: lambda layout: _rows(layout, -1, (1,), (1,)),
    aten.softmax.int: _along,
    aten._softmax.default: _along,
    aten.log_softmax.int: _along,
    aten._log_softmax.default: _along,
    aten.cross_entropy_loss.default: _cross_entropy,
}
HAVE_INNER_COLLECTIVES = frozenset(_INSIDE)
