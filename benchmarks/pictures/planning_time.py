"""Planning time beside a peer's on the same work and mesh, two bars a case: planning-time.svg.

The seconds are those of benchmarks/planning/beside.json, which says how each was measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pictures.style import svg, text

FIGURES = Path(__file__).parent.parent / "planning" / "beside.json"
LEFT, TOP, SIDE, BAR, GAP = 262, 66, 400, 18, 18
PHASES = (("trace", "#8c959f"), ("choose", "#1f6feb"))


def picture(figures: Mapping[str, Any] | None = None) -> str:
    """Return the SVG, of the committed figures by default."""
    figures = json.loads(FIGURES.read_text(encoding="utf-8")) if figures is None else figures
    cases = figures["cases"]
    most = max(sum(case[who].values()) for case in cases for who in ("peer", "autopar"))
    scale = (SIDE - 60) / most
    drawn = [text(8, 20, "CPU seconds to plan on one given mesh", "title")]
    for number, (phase, color) in enumerate(PHASES):
        drawn.append(
            f'<rect x="{14 + 100 * number}" y="34" width="14" height="12" fill="{color}"/>'
        )
        drawn.append(text(34 + 100 * number, 45, phase))
    y = TOP
    for case in cases:
        drawn.append(text(8, y + BAR + 2, case["name"]))
        for who, name in (("peer", figures["peer"]), ("autopar", "autopar")):
            drawn.append(text(LEFT - 8, y + 13.5, name, "small", "end"))
            x = float(LEFT)
            for phase, color in PHASES:
                width = round(scale * case[who][phase], 1)
                drawn.append(
                    f'<rect x="{x:g}" y="{y}" width="{width:g}" height="{BAR - 3}" fill="{color}"/>'
                )
                x = round(x + width, 1)
            drawn.append(text(x + 6, y + 13, f"{sum(case[who].values()):.1f} s", "small"))
            y += BAR
        y += GAP
    drawn.append(
        text(8, y + 6, "Without what writes the ranks' graphs. Shorter is better.", "small")
    )
    return svg(LEFT + SIDE + 20, y + 20, "planning time of a peer and of autopar", drawn)
