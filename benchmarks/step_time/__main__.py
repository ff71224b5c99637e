"""Step time on an emulated cluster: autopar against what people use.

    python -m benchmarks.step_time --quick
    python -m benchmarks.step_time --docs docs/benchmarks.md

A cell is a model on nodes × ranks at a rate. Its contestants take turns within one process group;
one whose loss or gradient differs from the single device's is disqualified. Figures go to
OUT/results.json as they come, cell by cell; a cell that is run again replaces its older figures.

--docs adds summaries of OUT's cells to summaries.json, of each cell the newest, and writes page and
picture from that file alone: it is committed, OUT is not. So a run needs no more than
the cells that the page lacks: `--missing --docs docs/benchmarks.md`.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cluster import (
    Failed,
    Shape,
    Unavailable,
    missing,
    rate_text,
    read_rate,
    read_shape,
    stop_on_signals,
)
from benchmarks.models import SUBJECTS, TIMED
from benchmarks.step_time import cells, summaries
from benchmarks.step_time import pages as step_pages
from benchmarks.step_time.cells import Cell, Settings
from benchmarks.step_time.peers import PEERS

RATES = ("100mbit", "400mbit", "2gbit", "unlimited")
SHAPES = ("2x2", "4x1", "2x4")
LAYOUTS = ("auto", "ddp", "fsdp", "megatron", "megatron-sp", "atp", "4d", "3d", "2.5d")
OWN = tuple(
    f"autopar {layout}" for layout in (*LAYOUTS, "auto+waiting", "ddp+waiting", "auto+stages")
)
EVERY = (*PEERS, *OWN)
# Measured once on a quiet machine of two cores, without an optimizer: 2×2, the GPT.
EARLIER = {
    "200mbit": {"DDP": 4.6, "FSDP2": 9.0, "tensor": 7.7, "FSDP2 × tensor": 8.1},
    "1gbit": {"DDP": 1.37, "FSDP2": 2.35, "tensor": 2.50, "FSDP2 × tensor": 2.39},
    "5gbit": {"DDP": 0.87, "FSDP2": 1.23, "tensor": 1.51, "FSDP2 × tensor": 1.35},
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=SUBJECTS, default=TIMED)
    add("--shapes", nargs="+", default=SHAPES, help="nodes x ranks a node")
    add("--rates", nargs="+", default=RATES, help="of each node's link")
    add("--contestants", nargs="+", choices=EVERY, metavar="NAME", help=", ".join(EVERY))
    add("--steps", type=int, default=5, help="timed ones; at least 15 where the link is unlimited")
    add("--warmups", type=int, default=2)
    add("--timeout", type=float, default=1800.0, help="seconds a cell (default: 1800)")
    add("--quick", action="store_true", help="the GPT, 2x2 at 1gbit, a few layouts, three steps")
    add("--earlier", action="store_true", help="the peers' row that was measured before, again")
    add("--calibrate", type=float, default=90.0, help="seconds; 0: the world is written by hand")
    add("--missing", action="store_true", help="only the cells that neither OUT nor the page has")
    add("--worlds", type=Path, metavar="DIR", help="calibrated worlds: used if there, else left")
    add("--trace", default="", metavar="DIR", help="also a profile of a step of each contestant")
    add("--out", type=Path, default=Path("out/step_time"))
    add("--docs", type=Path, metavar="FILE", help="add OUT to the page and its picture")
    add(
        "--summaries",
        type=Path,
        default=summaries.COMMITTED,
        metavar="FILE",
        help="what the page is of",
    )
    add("--no-run", action="store_true", help="only show what OUT has")
    options = parser.parse_args(arguments)
    if options.quick:
        options.models, options.shapes, options.rates = ["gpt"], ["2x2"], ["1gbit"]
        options.contestants = options.contestants or (*PEERS, *OWN[:5])
        options.steps, options.warmups = 3, 1
    if options.earlier:
        options.models, options.shapes, options.rates = ["gpt"], ["2x2"], list(EARLIER)
        options.contestants = [name for name in PEERS if name != "HSDP"]
    options.contestants = tuple(options.contestants or EVERY)
    try:
        sizes = [read_shape(shape) for shape in options.shapes]
        rates = [read_rate(rate) for rate in options.rates]
        options.cells = [
            (model, Shape(*size, rate))
            for model, size, rate in itertools.product(options.models, sizes, rates)
        ]
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: list[str] | None = None) -> int:
    """1 where a contestant was wrong, a cell failed, or none could be run."""
    options = parse(arguments)
    stop_on_signals()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 130)
    path = options.out / "results.json"
    status = 0
    if not options.no_run:
        statuses = [run(model, shape, options, path, console) for model, shape in options.cells]
        status = max(statuses)
    saved = cells.load(path)["cells"]
    if options.no_run:
        for cell in saved:
            console.print(table(cell))
    if options.earlier:
        console.print(earlier_table(saved))
    short = [summaries.summary(cell) for cell in saved]
    if saved:
        step_pages.draw(short, options.out)
        console.print(step_pages.verdicts(short))
    if not options.docs:
        if options.no_run and not saved:
            console.print(f"[bold red]{path} has no cell[/]: run without --no-run")
            status = 1
        return status
    if not (short or cells.load(options.summaries)["cells"]):
        console.print(
            f"[bold red]no page[/]: neither {path} nor {options.summaries} has a cell; run without "
            "--no-run, with models and contestants of which one can run here",
            soft_wrap=True,
        )
        return 1
    step_pages.write(summaries.merge(options.summaries, short), options.docs)
    return status


def run(model: str, shape: Shape, options: argparse.Namespace, path: Path, console: Console) -> int:
    """One cell, shown and kept."""
    wanted = (model, shape.nodes, shape.ranks_per_node, shape.rate)
    if options.missing and wanted in known(options, path):
        return 0
    if missing() and shape.rate is not None:
        console.print(f"{model}, {shape}: left out: {missing()}; --rates unlimited needs neither")
        return 1
    console.print(f"[bold]{model}, {shape}[/]: {SUBJECTS[model].why}")
    settings = Settings(
        tuple(options.contestants), options.steps, options.warmups, options.timeout,
        options.calibrate, options.trace, _world(options.worlds, shape),
    )  # fmt: skip
    try:
        cell = cells.measured(model, shape, settings)
    except (Failed, Unavailable) as error:
        console.print(f"[bold red]{model}, {shape}: failed[/]: {error}", soft_wrap=True)
        return 1
    cells.keep(path, cell, "python -m benchmarks.step_time " + shlex.join(sys.argv[1:]))
    console.print(table(cell))
    wrong = [t for t in cell["contestants"] if t["reason"].startswith("WRONG")]
    for timed in wrong:
        console.print(f"[bold red]{timed['name']} is disqualified[/]: {timed['reason']}")
    return int(bool(wrong))


def known(options: argparse.Namespace, path: Path) -> set[tuple[Any, ...]]:
    """The keys of the cells that the file has, or the page that is to be written."""
    files = [path, options.summaries] if options.docs else [path]
    return {cells.key(cell) for file in files for cell in cells.load(file)["cells"]}


def _world(folder: Path | None, shape: Shape) -> str:
    """The file of the world that cells of one cluster share; "" for one of their own each."""
    if folder is None:
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    rate = rate_text(shape.rate)
    return str(folder.resolve() / f"{shape.nodes}x{shape.ranks_per_node}-{rate}.json")


HEADINGS = ("step s", "least–most", "fwd+bwd s", "CPU s", "cable MB", "÷ best peer", "modelled s")


def table(cell: Cell) -> Table:
    """Fastest first, those that are out at the end with the reason."""
    peer = cells.best(t for t in cells.standing(cell) if cells.is_peer(t))
    world = "calibrated" if cell["calibrated"] else "by hand"
    caption = (
        f"medians of {cell['steps']} steps; a step's time is the slowest rank's; cable: sent by "
        f"the busiest node; load average before {cell['load']:.1f}; world {world}: {cell['world']}"
    )
    shown = Table(title=cells.title(cell), title_justify="left", caption=caption)
    shown.add_column("contestant")
    for heading in HEADINGS:
        shown.add_column(heading, justify="right")
    shown.add_column("mesh or reason", overflow="fold")
    for timed in sorted(cells.standing(cell), key=cells.median):
        shown.add_row(*row(timed, peer))
    for timed in cell["contestants"]:
        if timed["reason"]:
            shown.add_row(timed["name"], *[""] * len(HEADINGS), timed["reason"])
    return shown


def row(timed: dict[str, Any], peer: dict[str, Any] | None) -> tuple[str, ...]:
    seconds = timed["seconds"]
    return (
        timed["name"],
        f"{cells.median(timed):.3f}",
        f"{min(seconds):.2f}–{max(seconds):.2f}",
        f"{cells.median(timed, 'forward_backward'):.3f}",
        f"{cells.median(timed, 'cpu_seconds'):.2f}",
        f"{cells.median(timed, 'cable_bytes') / 1e6:.1f}",
        "" if peer is None else f"{1 / cells.paired(timed, peer):.2f}",
        f"{timed['modelled']:.3f}" if timed["modelled"] else "",
        timed["mesh"],
    )


def earlier_table(saved: list[Cell]) -> Table:
    """The peers' forward and backward now and as it was measured before."""
    shown = Table("rate", "contestant", title="The row that was measured before, again")
    for heading in ("then s", "now s", "now ÷ then", "load"):
        shown.add_column(heading, justify="right")
    for rate, row_of_rate in EARLIER.items():
        cell = next((c for c in saved if cells.key(c) == ("gpt", 2, 2, read_rate(rate))), None)
        for timed in cell["contestants"] if cell else ():
            then, now = row_of_rate.get(timed["name"]), cells.median(timed, "forward_backward")
            if cell and then:
                figures = (f"{then:.2f}", f"{now:.2f}", f"{now / then:.2f}", f"{cell['load']:.1f}")
                shown.add_row(rate, timed["name"], *figures)
    return shown


if __name__ == "__main__":
    sys.exit(main())
