"""The page of benchmarks.step_time, with its picture, from summaries of its cells alone."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from rich.table import Table

from benchmarks.cluster import rate_text
from benchmarks.models import SUBJECTS
from benchmarks.pictures import step_time
from benchmarks.step_time.summaries import Contestant, Summary, Verdict, cluster_size, ordered


def verdicts(saved: list[Summary]) -> Table:
    """Auto against the best peer, a line a cell."""
    shown = Table(title="auto against the best peer", title_justify="left")
    for heading in ("model", "cluster", "rate", "best peer"):
        shown.add_column(heading)
    for heading in ("link ÷ step", "peer ÷ auto", "wanted"):
        shown.add_column(heading, justify="right")
    shown.add_column("")
    for row in _verdicts(saved):
        shown.add_row(*row)
    return shown


def _verdicts(saved: list[Summary]) -> list[tuple[str, ...]]:
    judged = [(cell, cell["verdict"]) for cell in ordered(saved)]
    return [_verdict(cell, verdict) for cell, verdict in judged if verdict is not None]


def _verdict(cell: Summary, judged: Verdict) -> tuple[str, ...]:
    figures = (f"{judged['share']:.2f}", f"{judged['ratio']:.2f}", f"{judged['wanted']:.2f}")
    where = (cell["model"], cluster_size(cell), rate_text(cell["rate"]), judged["peer"])
    return (*where, *figures, "met" if judged["met"] else "missed")


# -- the page --------------------------------------------------------------------------------------
PREFACE = """\
# Step times on an emulated cluster

Written by `python -m benchmarks.step_time --docs docs/benchmarks.md` from
`benchmarks/step_time/summaries.json`, which has the command, date, machine and load of every cell;
do not edit.

A node is a network namespace of one machine, whose link `tc` limits. All contestants train the same
model on the same batches, in float32, with one thread a rank, and take turns step by step. A step
is forward, backward and AdamW; its time is the slowest rank's. A contestant whose loss or first
gradient is more than 1e-4 off the single device's is out. HSDP is FSDP2 within a node and a sum
between nodes.
"""

RATIOS = """\
## auto against the best peer

"1.70 DDP": DDP was the best peer, and its step took 1.70 times as long as auto's in the same round
(median over the rounds).
"""


def write(saved: list[Summary], page: Path) -> None:
    """The page, and its picture in images/ beside it."""
    draw(saved, page.parent / "images")
    lines = [PREFACE, "![steps of peers and of autopar](images/step-time.svg)\n"]
    lines += [*_ratio_lines(saved), "", _provenance(saved)]
    lines += ["\n## Seconds a step: median (least–most)"]
    for model, of_model in groupby(ordered(saved), key=lambda cell: cell["model"]):
        lines += [f"\n### {model}, {SUBJECTS[model].why}"]
        for size, of_size in groupby(of_model, key=cluster_size):
            lines += ["", *_matrix(size, list(of_size))]
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


def draw(saved: list[Summary], folder: Path) -> None:
    """The picture of these cells, as step-time.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "step-time.svg").write_text(step_time.picture(saved), encoding="utf-8")


def _model_and_size(cell: Summary) -> tuple[str, str]:
    return cell["model"], cluster_size(cell)


def _ratio_lines(saved: list[Summary]) -> list[str]:
    """A line a model and cluster, a column a rate."""
    rates = sorted({cell["rate"] or float("inf") for cell in saved})
    texts = [rate_text(None if rate == float("inf") else rate) for rate in rates]
    rows = [("model", "cluster", *texts)]
    for (model, size), group in groupby(ordered(saved), key=_model_and_size):
        by_rate = {rate_text(cell["rate"]): _ratio(cell["verdict"]) for cell in group}
        rows.append((model, size, *(by_rate.get(text, "") for text in texts)))
    return [RATIOS, *markdown(rows)]


def _ratio(judged: Verdict | None) -> str:
    if judged is None:
        return ""
    return f"{judged['ratio']:.2f} {judged['peer']}"


def markdown(rows: list[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


def _matrix(size: str, saved: list[Summary]) -> list[str]:
    """A line a contestant, a column a rate, of a cluster of this size."""
    names = list(dict.fromkeys(t["name"] for cell in saved for t in cell["contestants"]))
    rows = [(size, *(rate_text(cell["rate"]) for cell in saved))]
    for name in names:
        by_cell = ({t["name"]: t for t in cell["contestants"]}.get(name) for cell in saved)
        rows.append((name, *(_entry(timed) for timed in by_cell)))
    reasons = {t["name"]: t["reason"] for c in saved for t in c["contestants"] if t["reason"]}
    below = [f"- {name}: {reason}" for name, reason in reasons.items()]
    return [*markdown(rows), *([""] if below else []), *below]


def _entry(timed: Contestant | None) -> str:
    if timed is None:
        return ""
    spread = timed["seconds"]
    if spread is None:
        return timed["reason"].partition(":")[0]
    return f"{spread['median']:.3f} ({spread['least']:.2f}–{spread['most']:.2f})"


def _provenance(saved: list[Summary]) -> str:
    """When the cells were timed, and on what."""
    days = sorted(cell["date"].split()[0] for cell in saved)
    machines = "; ".join(dict.fromkeys(cell["machine"] for cell in saved))
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    return f"Timed on {when}. Machines: {machines}."
