"""Pictures of the report as SVG: which rank holds which block of a matrix, and the cluster.

Example: owners(layout) draws the blocks of a matrix, each in the colour of the first rank that
holds it. Plain text leaves, which the page takes as it is. page.py calls this module.
"""

from __future__ import annotations

import html
import math
from collections import defaultdict

from autopar.ir.layout import Layout
from autopar.ir.plan_table import format_ranks
from autopar.world import World

_SIDE = 120  # pixels of a matrix
_MOST_BLOCKS = 32  # drawn along a side
_MOST_NAMED = 4  # ranks that a block names
_MOST_DEVICES, _MOST_GROUPS = 8, 4  # drawn of the innermost level and of the others


def colour(rank: int, ranks: int) -> str:
    """Return the colour of a rank: hues go round with the ranks."""
    return f"hsl({360 * rank // max(1, ranks)} 65% 62%)"


def block_of(layout: Layout, rank: int) -> tuple[int, int]:
    """Return the row and the column of the block that a rank holds, in blocks; the last dim are the
    columns, all others the rows.

    >>> from autopar.ir.layout import I, S
    >>> from autopar.ir.mesh import Mesh
    >>> block_of(Layout(Mesh.parse("x2.y2"), (8, 6), (S(0, 4), S(1, 3))), 3)
    (1, 1)
    """
    coordinate, place = layout.mesh.coordinate(rank), [0, 0]
    for dim in range(len(layout.shape)):
        side = int(dim == len(layout.shape) - 1 and dim > 0)
        for axis, _, size in layout.digits(dim):
            place[side] = place[side] * size + coordinate[axis]
    return place[0], place[1]


def _blocks(layout: Layout) -> tuple[int, int]:
    """Return the number of blocks along the rows and the columns."""
    last = len(layout.shape) - 1
    rows = math.prod(d.size for dim in range(last or 1) for d in layout.digits(dim))
    return rows, math.prod(d.size for d in layout.digits(last)) if last > 0 else 1


def owners(name: str, layout: Layout) -> str:
    """Return a picture of a matrix with its blocks, each with the ranks that hold it."""
    ranks = layout.mesh.size
    rows, columns = _blocks(layout)
    ranks_of: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in range(ranks):
        ranks_of[block_of(layout, rank)].append(rank)
    drawn_rows, drawn_columns = min(rows, _MOST_BLOCKS), min(columns, _MOST_BLOCKS)
    width, height = _SIDE / drawn_columns, _SIDE / drawn_rows
    shapes = []
    for row in range(drawn_rows):
        for column in range(drawn_columns):
            who = ranks_of[(row * rows // drawn_rows, column * columns // drawn_columns)]
            shapes.append(_block(column * width, row * height, width, height, who, ranks))
    shape = "×".join(map(str, layout.shape))
    title = (
        f"{name} ({shape}), {layout}: {rows} × {columns} blocks, each on {format_ranks(len(who))}"
    )
    return (
        f'<figure><svg viewBox="0 0 {_SIDE} {_SIDE}" width="{_SIDE}" role="img" '
        f'aria-label="{html.escape(title)}">{"".join(shapes)}</svg>'
        f"<figcaption><b>{html.escape(name)}</b> {shape}<br>{html.escape(str(layout))}"
        f"</figcaption></figure>"
    )


def _block(x: float, y: float, width: float, height: float, who: list[int], ranks: int) -> str:
    """Return one block, with its ranks where there is room to name them."""
    fill = colour(who[0], ranks) if who else "none"
    text = ranks_text(who)
    rectangle = (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}" '
        f'stroke="#0006" stroke-width=".5"><title>ranks {text}</title></rect>'
    )
    if width < 7 * len(text) or height < 12:
        return rectangle
    middle = f'x="{x + width / 2:.1f}" y="{y + height / 2 + 3.5:.1f}"'
    return rectangle + (
        f'<text {middle} text-anchor="middle" font-size="10" fill="#111">{text}</text>'
    )


def ranks_text(ranks: list[int]) -> str:
    """Return ranks in short: "0-3", "0,2,4,6", "0,8,…".

    >>> ranks_text([0, 1, 2, 3]), ranks_text([0, 2, 4, 6]), ranks_text([*range(0, 64, 8)])
    ('0-3', '0,2,4,6', '0,8,…')
    """
    if len(ranks) > 1 and ranks == [*range(ranks[0], ranks[-1] + 1)]:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= _MOST_NAMED:
        return ",".join(map(str, ranks))
    return ",".join(map(str, ranks[:2])) + ",…"


def cluster(world: World, load: list[float]) -> str:
    """Return the cluster as boxes in boxes, innermost level first; `load` are the bytes that a rank
    sends over each level in a step.
    """
    device = f'<span class="device" title="{html.escape(world.device.name)}"></span>'
    picture = device
    names = []
    for number, level in enumerate(world.levels):
        if level.ranks == 1:
            continue
        shown = min(level.ranks, _MOST_DEVICES if number == 0 else _MOST_GROUPS)
        more = f"<small>… {level.ranks} in all</small>" if shown < level.ranks else ""
        share = load[number] / max(load) if max(load, default=0.0) else 0.0
        picture = (
            f'<div class="level" style="border-color: hsl(20 90% {80 - 40 * share:.0f}%); '
            f'border-width: {1 + 4 * share:.1f}px">{picture * shown}{more}</div>'
        )
        joined = "groups" if number else "ranks"
        names.append(
            f"<li>level {number + 1}: {level.ranks} {joined} at {level.bytes_per_s / 1e9:.3g} GB/s "
            f"per {level.per}; a rank sends {load[number] / 1e6:,.1f} MB over it in a step</li>"
        )
    return f'<div class="cluster">{picture}</div><ul>{"".join(names)}</ul>'
