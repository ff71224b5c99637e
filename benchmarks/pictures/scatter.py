"""Planned against measured, a point a run: planned-steps.svg and planned-memory.svg.

The steps are those of benchmarks/model/predicted.json, the peaks those of memory.json beside it,
which `python -m benchmarks.model.memory --only gpt --json FILE` writes; each as it was planned when
it ran.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.model import recorded
from benchmarks.pictures.style import svg, text
from benchmarks.step_time import cells

SIDE, LEFT, TOP = 380, 74, 54
FEW, MANY = (1, 2, 5), (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8)  # ticks of many and of few decades
COLORS = ("#1f6feb", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#9a6700", "#0a7ea4", "#cf222e")
PEAKS = Path(__file__).parent.parent / "model" / "memory.json"
MORE = """
  .grid { stroke: #8c959f; stroke-opacity: 0.25 } .equal { stroke: #8c959f; stroke-width: 1.5 }
  .tenth { fill: #8c959f; fill-opacity: 0.16 }
"""


class Run(NamedTuple):
    """A point: its colour is that of its kind."""

    kind: str
    planned: float
    measured: float


def steps() -> str:
    """Return the SVG of the steps, in seconds."""
    runs = [
        Run(timed["name"].removeprefix("autopar "), timed["modelled"], cells.median(timed))
        for cell in cells.load(recorded.RECORDS)["cells"]
        for timed in cells.standing(cell)
    ]
    return picture("Seconds of a step", "s", runs)


def peaks() -> str:
    """Return the SVG of a rank's peaks of memory, in MiB; all pipelines are one kind."""
    runs = [
        Run(
            "stages of a pipeline" if row["case"]["stages"] > 1 else row["case"]["layout"],
            row["planned"] / 2**20,
            row["measured"] / 2**20,
        )
        for row in json.loads(PEAKS.read_text(encoding="utf-8"))
        if not row["refused"]
    ]
    return picture("Peak memory of a rank", "MiB", runs)


def picture(title: str, unit: str, runs: Sequence[Run]) -> str:
    """Return planned over measured on two logarithmic scales, with a band of a tenth."""
    values = [value for run in runs for value in (run.planned, run.measured)]
    low, high = min(values) / 1.15, max(values) * 1.15
    scale = SIDE / math.log(high / low)

    def x(value: float) -> float:
        return round(LEFT + scale * math.log(value / low), 1)

    def y(value: float) -> float:
        return round(TOP + SIDE - scale * math.log(value / low), 1)

    error = statistics.mean(abs(run.planned / run.measured - 1) for run in runs)
    drawn = [
        text(LEFT, 20, title, "title"),
        text(LEFT, 41, f"{len(runs)} runs, mean error {error:.1%}"),
    ]
    corners = ((low, low), (low, low * 1.1), (high / 1.1, high), (high, high), (high, high / 1.1))
    band = (*corners, (low * 1.1, low))
    points = " ".join(f"{x(a):g},{y(b):g}" for a, b in band)
    drawn.append(f'<polygon points="{points}" class="tenth"/>')
    for tick in _ticks(low, high):
        drawn += [
            f'<path d="M{x(tick):g} {TOP} V{TOP + SIDE}" class="grid"/>',
            f'<path d="M{LEFT} {y(tick):g} H{LEFT + SIDE}" class="grid"/>',
            text(x(tick), TOP + SIDE + 18, f"{tick:g}", "small", "middle"),
            text(LEFT - 8, y(tick) + 4, f"{tick:g}", "small", "end"),
        ]
    drawn.append(f'<path d="M{LEFT} {TOP + SIDE} L{LEFT + SIDE} {TOP}" class="equal"/>')
    drawn.append(text(LEFT + SIDE / 2, TOP + SIDE + 40, f"measured, {unit}", "", "middle"))
    drawn.append(
        f'<text transform="translate(20 {TOP + SIDE / 2:g}) rotate(-90)" text-anchor="middle">'
        f"planned, {unit}</text>"
    )
    kinds = list(dict.fromkeys(run.kind for run in runs))
    for run in runs:
        color = COLORS[kinds.index(run.kind) % len(COLORS)]
        drawn.append(
            f'<circle cx="{x(run.measured):g}" cy="{y(run.planned):g}" r="4.5" fill="{color}" '
            'fill-opacity="0.8"/>'
        )
    for number, kind in enumerate(kinds):
        row = TOP + 22 + 20 * number
        color = COLORS[number % len(COLORS)]
        drawn.append(f'<circle cx="{LEFT + 16}" cy="{row - 5}" r="4.5" fill="{color}"/>')
        drawn.append(text(LEFT + 28, row, kind, "small"))
    drawn.append(text(LEFT, TOP + SIDE + 62, "Grey band: within a tenth.", "small"))
    return svg(LEFT + SIDE + 16, TOP + SIDE + 74, f"{title}, planned and measured", drawn, MORE)


def _ticks(low: float, high: float) -> list[float]:
    """Return round values between two values.

    >>> _ticks(0.4, 11)
    [0.5, 1.0, 2.0, 5.0, 10.0]
    """
    ticks = FEW if high / low > 10 else MANY
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = (round(tick * 10.0**power, 9) for power in powers for tick in ticks)
    return [tick for tick in every if low <= tick <= high]
