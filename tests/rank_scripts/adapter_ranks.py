"""What test_adapters.py starts under torchrun: the same three steps by another library's loop.

`adapter_ranks.py FILE fabric|accelerate` writes what the ranks lost, and one device, into FILE.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.world import ranks
from on_ranks import caught

STEPS, MICRO, MOST = 3, 2, 0.1  # a step sums the gradients of two batches and clips them


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 6)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.down(self.up(x).relu()), target)


def fresh(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def batches(start: int = 0) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """The number of a batch, from 1, and the batch."""
    drawn = torch.Generator().manual_seed(5)
    for number in range(1, STEPS * MICRO + 1):
        x = torch.randn(8, 16, generator=drawn)
        target = torch.randint(0, 6, (8,), generator=drawn)
        if number > start:
            yield number, (x, target)


def trainers(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def plain() -> list[float]:
    """The losses of one device, in plain torch."""
    model = fresh()
    optimizer, schedule = trainers(model)
    losses = []
    for number, batch in batches():
        loss = model(*batch)
        (loss / MICRO).backward()
        losses.append(loss.item())
        if number % MICRO == 0:
            nn.utils.clip_grad_norm_(model.parameters(), MOST)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return losses


def parallel(seed: int = 0) -> nn.Module:
    _, batch = next(batches())
    return autopar.parallelize(fresh(seed), inputs=batch, layout="fsdp")


def by_accelerate() -> dict[str, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO)
    par = parallel()
    model, optimizer, schedule, same = autopar.prepare(accelerator, par, *trainers(par), [1])
    losses, rates = [], []
    for _, batch in batches():
        with accelerator.accumulate(model):
            loss = model(*batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MOST)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            rates.append(schedule.get_last_lr()[0])
    refused = caught(lambda: autopar.prepare(accelerator, fresh()))
    same_model = accelerator.unwrap_model(model) is par and model is par and same == [1]
    return {"losses": losses, "as it was": same_model, "rates": rates, "refused": refused}


def by_fabric() -> dict[str, Any]:
    from lightning_fabric import Fabric
    from torch.utils.data import DataLoader

    fabric = Fabric(accelerator="cpu", devices=2, strategy=autopar.fabric_strategy())
    fabric.launch()
    folder = ranks.from_rank_0(tempfile.mkdtemp())
    par = parallel()
    plain_optimizer, schedule = trainers(par)
    model, optimizer = fabric.setup(par, plain_optimizer)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "number": 0}
    losses = fabric_losses(fabric, state, folder)

    again = parallel(seed=9)
    optimizer, schedule = trainers(again)
    model, optimizer = fabric.setup(again, optimizer)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "number": 0}
    rest = fabric.load(folder, state)
    later = fabric_losses(fabric, state)
    loader = fabric.setup_dataloaders(DataLoader(range(8), batch_size=8))
    rows = [len(batch) for batch in loader]
    facts = {"losses": losses, "later": later, "rest": rest, "rows": rows}
    facts["as it was"] = model.module is again and model.plan is again.plan
    facts["refused"] = caught(lambda: fabric.setup(fresh()))
    facts["refused state"] = caught(lambda: fabric.save(folder, {"number": 1}))
    facts["refused load"] = caught(lambda: fabric.load(folder))
    return facts


def fabric_losses(fabric: Any, state: dict[str, Any], folder: str = "") -> list[float]:
    """The losses of the batches after the state's number; the first step's state goes to folder."""
    model, optimizer = state["model"], state["optimizer"]
    losses = []
    for number, batch in batches(state["number"]):
        last = number % MICRO == 0
        with fabric.no_backward_sync(model, enabled=not last):
            loss = model(*batch)
            fabric.backward(loss / MICRO)
            losses.append(loss.item())
        if last:
            fabric.clip_gradients(model, optimizer, max_norm=MOST)
            optimizer.step()
            state["schedule"].step()
            optimizer.zero_grad()
        if number == MICRO and folder:
            state["number"] = number
            fabric.save(folder, state)
    return losses


def main() -> None:
    path, library = sys.argv[1:]
    torch.set_num_threads(1)
    facts = {"fabric": by_fabric, "accelerate": by_accelerate}[library]()
    facts["one device"] = plain()
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(facts), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
