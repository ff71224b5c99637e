"""Train a GPT on several ranks, its code untouched, and hold every loss against one device.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 examples/train_gpt.py

The model is that of autopar/tools/decoders.py, which knows of no ranks; any other does as well.
The text is real: the source of Python's own standard library on this machine, as bytes. Rank 0
first trains a copy of the model alone; then all ranks train the parallel one on the same batches.
The exit status is 1 where a loss differs by more than 1e-4 relative.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import autopar
from autopar.tools.decoders import Gpt, Sizes, small_weights

LIMIT = 1e-4  # largest relative difference of a loss from the single device's
SIZES = Sizes("gpt", layers=4, width=256, heads=8, vocabulary=256, context=128)  # of bytes
BATCH = 16  # sequences over all ranks together
TEXT_BYTES = 2_000_000

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Run:
    """The loss of every step, in nats, and the median time of a step in s."""

    losses: list[float]
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """A run on one device and the same one on several ranks."""

    single: Run
    several: Run

    @property
    def differences(self) -> list[float]:
        """|several - single| / |single| by step."""
        pairs = zip(self.several.losses, self.single.losses, strict=True)
        return [abs(b - a) / abs(a) for b, a in pairs]

    @property
    def worst(self) -> float:
        """The largest difference; infinite where a loss is not a number."""
        return max(d if d == d else float("inf") for d in self.differences)


def main() -> int:
    options = parse()
    if "RANK" not in os.environ:
        raise SystemExit(f"no ranks are running: use `make demo`, or torchrun:\n\n{__doc__}")
    dist.init_process_group("gloo")
    console = Console(quiet=dist.get_rank() != 0, highlight=False)
    if not console.is_terminal:
        console.width = 118
    status = demo(options, console)
    dist.destroy_process_group()
    return status


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=30, help="AdamW steps (default: 30)")
    parser.add_argument("--layout", default="auto", help="auto or a layout's name (default: auto)")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="where files go")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: at least one step is needed")
    return options


def demo(options: argparse.Namespace, console: Console) -> int:
    """Plan, train alone, train together, compare, leave the files. Returns the exit status."""
    torch.manual_seed(0)
    model = Gpt(SIZES).apply(small_weights)
    text, files = standard_library()
    batches = cut(text, options.steps, SIZES.context)
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    world = autopar.World.detect()
    console.print(f"[bold]world[/]  {world}")
    console.print(f"[bold]text[/]   {len(text) / 1e6:.1f} MB: {files} files of Python's library")
    shape = f"batch {BATCH} × {SIZES.context}"
    console.print(f"[bold]model[/]  GPT, {parameters:.1f} M parameters, {shape}")
    plan = autopar.plan(model, world, batches[0], layout=options.layout)
    console.print(f"[bold]mesh[/]   {plan.mesh}")
    console.print(plan.table())

    single = alone(model, batches, console)
    par = autopar.apply(model, plan)
    several = train(par, batches, console, f"{dist.get_world_size()} ranks")
    if single is None:
        return 0
    comparison = Comparison(single, several)
    console.print(by_step(comparison))
    console.print(speed(comparison, plan))
    save(options.out, plan, par, comparison)
    return close(comparison, parameters, plan, options.out, console)


def standard_library() -> tuple[Tensor, int]:
    """The first 2 MB of the standard library's source, by name: bytes (n,), number of files."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    data, files = bytearray(), 0
    for path in sorted(folder.glob("*.py")):
        if len(data) >= TEXT_BYTES:
            break
        data += path.read_bytes()
        files += 1
    if len(data) < 100_000:
        raise SystemExit(f"{folder} has {len(data)} bytes of Python source, 100000 are needed")
    return torch.frombuffer(data[:TEXT_BYTES], dtype=torch.uint8), files


def cut(text: Tensor, steps: int, context: int) -> list[Batch]:
    """Seeded random windows: for each step tokens and targets, int64 (batch, context)."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(len(text) - context, (steps, BATCH, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)].long()
    return [(w[:, :-1].contiguous(), w[:, 1:].contiguous()) for w in windows]


def alone(model: nn.Module, batches: list[Batch], console: Console) -> Run | None:
    """Rank 0 trains a copy by itself while the other ranks wait, so that it has the cores alone."""
    run = None
    if dist.get_rank() == 0:
        run = train(copy.deepcopy(model), batches, console, "single device, rank 0")
    dist.barrier()
    return run


def train(model: nn.Module, batches: list[Batch], console: Console, title: str) -> Run:
    """One AdamW step a batch: the loop that anybody would write for one device."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, seconds = [], []
    with progress(console, title, len(batches)) as report:
        for tokens, targets in batches:
            started = time.perf_counter()
            optimizer.zero_grad()
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - started)
            report(losses[-1])
    return Run(losses, statistics.median(seconds))


