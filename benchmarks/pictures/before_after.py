"""One block of a model, and what each of four ranks runs of it: before-after.svg.

Everything is read off a plan: shapes and blocks from the layouts, products and collectives from the
rewritten graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import fx, nn

import autopar
from autopar.ir.layout import Layout
from autopar.ir.program import Program
from benchmarks.pictures.style import svg, text

ROWS, WIDTH, HIDDEN = 32, 64, 256
GRID = autopar.GridHSDP(replicate=2, tensor=2, sequence=False)
WORDS = {"linear": "linear", "relu": "relu", "add": "+ x", "all_reduce": "all-reduce"}

LEFT, RANKS_LEFT, COLUMN, BOX = 8, 158, 124, 114  # pixels
TOP, STEP, HEIGHT = 88, 58, 42


class Block(nn.Module):
    """Two products, as every transformer has them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Row(NamedTuple):
    """A line of the picture: an op of the graph and the layouts of its result and its weight, or a
    collective and its axes.
    """

    words: str
    layout: Layout
    weight: Layout | None = None
    axes: tuple[str, ...] = ()


def rows(program: Program) -> Iterator[Row]:
    """Yield the ops and the collectives of the rewritten graph in order."""
    for node in program.module.graph.nodes:
        name = str(node.target).removeprefix("aten.").split(".")[0]
        if node.op != "call_function" or getattr(node.target, "__name__", "") == "replicate":
            continue
        layout = node.meta["layout"]
        if "step" in node.meta:
            step = node.meta["step"]
            yield Row(WORDS[node.target.__name__], layout, axes=step.axes)
        else:
            yield Row(WORDS[name], layout, _weight(program, node))


def _weight(program: Program, node: fx.Node) -> Layout | None:
    """Return the stored layout of the weight of a product, as its transpose: rows are what it
    takes, columns what it gives.
    """
    for operand in node.all_input_nodes:
        while operand.op == "call_function" and "step" in operand.meta:
            operand = operand.all_input_nodes[0]
        if operand.op == "placeholder" and operand.name.endswith("weight"):
            return program.layouts[operand.name]
    return None


def picture() -> str:
    """Return the SVG."""
    plan = autopar.plan(
        Block(), 4, (torch.ones(ROWS, WIDTH),), GRID, outputs="sharded", smaller=False
    )
    assert plan.context is not None
    program, mesh = plan.context.program, plan.mesh
    lines = [*rows(program)]
    sums = {c.chain: c.axes for c in plan.collectives if c.backward and c.kind == "all_reduce"}
    bottom = TOP + (len(lines) + 2) * STEP + 14
    right = RANKS_LEFT + mesh.size * COLUMN
    drawn = [
        text(LEFT, 20, "What you write", "title"),
        text(LEFT, 42, "one device"),
        text(RANKS_LEFT, 20, f"What each rank runs, on the mesh {mesh}", "title"),
    ]
    for rank in range(mesh.size):
        drawn.append(text(_x(rank), 42, f"rank {rank}"))
        for place, (axis, at) in enumerate(mesh.coordinate(rank).items()):
            drawn.append(text(_x(rank), 59 + 15 * place, f"{axis} {at}", "small"))
    x = Layout(mesh, (ROWS, WIDTH), program.layouts["x"].states)
    drawn += _boxes(TOP, "x", x, None)
    for number, line in enumerate(lines, 1):
        y = TOP + number * STEP
        if line.axes:
            drawn += _bars(y, line.words, [mesh.group(line.axes, r) for r in range(mesh.size)],
                           f"over {' and '.join(line.axes)}")  # fmt: skip
        else:
            drawn += _boxes(y, line.words, line.layout, line.weight)
    y = TOP + (len(lines) + 1) * STEP
    for axes in dict.fromkeys(sums.values()):
        groups = [mesh.group(axes, rank) for rank in range(mesh.size)]
        drawn += _links(
            y, groups, f"in the backward, gradients of weights: all-reduce over {axes[0]}"
        )
    drawn.append(text(LEFT, bottom - 12, "Blue: the block of a weight that is held.", "small"))
    label = f"one block of a model on one device, and what each of {mesh.size} ranks runs of it"
    return svg(right, bottom, label, drawn)


