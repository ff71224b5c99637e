"""Cells of a benchmark on the emulated cluster: a cluster brought up, ranks run, figures kept."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.cluster import Shape, launch, missing, network, rate_text
from benchmarks.step_time.ranks import Job

Cell = dict[str, Any]  # what the ranks wrote: a Job, and `contestants`, each a Timed
UNLIMITED_STEPS = 15  # there the differences are small


@dataclass(frozen=True)
class Settings:
    """What the cells of a run have in common. `calibrate_s`: for so many seconds the world
    is measured on its cluster first; 0: it is written by hand from the rate. `world`: the file of
    one that several cells share, made by the first of them; "": each has its own. `seen`: at last
    a step of each of autopar's contestants is profiled.
    """

    contestants: tuple[str, ...]
    steps: int = 5
    warmups: int = 2
    timeout: float = 1800.0
    calibrate_s: float = 90.0
    trace: str = ""
    world: str = ""
    seen: bool = False


def measured(model: str, shape: Shape, settings: Settings) -> Cell:
    """One cell. Without root or tc an unlimited one runs on loopback; raises Unavailable for
    others, Failed where a rank fails.
    """
    loopback = bool(missing()) and shape.rate is None
    steps = settings.steps if shape.rate is not None else max(settings.steps, UNLIMITED_STEPS)
    with (
        tempfile.TemporaryDirectory(prefix="autopar-cell-") as folder,
        nullcontext() if loopback else network(shape),
    ):
        world = settings.world or str(Path(folder, "world.json"))
        job = Job(
            model, shape.nodes, shape.ranks_per_node, shape.rate, settings.contestants, world,
            str(Path(folder, "cell.json")), steps, settings.warmups, settings.trace,
            settings.calibrate_s, settings.seen,
        )  # fmt: skip
        job_file = Path(folder, "job.json")
        job_file.write_text(json.dumps(asdict(job)))
        command = [sys.executable, "-m", "benchmarks.step_time.ranks", str(job_file)]
        launch(shape, command, settings.timeout, loopback).check()
        cell = json.loads(Path(job.out).read_text())
    return {**cell, "date": now(), "calibrated": settings.calibrate_s > 0}


# -- where and when --------------------------------------------------------------------------------
def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def machine() -> dict[str, str]:
    """What the figures depend on."""
    facts = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    lines = [line.partition(":")[2].strip() for line in facts.splitlines() if "model name" in line]
    return {
        "cpu": f"{len(lines)} × {lines[0]}" if lines else platform.processor(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


# -- a run's file ----------------------------------------------------------------------------------
def key(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    return cell["model"], cell["nodes"], cell["ranks_per_node"], cell["rate"]


def load(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"cells": []}
    return json.loads(path.read_text(encoding="utf-8"))


def keep(path: Path, cell: Cell, command: str) -> None:
    """Adds a cell to the file at once, in place of an older one like it."""
    run = load(path)
    others = [other for other in run["cells"] if key(other) != key(cell)]
    path.parent.mkdir(parents=True, exist_ok=True)
    cell = {**cell, "command": command, "machine": machine()}
    path.write_text(json.dumps({"cells": [*others, cell]}, indent=1) + "\n")


# -- what they say ---------------------------------------------------------------------------------
def median(timed: dict[str, Any], what: str = "seconds") -> float:
    return statistics.median(timed[what]) if timed[what] else float("nan")


def standing(cell: Cell) -> list[dict[str, Any]]:
    """The contestants that count: made and right."""
    return [timed for timed in cell["contestants"] if stands(timed)]


def stands(timed: dict[str, Any]) -> bool:
    return not timed["reason"] and bool(timed["seconds"])


def is_peer(timed: dict[str, Any]) -> bool:
    return not timed["name"].startswith("autopar")


def best(contestants: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    return min(contestants, key=median, default=None)


def paired(faster: dict[str, Any], slower: dict[str, Any]) -> float:
    """The median over the steps of slower / faster: steps of one round met the same machine."""
    return statistics.median(b / a for a, b in zip(faster["seconds"], slower["seconds"]))


def title(cell: Cell) -> str:
    size = f"{cell['nodes']}×{cell['ranks_per_node']}"
    return f"{cell['model']}, {size} at {rate_text(cell['rate'])}"
