"""The figures of a report, by plotly: meshes and layouts, the step's timeline, and its memory.

Example: layouts_figure(facts) is a plotly figure; `bundle()` is the script that draws figures in a
browser. page.py puts both into one file.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autopar.cost.peak import moments
from autopar.errors import AutoparError
from autopar.ir.plan import Plan
from autopar.ir.plan_table import byte_unit, format_bytes, format_seconds
from autopar.tools.report.alternatives import Alternative
from autopar.tools.report.facts import Facts

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_MOST_MESHES, _MOST_SPANS = 40, 4000
_CLOSE = 0.03, 0.15  # of the height and width of a figure: points whose names would overlap
_COLOURS = {
    "compute": "#4c78a8", "wait": "#e45756", "all_gather": "#72b7b2", "reduce_scatter": "#f58518",
    "all_reduce": "#b279a2", "all_to_all": "#eeca3b", "broadcast": "#54a24b", "reduce": "#9d755d",
}  # fmt: skip
_KINDS = ("parameters", "optimizer", "gradients", "activations", "transient")


class ReportError(AutoparError):
    """A report that cannot be made."""


def require_libraries() -> None:
    """Raise ReportError, with what to install, where plotly or jinja2 is missing."""
    missing = [name for name in ("plotly", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        raise ReportError(
            f"a report needs {' and '.join(missing)}, which {'are' if missing[1:] else 'is'} not "
            "installed: pip install 'autopar[report]'"
        )


def bundle() -> str:
    """Return plotly's script, to be put into a page."""
    from plotly.offline import get_plotlyjs  # only where a report is made

    return str(get_plotlyjs())


def _figure(height: int, x: str, y: str = "") -> Figure:
    from plotly import graph_objects

    figure = graph_objects.Figure()
    figure.update_layout(
        height=height,
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        xaxis={"title": x, "automargin": True},
        yaxis={"title": y, "automargin": True},
    )
    return figure


def layouts_figure(facts: Facts) -> Figure | None:
    """Return step against memory for the plan and the named layouts; None without any."""
    timed = [other for other in facts.others if other.seconds is not None]
    if not timed:
        return None
    plan = facts.plan
    most = max(plan.peak_bytes, *(other.peak_bytes or 0.0 for other in timed))
    unit, unit_bytes = byte_unit(most)
    figure = _figure(340, f"memory at the peak of a device, {unit}", "step, ms")
    figure.add_scatter(
        x=[(other.peak_bytes or 0.0) / unit_bytes for other in timed],
        y=[(other.seconds or 0.0) * 1e3 for other in timed],
        text=_names_of_points(timed),
        hovertext=[f"{other.layout} on {other.mesh}" for other in timed],
        hovertemplate="%{hovertext}<br>%{y:.2f} ms, %{x:.2f} " + f"{unit}<extra></extra>",
        mode="markers+text", textposition="top center", cliponaxis=False, name="named layouts",
        marker={"size": 9, "color": "#888"},
    )  # fmt: skip
    figure.add_scatter(
        x=[plan.peak_bytes / unit_bytes], y=[plan.step_seconds * 1e3], text=[f"<b>{plan.mesh}</b>"],
        hovertemplate=f"the plan: {plan.layout} on {plan.mesh}<br>%{{y:.2f}} ms, %{{x:.2f}} {unit}"
        "<extra></extra>",
        mode="markers+text", textposition="bottom center", cliponaxis=False, name="the plan",
        marker={"size": 14, "color": "#e45756", "symbol": "star"},
    )  # fmt: skip
    if plan.device_limit is not None and plan.device_limit < 2 * most:
        figure.add_vline(x=plan.device_limit / unit_bytes, line={"dash": "dot", "color": "#888"})
    steps = [plan.step_seconds, *(other.seconds or 0.0 for other in timed)]
    if max(steps) > 4 * min(steps):
        ticks = _log_ticks(min(steps) * 1e3, max(steps) * 1e3)
        figure.update_yaxes(type="log", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])
    return figure


def _names_of_points(timed: Sequence[Alternative]) -> list[str]:
    """Return the name of each point; the first of those that lie close together has the names of
    all, as they would be written over one another.
    """
    points = [(other.seconds or 0.0, other.peak_bytes or 0.0) for other in timed]
    spans = [max(values) - min(values) or 1.0 for values in zip(*points, strict=True)]
    names: list[list[str]] = []
    for number, (other, point) in enumerate(zip(timed, points, strict=True)):
        near = [
            before
            for before in range(number)
            if names[before]
            and all(
                abs(a - b) < close * s
                for a, b, s, close in zip(points[before], point, spans, _CLOSE, strict=True)
            )
        ]
        names.append([] if near else [other.layout])
        if near:
            names[near[0]].append(other.layout)
    return [", ".join(each) for each in names]


