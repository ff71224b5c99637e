"""A sum of a few rows of a CPU's memory by torch's reduction, and row by row added to the first.

    python -m benchmarks.step_time.rows

Two ways to add up what gloo's reduce-scatters bring (`passes/overlap/reinplace.py`), on one thread,
in turns, medians. They give the same bits, or this says so and ends with 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor


def reduced(rows: Tensor) -> Tensor:
    return rows.sum(0)


def added(rows: Tensor) -> Tensor:
    """Writes to rows[0]."""
    total, *others = rows
    for other in others:
        total.add_(other)
    return total


def seconds(run: Callable[[Tensor], Tensor], rows: Tensor, cold: Tensor) -> float:
    """Of one sum of rows that are in no cache."""
    cold.add_(1)
    start = time.perf_counter()
    run(rows)
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 3, 4, 8])
    parser.add_argument("--kilobytes", type=int, nargs="+", default=[64, 1024, 16384], help="a row")
    parser.add_argument("--pairs", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cold = torch.zeros(1 << 23)
    table = Table("rows", "KB a row", "reduction ms", "added ms", "reduction ÷ added", "same bits")
    alike = True
    for count in options.rows:
        for kilobytes in options.kilobytes:
            rows = torch.randn(count, kilobytes << 8)
            same = torch.equal(reduced(rows), added(rows.clone()))
            pairs = [
                (seconds(reduced, rows, cold), seconds(added, rows, cold))
                for _ in range(options.pairs)
            ]
            reducing, other = (1e3 * statistics.median(taken) for taken in zip(*pairs, strict=True))
            ratio = statistics.median(a / b for a, b in pairs)
            cells = (f"{reducing:.3f}", f"{other:.3f}", f"{ratio:.2f}", str(same))
            table.add_row(str(count), str(kilobytes), *cells)
            alike &= same
    Console(highlight=False).print(table)
    return int(not alike)


if __name__ == "__main__":
    sys.exit(main())
