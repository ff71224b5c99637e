"""autopar's step beside that of the best peer, a row a cluster, a dot a rate: step-time.svg.

The ratios are the verdicts of benchmarks/step_time/summaries.json.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from benchmarks.cluster import rate_text
from benchmarks.pictures.style import svg, text
from benchmarks.step_time import cells, summaries
from benchmarks.step_time.summaries import Summary, cluster_size, ordered

LEFT, TOP, SIDE, ROW, GAP = 112, 84, 400, 24, 12
TICKS = (0.1, 0.2, 0.5, 1, 1.5, 2, 3, 5, 10, 20, 50, 100)
COLORS = ("#8250df", "#1f6feb", "#0a7ea4", "#9a6700")  # the slowest link first
MORE = """
  .grid { stroke: #8c959f; stroke-opacity: 0.25 } .even { stroke: #8c959f; stroke-width: 1.5 }
"""


def picture(saved: Sequence[Summary] | None = None) -> str:
    """Return the SVG, of the committed summaries by default."""
    saved = ordered(cells.load(summaries.COMMITTED)["cells"] if saved is None else saved)
    rates = sorted({cell["rate"] or math.inf for cell in saved})
    colors = {rate: COLORS[number % len(COLORS)] for number, rate in enumerate(rates)}
    ratios = [cell["verdict"]["ratio"] for cell in saved if cell["verdict"] is not None]
    low, high = min(0.9, *ratios, 1), max(2.1, *ratios, 1) * 1.05
    scale = SIDE / math.log(high / low)

    def x(ratio: float) -> float:
        return round(LEFT + scale * math.log(ratio / low), 1)

    drawn = [text(8, 20, "Step of the best peer ÷ autopar's, by the rate of a link", "title")]
    for number, rate in enumerate(rates):
        left = 14 + 116 * number
        drawn.append(f'<circle cx="{left}" cy="39" r="5" fill="{colors[rate]}"/>')
        drawn.append(text(left + 10, 44, rate_text(None if rate == math.inf else rate)))
    y = TOP
    for model, of_model in groupby(saved, key=lambda cell: cell["model"]):
        for size, group in groupby(of_model, key=cluster_size):
            y += ROW
            drawn.append(text(8, y + 5, f"{model}, {size}"))
            drawn.append(f'<path d="M{LEFT} {y} H{LEFT + SIDE}" class="grid"/>')
            for cell in group:
                if cell["verdict"] is not None:
                    at, color = x(cell["verdict"]["ratio"]), colors[cell["rate"] or math.inf]
                    drawn.append(f'<circle cx="{at:g}" cy="{y}" r="5" fill="{color}"/>')
        y += GAP
    for tick in (tick for tick in TICKS if low <= tick <= high):
        kind = "even" if tick == 1 else "grid"
        drawn.append(f'<path d="M{x(tick):g} {TOP} V{y}" class="{kind}"/>')
        drawn.append(text(x(tick), TOP - 8, f"{tick:g} ×", "small", "middle"))
    drawn.append(text(8, y + 18, "Right of 1: autopar is faster than every peer: DDP, FSDP2, HSDP, "
                                 "tensor parallelism.", "small"))  # fmt: skip
    return svg(LEFT + SIDE + 20, y + 30, "steps of peers and of autopar", drawn, MORE)
