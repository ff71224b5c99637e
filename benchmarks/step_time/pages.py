"""Plots and the page of benchmarks.step_time, from summaries of its cells alone."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.cluster import rate_text
from benchmarks.models import SUBJECTS
from benchmarks.step_time.summaries import Contestant, Spread, Summary, Verdict


def _order(cell: Summary) -> tuple[Any, ...]:
    rate = cell["rate"] if cell["rate"] is not None else float("inf")
    nodes, each = cell["nodes"], cell["ranks_per_node"]
    return list(SUBJECTS).index(cell["model"]), nodes * each, nodes, rate


def _size(cell: Summary) -> str:
    return f"{cell['nodes']}×{cell['ranks_per_node']}"


def verdicts(found: list[Summary]) -> Table:
    """Auto against the best peer, a line a cell."""
    shown = Table(title="auto against the best peer", title_justify="left")
    for heading in ("model", "cluster", "rate", "best peer"):
        shown.add_column(heading)
    for heading in ("link ÷ step", "peer ÷ auto", "wanted"):
        shown.add_column(heading, justify="right")
    shown.add_column("")
    for row in _verdicts(found):
        shown.add_row(*row)
    return shown


def _verdicts(found: list[Summary]) -> list[tuple[str, ...]]:
    judged = [(cell, cell["verdict"]) for cell in sorted(found, key=_order)]
    return [_verdict(cell, verdict) for cell, verdict in judged if verdict is not None]


def _verdict(cell: Summary, judged: Verdict) -> tuple[str, ...]:
    figures = (f"{judged['share']:.2f}", f"{judged['ratio']:.2f}", f"{judged['wanted']:.2f}")
    where = (cell["model"], _size(cell), rate_text(cell["rate"]), judged["peer"])
    return (*where, *figures, "met" if judged["met"] else "missed")


# -- plots -----------------------------------------------------------------------------------------
def plots(found: list[Summary], folder: Path) -> list[Path]:
    """A picture a model: step time against rate, a panel a cluster, a line a contestant."""
    return [
        _plot(model, list(of_model), folder / f"step_time_{model}.png")
        for model, of_model in groupby(sorted(found, key=_order), key=lambda cell: cell["model"])
    ]


def _plot(model: str, found: list[Summary], path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = list(dict.fromkeys(_size(cell) for cell in found))
    width = 2 + 4 * len(sizes)
    figure, panels = pyplot.subplots(1, len(sizes), figsize=(width, 5), squeeze=False, sharey=True)
    names = list(dict.fromkeys(t["name"] for cell in found for t in cell["contestants"]))
    for panel, size in zip(panels[0], sizes, strict=True):
        _panel(panel, [cell for cell in found if _size(cell) == size], names)
        panel.set_title(f"{model}, {size}")
    panels[0][0].set_ylabel("step, s (median; bars: least to most)")
    lines = {
        label: line
        for panel in panels[0]
        for line, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    panels[0][-1].legend(
        lines.values(), lines.keys(), fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5)
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _panel(panel: Any, found: list[Summary], names: list[str]) -> None:
    rates = [rate_text(cell["rate"]) for cell in found]
    for number, name in enumerate(names):
        points = _points(found, name)
        if not points:
            continue
        middles = [spread["median"] for _, spread in points]
        # Never below 0: each figure was rounded by itself.
        below = [max(0.0, spread["median"] - spread["least"]) for _, spread in points]
        above = [max(0.0, spread["most"] - spread["median"]) for _, spread in points]
        own = name.startswith("autopar")
        style = {
            "linestyle": "-" if own else "--",
            "linewidth": 2.5 if name.endswith("auto") else 1,
        }
        color = f"C{number}" if number < 10 else f"C{number - 10}"
        panel.errorbar(
            [place for place, _ in points], middles, yerr=[below, above], label=name, color=color,
            marker="o" if own else "s", markersize=4, capsize=2, elinewidth=0.7, **style,
        )  # fmt: skip
    panel.set_yscale("log")
    panel.set_xticks(range(len(rates)), rates)
    panel.set_xlabel("rate of a node's link")
    panel.grid(alpha=0.3, which="both")


def _points(found: list[Summary], name: str) -> list[tuple[int, Spread]]:
    """Where the contestant stood: which of the cells, and how long its steps took."""
    return [
        (place, timed["seconds"])
        for place, cell in enumerate(found)
        for timed in cell["contestants"]
        if timed["name"] == name and timed["seconds"] is not None
    ]


# -- the page --------------------------------------------------------------------------------------
PREFACE = """\
# Step times on an emulated cluster

