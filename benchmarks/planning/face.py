"""What people wait for: `autopar plan …`, whole, in a fresh process, and `parallelize` on ranks.

    python -m benchmarks.planning.face                       # all cells: half an hour of one core
    python -m benchmarks.planning.face gpt2 llama3-8b --json face.json

A cell is a command, started anew: import, trace, search, and what is printed. CPU seconds count all
threads of the process and of its children, the peak is of its resident memory. `wanted` are the
seconds that such a call should take on a quiet core. AUTOPAR_CACHE is not set.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

_DECODER = {  # a transformers decoder of 64 layers, by its sizes
    "model_type": "llama", "hidden_size": 5120, "num_hidden_layers": 64, "vocab_size": 151936,
    "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 25600,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
_TIGHT = {  # a decoder of 48 layers that fits 256 GPUs only if it runs much again, or not at all
    "model_type": "mistral", "hidden_size": 6144, "num_hidden_layers": 48, "vocab_size": 32768,
    "num_attention_heads": 48, "num_key_value_heads": 8, "intermediate_size": 16384,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
_RANKS = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
import autopar
from autopar.tools.targets import Batch, resolve
start = time.process_time()
target = resolve("gpt2", Batch(8, 64), 8, real=True)
autopar.parallelize(target.model, inputs=target.inputs)
if dist.get_rank() == 0:
    print(f"seconds {time.process_time() - start}")
dist.destroy_process_group()
"""


class Cell(NamedTuple):
    """A command that people wait for, the CPU seconds that it should take, and the exit status with
    which it ends: 2 where it refuses.
    """

    name: str
    command: tuple[str, ...]
    wanted: float
    status: int = 0


def cells(folder: Path) -> list[Cell]:
    """Return the cells; the files that they read are written to `folder`."""
    config, tight = (folder / name / "config.json" for name in ("decoder", "tight"))
    for path, sizes in ((config, _DECODER), (tight, _TIGHT)):
        path.parent.mkdir()
        path.write_text(json.dumps(sizes))
    script = folder / "ranks.py"
    script.write_text(_RANKS)
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script))
    return [
        Cell("gpt2 on 8", _plan("gpt2", 8, "64x1024"), 8),
        Cell("llama3-8b on 64", _plan("llama3-8b", 64, "64x4096"), 15),
        Cell("decoder of 64 layers on 512", _plan(str(config), 512, "256x4096"), 60),
        Cell("48 layers on 256, tight", _plan(str(tight), 256, "256x4096", "--anyway"), 60),
        Cell("48 layers, refused", _plan(str(tight), 256, "256x4096", "--memory", "2GiB"), 30, 2),
        Cell("llama3-70b on 1024", _plan("llama3-70b", 1024, "1024x4096"), 60),
        Cell("llama3-405b on 16384", _plan("llama3-405b", 16384, "16384x4096"), 120),
        Cell("parallelize on 4 gloo ranks", ranks, 3),
    ]


def _plan(target: str, ranks: int, batch: str, *more: str) -> tuple[str, ...]:
    options = ("--world", "dgx-h100", "--ranks", str(ranks), "--batch", batch)
    return ("-m", "autopar", "plan", target, *options, *more)


def measure(cell: Cell) -> dict[str, float | str]:
    """Return CPU seconds, wall seconds and peak GiB of one run of a cell, in a process that has no
    other child.
    """
    options = {name: value for name, value in os.environ.items() if name != "AUTOPAR_CACHE"}
    options |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *cell.command], env=options, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != cell.status:
        return {"cell": cell.name, "error": done.stderr.strip()[-300:]}
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    for line in done.stdout.splitlines():
        if line.startswith("seconds "):  # of rank 0, beyond the imports
            cpu = float(line.split()[1])
    return {
        "cell": cell.name,
        "cpu_seconds": cpu,
        "wall_seconds": time.perf_counter() - start,
        "peak_gib": after.ru_maxrss / 2**20,
        "wanted": cell.wanted,
    }


def table(rows: list[dict[str, float | str]]) -> Table:
    """Return the rows as a table."""
    lines = Table(title="a call in a fresh process")
    for head in ("call", "CPU s", "wanted", "wall s", "peak GiB"):
        lines.add_column(head, justify="left" if head == "call" else "right")
    for row in rows:
        if "error" in row:
            lines.add_row(str(row["cell"]), str(row["error"]))
            continue
        figures = (f"{row[n]:.1f}" for n in ("cpu_seconds", "wanted", "wall_seconds", "peak_gib"))
        lines.add_row(str(row["cell"]), *figures)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="beginnings of the names of cells; none: all")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wanted = tuple(options.names) or ("",)
        chosen = [cell for cell in cells(Path(folder)) if cell.name.startswith(wanted)]
        rows = [measure(cell) for cell in chosen]
    Console().print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(not rows or any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
