"""What each named layout is, as data: the matrices of its product or two, kept and in use.

The pictures of docs/layouts.md are drawn from this, and tests/benchmarks/test_words.py counts
the words of benchmarks/model/formulas.py again with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from autopar.ir.layout import I, Layout, P, R, S, Step
from autopar.ir.mesh import Mesh
from autopar.ir.reshard import reshard_steps


@dataclass(frozen=True)
class Matrix:
    """One matrix of a chain of products: its dims, and its layout kept, used and computed.

    A layout is written "z:0 x:1 y:R": axis z splits dim 0, x splits dim 1, y is replicated; the
    first axis on a dim is the outermost; an axis not named is invariant. `used` is the layout of an
    operand in its product, `computed` that of a result as the product leaves it.
    """

    name: str
    dims: tuple[str, str]
    stored: str
    used: str | None = None
    computed: str | None = None


@dataclass(frozen=True)
class Chain:
    """A layout's picture: the mesh, one product or two, and the words that stand above it.

    `panels`: gathers and scatters are cut into that many panels (SUMMA).
    """

    name: str
    title: str
    mesh: str
    matrices: tuple[Matrix, ...]
    panels: int = 0


MK, KN, MN, NK = ("m", "k"), ("k", "n"), ("m", "n"), ("n", "k")
CHAINS = (
    Chain(
        "ddp",
        "ddp: the rows are split, every rank has all of W",
        "data4",
        (
            Matrix("X", MK, "data:0", used="data:0"),
            Matrix("W", KN, "", used="data:R"),
            Matrix("Y", MN, "data:0", computed="data:0"),
        ),
    ),
    Chain(
        "fsdp",
        "fsdp: the rows are split, W is put together for its use",
        "data4",
        (
            Matrix("X", MK, "data:0", used="data:0"),
            Matrix("W", KN, "data:0", used="data:R"),
            Matrix("Y", MN, "data:0", computed="data:0"),
        ),
    ),
    Chain(
        "megatron",
        "megatron: columns of W, then rows of V",
        "tp4",
        (
            Matrix("X", MK, "", used="tp:R"),
            Matrix("W", KN, "tp:1", used="tp:1"),
            Matrix("Y", MN, "tp:1", used="tp:1", computed="tp:1"),
            Matrix("V", NK, "tp:0", used="tp:0"),
            Matrix("Z", MK, "", computed="tp:P"),
        ),
    ),
    Chain(
        "megatron-sp",
        "megatron-sp: as megatron, with X and Z split on the rows",
        "tp4",
        (
            Matrix("X", MK, "tp:0", used="tp:R"),
            Matrix("W", KN, "tp:1", used="tp:1"),
            Matrix("Y", MN, "tp:1", used="tp:1", computed="tp:1"),
            Matrix("V", NK, "tp:0", used="tp:0"),
            Matrix("Z", MK, "tp:0", computed="tp:P"),
        ),
    ),
    Chain(
        "atp",
        "atp (4, 2): x of d1 = 4 ranks → n, y of d2 = 2 → k, swapped at the next product",
        "x4.y2",
        (
            Matrix("X", MK, "y:1", used="y:1 x:R"),
            Matrix("W", KN, "y:0 x:1", used="y:0 x:1"),
            Matrix("Y", MN, "x:1", used="x:1 y:R", computed="x:1 y:P"),
            Matrix("V", NK, "x:0 y:1", used="x:0 y:1"),
            Matrix("Z", MK, "y:1", computed="y:1 x:P"),
        ),
    ),
    Chain(
        "3d",
        "3d (2, 2, 2): x → m, y → n, z → k, every matrix spread over all three",
        "x2.y2.z2",
        (
            Matrix("X", MK, "x:0 y:0 z:1", used="x:0 z:1 y:R"),
            Matrix("W", KN, "z:0 x:0 y:1", used="z:0 y:1 x:R"),
            Matrix("Y", MN, "x:0 z:0 y:1", computed="x:0 y:1 z:P"),
        ),
    ),
    Chain(
        "4d",
        "4d (x=2, y=2, z=2): z → m, x → k, y → n; x and y swap at the next product",
        "z2.x2.y2",
        (
            Matrix("X", MK, "z:0 x:1", used="z:0 x:1 y:R"),
            Matrix("W", KN, "x:0 z:0 y:1", used="x:0 y:1 z:R"),
            Matrix("Y", MN, "z:0 y:1", used="z:0 y:1 x:R", computed="z:0 y:1 x:P"),
            Matrix("V", NK, "y:0 z:0 x:1", used="y:0 x:1 z:R"),
            Matrix("Z", MK, "z:0 x:1", computed="z:0 x:1 y:P"),
        ),
    ),
    Chain(
        "2.5d",
        "2.5d (q=2, d=2): depth, row → m; col → n; in q panels t",
        "depth2.row2.col2",
        (
            Matrix("X", MK, "depth:0 row:0 col:1", used="depth:0 row:0 col:R"),
            Matrix("W", KN, "row:0 col:1", used="row:R col:1 depth:R"),
            Matrix("Y", MN, "depth:0 row:0 col:1", computed="depth:0 row:0 col:1"),
        ),
        panels=2,
    ),
)


def layout(text: str, mesh: Mesh, shape: tuple[int, int]) -> Layout:
    """The layout that `Matrix` writes as text, for a matrix of this shape."""
    states, stride = dict.fromkeys(mesh.names, I), list(shape)
    for entry in text.split():
        axis, state = entry.split(":")
        if state in "RP":
            states[axis] = R if state == "R" else P
        else:
            stride[int(state)] //= mesh.sizes[axis]
            states[axis] = S(int(state), stride[int(state)])
    return Layout(mesh, shape, tuple(states.values()))


class Placed(NamedTuple):
    """A matrix's layouts: kept, and while the product runs (as computed, for a result)."""

    stored: Layout
    working: Layout
    path: tuple[Step, ...]  # every change of state, in the order of the forward


