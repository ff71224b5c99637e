"""The planned peak of memory of a training step against what an allocator counts on real ranks.

    python -m benchmarks.model.memory [--runs 3] [--only gpt fsdp] [--json memory.json] [--alone]

Every case is a model that `autopar.parallelize` lays out on gloo ranks (on NCCL ranks where there
are GPUs), trained by AdamW for a few steps: forward, backward, step. Counted on every rank is what
the allocator holds above what was there before the model: at the most during a step, and between
two. The rank that held most is shown. `--alone` runs rank 0 by itself, in a group that moves
nothing: so one GPU shows what each of several would hold. On CPUs the count is a hook's
(allocations.c, which gcc compiles), on GPUs torch's own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.model.memory_ranks import Case, Counted

WITHIN = 0.1  # how far measured may be from planned
TIMEOUT_S = 900.0  # of all cases of a model on as many ranks

CASES = (
    Case("gpt", 2, "ddp"),
    Case("gpt", 2, "fsdp"),
    Case("gpt", 4, "megatron"),
    Case("gpt", 4, "megatron-sp", "full"),
    Case("gpt", 4, "4d"),
    Case("gpt", 4, "atp"),
    Case("gpt", 4, "fsdp", "gathers"),
    Case("gpt", 4, "auto", limit=0.8),
    Case("wide", 4, "fsdp"),
    Case("wide", 4, "fsdp", "gathers"),
    Case("wide", 2, "ddp"),
    Case("wide", 4, "fsdp", limit=0.75),
    Case("long", 4, "auto"),
    Case("long", 2, "fsdp", "full"),
    Case("long", 4, "megatron", limit=0.6),
    Case("llama", 4, "auto"),
    Case("llama", 4, "3d"),
    Case("llama", 4, "2.5d"),
    Case("llama", 4, "4d", limit=0.8),
    Case("qwen", 4, "fsdp", "full"),
    Case("qwen", 2, "ddp", limit=0.85),
    Case("gpt2", 4, "megatron"),
    Case("gpt2", 2, "fsdp"),
    Case("bert", 4, "4d"),
    Case("t5", 2, "megatron-sp"),
    Case("vit", 4, "2.5d"),
    Case("vit", 2, "fsdp", limit=0.8),
    Case("gpt", 1, "auto", microbatches=4),
    Case("gpt", 2, "ddp", microbatches=4),
    Case("gpt", 2, "fsdp", microbatches=2),
    Case("gpt", 4, "megatron", microbatches=2),
    Case("wide", 1, "auto", microbatches=2),
    Case("wide", 4, "4d", microbatches=4),
    Case("long", 2, "fsdp", limit=0.6, microbatches="auto"),
    Case("gpt", 2, "ddp", microbatches=4, stages=2),
    Case("gpt", 4, "fsdp", microbatches=4, stages=2),
    Case("gpt", 4, "megatron", microbatches=8, stages=2, schedule="interleaved", rounds=2),
    Case("gpt", 4, "ddp", microbatches=4, stages=4, schedule="gpipe"),
    Case("long", 4, "fsdp", "full", microbatches=2, stages=2),
    Case("llama", 4, "fsdp", microbatches=4, stages=2),
    Case("gpt", 2, "ddp", microbatches=4, stages=2, schedule="zero-bubble"),
    Case("gpt", 4, "fsdp", microbatches=4, stages=2, schedule="zero-bubble", rounds=2),
    Case("llama", 4, "megatron", microbatches=4, stages=2, schedule="zbv", rounds=2),
    Case("llama", 4, "ddp", "full", microbatches=4, stages=2, schedule="zero-bubble"),
    Case("gpt", 2, "fsdp", between=True),
    Case("gpt", 4, "megatron-sp", between=True),
    Case("wide", 4, "fsdp", limit=0.75, between=True),
    Case("llama", 4, "auto", between=True),
    Case("vit", 2, "ddp", between=True),
)


def hook(folder: Path) -> Path:
    """The allocator's hook, compiled."""
    library = folder / "allocations.so"
    source = Path(__file__).with_name("allocations.c")
    flags = ("-O2", "-shared", "-fPIC", "-o", str(library), "-ldl", "-pthread")
    subprocess.run(["gcc", str(source), *flags], check=True)
    return library


