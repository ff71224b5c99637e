"""The small collectives inside the sharded implementations of ops (autopar/sharded), for the cost
model and the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..layout import Layout, Traffic

aten = torch.ops.aten


class Inside(NamedTuple):
    """One collective inside an op: what moves, over which axes, forward or backward."""

    traffic: Traffic
    axes: tuple[str, ...]
    backward: bool


def inside(target: Any, operands: Sequence[Layout | None]) -> list[Inside]:
    """The collectives that an op runs inside when its operands lie so; none where the dim that it
    works along is whole.
    """
    find = _INSIDE.get(target)
    layout = operands[0] if operands else None
    return find(layout) if find is not None and layout is not None else []


def _rows(
    layout: Layout, dim: int, forward: Sequence[int], backward: Sequence[int]
) -> list[Inside]:
    """All-reduces of so many numbers per row each, over the axes of `dim`."""
    axes = tuple(digit.axis for digit in layout.digits(dim % len(layout.shape)))
    rows = layout.local_size // layout.local_shape[dim]
    return (
        [
            Inside(Traffic("all_reduce", rows * numbers), axes, late)
            for late, each in ((False, forward), (True, backward))
            for numbers in each
        ]
        if axes
        else []
    )


def _cross_entropy(layout: Layout) -> list[Inside]:
    class_dim = 1 if len(layout.shape) > 1 else 0
    found = _rows(layout, class_dim, (1, 2), ())
    classes = {digit.axis for digit in layout.digits(class_dim)}
    tokens = tuple(axis for axis in layout.axes_of("S") if axis not in classes)
    return [*found, Inside(Traffic("all_reduce", 1), tokens, False)] if tokens else found


def _along(layout: Layout) -> list[Inside]:
    return _rows(layout, -1, (1, 1), (1,))


_INSIDE: dict[Any, Callable[[Layout], list[Inside]]] = {
    aten.layer_norm.default: lambda layout: _rows(layout, -1, (1, 1), (2,)),
    aten.rms_norm.default: lambda layout: _rows(layout, -1, (1,), (1,)),
    aten.softmax.int: _along,
    aten._softmax.default: _along,
    aten.log_softmax.int: _along,
    aten._log_softmax.default: _along,
    aten.cross_entropy_loss.default: _cross_entropy,
}
HAVE_INSIDE = frozenset(_INSIDE)
