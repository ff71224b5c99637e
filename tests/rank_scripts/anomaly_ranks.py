"""What test_anomaly.py starts, as on_ranks.py says: steps in which torch looks for nan."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from on_ranks import Facts, everywhere, run_tasks

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_sync": {},
    "microbatches": {"microbatches": 2},
    "eager": {"backend": "eager"},
}


class Rooted(nn.Module):
    """The root of a parameter: at zero its gradient is infinite, times zero a nan."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)
        self.start = start
        self.scale = nn.Parameter(torch.full((8,), start))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.down(self.up(x).relu()) * self.start
        rows = rows * self.scale.sqrt()  # the line that a user looks for
        return rows.square().sum(1).mean()


def gradients(model: nn.Module, x: Tensor, retained: bool = False) -> dict[str, Tensor]:
    if retained:
        with model.no_sync():
            model(x).backward()
    model(x).backward()
    return {
        name: getattr(p.grad, "full_tensor", lambda grad=p.grad: grad)()
        for name, p in model.named_parameters()
    }


def task(layout: str) -> Facts:
    """By options: the largest error of a gradient on any rank, and what a nan is met with."""
    facts: Facts = {}
    for name, options in OPTIONS.items() if layout == "fsdp" else [("plain", {})]:
        torch.manual_seed(3)
        x, deferred = torch.randn(8, 16), name == "no_sync"
        right = Rooted(1.0)
        par = autopar.parallelize(copy.deepcopy(right), inputs=(x,), layout=layout, **options)
        with torch.autograd.detect_anomaly():
            summed = gradients(par, x, deferred)
        expected = gradients(right, x)
        errors = [float((summed[n] - (1 + deferred) * g).abs().max()) for n, g in expected.items()]
        par = autopar.parallelize(Rooted(0.0), inputs=(x,), layout=layout, **options)
        said: list[str] = []
        with warnings.catch_warnings(record=True) as shown, torch.autograd.detect_anomaly():
            warnings.simplefilter("always")
            with par.no_sync() if deferred else contextlib.nullcontext():
                try:
                    par(x).backward()
                except RuntimeError as error:
                    said = [str(error), *(str(w.message) for w in shown)]
        facts[name] = {"error": max(everywhere(max(errors))), "said": everywhere("\n".join(said))}
    return facts


if __name__ == "__main__":
    run_tasks({layout: functools.partial(task, layout) for layout in ("ddp", "fsdp", "megatron")})
