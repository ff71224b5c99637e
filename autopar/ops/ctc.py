"""The connectionist temporal classification (CTC) loss of every sample, as one operator.

torch's ctc_loss reads the lengths of inputs and targets on the host, and the size of what it keeps
for its backward depends on them, so export cannot follow it. `ctc_losses` has torch's kernels
behind one operator, whose backward runs the loss again: of (t, n, c) log-probabilities it returns
(n,) losses. passes/trace/torch_branches.py puts it in the place of `F.ctc_loss`; its rule stands in
rules/losses.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@torch.library.custom_op("autopar::ctc_loss", mutates_args=())
def ctc_losses(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """Return the loss of each sample. log_probs: (t, n, c); targets: (n, s); lengths: (n)."""
    operands = log_probs, targets, input_lengths, target_lengths
    losses, _ = aten._ctc_loss.Tensor(*operands, blank, zero_infinity)
    return torch.where(losses == math.inf, 0, losses) if zero_infinity else losses


@ctc_losses.register_fake
def _fake_losses(log_probs: Tensor, *rest: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@torch.library.custom_op("autopar::ctc_loss_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """Return the gradient of log_probs, by torch's loss and its backward."""
    operands = log_probs, targets, input_lengths, target_lengths
    losses, alphas = aten._ctc_loss.Tensor(*operands, blank, zero_infinity)
    if zero_infinity:
        gradient = torch.where(losses == math.inf, 0, gradient)
    return aten._ctc_loss_backward.Tensor(
        gradient, *operands, losses, alphas, blank, zero_infinity
    ).contiguous()


@_backward.register_fake
def _fake_backward(gradient: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, blank, zero_infinity = inputs
    ctx.save_for_backward(*tensors)
    ctx.facts = blank, zero_infinity


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    log_probs_gradient = _backward(gradient, *ctx.saved_tensors, *ctx.facts)
    return log_probs_gradient, None, None, None, None, None


ctc_losses.register_autograd(_gradient, setup_context=_save_for_backward)
