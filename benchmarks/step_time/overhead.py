"""What the emitted graphs cost beside the same computation written by hand, and DTensor's eager.

    python -m benchmarks.step_time.overhead --pairs 30

Collectives run on unlimited loopback, at worlds of 1 and 2, so that what is left is what the host
does: operators, autograd, waiting. By hand means what a person writes with torch.distributed: the
same collectives, of the same sizes in the same order, around the model's own modules. A step is
forward and backward; the three take turns and ratios are of steps of one round.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.nn import functional as F

import autopar
from autopar.tools import decoders
from autopar.tools.decoders import GptAttention, GptBlock, small_weights, split_heads
from benchmarks.cluster import Shape, launch, stop_on_signals
from benchmarks.step_time import cells
from benchmarks.step_time.peers import split

WANTED = 1.03
HAND, EMITTED, EAGER = "by hand", "emitted", "DTensor eager"


@dataclass(frozen=True)
class Sizes:
    """Of the stack of transformer layers that is timed, and of its batch over all ranks."""

    width: int = 256
    layers: int = 4
    batch: int = 8
    sequence: int = 128


class Core(nn.Module):
    """Attention's heart by itself, (batch, heads, sequence, size), so that it can be wrapped."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class CoredAttention(GptAttention):
    def __init__(self, sizes: decoders.Sizes) -> None:
        super().__init__(sizes)
        self.core = Core()

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (split_heads(y, self.heads) for y in self.qkv(x).chunk(3, dim=-1))
        return self.out(self.core(query, key, value).transpose(1, 2).flatten(2))


class Stack(nn.Module):
    """Transformer layers and a mean square loss: what layouts of a block are compared on."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        block_sizes = decoders.Sizes("gpt", sizes.layers, sizes.width, 8, 256, sizes.sequence)
        self.blocks = nn.ModuleList(GptBlock(block_sizes) for _ in range(sizes.layers))
        for block in self.blocks:
            block.attention = CoredAttention(block_sizes)
        self.apply(small_weights)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """`x` and `target`: (batch, sequence, width)."""
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, target)


# -- by hand: the collectives and their adjoints ---------------------------------------------------
class _SumGradient(torch.autograd.Function):
    """The same value on all ranks; its gradient is summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.contiguous()
        total = total.clone() if total is gradient else total
        dist.all_reduce(total)
        return total


class _Sum(torch.autograd.Function):
    """The sum over the ranks; the gradient is the same on all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class DataByHand(nn.Module):
    """Each rank's part of the batch; every gradient is summed where it is made."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.ranks = model, dist.get_world_size()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        own = {n: _SumGradient.apply(p) for n, p in self.model.named_parameters()}
        place = dist.get_rank()
        x, target = x.chunk(self.ranks)[place], target.chunk(self.ranks)[place]
        loss = torch.func.functional_call(self.model, own, (x, target))
        return _Sum.apply(loss / self.ranks)


class _Columns(nn.Module):
    """A linear's own rows of the weight: its part of the output."""

    def __init__(self, whole: nn.Linear, parts: int) -> None:
        super().__init__()
        ranks, rank = dist.get_world_size(), dist.get_rank()
        weight = whole.weight.detach().unflatten(0, (parts, ranks, -1))[:, rank].flatten(0, 1)
        bias = whole.bias.detach().unflatten(0, (parts, ranks, -1))[:, rank].flatten(0, 1)
        self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(_SumGradient.apply(x), self.weight, self.bias)


class _Rows(nn.Module):
    """A linear's own columns of the weight; outputs are summed, then the bias is added."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        ranks, rank = dist.get_world_size(), dist.get_rank()
        weight = whole.weight.detach().chunk(ranks, dim=1)[rank]
        self.weight = nn.Parameter(weight.clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return _Sum.apply(F.linear(x, self.weight)) + self.bias


def megatron_by_hand(model: nn.Module) -> nn.Module:
    """Columns then rows in attention and feed-forward; norms and residual stream on all ranks."""
    for block in model.get_submodule("blocks").children():
        assert isinstance(block, GptBlock)
        block.attention.heads //= dist.get_world_size()
        block.attention.qkv = _Columns(block.attention.qkv, 3)  # type: ignore[assignment]
        block.attention.out = _Rows(block.attention.out)  # type: ignore[assignment]
        block.up = _Columns(block.up, 1)  # type: ignore[assignment]
        block.down = _Rows(block.down)  # type: ignore[assignment]
    return model


# -- DTensor, eager --------------------------------------------------------------------------------
class ByDTensor(nn.Module):
    """Parameters replicated, the batch sharded: DTensor finds the sums itself. It has no rule for
    the CPU's fused attention: that runs on the local parts.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.get_submodule("blocks").children():
            block.get_submodule("attention").core = _LocalCore()
        self.model = distribute_module(model, self.mesh)
        for p in self.model.parameters():
            p.register_post_accumulate_grad_hook(_summed)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        own = (t.chunk(ranks)[rank] for t in (x, target))
        loss = self.model(*(DTensor.from_local(t, self.mesh, [Shard(0)]) for t in own))
        return loss.redistribute(placements=[Replicate()]).to_local()


def _summed(p: Tensor) -> None:
    """DTensor leaves a gradient as parts of a sum."""
    if isinstance(p.grad, DTensor) and not p.grad.placements[0].is_replicate():
        p.grad = p.grad.redistribute(placements=[Replicate()])


