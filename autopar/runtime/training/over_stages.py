"""What concerns the parameters of all stages of a pipeline, of which a rank holds those of its own.

    par.clip_grad_norm_(1.0)        # the norm over all stages, tied weights counted once
    par.save_pretrained("out")      # one whole tensor after the other, from the stage that has it

On a mesh without stages every rank holds parts of everything, and these are torch's own functions
on DTensors. runtime/module.py, pretrained.py and unshard.py call them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from autopar._compat import local_of
from autopar.runtime.training.stages_run import StagesRun


def unsharded_tensor(
    run: Callable[..., Any], device: torch.device, name: str, tensor: Tensor
) -> Tensor:
    """Return the whole tensor of a parameter or buffer, on every rank. Collective. `tensor`: what
    this rank has of it, which of parameters of other stages is on the meta device.
    """
    value = tensor.detach()
    value = value.full_tensor() if isinstance(value, DTensor) else value
    if not isinstance(run, StagesRun) or name not in run.first_holders:
        return value
    if value.is_meta:
        value = torch.empty_like(value, device=device)
    source = run.first_holders[name]
    sent = value.contiguous()
    dist.broadcast(sent, group=run.links.group, group_src=source)
    return sent


@torch.no_grad()
def clip_grad_norm(
    run: Callable[..., Any],
    parameters: Iterable[tuple[str, nn.Parameter]],
    max_norm: float,
    norm_type: float,
) -> Tensor:
    """Scale gradients such that the norm of all of them is at most `max_norm`, and return what it
    was. Collective; nothing waits for the device.
    """
    named = [(name, p) for name, p in parameters if p.grad is not None]
    counted = [p.grad for name, p in named if _counts(run, name)]
    total = get_total_norm([x for x in counted if x is not None], norm_type)
    total = total.full_tensor() if isinstance(total, DTensor) else total
    if isinstance(run, StagesRun):
        largest = norm_type == float("inf")
        # stages may have other dtypes, and the square of a norm is no number of float16
        total = total.to(
            run.device, torch.float64 if total.dtype == torch.float64 else torch.float32
        )
        share = (total if largest else total**norm_type).clone()
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        dist.all_reduce(share, op, group=run.links.group)
        total = share if largest else share ** (1 / norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for _, parameter in named:
        gradient = parameter.grad
        assert gradient is not None
        own = local_of(gradient) if isinstance(gradient, DTensor) else gradient
        own.mul_(scale.to(own.dtype))
    return total


def _counts(run: Callable[..., Any], name: str) -> bool:
    """Whether this rank's stage is the one that counts a parameter."""
    if not isinstance(run, StagesRun):
        return True
    return run.first_holders.get(name, 0) == run.links.copy
