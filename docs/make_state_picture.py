"""Draws docs/images/states.svg: the four states of a tensor on an axis, and what moves from one to
another, forward and backward.

    python -m docs.make_state_picture [FILE]

The collectives are those of `autopar.ir.layout.TRAFFIC`. The file is plain SVG, light or dark as
the page is, and the same on every run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from autopar.ir.layout import TRAFFIC
from docs.make_readme_picture import STYLE

PICTURE = Path(__file__).parent / "images" / "states.svg"
WIDTH, HEIGHT = 880, 560
BOX_WIDTH, BOX_HEIGHT = 196, 84
BOXES = {  # where a state is drawn: left and top; what it is, and its gradient
    "P": (342, 30, "P: parts of a sum", "gradient: the same on all, R"),
    "I": (30, 238, "I: the same on all", "gradient: the same on all, I"),
    "R": (654, 238, "R: the same on all", "gradient: parts of a sum, P"),
    "S": (342, 446, "S: shards", "gradient: shards, S"),
}
# The changes that are drawn: the point that bends the line, and where its two words stand.
LINES = {
    "P->I": ((330, 150), (238, 150)),
    "P->R": ((550, 150), (642, 150)),
    "P->S": ((440, 280), (494, 196)),
    "I->R": ((440, 262), (330, 243)),
    "S->R": ((600, 380), (668, 436)),
    "R->S": ((520, 350), (496, 326)),
    "S->I": ((280, 380), (212, 436)),
    "I->S": ((360, 350), (384, 326)),
}
WORDS = {
    "all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_reduce": "all-reduce",
    "all_to_all": "all-to-all", None: "nothing",
}  # fmt: skip
MORE = """
  .path { fill: none; stroke: #8c959f; stroke-width: 1.6 }
  .there { fill: #1a7f37; font-size: 12px } .back { fill: #bc4c00; font-size: 12px }
  @media (prefers-color-scheme: dark) { .there { fill: #3fb950 } .back { fill: #f0883e } }
"""


def picture() -> str:
    """Return the SVG."""
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img" aria-label="the four states and their changes">',
        f"<style>{STYLE}{MORE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#8c959f"/></marker>'
        "</defs>",
    ]
    for change in LINES:
        drawn += _line(change)
    for state in BOXES:
        drawn += _box(state)
    drawn += [
        '<text x="30" y="40" class="there">what moves in the forward</text>',
        '<text x="30" y="58" class="back">what moves in the backward</text>',
        '<text x="560" y="536" class="small">S to another dim: '
        f"{WORDS[TRAFFIC['S->S'][0]]}, both ways</text>",
    ]
    return "\n".join((*drawn, "</svg>\n"))


def _line(change: str) -> list[str]:
    """Return the arrow of a change, with its two collectives."""
    (bend_x, bend_y), (x, y) = LINES[change]
    source, target = (_edge(state, (bend_x, bend_y)) for state in change.split("->"))
    there, back = (WORDS[kind] for kind in TRAFFIC[change])
    middle = f'x="{x}" text-anchor="middle"'
    return [
        f'<path d="M{source[0]:g} {source[1]:g} Q{bend_x} {bend_y} {target[0]:g} {target[1]:g}" '
        'class="path" marker-end="url(#tip)"/>',
        f'<text {middle} y="{y}" class="there">{there}</text>',
        f'<text {middle} y="{y + 15}" class="back">{back}</text>',
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
        f'<text x="{left + 10}" y="{top + 20}" class="title">{words}</text>',
        f'<text x="{left + 10}" y="{top + 38}" class="small">{gradient}</text>',
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
        drawn.append(f'<text x="{left + 71}" y="{top + 66}">+</text>')
    return drawn


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    path.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
