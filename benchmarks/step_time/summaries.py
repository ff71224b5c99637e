"""What a page keeps of cells: few figures, rounded as it shows them, in summaries.json, which git
has. A cell's raw figures stay where they were taken; what needs its single steps is found here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict

from benchmarks.models import SUBJECTS
from benchmarks.step_time import cells
from benchmarks.step_time.cells import Cell

# Peer ÷ auto that is wanted: limited, unlimited, link-bound, and where the floor of auto is low.
LEAST, NOISE, GAIN, MUCH = 1.0, 0.97, 1.15, 1.3
LOW = 0.65  # of the best peer's floor
COMMITTED = Path(__file__).with_suffix(".json")


class Spread(TypedDict):
    """Of a step's seconds."""

    median: float
    least: float
    most: float


class Contestant(TypedDict):
    """`seconds` is None where `reason` says why it is out."""

    name: str
    reason: str
    seconds: Spread | None


class Verdict(TypedDict):
    """Auto against the best peer: how much faster, how much was asked for, and the best peer's part
    of a step that its bytes need on the cable. `met` is found before the ratio is rounded.
    """

    peer: str
    ratio: float
    wanted: float
    share: float
    met: bool


class Summary(TypedDict):
    """A cell; `verdict` is None where a side of it is missing."""

    model: str
    nodes: int
    ranks_per_node: int
    rate: float | None
    date: str
    load: float
    calibrated: bool
    machine: str
    command: str
    contestants: list[Contestant]
    verdict: Verdict | None


def summary(cell: Cell) -> Summary:
    """Of a cell as `cells.keep` leaves it."""
    facts = cell["machine"]
    return {
        "model": cell["model"],
        "nodes": cell["nodes"],
        "ranks_per_node": cell["ranks_per_node"],
        "rate": cell["rate"],
        "date": cell["date"],
        "load": round(cell["load"], 1),
        "calibrated": cell["calibrated"],
        "machine": f"{facts['cpu']}, {facts['system']}, torch {facts['torch']}",
        "command": cell["command"],
        "contestants": [_contestant(timed) for timed in cell["contestants"]],
        "verdict": verdict(cell),
    }


def _contestant(timed: dict[str, Any]) -> Contestant:
    spread = _spread(timed) if cells.stands(timed) else None
    return {"name": timed["name"], "reason": timed["reason"], "seconds": spread}


def _spread(timed: dict[str, Any]) -> Spread:
    least, most = (round(end(timed["seconds"]), 2) for end in (min, max))
    return {"median": round(cells.median(timed), 3), "least": least, "most": most}


def ordered(saved: Iterable[Summary]) -> list[Summary]:
    """By model, number of ranks, number of nodes and rate; a link without a limit comes last."""

    def place(cell: Summary) -> tuple[float, ...]:
        rate = cell["rate"] if cell["rate"] is not None else math.inf
        nodes, each = cell["nodes"], cell["ranks_per_node"]
        return list(SUBJECTS).index(cell["model"]), nodes * each, nodes, rate

    return sorted(saved, key=place)


def cluster_size(cell: Summary) -> str:
    return f"{cell['nodes']}×{cell['ranks_per_node']}"


# -- auto against the best peer --------------------------------------------------------------------
def verdict(cell: Cell) -> Verdict | None:
    contestants = cells.standing(cell)
    peer = cells.best(t for t in contestants if cells.is_peer(t))
    auto = next((t for t in contestants if t["name"] == "autopar auto"), None)
    if peer is None or auto is None:
        return None
    ratio, wanted = cells.paired(auto, peer), _wanted(cell, auto, peer)
    return {
        "peer": peer["name"],
        "ratio": round(ratio, 2),
        "wanted": wanted,
        "share": round(link_share(cell, peer), 2),
        "met": ratio >= wanted,
    }


def _wanted(cell: Cell, auto: dict[str, Any], peer: dict[str, Any]) -> float:
    if cell["rate"] is None:
        return NOISE
    if floor(cell, auto) <= LOW * floor(cell, peer):
        return MUCH
    return GAIN if link_share(cell, peer) > 0.5 else LEAST


def link_share(cell: Cell, timed: dict[str, Any]) -> float:
    """The part of a step that its bytes need on the busiest cable; 0 where that has no limit."""
    if cell["rate"] is None:
        return 0.0
    return cells.median(timed, "cable_bytes") * 8 / cell["rate"] / cells.median(timed)


def floor(cell: Cell, timed: dict[str, Any]) -> float:
    """Seconds that no overlap can save: of its bytes on the busiest cable, or of its computing on
    the machine's cores, whichever is longer.
    """
    link = link_share(cell, timed) * cells.median(timed)
    return max(link, cells.median(timed, "cpu_seconds") / cell["cores"])


# -- a page's file ---------------------------------------------------------------------------------
def merge(path: Path, added: Iterable[Summary]) -> list[Summary]:
    """What the file has from now on: of each cell the newest, in order of their dates."""
    every: list[Summary] = [*cells.load(path)["cells"], *added]
    newest = {cells.key(cell): cell for cell in sorted(every, key=_date)}
    by_date = sorted(newest.values(), key=_date)
    text = json.dumps({"cells": by_date}, indent=1, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
    return by_date


def _date(cell: Summary) -> str:
    return cell["date"]