Written by `python -m benchmarks.step_time --docs docs/benchmarks.md` from `docs/benchmarks.json`,
which has the exact command of every cell; do not edit.

A node is a network namespace of one machine. `tc … tbf` limits its link, and its ranks talk over
loopback (`benchmarks/cluster/`). All contestants train the same model on the same batches, in
float32, with one thread a rank, and take turns step by step. A step is forward, backward and AdamW;
its time is the slowest rank's. A contestant is out if a loss, or the norm of its first gradient, is
more than 1e-4 off the single device's. `benchmarks/step_time/peers.py` sets up the peers; HSDP is
FSDP2 within a node and a sum between nodes.
"""

RATIOS = """\
## auto against the best peer

Example: "1.70 DDP, link 0.93" says that DDP was the best peer, that its step took 1.70 times as
long as auto's in the same round (median over the rounds), and that its bytes need 0.93 of its step
on the busiest link. Spreads are in the tables below.
"""


def write(found: list[Summary], page: Path) -> None:
    """The page, and its plots in images/ beside it."""
    images = plots(found, page.parent / "images")
    lines = [PREFACE, *_ratio_lines(found)]
    lines += ["\n## Seconds a step: median (least–most)"]
    for (model, size), group in groupby(sorted(found, key=_order), key=_model_and_size):
        of_size = list(group)
        lines += [f"\n### {model}, {size}\n", SUBJECTS[model].why + ".\n", *_matrix(of_size)]
        lines += ["", *_provenance(of_size)]
    lines += ["\n## Plots\n", *(f"![{i.stem}](images/{i.name})" for i in images)]
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _model_and_size(cell: Summary) -> tuple[str, str]:
    return cell["model"], _size(cell)


def _ratio_lines(found: list[Summary]) -> list[str]:
    """A line a model and cluster, a column a rate."""
    rates = sorted({cell["rate"] or float("inf") for cell in found})
    texts = [rate_text(None if rate == float("inf") else rate) for rate in rates]
    rows = [("model", "cluster", *texts)]
    for (model, size), group in groupby(sorted(found, key=_order), key=_model_and_size):
        by_rate = {rate_text(cell["rate"]): _ratio(cell["verdict"]) for cell in group}
        rows.append((model, size, *(by_rate.get(text, "") for text in texts)))
    return [RATIOS, *markdown(rows)]


def _ratio(judged: Verdict | None) -> str:
    if judged is None:
        return ""
    return f"{judged['ratio']:.2f} {judged['peer']}, link {judged['share']:.2f}"


def markdown(rows: list[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


def _matrix(found: list[Summary]) -> list[str]:
    """A line a contestant, a column a rate."""
    names = list(dict.fromkeys(t["name"] for cell in found for t in cell["contestants"]))
    rows = [("contestant", *(rate_text(cell["rate"]) for cell in found))]
    for name in names:
        by_cell = ({t["name"]: t for t in cell["contestants"]}.get(name) for cell in found)
        rows.append((name, *(_entry(timed) for timed in by_cell)))
    reasons = {t["name"]: t["reason"] for c in found for t in c["contestants"] if t["reason"]}
    return [*markdown(rows), "", *(f"- {name}: {reason}" for name, reason in reasons.items())]


def _entry(timed: Contestant | None) -> str:
    if timed is None:
        return ""
    spread = timed["seconds"]
    if spread is None:
        return timed["reason"].partition(":")[0]
    return f"{spread['median']:.3f} ({spread['least']:.2f}–{spread['most']:.2f})"


def _provenance(found: list[Summary]) -> list[str]:
    """Machine and world once, each cell's date and load."""
    runs: dict[str, list[str]] = {}
    for cell in found:
        world = "calibrated" if cell["calibrated"] else "written by hand from the rate"
        when = f"{rate_text(cell['rate'])} {cell['date']}, load {cell['load']:.1f}"
        runs.setdefault(f"On {cell['machine']}, world {world}", []).append(when)
    return [f"{where}: {'; '.join(times)}." for where, times in runs.items()]
