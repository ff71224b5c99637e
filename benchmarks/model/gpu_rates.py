"""What one GPU's kernels take, beside what the cost model says of them.

    python -m benchmarks.model.gpu_rates                       # gpu_rates.json; nothing is run
    python -m benchmarks.model.gpu_rates --measure rates.json  # on the GPU that is here: a minute

Matrix products of a linear (forward, and the two of its backward) in bfloat16 and float32, causal
attention, ops without FLOPs, cross-entropy, AdamW in torch's two forms, and the start of a small
op. A row is the median of three timings by CUDA events over many runs. The table has for each kind
the median, the least and the largest of measured / modelled, for the nominal device of that name.
gpu_rates.json is from an earlier form of this script, which measured a few more shapes; the
constants of world/gpu_kernel_rates.py come from it, so it is kept. `--measure` as it stands ran on
another H100 on 2026-11-27.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from autopar.cost.compute import (
    attention_seconds,
    matmul_seconds,
    optimizer_seconds_of,
)
from autopar.ir.sharding_rule import ATTENTION_BACKWARD, Attends
from autopar.world import Device, World
from autopar.world.gpus import GPUS, known

RECORDED = Path(__file__).with_suffix(".json")
ROWS = (512, 2048, 8192)
WEIGHTS = (
    *((1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192), (4096, 1024), (1024, 4096)),
    *((4096, 14336), (14336, 4096), (8192, 1024), (8192, 3584), (4096, 128256)),
)
ATTENTIONS = ((8, 16, 1024, 64), (4, 32, 2048, 128), (2, 32, 4096, 128), (4, 8, 4096, 128))
Row = dict[str, Any]
Times = dict[str, float]  # milliseconds by part


# -- measuring -------------------------------------------------------------------------------------
def milliseconds(work: Callable[..., object]) -> float:
    for _ in range(3):
        work()
    often = max(3, int(20 / max(_timed(work, 3), 1e-3)))
    return sorted(_timed(work, often) for _ in range(3))[1]


def _timed(work: Callable[[], object], often: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(often):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / often


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=grad)


def products() -> Iterator[Row]:
    for dtype, (k, n), m in itertools.product((torch.bfloat16, torch.float32), WEIGHTS, ROWS):
        if dtype == torch.float32 and k * n > 4096 * 4096:
            continue
        x, w, g = (_random(*size, dtype=dtype) for size in ((m, k), (n, k), (m, n)))
        yield {
            "op": "mm",
            "dtype": str(dtype)[6:],
            "m": m,
            "k": k,
            "n": n,
            "forward": milliseconds(lambda x=x, w=w: x @ w.t()),
            "dx": milliseconds(lambda g=g, w=w: g @ w),
            "dw": milliseconds(lambda g=g, x=x: g.t() @ x),
        }


def attentions() -> Iterator[Row]:
    for b, h, s, d in ATTENTIONS:
        q, k, v = (_random(b, h, s, d, grad=True) for _ in range(3))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        g = torch.randn_like(out)
        forward = milliseconds(
            lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        )
        backward = milliseconds(lambda out=out, of=(q, k, v), g=g: _gradients(out, of, g))
        yield {**_named("attention", b=b, h=h, s=s, d=d), "forward": forward, "backward": backward}


def _gradients(out: torch.Tensor, of: Any, g: torch.Tensor) -> Any:
    return torch.autograd.grad(out, of, g, retain_graph=True)


def others() -> Iterator[Row]:
    for elements in (1 << 16, 1 << 20, 1 << 23, 1 << 26):
        x, y = _random(elements), _random(elements)
        yield {
            **_named("elementwise", elements=elements),
            "add": milliseconds(lambda x=x, y=y: x + y),
            "gelu": milliseconds(lambda x=x: F.gelu(x)),
            "silu": milliseconds(lambda x=x: F.silu(x)),
            "copy": milliseconds(lambda x=x: x.clone()),
        }
    for width in (1024, 4096, 8192):
        x, w, b = _random(8192, width), _random(width), _random(width)
        yield {
            **_named("norm", rows=8192, width=width),
            "layer": milliseconds(lambda x=x, w=w, b=b: F.layer_norm(x, w.shape, w, b)),
            "rms": milliseconds(lambda x=x, w=w: F.rms_norm(x, w.shape, w, 1e-5)),
        }
    for vocabulary in (32768, 128256):
        x = _random(8192, vocabulary)
        t = torch.randint(0, vocabulary, (8192,), device="cuda")
        forward = milliseconds(lambda x=x, t=t: F.cross_entropy(x, t))
        yield {**_named("cross entropy", rows=8192, vocabulary=vocabulary), "forward": forward}


def optimizers() -> Iterator[Row]:
    for elements, dtype in itertools.product((1 << 20, 1 << 24), (torch.bfloat16, torch.float32)):
        parameters = [nn.Parameter(_random(elements, dtype=dtype)) for _ in range(20)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        for fused in (False, True):
            step = torch.optim.AdamW(parameters, fused=fused).step
            facts = {"dtype": str(dtype)[6:], "elements": 20 * elements, "fused": fused}
            yield {"op": "adamw", **facts, "ms": milliseconds(step)}
    x = _random(16)
    yield {"op": "launch", "us": 1e3 * milliseconds(lambda: x.add_(1))}


def _named(op: str, **facts: int) -> Row:
    return {"op": op, "dtype": "bfloat16", **facts}


def measure() -> Row:
    """Return the name of the GPU that is here, torch's version, and the rows."""
    rows = [*products(), *attentions(), *others(), *optimizers()]
    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}


