"""Who holds which block of X, W, Y in each layout, and what moves in between: layout-*.svg.

Nothing is placed by hand: the owners come from cutting an index tensor with
`autopar.ir.layout.Layout` at the coordinate of every rank, the collectives from
`autopar.ir.reshard.steps`. Only CHAINS in chains.py says what a layout is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from benchmarks.pictures.chains import (
    Block,
    Chain,
    Matrix,
    Placed,
    blocks,
    collectives,
    place,
)

SIDE, GAP, LEFT = 132, 66, 92
# Pixels: top of the upper row, between the rows, below them.
STORED_TOP, ROW_GAP, LEGEND = 92, 124, 74
WORKING_TOP = STORED_TOP + SIDE + ROW_GAP
CHIP = 18
ENTRIES = 16  # a drawn matrix has so many rows and columns; every block is a whole number of them
RANKS = ("#3465a4", "#c4601d", "#2e7d4f", "#b03a48", "#6b4fa0", "#86653a", "#a8458b", "#4a6470")
INK, GREY, SHARED, FORWARD, BACKWARD = "#222222", "#6a6a6a", "#f7f7f4", "#1d5fa8", "#b3261e"
KINDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all": "all-to-all",
}
PANEL_KINDS = KINDS | {"all_gather": "broadcast panels", "reduce_scatter": "reduce panels"}


def text(x: float, y: float, words: str, fill: str = INK, size: float = 11, more: str = "") -> str:
    words = words.replace("&", "&amp;").replace("<", "&lt;")
    where = f'x="{x:g}" y="{y:g}" font-size="{size:g}"'
    return f'<text {where} text-anchor="middle" fill="{fill}"{more}>{words}</text>'


def rectangle(x: float, y: float, width: float, height: float, more: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" {more}/>'


def chip(x: float, y: float, rank: int) -> str:
    """The number of a rank on its colour, centred at (x, y)."""
    half = CHIP / 2
    ground = rectangle(x - half, y - half, CHIP, CHIP, f'rx="4" fill="{RANKS[rank]}"')
    return ground + text(x, y + 4, str(rank), "#ffffff", 11.5, ' font-weight="bold"')


def tint(rank: int) -> str:
    """The colour of a rank, mixed one to three with white."""
    parts = (int(RANKS[rank][place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{(part + 3 * 255) // 4:02x}" for part in parts)


def draw_block(block: Block, left: float, top: float, parts: bool, outlined: bool) -> str:
    """A block with the chips of its owners, joined by + where they hold parts of a sum."""
    unit = SIDE / ENTRIES
    x, y = left + block.column * unit, top + block.row * unit
    width, height = block.columns * unit, block.rows * unit
    fill = tint(block.owners[0]) if len(block.owners) == 1 else SHARED
    drawn = [rectangle(x, y, width, height, f'fill="{fill}" stroke="#ffffff" stroke-width="1.5"')]
    if outlined and 0 in block.owners:
        edge = f'fill="none" stroke="{INK}" stroke-width="2"'
        drawn.append(rectangle(x + 1, y + 1, width - 2, height - 2, edge))
    return "".join((*drawn, *_chips(block.owners, x + width / 2, y + height / 2, width, parts)))


def _chips(owners: Sequence[int], x: float, y: float, width: float, parts: bool) -> Iterator[str]:
    pitch = CHIP + (12 if parts else 5)
    across = min(len(owners), max(1, int(width // pitch)))
    across = math.ceil(len(owners) / math.ceil(len(owners) / across))
    down = math.ceil(len(owners) / across)
    for index, rank in enumerate(owners):
        row, column = divmod(index, across)
        cx, cy = x + (column - (across - 1) / 2) * pitch, y + (row - (down - 1) / 2) * pitch
        yield chip(cx, cy, rank)
        if parts and index + 1 < len(owners):
            in_row = column + 1 < across
            at = (cx + pitch / 2, cy + 4) if in_row else (cx, cy + pitch / 2 + 4)
            yield text(*at, "+", INK, 13)


def draw_matrix(
    placement: Layout, dims: tuple[str, str], left: float, top: float, lower: bool
) -> str:
    """The blocks of a matrix with its dims, and the axes that split them, at its edges."""
    parts = placement.axes_of("P")
    drawn = [draw_block(block, left, top, bool(parts), lower) for block in blocks(placement)]
    border = f'fill="none" stroke="{GREY}" stroke-width="1"'
    drawn.append(rectangle(left, top, SIDE, SIDE, border))
    rows, columns = (_split(placement, dim, name) for dim, name in enumerate(dims))
    drawn.append(text(left + SIDE / 2, top - 6, columns, GREY))
    x, y = left - 7, top + SIDE / 2
    drawn.append(text(x, y, rows, GREY, more=f' transform="rotate(-90 {x:g} {y:g})"'))
    if parts:
        words = f"parts of a sum over {', '.join(parts)}"
        drawn.append(text(left + SIDE / 2, top + SIDE + 15, words, GREY))
    return "\n".join(drawn)


def _split(placement: Layout, dim: int, name: str) -> str:
    digits = [digit.axis for digit in placement.digits(dim)]
    return f"{name} over {', '.join(digits)}" if digits else f"{name} whole"


def draw_reshards(matrix: Matrix, placed: Placed, panels: int, x: float) -> str:
    """What moves between the two rows of the picture, forward and backward, among which ranks."""
    names = PANEL_KINDS if panels else KINDS
    forward, backward = collectives(placed.path)
    lines = [
        (f"{matrix.name}: {names[kind]} over {', '.join(axes)}", FORWARD) for kind, axes in forward
    ]
    lines += [
        (f"d{matrix.name}: {names[kind]} over {', '.join(axes)}", BACKWARD)
        for kind, axes in backward
    ]
    middle = STORED_TOP + SIDE + ROW_GAP / 2
    if not lines:
        return text(x, middle, "nothing moves", GREY)
    lines += [(line, GREY) for line in _groups(placed)]
    top = min(middle + 8 - 7 * len(lines), WORKING_TOP - 30 - 14 * len(lines))
    drawn = [text(x, top + 14 * index, *line) for index, line in enumerate(lines)]
    return "\n".join((*drawn, *_arrows(matrix, x, bool(forward), bool(backward))))


def _groups(placed: Placed) -> list[str]:
    """The groups of ranks of every collective, as {0 2} {1 3}; each set of axes once."""
    mesh = placed.stored.mesh
    sets = dict.fromkeys(step.axes for step in placed.path if any(step.traffic(True)))
    return [
        " ".join(
            "{" + " ".join(map(str, group)) + "}"
            for group in sorted({tuple(mesh.group(axes, rank)) for rank in range(mesh.size)})
        )
        for axes in sets
    ]


def _arrows(matrix: Matrix, x: float, forward: bool, backward: bool) -> Iterator[str]:
    """Operands come down into the product and results go up; their gradients the other way."""
    result = matrix.computed is not None
    upper = STORED_TOP + SIDE + 5 if result else WORKING_TOP - 34
    if forward:
        yield _arrow(x - (6 if backward else 0), upper, upper + 14, result, FORWARD)
    if backward:
        yield _arrow(x + (6 if forward else 0), upper, upper + 14, not result, BACKWARD)


def _arrow(x: float, top: float, bottom: float, upward: bool, fill: str) -> str:
    tip, end = (top, bottom) if upward else (bottom, top)
    back = tip + 7 if upward else tip - 7
    head = f"{x - 4:g},{back:g} {x + 4:g},{back:g} {x:g},{tip:g}"
    shaft = f'x1="{x:g}" y1="{end:g}" x2="{x:g}" y2="{back:g}"'
    line = f'<line {shaft} stroke="{fill}" stroke-width="1.5"/>'
    return f'{line}<polygon points="{head}" fill="{fill}"/>'


def draw_panels(placed: Placed, panels: int, left: float) -> str:
    """Dashed lines where a gathered operand is cut into panels t, and their numbers beside it."""
    drawn = []
    pitch = SIDE / panels
    for dim in {step.before.state(step.axes[0]).dim for step in placed.path if step.kind == "S->R"}:
        for panel in range(panels):
            start, middle = pitch * panel, pitch * (panel + 0.5)
            if panel:
                drawn.append(_dashes(left, start, dim))
            x, y = (middle, SIDE + 15) if dim else (SIDE + 14, middle + 4)
            drawn.append(text(left + x, WORKING_TOP + y, f"t={panel}", GREY))
    return "\n".join(drawn)


def _dashes(left: float, along: float, dim: int) -> str:
    x, y = (left + along, WORKING_TOP) if dim else (left, WORKING_TOP + along)
    end = f'x2="{x:g}" y2="{y + SIDE:g}"' if dim else f'x2="{x + SIDE:g}" y2="{y:g}"'
    return f'<line x1="{x:g}" y1="{y:g}" {end} stroke="{INK}" stroke-dasharray="4 3"/>'


def draw_legend(mesh: Mesh, width: float) -> str:
    """Where every rank stands on the axes, and what the marks mean."""
    top = WORKING_TOP + SIDE + 34
    pitch = min(96.0, (width - 24) / mesh.size)
    left = (width - pitch * mesh.size) / 2
    drawn = []
    for rank in range(mesh.size):
        x = left + pitch * (rank + 0.5)
        words = ", ".join(map(str, mesh.coordinate(rank).values()))
        drawn.append(chip(x, top + 10, rank) + text(x, top + 32, words, GREY, 10))
    where = f"rank, and where it stands on ({', '.join(mesh.names)})"
    words = f"{where} · outlined: rank 0's part of the product"
    drawn.append(text(width / 2, top + 54, words, GREY))
    return "\n".join(drawn)


def picture(chain: Chain) -> str:
    """The SVG of one layout."""
    mesh = Mesh.parse(chain.mesh)
    width = LEFT + len(chain.matrices) * (SIDE + GAP) - 30
    height = WORKING_TOP + SIDE + 34 + LEGEND
    drawn = [text(width / 2, 28, chain.title, INK, 15, ' font-weight="bold"'), _key(width / 2)]
    for row, words in (
        (STORED_TOP, ("kept", "between", "uses")),
        (WORKING_TOP, ("in the", "product")),
    ):
        for index, word in enumerate(words):
            drawn.append(text(32, row + SIDE / 2 - 12 + 16 * index, word, INK, 12))
    for index, matrix in enumerate(chain.matrices):
        drawn.append(_column(chain, matrix, mesh, LEFT + index * (SIDE + GAP)))
        if index:
            x = LEFT + index * (SIDE + GAP) - GAP / 2 - 3
            sign = "×" if index % 2 else "="
            drawn += [
                text(x, top + SIDE / 2 + 7, sign, INK, 22) for top in (STORED_TOP, WORKING_TOP)
            ]
    drawn.append(draw_legend(mesh, width))
    fonts = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{fonts}">'
    ground = rectangle(0, 0, width, height, 'fill="#ffffff"')
    return "\n".join((opening, f"<title>{chain.title}</title>", ground, *drawn, "</svg>", ""))


def _key(x: float) -> str:
    return text(x - 60, 48, "blue: forward", FORWARD) + text(x + 60, 48, "red: backward", BACKWARD)


def _column(chain: Chain, matrix: Matrix, mesh: Mesh, left: float) -> str:
    """One matrix: its name, kept above, in the product below, what moves between."""
    placed = place(matrix, mesh, dict.fromkeys("mkn", ENTRIES))
    name = f"{matrix.name} [{', '.join(matrix.dims)}]"
    drawn = [
        text(left + SIDE / 2, STORED_TOP - 22, name, INK, 13, ' font-weight="bold"'),
        draw_matrix(placed.stored, matrix.dims, left, STORED_TOP, lower=False),
        draw_matrix(placed.working, matrix.dims, left, WORKING_TOP, lower=True),
        draw_reshards(matrix, placed, chain.panels, left + SIDE / 2),
    ]
    if chain.panels:
        drawn.append(draw_panels(placed, chain.panels, left))
    return "\n".join(drawn)
