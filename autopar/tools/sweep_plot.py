"""The page of `autopar sweep --plot`: curves of a sweep over the number of ranks, by plotly.

Example: write_page(Path("sweep.html"), "gpt2", points, priced=False) writes one HTML file that
needs no network. `autopar sweep` calls it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import AutoparError

if TYPE_CHECKING:
    from autopar.tools.sweep import SweepPoint

# Field of a point, title of its curves, what a unit of it is divided by.
_CURVES: tuple[tuple[str, str, float], ...] = (
    ("rate", "tokens or samples a second", 1.0),
    ("seconds", "step, ms", 1e-3),
    ("utilization", "model FLOPs utilisation, %", 1e-2),
    ("peak_bytes", "memory on each device, GiB", 2.0**30),
    ("price_per_million", "price of a million tokens or samples", 1.0),
)
_HEIGHT = 320  # pixels of one curve


class PlotError(AutoparError):
    """A page of curves that cannot be drawn."""


def require_plotly() -> None:
    """Raise PlotError, with what to install, where plotly is not installed."""
    if importlib.util.find_spec("plotly") is None:
        raise PlotError(
            "--plot: the curves are drawn by plotly, which is not installed: "
            "pip install 'autopar[report]' (or plotly alone); --csv needs nothing"
        )


def curves(points: Sequence[SweepPoint], priced: bool) -> list[tuple[str, str, list[Any]]]:
    """Return the curves as (title, batch, [(ranks, value), ...]), without the points that were
    refused; the prices only where they are `priced`.
    """
    batches = list(dict.fromkeys(point.batch for point in points))
    lines: list[tuple[str, str, list[Any]]] = []
    for name, title, size in _CURVES:
        if name == "price_per_million" and not priced:
            continue
        for batch in batches:
            pairs = [
                (point.ranks, getattr(point, name) / size)
                for point in points
                if point.batch == batch and getattr(point, name) is not None
            ]
            lines.append((title, batch or "its own batch", sorted(pairs)))
    return lines


def write_page(path: Path, target: str, points: Sequence[SweepPoint], priced: bool) -> None:
    """Write the curves of a sweep as one HTML page. Raises PlotError without plotly."""
    require_plotly()
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    lines = curves(points, priced)
    titles = list(dict.fromkeys(title for title, _, _ in lines))
    figure = make_subplots(rows=len(titles), cols=1, subplot_titles=titles)
    for title, batch, pairs in lines:
        x, y = [ranks for ranks, _ in pairs], [value for _, value in pairs]
        first = title == titles[0]
        scatter = Scatter(x=x, y=y, name=batch, mode="lines+markers", legendgroup=batch,
                          showlegend=first)  # fmt: skip
        figure.add_trace(scatter, row=titles.index(title) + 1, col=1)
    figure.update_xaxes(type="log", title_text="ranks")
    figure.update_layout(title=f"autopar sweep: {target}", height=_HEIGHT * len(titles))
    figure.write_html(path, include_plotlyjs=True)