def _x(rank: int) -> int:
    return RANKS_LEFT + rank * COLUMN


def _boxes(y: float, words: str, layout: Layout, weight: Layout | None) -> list[str]:
    """Return an op on one device and on every rank."""
    drawn = _box(LEFT, y, words, layout.shape, weight, None)
    for rank in range(layout.mesh.size):
        coordinate = layout.mesh.coordinate(rank)
        drawn += _box(_x(rank), y, words, layout.local_shape, weight, coordinate)
    return drawn


def _box(
    x: float,
    y: float,
    words: str,
    shape: Sequence[int],
    weight: Layout | None,
    coordinate: dict[str, int] | None,
) -> list[str]:
    """Return an op with the shape of its result, and the block of its weight that is held."""
    width = BOX if coordinate is not None else BOX + 16
    drawn = [
        f'<rect x="{x}" y="{y}" width="{width}" height="{HEIGHT}" rx="5" class="box"/>',
        text(x + 10, y + 18, words),
        text(x + 10, y + 35, " × ".join(map(str, shape)), "small"),
    ]
    if words != "x":
        drawn.insert(0, f'<path d="M{x + 30} {y - STEP + HEIGHT} V{y}" class="line"/>')
    if weight is not None:
        drawn += _weight_part(x + width - 40, y + 6, weight, coordinate)
    return drawn


def _weight_part(
    x: float, y: float, weight: Layout, coordinate: dict[str, int] | None
) -> list[str]:
    """Return a weight as a small rectangle, k down and n across, with the block that is held."""
    n, k = weight.shape
    wide, high = (34, 30) if n > k else (30, 30)
    across, down = (0.0, 1.0), (0.0, 1.0)
    if coordinate is not None:
        index = torch.arange(n * k).reshape(n, k)
        part = weight.cut(index, coordinate)
        across = int(part.min()) // k / n, (int(part.max()) // k + 1) / n
        down = int(part.min()) % k / k, (int(part.max()) % k + 1) / k
    left, top = x + across[0] * wide, y + down[0] * high
    return [
        f'<rect x="{x:g}" y="{y:g}" width="{wide}" height="{high}" class="weight"/>',
        f'<rect x="{left:g}" y="{top:g}" width="{(across[1] - across[0]) * wide:g}" '
        f'height="{(down[1] - down[0]) * high:g}" class="held"/>',
    ]


def _bars(y: float, words: str, groups: Sequence[Sequence[int]], over: str) -> list[str]:
    """Return a collective among neighbours: a bar over the columns of each group."""
    drawn = []
    for group in dict.fromkeys(map(tuple, groups)):
        left, right = _x(group[0]), _x(group[-1]) + BOX
        for rank in group:
            drawn.append(f'<path d="M{_x(rank) + 30} {y - STEP + HEIGHT} V{y + 8}" class="line"/>')
        drawn += [
            f'<rect x="{left}" y="{y + 8}" width="{right - left}" height="24" rx="12" '
            'class="forward"/>',
            text((left + right) / 2, y + 24, f"{words} {over}", "onbar", "middle"),
        ]
    drawn.append(f'<path d="M{LEFT + 30} {y - STEP + HEIGHT} V{y + STEP}" class="line"/>')
    for rank in range(max(map(max, groups)) + 1):
        drawn.append(f'<path d="M{_x(rank) + 30} {y + 32} V{y + HEIGHT}" class="line"/>')
    return drawn


def _links(y: float, groups: Sequence[Sequence[int]], words: str) -> list[str]:
    """Return a collective among ranks that are no neighbours: a bar for each group, one below the
    other, with a dot at every rank that takes part.
    """
    drawn = [text(RANKS_LEFT, y + 6, words, "small")]
    for number, group in enumerate(dict.fromkeys(map(tuple, groups))):
        middle = y + 22 + number * 18
        left, right = _x(group[0]) + 30, _x(group[-1]) + 30
        drawn.append(
            f'<rect x="{left}" y="{middle - 2}" width="{right - left}" height="4" '
            'class="backward"/>'
        )
        drawn += [
            f'<circle cx="{_x(r) + 30}" cy="{middle}" r="6" class="backward"/>' for r in group
        ]
    return drawn
