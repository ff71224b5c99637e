"""A training run that is saved: a model, its rows, and all that a script keeps of it."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import autopar

BATCH, WIDTH, CLASSES, HALF, STEPS = 8, 16, 6, 3, 6


class Model(nn.Module):
    """A tied weight, dropout and running statistics."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.up, self.drop, self.norm = nn.Linear(WIDTH, 32), nn.Dropout(drop), nn.BatchNorm1d(32)
        self.down, self.again = nn.Linear(32, WIDTH), nn.Linear(WIDTH, 32, bias=False)
        self.again.weight = self.up.weight
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.down(self.drop(self.norm(self.up(x)).relu()))
        return F.cross_entropy(self.head(self.again(x)), target)


def rows() -> TensorDataset:
    drawn = torch.Generator().manual_seed(5)
    features = torch.randn(32, WIDTH, generator=drawn)
    return TensorDataset(features, torch.randint(0, CLASSES, (32,), generator=drawn))


def fresh(drop: float, seed: int = 0) -> tuple[Model, tuple[Tensor, Tensor]]:
    torch.manual_seed(seed)
    random.seed(seed)
    x, target = rows()[:BATCH]
    return Model(drop), (x, target)


class Run:
    """A model with all that a training script saves."""

    def __init__(self, model: Any, loader: Any, folder: Path, **options: Any) -> None:
        self.model, self.loader = model, loader
        self.begin()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.checkpoints = autopar.Checkpoints(
            folder, model=model, optimizer=self.optimizer, schedule=self.schedule,
            **({"loader": loader} if hasattr(loader, "state_dict") else {}), **options,
        )  # fmt: skip

    def begin(self) -> None:
        """Reads from where the loader is."""
        self.batches = itertools.chain.from_iterable(self.loader for _ in range(9))

    def losses(self, steps: int) -> list[float]:
        losses = []
        for batch in itertools.islice(self.batches, steps):
            self.optimizer.zero_grad()
            loss = self.model(*batch)
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            losses.append(float(loss.detach()))
        return losses


def parallel_run(layout: str, folder: Path, drop: float, seed: int = 0, **options: Any) -> Run:
    model, inputs = fresh(drop, seed)
    par: Any = autopar.parallelize(model, inputs=inputs, layout=layout)
    return Run(par, par.loader(rows(), shuffle=True, seed=1), folder, **options)