@contextmanager
def progress(console: Console, title: str, steps: int) -> Iterator[Callable[[float], None]]:
    """A bar in a terminal; elsewhere a line each tenth step. Yields what to call with a loss."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=steps, loss=float("nan"))

        def report(loss: float) -> None:
            bar.update(task, advance=1, loss=loss)
            done = int(bar.tasks[task].completed)
            if not console.is_terminal and (done % 10 == 0 or done == steps):
                console.print(f"{title}: step {done} of {steps}, loss {loss:.4f}")

        yield report


def by_step(comparison: Comparison) -> Table:
    """About thirty rows of both losses and their relative difference."""
    single, several = comparison.single.losses, comparison.several.losses
    steps = len(single)
    table = Table("step", f"{dist.get_world_size()} ranks", "single device", "relative difference")
    for column in table.columns:
        column.justify = "right"
    for i in range(0, steps, -(-steps // 30)):
        difference = comparison.differences[i]
        table.add_row(f"{i + 1}", f"{several[i]:.6f}", f"{single[i]:.6f}", f"{difference:.1e}")
    return table


def speed(comparison: Comparison, plan: autopar.Plan) -> str:
    """Time of a step, measured and modelled, and what a rank was planned to hold and send."""
    ranks, cores = dist.get_world_size(), os.cpu_count() or 1
    few = f" with a core for each; {cores} are shared here" if cores < ranks else ""
    return (
        f"a step took {comparison.several.seconds:.3f} s on {ranks} ranks "
        f"(modelled {plan.step_seconds:.3f} s{few}) "
        f"and {comparison.single.seconds:.3f} s on one device; "
        f"a rank sends {plan.comm_bytes / 1e6:.1f} MB a step and holds at most "
        f"{plan.peak_bytes / 1e6:.1f} MB (both planned)"
    )


def save(
    folder: Path, plan: autopar.Plan, par: autopar.ParallelModule, comparison: Comparison
) -> None:
    """plan.json, report.html (open it in a browser), graph.txt (the rewritten graph to read) and
    loss.png.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan.save(folder / "plan.json")
    plan.report(folder / "report.html", "the demo's GPT")
    (folder / "graph.txt").write_text(par.listing(), encoding="utf-8")
    plot(folder / "loss.png", comparison)


def plot(path: Path, comparison: Comparison) -> None:
    """Both losses by step above, their relative difference and the limit below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    single, several = comparison.single.losses, comparison.several.losses
    steps = range(1, len(single) + 1)
    figure, (top, bottom) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1))
    top.plot(steps, single, label="single device", linewidth=4, alpha=0.4)
    top.plot(steps, several, label=f"{dist.get_world_size()} ranks", linewidth=1.2)
    top.set_ylabel("loss (nats a byte)")
    top.legend()
    # Exactly zero has no place on a logarithmic axis: it is drawn a little under float32's step.
    bottom.semilogy(steps, [max(d, 1e-8) for d in comparison.differences], "o", markersize=3)
    bottom.axhline(LIMIT, color="tab:red", linewidth=1, label=f"limit {LIMIT:.0e}")
    bottom.set_ylabel("relative difference")
    bottom.set_xlabel("step")
    bottom.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def close(
    comparison: Comparison, parameters: float, plan: autopar.Plan, folder: Path, console: Console
) -> int:
    """Print what was shown, in one line; 1 where it was not shown."""
    worst, ranks = comparison.worst, dist.get_world_size()
    subject = (
        f"a GPT of {parameters:.1f} M parameters, written for one device, trained "
        f"{len(comparison.differences)} steps on {ranks} ranks (mesh {plan.mesh})"
    )
    word = "[bold red]NOT shown[/]" if worst > LIMIT else "[bold green]shown[/]"
    result = f"the loss differs from one device's by at most {worst:.1e} relative"
    files = f"(limit {LIMIT:.0e}); {folder}/ has plan.json, report.html, graph.txt, loss.png"
    console.print(f"{word}: {subject}; {result} {files}", soft_wrap=True)
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
