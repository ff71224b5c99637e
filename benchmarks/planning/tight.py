"""Sixteen calls whose memory is tight, to compare a version with another one.

    python -m benchmarks.planning.tight --json now.json
    python -m benchmarks.planning.tight --json now.json --than benchmarks/planning/tight.json

Twelve layers of Llama-3's 8B and 70B widths are planned for 32 and 256 H100s, a sample of 8192
tokens a rank: first without a limit, then on devices with 1.0, 0.8, 0.6 and 0.5 of that peak, of
which autopar leaves a reserve. Each width and world is a process of its own. A row has the
modelled step, the peak and CPU seconds; where nothing fits, the least that is needed. `--than`
returns 1 where a step is more than 1 % longer than in another file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SHARES = (1.0, 0.8, 0.6, 0.5)  # of the peak of the plan without a limit
WIDTHS, RANKS = ("llama3-8b", "llama3-70b"), (32, 256)
LAYERS, TOKENS = 12, 8192
LONGER = 0.01  # of a step
ENOUGH = 2.0**50  # bytes

Row = dict[str, Any]


def rows(width: str, ranks: int) -> list[Row]:
    """Return the rows of a width on a world: the plan without a limit, then those within it."""
    import torch

    import autopar
    from autopar import World
    from autopar.tools.decoders import Llama
    from autopar.tools.targets import NAMED

    with torch.device("meta"):
        model = Llama(replace(NAMED[width], layers=LAYERS)).to(torch.bfloat16)
    tokens = torch.ones(ranks, TOKENS, dtype=torch.int64, device="meta")
    world = World.preset("dgx-h100", ranks=ranks)
    results: list[Row] = []

    def call(share: float | None, limit: float) -> None:
        start = time.process_time()
        row: Row = {"width": width, "ranks": ranks, "share": share}
        try:
            plan = autopar.plan(model, world, (tokens, tokens), memory=limit, smaller=False)
            row |= {"step": plan.step_seconds, "sum": plan.seconds, "peak": plan.peak_bytes}
        except autopar.PlanError as error:
            row["error"] = str(error).splitlines()[0]
        results.append(row | {"cpu": time.process_time() - start})

    call(None, ENOUGH)
    for share in SHARES:
        call(share, share * results[0]["peak"])
    return results


def longer(now: list[Row], before: list[Row]) -> list[str]:
    """Return a line for every step that is longer than before, or that is no more."""
    known = {(row["width"], row["ranks"], row["share"]): row for row in before}
    lines = []
    for row in now:
        then = known.get((row["width"], row["ranks"], row["share"]), {})
        if "step" in then and row.get("step", float("inf")) > (1 + LONGER) * then["step"]:
            lines.append(f"{row} was {then}")
    return lines


def table(now: list[Row]) -> Table:
    """Return the rows as a table."""
    lines = Table(title="12 layers within a share of the peak without a limit")
    for head in ("width", "ranks", "share", "step ms", "peak GiB", "CPU s"):
        lines.add_column(head, justify="left" if head == "width" else "right")
    for row in now:
        figures = (
            (f"{1e3 * row['step']:.1f}", f"{row['peak'] / 2**30:.2f}")
            if "step" in row
            else (row["error"], "")
        )
        share = "no limit" if row["share"] is None else f"{row['share']:.1f}"
        lines.add_row(row["width"], str(row["ranks"]), share, *figures, f"{row['cpu']:.1f}")
    return lines


def main() -> int:
    """Run the calls, each width and world in a process, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--than", type=Path)
    parser.add_argument("--only", nargs=2, metavar=("WIDTH", "RANKS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(rows(options.only[0], int(options.only[1]))))
        return 0
    now: list[Row] = []
    for width in WIDTHS:
        for ranks in RANKS:
            command = [sys.executable, "-m", "benchmarks.planning.tight", "--only"]
            done = subprocess.run(
                [*command, width, str(ranks)], capture_output=True, text=True, check=True
            )
            now += json.loads(done.stdout.splitlines()[-1])
    Console().print(table(now))
    if options.json:
        options.json.write_text(json.dumps(now, indent=1) + "\n")
    lines = longer(now, json.loads(options.than.read_text())) if options.than else []
    print("\n".join(lines))
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
