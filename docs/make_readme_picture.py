"""Draws docs/images/before-after.svg: one block of a model, and what each of four ranks runs of it.

    python -m docs.make_readme_picture [FILE]

Everything is read off a plan: shapes and blocks from the layouts, products and collectives from the
rewritten graph. The file is plain SVG, light or dark as the page is, and the same on every run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import fx, nn

import autopar
from autopar.ir.layout import Layout
from autopar.ir.program import Program

PICTURE = Path(__file__).parent / "images" / "before-after.svg"
ROWS, WIDTH, HIDDEN = 32, 64, 256
GRID = autopar.GridHSDP(replicate=2, tensor=2, sequence=False)
WORDS = {"linear": "linear", "relu": "relu", "add": "+ x", "all_reduce": "all-reduce"}

LEFT, RANKS_LEFT, COLUMN, BOX = 20, 268, 174, 154  # pixels
TOP, STEP, HEIGHT = 92, 62, 40
STYLE = """
  text { font-family: system-ui, sans-serif; font-size: 13px; fill: #1f2328 }
  .small { font-size: 11.5px; fill: #59636e } .title { font-size: 15px; font-weight: 600 }
  .box { fill: #f6f8fa; stroke: #8c959f } .weight { fill: #ffffff; stroke: #8c959f }
  .held { fill: #1f6feb } .forward { fill: #1a7f37 } .backward { fill: #bc4c00 }
  .line { stroke: #8c959f } .onbar { fill: #ffffff; font-size: 12px }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 } .box { fill: #161b22; stroke: #6e7681 }
    .weight { fill: #0d1117; stroke: #6e7681 } .held { fill: #4493f8 }
    .forward { fill: #2ea043 } .backward { fill: #db6d28 } .line { stroke: #6e7681 }
  }
"""


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
    bottom = TOP + len(lines) * STEP + 2 * STEP
    right = RANKS_LEFT + mesh.size * COLUMN
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right} {bottom}" '
        f'width="{right}" height="{bottom}" role="img" aria-label="one block of a model on one '
        f'device, and what each of {mesh.size} ranks runs of it">',
        f"<style>{STYLE}</style>",
        _text(LEFT, 28, "What you write", "title"),
        _text(LEFT, 48, "one device", "small"),
        _text(RANKS_LEFT, 28, f"What autopar makes of it on the mesh {mesh}", "title"),
    ]
    for rank in range(mesh.size):
        place = ", ".join(f"{axis} {at}" for axis, at in mesh.coordinate(rank).items())
        drawn.append(_text(_x(rank), 48, f"rank {rank}: {place}", "small"))
    x = Layout(mesh, (ROWS, WIDTH), program.layouts["x"].states)
    drawn += _boxes(TOP, "x", x, None)
    for number, line in enumerate(lines, 1):
        y = TOP + number * STEP
        if line.axes:
            drawn += _bars(y, line.words, [mesh.group(line.axes, r) for r in range(mesh.size)],
                           "forward", f"over {' and '.join(line.axes)}")  # fmt: skip
        else:
            drawn += _boxes(y, line.words, line.layout, line.weight)
    y = TOP + (len(lines) + 1) * STEP
    for axes in dict.fromkeys(sums.values()):
        groups = [mesh.group(axes, rank) for rank in range(mesh.size)]
        drawn += _links(
            y, groups, f"in the backward, gradients of weights: all-reduce over {axes[0]}"
        )
    drawn.append(_text(LEFT, bottom - 12, "Blue: the block of a weight that is held.", "small"))
    return "\n".join((*drawn, "</svg>\n"))


def _x(rank: int) -> int:
    return RANKS_LEFT + rank * COLUMN


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{kind}>{words}</text>'


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
    width = BOX if coordinate is not None else BOX + 40
    drawn = [
        f'<rect x="{x}" y="{y}" width="{width}" height="{HEIGHT}" rx="5" class="box"/>',
        _text(x + 10, y + 18, words),
        _text(x + 10, y + 33, " × ".join(map(str, shape)), "small"),
    ]
    if words != "x":
        drawn.insert(0, f'<path d="M{x + 30} {y - STEP + HEIGHT} V{y}" class="line"/>')
    if weight is not None:
        drawn += _held(x + width - 44, y + 5, weight, coordinate)
    return drawn


def _held(x: float, y: float, weight: Layout, coordinate: dict[str, int] | None) -> list[str]:
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


def _bars(y: float, words: str, groups: Sequence[Sequence[int]], kind: str, over: str) -> list[str]:
    """Return a collective among neighbours: a bar over the columns of each group."""
    drawn = []
    for group in dict.fromkeys(map(tuple, groups)):
        left, right = _x(group[0]), _x(group[-1]) + BOX
        for rank in group:
            drawn.append(f'<path d="M{_x(rank) + 30} {y - STEP + HEIGHT} V{y + 8}" class="line"/>')
        drawn += [
            f'<rect x="{left}" y="{y + 8}" width="{right - left}" height="24" rx="12" '
            f'class="{kind}"/>',
            _text((left + right) / 2, y + 24, f"{words} {over}", "onbar", "middle"),
        ]
    drawn.append(f'<path d="M{LEFT + 30} {y - STEP + HEIGHT} V{y + STEP}" class="line"/>')
    for rank in range(max(map(max, groups)) + 1):
        drawn.append(f'<path d="M{_x(rank) + 30} {y + 32} V{y + HEIGHT}" class="line"/>')
    return drawn


def _links(y: float, groups: Sequence[Sequence[int]], words: str) -> list[str]:
    """Return a collective among ranks that are no neighbours: a bar for each group, one below the
    other, with a dot at every rank that takes part.
    """
    drawn = [_text(RANKS_LEFT, y + 6, words, "small")]
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


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    path.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