def place(matrix: Matrix, mesh: Mesh, sizes: dict[str, int]) -> Placed:
    shape = (sizes[matrix.dims[0]], sizes[matrix.dims[1]])
    stored = layout(matrix.stored, mesh, shape)
    path: tuple[Step, ...] = ()
    working = stored
    if matrix.used is not None:
        working = layout(matrix.used, mesh, shape)
        path = reshard_steps(stored, working)
    if matrix.computed is not None:
        working = layout(matrix.computed, mesh, shape)
        path = (*reshard_steps(working, stored), *path)
    return Placed(stored, working, path)


class Block(NamedTuple):
    """Entries with the same owners: first row, first column, rows, columns."""

    owners: tuple[int, ...]
    row: int
    column: int
    rows: int
    columns: int


def blocks(placement: Layout) -> list[Block]:
    """Who holds what, by cutting the indices of all entries at every rank's coordinate."""
    for axis in placement.axes_of("P"):
        # Of a sum a rank has every entry of its part.
        placement = placement.with_state(axis, R)
    rows, columns = placement.shape
    indices = torch.arange(rows * columns).reshape(rows, columns)
    owners: dict[int, list[int]] = defaultdict(list)
    for rank in range(placement.mesh.size):
        for index in placement.cut(indices, placement.mesh.coordinate(rank)).flatten().tolist():
            owners[index].append(rank)
    entries: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index in range(rows * columns):
        entries[tuple(owners[index])].append(index)
    return [_rectangle(ranks, numbers, columns) for ranks, numbers in entries.items()]


def _rectangle(owners: tuple[int, ...], entries: list[int], width: int) -> Block:
    first, last = divmod(entries[0], width), divmod(entries[-1], width)
    rows, columns = last[0] - first[0] + 1, last[1] - first[1] + 1
    assert rows * columns == len(entries), f"the part of ranks {owners} is no rectangle"
    return Block(owners, *first, rows, columns)


Collective = tuple[str, tuple[str, ...]]


def collectives(path: Sequence[Step]) -> tuple[Sequence[Collective], Sequence[Collective]]:
    """(kind, axes) of what the changes of state move, forward and backward, each in its order."""
    moved = [(step.traffic(True), step.axes) for step in path]
    forward = [(there.collective, axes) for (there, _), axes in moved if there]
    backward = [(back.collective, axes) for (_, back), axes in reversed(moved) if back]
    return forward, backward
