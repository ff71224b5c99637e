"""Dims that are padded with zeros so that mesh axes divide them, and what a rank holds of them.

Example: a vocabulary of 10 on four ranks is padded to 12. Ranks 0, 1 and 2 hold three rows, and the
last one holds one row, which its graph gets with two rows of zeros below it. A plain `Shard` of
DTensor divides 10 rows like that: parameters, checkpoints and state dicts have no padding.

passes/pad.py pads a traced program and notes the `Pad`s of every value in `Program.padding`. The
runtime cuts, joins and fills parameters with the functions of this file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.errors import LayoutError
from autopar.ir.layout import Layout, S


class Pad(NamedTuple):
    """One padded factor of a dim, which is (outer, size, inner) and becomes (outer, padded, inner).

    `atom`: the number of the atom of the unpadded program that is padded. Example: the rows (3, 12
    heads, 64) of a fused weight, with 16 heads, are Pad(dim=0, outer=3, size=12, padded=16,
    inner=64).
    """

    dim: int
    outer: int
    size: int
    padded: int
    inner: int
    atom: int = -1


Pads = Sequence[Pad]


def padded_shape(shape: Sequence[int], pads: Pads) -> tuple[int, ...]:
    """Return the shape with its padding.

    >>> padded_shape((10, 4), [Pad(0, 1, 10, 12, 1)])
    (12, 4)
    """
    sizes = list(shape)
    for pad in pads:
        sizes[pad.dim] = pad.outer * pad.padded * pad.inner
    return tuple(sizes)


def unpadded_shape(shape: Sequence[int], pads: Pads) -> tuple[int, ...]:
    """Return a padded shape without its padding."""
    sizes = list(shape)
    for pad in pads:
        sizes[pad.dim] = pad.outer * pad.size * pad.inner
    return tuple(sizes)


def resize(layout: Layout, before: Pads, after: Pads) -> Layout:
    """Return the layout of a tensor whose dims are padded to other sizes: every axis holds the same
    digit of the same factor. Raises LayoutError where the new sizes do not divide.

    >>> from autopar.ir.layout import S
    >>> from autopar.ir.mesh import Mesh
    >>> rows = Layout(Mesh.parse("x2"), (12, 4), (S(0, 6),))
    >>> resize(rows, [Pad(0, 1, 10, 12, 1)], [Pad(0, 1, 10, 10, 1)]).local_shape
    (5, 4)
    """
    states, shape = list(layout.states), list(layout.shape)
    for old, new in zip(before, after, strict=True):
        assert (old.dim, old.atom, old.inner) == (new.dim, new.atom, new.inner), (old, new)
        shape[old.dim] = new.outer * new.padded * new.inner
        for place, state in enumerate(states):
            if state.kind == "S" and state.dim == old.dim and state.stride >= old.inner:
                stride, rest = divmod(state.stride * new.padded, old.padded)
                if rest:
                    axis = layout.mesh.axes[place]
                    raise LayoutError(
                        f"axis {axis.name} of size {axis.size} holds a digit of dim {old.dim} that "
                        f"{new.padded} entries in place of {old.padded} do not have"
                    )
                states[place] = S(state.dim, stride)
    return Layout(layout.mesh, tuple(shape), tuple(states))


def without_padding(tensor: Tensor, pads: Pads) -> Tensor:
    """Return a padded tensor without its padding.

    >>> without_padding(torch.arange(6), [Pad(0, 2, 2, 3, 1)])
    tensor([0, 1, 3, 4])
    """
    for pad in pads:
        blocks = tensor.unflatten(pad.dim, (pad.outer, pad.padded, pad.inner))
        tensor = blocks.narrow(pad.dim + 1, 0, pad.size).flatten(pad.dim, pad.dim + 2)
    return tensor


def filled_up(part: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor with zeros at the end of its dims, up to this shape; itself if it has it."""
    if tuple(part.shape) == tuple(shape):
        return part
    amounts = [
        amount
        for size, target in zip(reversed(part.shape), reversed(tuple(shape)), strict=True)
        for amount in (0, target - size)
    ]
    return torch.nn.functional.pad(part, amounts)


# -- parameters, whose dims are padded at their ends -----------------------------------------------
def plain_shards(layout: Layout, pads: Pads) -> bool:
    """Whether plain Shards cut the unpadded tensor as this layout cuts the padded one: one axis at
    most splits a padded dim, and its parts have as many rows as those of `torch.chunk`.
    """
    for pad in pads:
        digits = layout.digits(pad.dim)
        if len(digits) > 1:
            return False
        if digits and pad.padded != digits[0].size * math.ceil(pad.size / digits[0].size):
            return False
    return True


def part_box(
    layout: Layout, pads: Pads, coordinate: Mapping[str, int]
) -> tuple[tuple[int, int], ...]:
    """Return (start, length) in the unpadded tensor of a rank's part, for each dim."""
    unpadded = unpadded_shape(layout.shape, pads)
    box = []
    for dim, (size, length) in enumerate(zip(unpadded, layout.local_shape, strict=True)):
        start = sum(coordinate[digit.axis] * digit.stride for digit in layout.digits(dim))
        start = min(start, size)
        box.append((start, min(length, size - start)))
    return tuple(box)


def cut_unpadded(
    layout: Layout, unpadded: Tensor, pads: Pads, coordinate: Mapping[str, int]
) -> Tensor:
    """Return the part of the tensor `unpadded` that a rank holds."""
    if not pads:
        return layout.cut(unpadded, dict(coordinate))
    for dim, (start, length) in enumerate(part_box(layout, pads, coordinate)):
        unpadded = unpadded.narrow(dim, start, length)
    return unpadded.clone(memory_format=torch.contiguous_format)


def join_unpadded(layout: Layout, parts: list[Tensor], pads: Pads) -> Tensor:
    """Return the unpadded tensor, of the parts of all ranks in their order."""
    if not pads:
        return layout.join(parts)
    unpadded = layout.join([filled_up(part, layout.local_shape) for part in parts])
    return without_padding(unpadded, pads)