class _LocalCore(Core):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert isinstance(query, DTensor)
        own = (t.to_local() for t in (query, key, value) if isinstance(t, DTensor))
        return DTensor.from_local(super().forward(*own), query.device_mesh, query.placements)


def megatron_by_dtensor(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    return split(model, mesh)


Maker = Callable[[nn.Module], nn.Module]
CASES: dict[str, tuple[Maker, Maker]] = {
    "ddp": (DataByHand, ByDTensor),
    "megatron": (megatron_by_hand, megatron_by_dtensor),
}


# -- on the ranks ----------------------------------------------------------------------------------
def contestants(layout: str, sizes: Sizes, batch: tuple[Tensor, Tensor]) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    model = Stack(sizes)
    if dist.get_world_size() == 1:
        emitted = autopar.parallelize(model, None, batch)
        return {HAND: model, EMITTED: emitted, EAGER: ByDTensor(copy.deepcopy(model))}
    by_hand, eager_maker = CASES[layout]
    return {
        HAND: by_hand(copy.deepcopy(model)),
        EMITTED: autopar.parallelize(model, None, batch, layout=layout),
        EAGER: eager_maker(copy.deepcopy(model)),
    }


def timed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """(seconds of forward and backward on this rank, the loss)."""
    for p in model.parameters():
        p.grad = None
    dist.barrier()
    started = time.perf_counter()
    loss = model(*batch)
    loss.backward()
    seconds = time.perf_counter() - started
    return seconds, float(loss.detach())


def rounds(layout: str, sizes: Sizes, pairs: int, warmups: int = 3) -> dict[str, Any]:
    """Seconds of each by round, the slowest rank's, and its loss. Who begins changes by round."""
    torch.manual_seed(1)
    x, target = torch.randn(2, sizes.batch, sizes.sequence, sizes.width)
    variants = contestants(layout, sizes, (x, target))
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    losses = {}
    names = list(variants)
    for number in range(warmups + pairs):
        for name in names[number % 3 :] + names[: number % 3]:
            taken, losses[name] = timed(variants[name], (x, target))
            slowest = torch.tensor(taken, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if number >= warmups:
                seconds[name].append(float(slowest))
    return {"layout": layout, "ranks": dist.get_world_size(), "seconds": seconds, "losses": losses}


def on_rank(job: dict[str, Any]) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    layouts = CASES if dist.get_world_size() > 1 else ("one device",)
    results = [rounds(layout, Sizes(**job["sizes"]), job["pairs"]) for layout in layouts]
    if dist.get_rank() == 0:
        Path(job["out"]).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


# -- outside ---------------------------------------------------------------------------------------
def ratios(result: dict[str, Any], of: str, over: str) -> list[float]:
    pairs = zip(result["seconds"][of], result["seconds"][over], strict=True)
    return [a / b for a, b in pairs]


def table(results: list[dict[str, Any]], pairs: int) -> Table:
    shown = Table("ranks", "layout", title=f"forward and backward, medians of {pairs} rounds")
    for heading in ("by hand ms", "emitted ÷ by hand", "quartiles", "emitted ÷ DTensor eager", ""):
        shown.add_column(heading, justify="right")
    for result in results:
        to_hand, to_eager = ratios(result, EMITTED, HAND), ratios(result, EMITTED, EAGER)
        low, middle, high = statistics.quantiles(to_hand, n=4)
        met = middle <= WANTED and statistics.median(to_eager) < 1
        shown.add_row(
            str(result["ranks"]), result["layout"],
            f"{1e3 * statistics.median(result['seconds'][HAND]):.1f}", f"{middle:.3f}",
            f"{low:.3f}–{high:.3f}", f"{statistics.median(to_eager):.3f}",
            "met" if met else "missed",
        )  # fmt: skip
    return shown


def wrong(result: dict[str, Any]) -> str:
    """What differs from the loss by hand, in words; "" where nothing does."""
    expected = result["losses"][HAND]
    off = {n: abs(loss - expected) / expected for n, loss in result["losses"].items()}
    named = [f"{name} is {error:.1e} off" for name, error in off.items() if not error <= 1e-5]
    return f"{result['ranks']} ranks, {result['layout']}: {', '.join(named)}" if named else ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--ranks", type=int, nargs="+", default=(1, 2))
    for name, value in asdict(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--timeout", type=float, default=900.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    stop_on_signals()
    results = []
    sizes = {name: getattr(options, name) for name in asdict(Sizes())}
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory(prefix="autopar-overhead-") as folder:
            job = {"sizes": sizes, "pairs": options.pairs, "out": str(Path(folder, "out.json"))}
            extra = {"AUTOPAR_OVERHEAD": json.dumps(job)}
            command = [sys.executable, "-m", "benchmarks.step_time.overhead"]
            launch(Shape(1, ranks), command, options.timeout, loopback=True, extra=extra).check()
            results += json.loads(Path(job["out"]).read_text())
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    console.print(table(results, options.pairs), f"load average {os.getloadavg()[0]:.1f}", sep="\n")
    if options.json:
        facts = {"date": cells.now(), "machine": cells.machine(), "sizes": sizes}
        options.json.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")
    faults = [fault for result in results if (fault := wrong(result))]
    for fault in faults:
        console.print(f"[bold red]WRONG[/]: {fault}")
    return int(bool(faults))


if __name__ == "__main__":
    if "AUTOPAR_OVERHEAD" in os.environ:
        on_rank(json.loads(os.environ["AUTOPAR_OVERHEAD"]))
    else:
        sys.exit(main())
