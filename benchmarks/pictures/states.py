"""The four states of a tensor on an axis, and what moves from one to another: states.svg.

The collectives, forward and backward, are those of `autopar.ir.layout.TRAFFIC`.
"""

from __future__ import annotations

from autopar.ir.layout import TRAFFIC
from benchmarks.pictures.style import svg, text

WIDTH, HEIGHT = 660, 500
BOX_WIDTH, BOX_HEIGHT = 196, 84
BOXES = {  # where a state is drawn: left and top; what it is, and its gradient
    "P": (232, 14, "P: parts of a sum", "gradient: the same on all, R"),
    "I": (10, 206, "I: the same on all", "gradient: the same on all, I"),
    "R": (454, 206, "R: the same on all", "gradient: parts of a sum, P"),
    "S": (232, 400, "S: shards", "gradient: shards, S"),
}
# The changes that are drawn: the point that bends the line, and where its two words stand.
LINES = {
    "P->I": ((222, 150), (150, 138)),
    "P->R": ((438, 150), (512, 138)),
    "P->S": ((330, 240), (384, 160)),
    "I->R": ((330, 232), (262, 212)),
    "S->R": ((448, 343), (522, 362)),
    "R->S": ((388, 314), (382, 288)),
    "S->I": ((212, 343), (138, 362)),
    "I->S": ((272, 314), (278, 288)),
}
WORDS = {
    "all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_reduce": "all-reduce",
    "all_to_all": "all-to-all", None: "nothing",
}  # fmt: skip
MORE = """
  .path { fill: none; stroke: #8c959f; stroke-width: 1.6 }
  .there { fill: #1a7f37; font-size: 13px } .back { fill: #bc4c00; font-size: 13px }
  @media (prefers-color-scheme: dark) { .there { fill: #3fb950 } .back { fill: #f0883e } }
"""


def picture() -> str:
    """Return the SVG."""
    drawn = [
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#8c959f"/></marker>'
        "</defs>",
    ]
    for change in LINES:
        drawn += _line(change)
    for state in BOXES:
        drawn += _box(state)
    drawn += [
        text(10, 28, "what moves in the forward", "there"),
        text(10, 46, "what moves in the backward", "back"),
        text(440, 462, "S to another dim:", "small"),
        text(440, 478, f"{WORDS[TRAFFIC['S->S'][0]]}, both ways", "small"),
    ]
    return svg(WIDTH, HEIGHT, "the four states and their changes", drawn, MORE)


def _line(change: str) -> list[str]:
    """Return the arrow of a change, with its two collectives."""
    (bend_x, bend_y), (x, y) = LINES[change]
    source, target = (_edge(state, (bend_x, bend_y)) for state in change.split("->"))
    there, back = (WORDS[kind] for kind in TRAFFIC[change])
    return [
        f'<path d="M{source[0]:g} {source[1]:g} Q{bend_x} {bend_y} {target[0]:g} {target[1]:g}" '
        'class="path" marker-end="url(#tip)"/>',
        text(x, y, there, "there", "middle"),
        text(x, y + 16, back, "back", "middle"),
    ]


def _edge(state: str, towards: tuple[float, float]) -> tuple[float, float]:
    """Return the point on the edge of a box on the way from its middle to a point."""
    left, top, *_ = BOXES[state]
    x, y = left + BOX_WIDTH / 2, top + BOX_HEIGHT / 2
    across, down = towards[0] - x, towards[1] - y
    scale = min(
        BOX_WIDTH / 2 / abs(across) if across else 9.0, BOX_HEIGHT / 2 / abs(down) if down else 9.0
    )
    return round(x + across * scale, 1), round(y + down * scale, 1)


def _box(state: str) -> list[str]:
    """Return a state with what two ranks hold of a tensor."""
    left, top, words, gradient = BOXES[state]
    drawn = [
        f'<rect x="{left}" y="{top}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" '
        'class="box"/>',
        text(left + 10, top + 20, words, "title"),
        text(left + 10, top + 38, gradient, "small"),
    ]
    for rank in range(2):
        x, y = left + 10 + rank * 76, top + 48
        drawn.append(f'<rect x="{x}" y="{y}" width="56" height="26" class="weight"/>')
        if state == "S":
            drawn.append(f'<rect x="{x + 28 * rank}" y="{y}" width="28" height="26" class="held"/>')
        else:
            faint = ' opacity="0.4"' if state == "P" else ""
            drawn.append(f'<rect x="{x}" y="{y}" width="56" height="26" class="held"{faint}/>')
    if state == "P":
        drawn.append(text(left + 71, top + 66, "+"))
    return drawn
