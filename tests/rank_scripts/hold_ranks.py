"""What test_no_sync.py starts on gloo ranks: `hold_ranks.py FILE LAYOUT...`. Every habit of
accumulation runs on a parallel model and on the original with the same data; FILE says for each
layout how far the two are apart, and how many collectives the backwards issued.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import autopar
from backward_forms import recorded_forms
from on_ranks import run_everywhere

GRIDS: dict[str, Any] = {"4d": autopar.Grid4D(z=2, data=2), "2.5d": autopar.Grid25D(q=2)}
Run = Callable[[nn.Module], list[Tensor]]
HABITS: dict[str, Run] = {}


class Net(nn.Module):
    """Its first layer's weight is tied to its last one's, so two sums make that gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(16, 64), nn.LayerNorm(64)
        self.down, self.head = nn.Linear(64, 16), nn.Linear(16, 64, bias=False)
        self.head.weight = self.up.weight

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.down(self.norm(F.gelu(self.up(x))))
        return F.cross_entropy(self.head(h), target)


def loss_of(model: nn.Module, step: int = 0, rows: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 16, generator=generator)
    return model(x, torch.randint(0, 64, (rows,), generator=generator))


def hold_gradients(model: nn.Module) -> AbstractContextManager[None]:
    return model.no_sync() if isinstance(model, autopar.ParallelModule) else nullcontext()


def habit(run: Run) -> Run:
    HABITS[run.__name__] = run
    return run


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2)


@habit
def one_sum_for_four_backwards(model: nn.Module) -> list[Tensor]:
    optimizer, losses = adamw(model), []
    for step in range(3):
        for part in range(4):
            with hold_gradients(model) if part < 3 else nullcontext():
                loss = loss_of(model, 4 * step + part) / 4
                loss.backward()
            losses.append(loss)
        losses.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@habit
def a_sum_before_and_after(model: nn.Module) -> list[Tensor]:
    loss_of(model, 0).backward()
    with hold_gradients(model), hold_gradients(model):
        loss_of(model, 1).backward()
    loss_of(model, 2).backward()
    loss_of(model, 3).backward()
    return []


@habit
def forget_deferred_gradients(model: nn.Module) -> list[Tensor]:
    optimizer = adamw(model)
    with hold_gradients(model):
        loss_of(model, 0).backward()
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    return []


@habit
def a_last_batch_of_fewer_rows(model: nn.Module) -> list[Tensor]:
    with hold_gradients(model):
        loss_of(model, 0).backward()
    loss_of(model, 1, rows=4).backward()
    with hold_gradients(model):
        loss_of(model, 2, rows=4).backward()
    loss_of(model, 3).backward()
    with hold_gradients(model):
        loss_of(model, 4).backward()
    loss_of(model, 5, rows=3).backward()
    return []


@habit
def step_on_deferred_gradients(model: nn.Module) -> list[Tensor]:
    optimizer = adamw(model)
    with hold_gradients(model):
        loss_of(model, 0).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    return [norm]


@habit
def a_backward_after_the_context(model: nn.Module) -> list[Tensor]:
    with hold_gradients(model):
        loss = loss_of(model, 0)
    loss.backward()
    loss = loss_of(model, 1)
    with hold_gradients(model):
        loss.backward()
    loss_of(model, 2).backward()
    return []


def full(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def compared(run: Run, parallel: nn.Module, plain: nn.Module) -> float:
    """The largest difference of what a habit gives on both, relative to what one device gives."""
    state = copy.deepcopy(plain.state_dict())
    for model in (parallel, plain):
        model.zero_grad()
        model.load_state_dict(state)
    pairs = list(zip(map(full, run(parallel)), map(full, run(plain)), strict=True))
    theirs = dict(plain.named_parameters())
    for name, parameter in parallel.named_parameters():
        pairs.append((full(parameter), theirs[name].detach()))
        own, their = parameter.grad, theirs[name].grad
        assert (own is None) == (their is None), name
        if own is not None and their is not None:
            pairs.append((full(own), their))
    return max(float((a - b).norm() / (b.norm() + 1e-12)) for a, b in pairs)


def forms_run(model: nn.Module) -> list[str]:
    """The forms of the backwards of three steps in four parts."""
    model.zero_grad()
    with recorded_forms() as forms:
        HABITS["one_sum_for_four_backwards"](model)
    return forms


def facts_of(name: str) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    plain, inputs = Net(), (torch.randn(8, 16), torch.zeros(8, dtype=torch.long))
    layout = GRIDS.get(name, name)
    parallel = autopar.parallelize(copy.deepcopy(plain), inputs=inputs, layout=layout)
    apart: dict[str, Any] = {}
    for habit_name, run in HABITS.items():
        try:
            apart[habit_name] = compared(run, parallel, plain)
        except Exception as error:
            apart[habit_name] = f"{type(error).__name__}: {error}"
    return {"apart": apart, "forms": forms_run(parallel)}


if __name__ == "__main__":
    run_everywhere(facts_of)
