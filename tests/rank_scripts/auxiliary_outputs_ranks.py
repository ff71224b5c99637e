"""What test_auxiliary_outputs.py starts, as on_ranks.py says: gradients by auxiliary outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
import models
from autopar.passes.overlap.assumptions import rerun_for
from autopar.runtime import backends
from autopar.runtime.backends import Scheduled
from on_ranks import Facts, run_tasks
from one_device import joined

Loss = Callable[[Tensor, Tensor], Tensor]


class Counted(nn.Module):
    """Logits, and how many of them are positive: a scalar, but no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.down(torch.relu(self.up(x)))
        return logits, (logits > 0).float().mean()


def alone(logits: Tensor, loss: Tensor) -> Tensor:
    return loss


def both(logits: Tensor, loss: Tensor) -> Tensor:
    return loss + logits.square().mean()


def of_logits(logits: Tensor, _: Tensor) -> Tensor:
    return logits.square().mean()


def wrong(model: nn.Module, par: Any, args: Any, loss: Loss) -> float:
    """The largest error of a gradient, of its own largest entry."""
    model.zero_grad(), par.zero_grad()
    loss(*model(*args)).backward()
    logits, scalar = par(*args)
    loss(logits.full_tensor(), scalar).backward()
    expected = dict(model.named_parameters())
    errors = []
    for name, parameter in par.named_parameters():
        gradient, right = joined(parameter.grad, par.layout(name)), expected[name].grad
        errors.append(float((gradient - right).abs().max() / right.abs().max().clamp(min=1e-2)))
    return max(errors)


def steps(model: nn.Module, args: Any, layout: str, losses: list[Loss]) -> Facts:
    """Errors by step; how often a backward was derived, and a graph run once more."""
    par = autopar.parallelize(
        copy.deepcopy(model),
        dist.get_world_size(),
        args,
        layout=layout,
        overlap=True,
        outputs="sharded",
    )
    deriving: Any = patch.object(Scheduled, "derived", autospec=True, side_effect=Scheduled.derived)
    with deriving as derived, patch.object(backends, "rerun_for", wraps=rerun_for) as again:
        errors = [wrong(model, par, args, loss) for loss in losses]
    return {"errors": errors, "derived": derived.call_count, "again": again.call_count}


def auxiliary_outputs() -> Facts:
    model, args, _ = models.gpt()
    return steps(model, args, "megatron", [alone, alone, both, both, alone])


def no_loss() -> Facts:
    torch.manual_seed(0)
    return steps(Counted(), (torch.randn(8, 16),), "ddp", [of_logits, of_logits])


if __name__ == "__main__":
    run_tasks({"auxiliary": auxiliary_outputs, "no loss": no_loss})
