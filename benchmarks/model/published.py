"""Published throughputs of dense models, beside what the cost model says of the same runs.

    python -m benchmarks.model.published [--rows FILE] [--json FILE] [--only WORD]

A row of FILE is one run: the model's sizes, the GPUs, how they were laid out, what was reported.
For each the model is built by its sizes (on meta, with two numbers of layers: a step grows by the
same seconds with every further one), its layout is forced, and the modelled tokens/s stand beside
the published ones. No constant is fitted to a row: they are those of autopar/world/machines.py.

A run in micro-batches is so many steps of one, and one step of the optimizer. Model FLOPs are
counted as all of these sources do: 6 a parameter and 12 · layers · width · sequence a token.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

import autopar
from autopar import Grid4D, World
from autopar.cost.memory import Recompute
from autopar.tools.decoders import Gpt, Llama, Sizes
from autopar.world import Device
from autopar.world.gpu_kernel_rates import FLASH_2_ON_A100, FLASH_2_ON_H100, attention_points
from autopar.world.gpus import GPUS, known
from autopar.world.machines import card_a_rank, nvlink

ROWS = Path(__file__).with_name("published.csv")
LAYERS = (2, 4)  # that are planned; the others are extrapolated
NODE = 8  # GPUs
NETWORK_BYTES_PER_S = {"A100": 25e9, "V100": 12.5e9}  # a GPU's card; others have one of 400 Gb/s
# llm-foundry's script of these benchmarks takes FlashAttention in Triton. FlashAttention-2's paper
# (arXiv 2307.08691, section 4.1) gives 1.3 to 2.5 times its speed: their geometric mean.
TRITON_SLOWER = (1.3 * 2.5) ** 0.5
MOST = 6  # rows: a source with as many has its tau judged


@dataclass(frozen=True)
class Run:
    """A published run. `micro`: samples of a rank in one micro-batch; `parts`: micro-batches of a
    step; `shards`: how its weights are sharded (see _shards); `reduced_in`: the dtype in which
    gradients are summed, "" for their own.
    """

    source: str
    model: str
    sizes: Sizes
    sequence: int
    batch: int
    gpus: int
    gpu: str
    tensor: int
    shards: str
    micro: int
    parts: int
    recompute: Recompute
    reduced_in: str
    metric: str
    value: float

    @property
    def flops_per_token(self) -> float:
        """The model's FLOPs for one token, forward and backward."""
        return 6.0 * parameters(self.sizes) + 12.0 * self.sizes.layers * (
            self.sizes.width * self.sequence
        )

    @property
    def device(self) -> Device:
        return GPUS[self.gpu]

    @property
    def published(self) -> float:
        """The published tokens/s of all GPUs."""
        peak = self.gpus * self.device.rate(torch.bfloat16)
        match _metric(self.metric):
            case "mfu":
                return self.value / 100 * peak / self.flops_per_token
            case "tflops":
                return self.value * 1e12 * self.gpus / self.flops_per_token
            case "tokens/gpu":
                return self.value * self.gpus
            case "seconds":
                return self.batch * self.sequence / self.value
            case "samples":
                return self.value * self.sequence
        return self.value

    def mfu(self, tokens_per_s: float) -> float:
        """Return so many tokens/s as a fraction of the peak of all GPUs."""
        return tokens_per_s * self.flops_per_token / self.gpus / self.device.rate(torch.bfloat16)


def _metric(name: str) -> str:
    """Return which of the figures a source's name means.

    >>> [_metric(name) for name in ("MFU %", "TFLOP/s/GPU", "tokens/s/GPU", "tokens/s")]
    ['mfu', 'tflops', 'tokens/gpu', 'tokens']
    """
    low = name.lower()
    if "mfu" in low:
        return "mfu"
    if "flop" in low:
        return "tflops"
    if "token" in low or re.search(r"\btps\b|\bwps\b", low):
        return "tokens/gpu" if "gpu" in low or "device" in low else "tokens"
    if "sample" in low or "sequences" in low:
        return "samples"
    return "seconds"


class Rated(NamedTuple):
    """A run with its modelled tokens/s; `why` it has none."""

    run: Run
    modelled: float
    why: str = ""

    @property
    def ratio(self) -> float:
        return self.modelled / self.run.published


# -- reading ---------------------------------------------------------------------------------------
def read(path: Path) -> list[tuple[Run, str]]:
    """Return the runs of a file, each with the reason why it cannot be modelled, or ""."""
    with path.open(encoding="utf-8", newline="") as file:
        return [_run(row) for row in csv.DictReader(file)]


