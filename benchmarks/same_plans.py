"""Whether plans are what they were: 12 plans are saved with one version of autopar and held against
those of another. It goes when the house is built.

    python -m benchmarks.same_plans save FOLDER
    python -m benchmarks.same_plans compare FOLDER
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

PAIRS = (
    "gpt2 --world dgx-a100 --ranks 8 --batch 16x1024",
    "gpt2 --world laptop --ranks 4 --batch 8x512",
    "gpt2 --world ethernet-25g --ranks 8 --batch 16x1024",
    "gpt2 --world dgx-a100 --ranks 8 --batch 16x1024 --layout 4d --memory 2GiB",
    "gpt2 --world pcie-4090 --ranks 4 --batch 8x512 --layout 2.5d:q=2,d=1",
    "llama3-8b --world dgx-h100 --ranks 64 --batch 64x4096",
    "llama3-8b --world pcie-4090 --ranks 8 --batch 8x1024",
    "llama3-70b --world dgx-h100 --ranks 128 --batch 128x4096",
    "gpt-5b --world perlmutter --ranks 64 --batch 64x1024",
    "gpt-10b --world frontier --ranks 64 --batch 64x1024 --recompute full",
    "gpt-20b --world alps --ranks 128 --batch 128x1024 --layout fsdp",
    "gpt-5b --world dgx-b200 --ranks 16 --batch 64x1024 --layout megatron-sp",
)


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for number, pair in enumerate(PAIRS):
        path = folder / f"{number}{'' if what == 'save' else '-now'}.json"
        command = [sys.executable, "-m", "autopar", "plan", *pair.split(), "--save", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if what == "save":
            print(pair, "->", done.returncode, flush=True)
        else:
            before = json.loads((folder / f"{number}.json").read_text())
            faults = differing(before, json.loads(path.read_text()), "")
            print(pair, "->", "; ".join(faults[:5]) or "the same", flush=True)


def differing(before: Any, now: Any, place: str) -> list[str]:
    """Where two documents differ by more than rounding."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            fault
            for key in sorted({*before, *now})
            for fault in differing(before.get(key), now.get(key), f"{place}.{key}")
        ]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return [
            fault
            for number, (a, b) in enumerate(zip(before, now))
            for fault in differing(a, b, f"{place}[{number}]")
        ]
    if isinstance(before, float) and isinstance(now, float | int):
        return [] if math.isclose(before, now, rel_tol=1e-9) else [f"{place}: {before} / {now}"]
    return [] if before == now else [f"{place}: {before} / {now}"]


if __name__ == "__main__":
    main()
