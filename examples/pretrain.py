"""Pretrain a Llama on the bytes of text files, and go on where a run was cut off.

    torchrun --standalone --nproc-per-node 4 examples/pretrain.py README.md docs/*.md
    torchrun --standalone --nproc-per-node 2 examples/pretrain.py README.md docs/*.md

The second command goes on from the last checkpoint of the first, on half the ranks. Needs
transformers. `train` is plain training code: it runs a model of one device as it is.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

ROWS, LENGTH, PARTS = 8, 64, 4  # a step adds the gradients of 4 batches of 8 rows
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)


class Text(Dataset[Tensor]):
    """Rows of LENGTH bytes."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.bytes = b"\n".join(file.read_bytes() for file in files)

    def __len__(self) -> int:
        return len(self.bytes) // LENGTH

    def __getitem__(self, row: int) -> Tensor:
        return torch.tensor(list(self.bytes[row * LENGTH : (row + 1) * LENGTH]))


def split(text: Text) -> tuple[Subset[Tensor], Subset[Tensor]]:
    """Return the rows to train on and those to validate with, which are no whole batches."""
    last = len(text) - 5 * ROWS - 3
    return Subset(text, range(last)), Subset(text, range(last, len(text)))


def train(
    model: nn.Module,
    training: Iterable[Tensor],
    validation: Iterable[Tensor],
    steps: int,
    bfloat16: bool,
    checkpoints: Callable[..., autopar.Checkpoints] | None = None,
    report: Callable[[str], Any] = print,
) -> None:
    """Train for so many steps of AdamW, each on PARTS batches, and validate every 20 steps."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=60)
    saved = checkpoints and checkpoints(model=model, optimizer=optimizer, schedule=schedule)
    start = (saved and saved.load()) or 0
    device = next(model.parameters()).device.type
    cast = torch.autocast(device, torch.bfloat16, enabled=bfloat16)
    batches = itertools.chain.from_iterable(itertools.repeat(training))
    for step in range(start + 1, steps + 1):
        losses = []
        for ids in itertools.islice(batches, PARTS):
            with cast:
                loss = model(input_ids=ids, labels=ids).loss / PARTS
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        report(f"step {step} loss {sum(losses).item():.7f}")
        if step % 20 == 0:
            model.eval()
            with torch.no_grad(), cast:
                scores = [model(input_ids=ids, labels=ids).loss for ids in validation]
            model.train()
            report(f"step {step} validation {torch.stack(scores).mean().item():.7f}")
            if saved:
                saved.save(step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--layout", default="auto")
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", type=Path, default=Path("out/pretrain"))
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    par = autopar.parallelize(
        model,
        inputs={"input_ids": ids, "labels": ids},
        layout=options.layout,
        reduce_dtype="float32",
        outputs="sharded",
    )
    torch.manual_seed(0)
    par.init_weights()
    training, validation = split(Text(options.files))
    loader = par.loader(training, shuffle=True, drop_last=True)

    def checkpoints(**state: Any) -> autopar.Checkpoints:
        return autopar.Checkpoints(options.folder, loader=loader, **state)

    def report(line: str) -> None:
        if dist.get_rank() == 0:
            print(line, flush=True)

    steps = options.steps, options.bfloat16
    train(par, loader, par.loader(validation), *steps, checkpoints, report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
