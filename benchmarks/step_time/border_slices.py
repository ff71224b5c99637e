"""What slices of the tensors between two stages gain, on real ranks.

    python -m benchmarks.cluster --nodes 2 --ranks-per-node 2 --rate 400mbit -- \
        python -m benchmarks.step_time.border_slices

Two stages, each tensor parallel on the ranks of a node, train the GPT of step_time. Ranks of a
stage hold the same residual stream: they send it whole, both, or a slice of it each. The two run
in turns within one process group; printed are the median seconds of a step, of the slowest rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.runtime.calibrate_on_ranks import calibrate_on_ranks
from benchmarks.models import SUBJECTS, Subject

LAYOUT = autopar.Stages(2, "megatron")


def pair(
    subject: Subject, world: autopar.World, microbatches: int
) -> dict[str, autopar.ParallelModule]:
    """The model with border tensors in slices, and whole."""
    model, (batch,) = subject.model(), subject.batches(1)
    sliced = autopar.parallelize(model, world, batch, layout=LAYOUT, microbatches=microbatches)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        sliced.plan.save(file)
        plan = autopar.Plan.load(file)
    assert plan.slices_borders, "slices are modelled to be slower here"
    plan = dataclasses.replace(plan, slices_borders=False)
    return {"slices": sliced, "whole": autopar.apply(model, plan, batch)}


def seconds(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Seconds of a step on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    module(*batch).backward()
    taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="gpt", choices=SUBJECTS)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--calibrate", type=float, default=45.0, help="seconds")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    subject = SUBJECTS[options.model]
    world = calibrate_on_ranks(lambda: (subject.model(), subject.batches(1)[0]), options.calibrate)
    modules = pair(subject, world, options.microbatches)
    taken: dict[str, list[float]] = {name: [] for name in modules}
    for batch in subject.batches(options.steps + 1):
        for name, module in modules.items():
            taken[name].append(seconds(module, batch))
    if dist.get_rank() == 0:
        for name, own in taken.items():
            modelled = modules[name].plan.seconds
            print(f"{name:8} {statistics.median(own[1:]):.3f} s (modelled {modelled:.3f} s)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