def counted(cases: Iterable[Case], alone: bool = False) -> Iterator[Counted]:
    """What each case took, on all of its ranks or on rank 0 `alone`; those of a model on as many
    ranks run in the same processes. Raises RuntimeError where these end early.
    """
    groups: dict[tuple[int, str], list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.ranks, case.model].append(case)
    with tempfile.TemporaryDirectory() as folder:
        for (ranks, _), several in sorted(groups.items()):
            yield from _on_ranks(ranks, several, Path(folder), alone)


def _on_ranks(ranks: int, cases: list[Case], folder: Path, alone: bool) -> list[Counted]:
    cases_file, out = folder / f"cases{ranks}.json", folder / f"counted{ranks}.jsonl"
    cases_file.write_text(json.dumps([asdict(case) for case in cases]), encoding="utf-8")
    out.unlink(missing_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not torch.cuda.is_available():
        env |= {"LD_PRELOAD": str(hook(folder)), "GLOO_SOCKET_IFNAME": "lo"}
    python = (sys.executable, "-W", "ignore")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    script = ("-m", "benchmarks.model.memory_ranks", str(cases_file), str(out), str(ranks * alone))
    done = subprocess.run(
        [*python, *(() if alone else torchrun), *script],
        env=env, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{ranks} ranks ended early:\n{done.stderr[-3000:]}")
    lines = out.read_text(encoding="utf-8").splitlines()
    return [
        Counted(**{**record, "case": Case(**record["case"])}) for record in map(json.loads, lines)
    ]


def is_good(counted: Counted) -> bool:
    """Whether what was planned was held, and so was the limit."""
    within = abs(counted.ratio - 1) <= WITHIN
    return not counted.refused and within and not exceeds(counted)


def exceeds(counted: Counted) -> bool:
    return bool(counted.limit) and counted.measured > counted.limit


def table(rows: Iterable[Counted]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, title="MiB at the peak of a step", title_justify="left")
    for name in ("model", "ranks", "layout", "recomputed"):
        shown.add_column(name)
    for name in ("limit", "planned", "measured", "ratio", "steady", "start", "largest"):
        shown.add_column(name, justify="right")
    for row in rows:
        case = row.case
        sizes = (row.limit, row.planned, row.measured)
        limit, planned, measured = (f"{size / 2**20:.2f}" if size else "" for size in sizes)
        how: str = "auto" if case.limit is not None else case.recompute
        how += f", {case.microbatches} parts" * (case.microbatches != 1)
        if case.stages > 1:
            how += f", stage {row.stage} of {case.stages}, {case.schedule}"
        how += ", evaluated and saved between" * case.between
        ratio = row.refused or f"{row.ratio:.3f}" + ("" if is_good(row) else " !")
        rest = (f"{size / 2**20:.2f}" for size in (row.steady, row.start, row.largest))
        names = case.model, str(case.ranks), case.layout, how
        shown.add_row(*names, limit, planned, measured, ratio, *rest)
    return shown


def _words(case: Case) -> set[str]:
    """What `--only` may name of a case: its values, and which of its switches are on."""
    facts = asdict(case)
    stages = {"stages"} if case.stages > 1 else set()
    return {*map(str, facts.values()), *(n for n, value in facts.items() if value is True)} | stages


def main() -> int:
    """1 where a measured peak is more than a tenth off the planned one or above the limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--only", nargs="+", help="cases with all of these words")
    parser.add_argument("--alone", action="store_true", help="rank 0 by itself, as on one GPU")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    options = parser.parse_args()
    words = set(options.only or ())
    cases = [case for case in CASES if words <= _words(case)]
    rows = []
    for row in (row for _ in range(options.runs) for row in counted(cases, options.alone)):
        rows.append(row)
        print(f"{row.case}: {row.refused or format(row.ratio, '.3f')}", file=sys.stderr, flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(r) for r in rows], indent=1))
    Console(width=130).print(table(rows))
    bad = [row for row in rows if not is_good(row)]
    over = sum(exceeds(row) for row in rows)
    print(f"{len(rows) - len(bad)} of {len(rows)} within {WITHIN:.0%}; {over} above their limit")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
