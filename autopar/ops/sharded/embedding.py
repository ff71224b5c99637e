"""Digits of a dim's index: between global and local positions; and the lookup that needs them,
embedding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

Digit = tuple[
    str, int, int
]  # (axis, stride, size): the axis holds (i // stride) % size of the global index i


def localize(
    index: Tensor, coordinates: Sequence[Tensor], digits: Sequence[Digit]
) -> tuple[Tensor, Tensor]:
    """Where the elements with these global indices lie on this rank, and whether they do (bool).

    The local index is the global one with the digits cut out; it is in range for every index, owned
    or not. With digits [("x", 2, 3)] of a dim of 12, global 7 = (1, 0, 1) lies at local (1, 1) = 3
    on the rank with coordinate 0.
    """
    owned = torch.ones_like(index, dtype=torch.bool)
    local = index
    for coordinate, (_, stride, size) in _from_the_top(coordinates, digits):
        owned = owned & (index // stride % size == coordinate)
        local = local // (stride * size) * stride + local % stride
    return local, owned


def globalize(local: Tensor, coordinates: Sequence[Tensor], digits: Sequence[Digit]) -> Tensor:
    """The global index of local ones: the inverse of `localize` on what the rank owns."""
    for coordinate, (_, stride, size) in reversed(_from_the_top(coordinates, digits)):
        local = local // stride * (stride * size) + coordinate * stride + local % stride
    return local


def _from_the_top(
    coordinates: Sequence[Tensor], digits: Sequence[Digit]
) -> list[tuple[Tensor, Digit]]:
    """Highest stride first: a digit that is cut out must not move the ones still to be cut."""
    scalars = [coordinate.squeeze(0) for coordinate in coordinates]
    return sorted(zip(scalars, digits, strict=True), key=_stride, reverse=True)


def _stride(entry: tuple[Tensor, Digit]) -> int:
    return entry[1][1]


def embedding(
    weight: Tensor,
    indices: Tensor,
    coordinates: Sequence[Tensor],
    digits: Sequence[Digit],
    padding_idx: int | None = None,
) -> Tensor:
    """Rows of `weight` (local rows, width) at global `indices` (...): (..., width), P over the
    digits' axes.

    Rows of other ranks give zeros and no gradient; `padding_idx` (global; None or -1 for none, as
    in ATen) gives its row and no gradient. Nothing is communicated.
    """
    local, owned = localize(indices, coordinates, digits)
    rows = F.embedding(torch.where(owned, local, 0), weight)
    if padding_idx is not None and padding_idx >= 0:
        rows = torch.where((indices == padding_idx).unsqueeze(-1), rows.detach(), rows)
    return torch.where(owned.unsqueeze(-1), rows, 0)
