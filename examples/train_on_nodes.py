"""Train a GPT on several machines, from the last checkpoint on: what the scripts beside it start.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 --max-restarts 3 \\
        examples/train_on_nodes.py --checkpoints out/nodes --steps 20

It goes on where the run was cut off, whether torchrun started the ranks again or you did, on as
many ranks or on fewer. The text is a made-up one, so that nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

import autopar
from autopar.tools.decoders import Gpt, Sizes, small_weights

SIZES = Sizes("gpt", layers=4, width=256, heads=8, vocabulary=256, context=128)
BATCH = 16  # sequences over all ranks together


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Counting up from a number that hangs on the row: tokens and targets, int64 (context,)."""

    def __init__(self, rows: int = 1024) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        text = (row + torch.arange(SIZES.context + 1)) % SIZES.vocabulary
        return text[:-1], text[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoints", type=Path, required=True, help="a folder all nodes see")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--every", type=int, default=100, help="steps from checkpoint to checkpoint"
    )
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()  # NCCL on GPUs, gloo on CPUs
    train(options)
    dist.destroy_process_group()


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model = Gpt(SIZES).apply(small_weights)
    tokens = torch.zeros(BATCH, SIZES.context, dtype=torch.int64)
    par = autopar.parallelize(model, inputs=(tokens, tokens))
    assert isinstance(par, autopar.ParallelModule)
    optimizer = torch.optim.AdamW(par.parameters(), lr=1e-3)
    loader = par.loader(Text(), shuffle=True, seed=0)
    checkpoints = autopar.Checkpoints(
        options.checkpoints, model=par, optimizer=optimizer, loader=loader
    )
    step = checkpoints.load() or 0
    while step < options.steps:
        for batch in loader:
            optimizer.zero_grad()
            loss = par(*batch)
            loss.backward()
            optimizer.step()
            step += 1
            if step % options.every == 0:
                checkpoints.save(step)
                if dist.get_rank() == 0:
                    print(f"step {step} on {dist.get_world_size()} ranks: loss {loss.item():.4f}")
            if step == options.steps:
                break


if __name__ == "__main__":
    main()
