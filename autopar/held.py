"""What a model holds when a plan is applied, against what it held when it was planned."""

from __future__ import annotations

import torch
from torch import nn

from autopar.errors import PlanError
from autopar.ir.program import Input, Program


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters, then its buffers, by every name."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def current(model: nn.Module, program: Program) -> dict[str, torch.Tensor]:
    """The model's parameters and buffers as they are now. Raises PlanError where one is gone or has
    another shape.
    """
    now_held = held(model)
    tensors = dict(program.tensors)
    for entry in program.signature.inputs:
        if entry.kind not in ("parameter", "buffer"):
            continue
        now = now_held.get(entry.target)
        planned = _facts(program.layouts[entry.node].shape, program.dtypes[entry.node], entry)
        found = "gone" if now is None else _facts(tuple(now.shape), now.dtype, entry, now)
        if now is None or found != planned:
            raise PlanError(
                f"{entry.kind} {entry.target} was {planned} when the model was planned and is "
                f"{found} now: plan again"
            )
        if any(now_held.get(name) is not now for name in entry.names):
            raise PlanError(
                f"{', '.join(entry.names)} were one tensor when the model was planned and are no "
                "longer: plan again"
            )
        tensors[entry.target] = now
    return tensors


def _facts(
    shape: tuple[int, ...], dtype: torch.dtype, entry: Input, now: torch.Tensor | None = None
) -> str:
    """What the graph was made for, in words; of a parameter also whether it is trained."""
    trained = entry.trainable if now is None else now.requires_grad
    frozen = ", frozen" if entry.kind == "parameter" and not trained else ""
    return f"{shape} {dtype}{frozen}"