def _run(row: dict[str, str]) -> tuple[Run, str]:
    sharding = row["sp/fsdp"]
    gpus, batch = int(row["gpus"]), int(row["global_batch"])
    tensor = int(row["tp"] or 1)
    samples = max(1, batch * tensor // gpus)  # of a rank, in a step
    micro, parts = _number("mbs", sharding), _number("accum", sharding)
    parts = parts or max(1, samples // (micro or samples))
    sizes = _sizes(row)
    run = Run(
        row["source"], row["model"], sizes, int(row["seq"]), batch, gpus,
        _gpu(row["gpu_type"]), tensor, _shards(sharding), micro or max(1, samples // parts), parts,
        _recompute(row), _reduced_in(row["dtype"]), row["reported_metric"],
        float(row["value"]),
    )  # fmt: skip
    return run, _unmodelled(row)


def _unmodelled(row: dict[str, str]) -> str:
    """Return why a row cannot be held against the model."""
    if not (row["dp"] or row["tp"] or row["sp/fsdp"]):
        return "no parallel sizes"
    for name, what in (("pp", "a pipeline"), ("cp", "context parallelism"), ("ep", "experts")):
        if int(row[name] or 1) > 1:
            return what
    return "fp8" if "8" in row["dtype"] else ""


def _reduced_in(dtype: str) -> str:
    """Return the dtype in which gradients are summed, "" for their own: under FSDP's mixed
    precision, as llm-foundry sets it for "amp_bf16", that is float32.
    """
    return "float32" if dtype.startswith("amp") else ""


def _number(name: str, text: str) -> int:
    """Return the number after a name, as 8 in "mbs8"; 0 where there is none."""
    match = re.search(rf"{name}\s*=?\s*(\d+)", text)
    return int(match[1]) if match else 0


def _recompute(row: dict[str, str]) -> Recompute:
    name: Recompute
    for name in get_args(Recompute):
        if name == (row["recompute"] or "none"):
            return name
    raise ValueError(f"{row['source']} recomputes {row['recompute']!r}")


def _shards(text: str) -> str:
    """Return how weights are sharded: "full" gathers them again in the backward, "grad" keeps what
    was gathered, "" does not shard them.
    """
    low = text.lower()
    if re.search(r"grad_op|zero-?2|_zero2", low):
        return "grad"
    return "full" if re.search(r"full|fsdp|zero|hybrid|hsdp", low) else ""


def _gpu(name: str) -> str:
    """Return the name in GPUS of a source's name such as "a100_40gb"."""
    words = re.sub(r"[_-]+", " ", name.upper())
    if "A100" in words:
        return "A100" if "40" in words else "A100-SXM4-80GB"
    return known(words) or "H100"


def _sizes(row: dict[str, str]) -> Sizes:
    width, heads = int(row["hidden"]), int(row["heads"])
    gated = re.search(r"llama|mistral|qwen|gemma", row["model"], re.IGNORECASE)
    inner = int(row["ffn"] or (0 if gated else 4 * width))
    return Sizes(
        "llama" if gated else "gpt", int(row["layers"]), width, heads, int(row["vocab"]),
        int(row["seq"]), key_heads=int(row["kv_heads"] or heads), inner=inner, tied=not gated,
    )  # fmt: skip


@lru_cache
def parameters(sizes: Sizes) -> int:
    """Return the number of parameters, a tied one once."""
    with torch.device("meta"):
        few, more = (
            sum(p.numel() for p in _model(replace(sizes, layers=count)).parameters())
            for count in (1, 2)
        )
    return few + (sizes.layers - 1) * (more - few)


def _model(sizes: Sizes) -> nn.Module:
    return Llama(sizes) if sizes.family == "llama" else Gpt(sizes)


# -- modelling -------------------------------------------------------------------------------------
def world_of(run: Run) -> World:
    """Return the run's GPUs on nodes of eight, with the network that its source names."""
    inside = min(NODE, run.gpus)
    levels = [nvlink(inside, run.gpu)]
    if run.gpus > inside:
        stated = re.search(r"(\d+) ?Gbps", run.source)  # of a node
        card = int(stated[1]) * 1e9 / 8 / NODE if stated else NETWORK_BYTES_PER_S.get(
            run.gpu.split("-")[0], 50e9
        )  # fmt: skip
        levels.append(replace(card_a_rank(card), ranks=run.gpus // inside))
    return World(tuple(levels), _as_then(run.device), "nccl")


def _as_then(device: Device) -> Device:
    """Return the device with the attention of these runs, where it is known."""
    if device.name.startswith("A100"):
        rates = FLASH_2_ON_A100
    elif device.name in ("H100", "H200"):
        rates = FLASH_2_ON_H100
    else:
        return device
    peak = device.rate(torch.bfloat16) / 1e12
    return replace(device, attention=attention_points(rates, peak, TRITON_SLOWER))


def tokens_per_s(run: Run) -> float:
    """Return the modelled tokens/s of all GPUs."""
    (few, fewer), (many, more) = ((count, _planned(_part(run), count)) for count in LAYERS)
    seconds = [
        a + (run.sizes.layers - few) * (b - a) / (many - few)
        for a, b in zip(fewer, more, strict=True)
    ]
    step, optimizer = seconds
    rows = run.micro * run.parts * run.gpus // run.tensor
    return rows * run.sequence / (run.parts * step + optimizer)


def _part(run: Run) -> Run:
    """Return the run without what its micro-batch does not depend on, so equal ones are planned
    once.
    """
    network = re.search(r"\d+ ?Gbps", run.source)
    return replace(
        run, source=network[0] if network else "", model="", batch=0, parts=1, metric="", value=0.0
    )


@lru_cache
def _planned(run: Run, layers: int) -> tuple[float, float]:
    """Return the seconds of one micro-batch, and of the optimizer's step, of as many layers."""
    ranks = run.gpus // run.tensor
    grid = Grid4D(y=run.tensor, **{"z" if run.shards else "data": ranks})
    recompute: Recompute = (
        "gathers" if run.shards == "full" and run.recompute == "none" else run.recompute
    )
    with torch.device("meta"):
        model = _model(replace(run.sizes, layers=layers)).to(torch.bfloat16)
        tokens = torch.zeros(run.micro * ranks, run.sequence, dtype=torch.long)
    plan = autopar.plan(
        model, world_of(run), (tokens, tokens), "fsdp" if run.tensor == 1 and run.shards else grid,
        memory=1e15, recompute=recompute, smaller=False,
        reduce_dtype=run.reduced_in or None,
    )  # fmt: skip
    optimizer = sum(r.computation or 0.0 for r in plan.rows if r.subgraph == "optimizer")
    return plan.step_seconds - optimizer, optimizer


# -- rating ----------------------------------------------------------------------------------------
def errors(rated: Sequence[Rated]) -> dict[str, float]:
    """Return the mean and the median of |modelled / published - 1|, the mean with its sign, and
    the least tau of a source with enough rows.
    """
    misses = [row.ratio - 1 for row in rated]
    taus = [tau for tau, count in taus_of(rated).values() if count >= MOST]
    return {
        "mean_absolute_error": statistics.fmean(map(abs, misses)),
        "median_absolute_error": statistics.median(map(abs, misses)),
        "bias": statistics.fmean(misses),
        "tau": min(taus) if taus else float("nan"),
    }


def taus_of(rated: Iterable[Rated]) -> dict[str, tuple[float, int]]:
    """Return Kendall's tau of tokens/s within each source, with its number of rows."""
    by_source: dict[str, list[Rated]] = defaultdict(list)
    for row in rated:
        by_source[row.run.source].append(row)
    return {
        source: (kendall([(o.run.published, o.modelled) for o in ones]), len(ones))
        for source, ones in by_source.items()
    }


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Kendall's tau: of all pairs of rows, the share in the same order less the share in the
    opposite one.

    >>> kendall([(1.0, 10.0), (2.0, 30.0), (3.0, 20.0)])
    0.3333333333333333
    """
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in combinations(pairs, 2)]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs) if signs else 1.0


def rate(run: Run, why: str) -> Rated:
    return Rated(run, 0.0, why) if why else Rated(run, tokens_per_s(run))


def table(rated: Iterable[Rated]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, title="tokens/s of all GPUs", title_justify="left")
    for name in ("model", "GPUs", "seq", "micro", "recomputed"):
        shown.add_column(name)
    for name in ("published", "modelled", "ratio", "MFU", "modelled"):
        shown.add_column(name, justify="right")
    for row in rated:
        run = row.run
        mfu = f"{run.mfu(run.published):.1%}"
        figures = (row.why, "", mfu, "") if row.why else (
            f"{row.modelled:,.0f}", f"{row.ratio:.2f}", mfu, f"{run.mfu(row.modelled):.1%}"
        )  # fmt: skip
        what = f"{run.parts} × {run.micro}", run.recompute, f"{run.published:,.0f}"
        shown.add_row(run.model, f"{run.gpus} {run.gpu}", str(run.sequence), *what, *figures)
    return shown


def _summary(rated: Sequence[Rated], figures: dict[str, float]) -> str:
    lines = [
        f"{len(rated)} rows: mean absolute error {figures['mean_absolute_error']:.1%}, median "
        f"{figures['median_absolute_error']:.1%}, bias {figures['bias']:+.1%}"
    ]
    for source, (tau, count) in taus_of(rated).items():
        lines.append(f"tau {tau:.2f} of {count} rows: {source}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=Path, default=ROWS, help="a file as published.csv")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--only", default="", help="rows with this word in source, model or GPU")
    options = parser.parse_args()
    rated: list[Rated] = []
    for run, why in read(options.rows):
        if options.only in f"{run.source} {run.model} {run.gpu}":
            rated.append(rate(run, why))
            print(f"{run.model} on {run.gpus} {run.gpu}", file=sys.stderr, flush=True)
    Console(width=130).print(table(rated))
    usable = [row for row in rated if not row.why]
    if not usable:
        print("none of these rows can be modelled")
        return 1
    figures = errors(usable)
    print(_summary(usable, figures))
    if options.json is not None:
        rows: list[dict[str, Any]] = [
            {**asdict(o.run), "published": o.run.published, "modelled": o.modelled, "why": o.why}
            for o in rated
        ]
        options.json.write_text(json.dumps({**figures, "rows": rows}, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