def _log_ticks(least: float, most: float) -> list[float]:
    """Return the round numbers around a range, three a decade.

    >>> _log_ticks(9.0, 41.0)
    [5.0, 10.0, 20.0, 50.0, 100.0]
    """
    decades = range(math.floor(math.log10(least)) - 1, math.ceil(math.log10(most)) + 1)
    ticks = [float(f"{digit}e{decade}") for decade in decades for digit in (1, 2, 5)]
    return [tick for tick in ticks if least / 2.5 <= tick <= most * 2.5]


def meshes_figure(plan: Plan) -> Figure | None:
    """Return the meshes that were considered, each as the range above its proven bound."""
    ordered = sorted(plan.meshes, key=lambda pair: pair[1])[:_MOST_MESHES]
    if len(ordered) < 2:
        return None
    most = max(plan.seconds, *(seconds for _, seconds in ordered)) * 1.04
    chosen = str(plan.mesh)
    figure = _figure(90 + 17 * len(ordered), "sum of the step's seconds, ms")
    figure.add_bar(
        y=[mesh for mesh, _ in ordered],
        base=[seconds * 1e3 for _, seconds in ordered],
        x=[(most - seconds) * 1e3 for _, seconds in ordered],
        orientation="h",
        marker={"color": ["#e4575688" if mesh == chosen else "#8888" for mesh, _ in ordered]},
        customdata=[seconds * 1e3 for _, seconds in ordered],
        hovertemplate="%{y}: no plan takes less than %{customdata:.2f} ms<extra></extra>",
        showlegend=False,
    )
    figure.add_vline(x=plan.seconds * 1e3, line={"color": "#e45756", "width": 2})
    figure.update_yaxes(autorange="reversed", type="category", tickfont={"size": 10})
    return figure


def timeline_figure(plan: Plan) -> Figure | None:
    """Return the modelled step on its tracks: computing, waiting, and each group's lane."""
    if plan.context is None or not plan.mesh.axes or plan.stage_starts:
        return None  # the step of stages is drawn by pipeline.py
    timeline = plan.timeline(plan.overlapped is not None)
    spans = sorted(timeline.spans, key=lambda span: -span.seconds)[:_MOST_SPANS]
    tracks = ["compute", "waits", *sorted({s.track for s in spans} - {"compute", "waits"})]
    figure = _figure(90 + 34 * len(tracks), "ms since the step began")
    for kind in sorted({span.kind for span in spans}, key=lambda k: (k != "compute", k)):
        mine = [span for span in spans if span.kind == kind]
        figure.add_bar(
            y=[span.track for span in mine],
            base=[round(span.start * 1e3, 5) for span in mine],
            x=[round(span.seconds * 1e3, 5) for span in mine],
            orientation="h", name=kind.replace("_", "-"),
            marker={"color": _COLOURS.get(kind, "#888"), "line": {"width": 0}},
            customdata=[f"{span.module} {span.name}, {span.phase}" for span in mine],
            hovertemplate="%{customdata}<br>%{x:.3f} ms from %{base:.3f}<extra></extra>",
        )  # fmt: skip
    figure.update_layout(barmode="overlay")
    figure.update_yaxes(categoryorder="array", categoryarray=tracks[::-1])
    return figure


def memory_figure(plan: Plan) -> Figure | None:
    """Return what a rank holds over the step by kind, communication being waited for."""
    if plan.context is None or plan.stage_starts:  # a rank holds its own stages alone
        return None
    memory = moments(plan.context.program, plan.optimizer, plan.context.world)
    unit, unit_bytes = byte_unit(max(sum(moment[1:]) for moment in memory))
    figure = _figure(300, "ops of the step, forward and backward", unit)
    for kind, colour in zip(_KINDS, ("#4c78a8", "#b279a2", "#f58518", "#72b7b2", "#bab0ac")):
        figure.add_scatter(
            x=[moment.op for moment in memory],
            y=[round(getattr(moment, kind) / unit_bytes, 5) for moment in memory],
            name=kind, stackgroup="held", line={"width": 0.5, "color": colour},
            hovertemplate=f"{kind}: %{{y:.3f}} {unit}<extra></extra>",
        )  # fmt: skip
    figure.update_layout(hovermode="x unified")
    return figure


def other_lines(facts: Facts) -> list[dict[str, Any]]:
    """Return a line for each named layout: its step, its memory, and what it lacks."""
    mine, lines = facts.plan.step_seconds, []
    for other in facts.others:
        needs = re.search(r"no plan fits .* needs ([0-9.,]+ [GM]iB)", other.why)
        lacks = f"does not fit: needs {needs[1]}" if needs else other.why
        if other.seconds is not None:
            more = other.seconds / mine - 1
            lacks = f"slower by {more:.1%}" if more > 5e-4 else "as fast"
        lines.append(
            {
                "layout": other.layout,
                "mesh": other.mesh,
                "step": "" if other.seconds is None else format_seconds(other.seconds),
                "memory": "" if other.peak_bytes is None else format_bytes(other.peak_bytes),
                "lacks": lacks,
            }
        )
    return lines