# -- rating ----------------------------------------------------------------------------------------
def modelled(row: Row, device: Device) -> Times:
    """Return the modelled milliseconds of each part of a row that the cost model knows."""
    dtype: torch.dtype = getattr(torch, str(row.get("dtype", "float32")))
    size = dtype.itemsize

    def of_bytes(tensors: float, elements: int) -> float:
        return 1e3 * float(matmul_seconds(0.0, tensors * elements * size, dtype, device))

    match row["op"]:
        case "mm":
            m, k, n = row["m"], row["k"], row["n"]
            moved = float((m * k + k * n + m * n) * size)
            took = 1e3 * float(matmul_seconds(2.0 * m * k * n, moved, dtype, device))
            return dict.fromkeys(("forward", "dx", "dw"), took)
        case "attention":
            b, h, s, d = (row[name] for name in "bhsd")
            attends, moved = Attends(s, d, True), 4.0 * b * h * s * d * size
            flops = attends.flops(b * h * s)
            return {
                part: 1e3
                * float(attention_seconds(times * flops, moved, attends, back, dtype, device))
                for part, times, back in (
                    ("forward", 1.0, False),
                    ("backward", ATTENTION_BACKWARD, True),
                )
            }
        case "elementwise":
            parts = {"add": 3, "gelu": 2, "silu": 2, "copy": 2}
            return {part: of_bytes(count, row["elements"]) for part, count in parts.items()}
        case "norm":
            return dict.fromkeys(("layer", "rms"), of_bytes(2, row["rows"] * row["width"]))
        case "cross entropy":
            return {"forward": of_bytes(1, row["rows"] * row["vocabulary"])}
        case "adamw":
            world = replace(World.of(1), device=device)
            return {"ms": 1e3 * optimizer_seconds_of(row["elements"], size, world)}
        case "launch":
            return {"us": 1e6 * device.launch_s}
    return {}


def ratios(recorded: Row) -> dict[tuple[str, ...], list[float]]:
    """Return measured / modelled of every part of every row, by kind: op, dtype, what else counts,
    and the part.
    """
    device = GPUS[known(recorded["gpu"]) or recorded["gpu"]]
    by_kind: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for row in recorded["rows"]:
        for part, took in modelled(row, device).items():
            size = ""
            if row["op"] == "mm":
                flops = 2 * row["m"] * row["k"] * row["n"]
                size = "under 10 GFLOP" if flops < 1e10 else "10 GFLOP and more"
            if row["op"] == "elementwise":
                size = "under 10 M" if row["elements"] < 1e7 else "10 M and more"
            if row["op"] == "adamw":
                size = "fused" if row["fused"] else "foreach"
            kind = row["op"], str(row.get("dtype", "")), size, part
            by_kind[kind].append(row[part] / took)
    return by_kind


def table(recorded: Row) -> Table:
    title = f"measured / modelled: {recorded['gpu']}, torch {recorded['torch']}"
    shown = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for name in ("op", "dtype", "which", "part"):
        shown.add_column(name)
    for name in ("rows", "median", "least", "largest"):
        shown.add_column(name, justify="right")
    for kind, kind_ratios in ratios(recorded).items():
        figures = statistics.median(kind_ratios), min(kind_ratios), max(kind_ratios)
        shown.add_row(*kind, str(len(kind_ratios)), *(f"{figure:.2f}" for figure in figures))
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--measure", type=Path, help="measure the GPU that is here, and write this")
    parser.add_argument("--recorded", type=Path, default=RECORDED)
    options = parser.parse_args()
    source = options.measure or options.recorded
    if options.measure is not None:
        if not torch.cuda.is_available():
            print("there is no GPU here: leave --measure out to see what is recorded")
            return 1
        options.measure.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    Console(width=110).print(table(json.loads(source.read_text(encoding="utf-8"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
