"""Functions of torch that branch on the values of tensors: one is traced without its branch, others
are named, with what to write instead.

Example: `F.gaussian_nll_loss` raises where a variance is negative, so export cannot follow it; its
formula alone can be traced. An `nn.AdaptiveLogSoftmaxWithLoss` picks the rows of each cluster,
whose number depends on the targets: the message says that the branch is torch's, and that
`log_prob` has none. export.py calls `BRANCHLESS` while it traces and `branching_function` where a
trace failed.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_TORCH = Path(torch.__file__).parent
_INSTEAD = {
    "ctc_loss": (
        "Return the log-probabilities from the model and take the loss of them outside: the size "
        "of what ctc_loss keeps for its backward depends on the lengths."
    ),
    "AdaptiveLogSoftmaxWithLoss": (
        "Take the log-probabilities of all classes, without a branch: "
        "-m.log_prob(x).gather(1, target[:, None]).mean()."
    ),
}


def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Return torch's gaussian_nll_loss without its check that no variance is negative.

    The variance (a number, of the shape of `input`, or with its last dim 1 or missing) is at least
    `eps`, which its gradient does not see.
    """
    if not isinstance(var, Tensor):
        var = torch.full_like(input, var)
    elif var.dim() == input.dim() - 1:
        var = var.unsqueeze(-1)
    clamped = var.clamp(min=eps).detach() + (var - var.detach())
    loss = 0.5 * (clamped.log() + (input - target) ** 2 / clamped)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.mean()


BRANCHLESS: dict[Any, Callable[..., Any]] = {F.gaussian_nll_loss: gaussian_nll_loss}


def branching_function(error: Exception) -> tuple[str, str] | None:
    """Return the function or module of torch whose branch an error of export is about, and what to
    write in its place ("" where there is no advice); None where the branch is in other code.
    """
    owner = None
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if not path.is_relative_to(_TORCH):
            if "autopar" not in path.parts:
                owner = None  # the code of a user or of a library, called by torch
            continue
        inside = path.relative_to(_TORCH).parts
        if inside[:2] == ("nn", "functional.py"):
            owner = f"torch.nn.functional.{frame.name}"
        elif inside[:2] == ("nn", "modules") and inside[-1] != "module.py":
            owner = _module_at(inside[-1], frame.lineno or 0)
    if owner is None:
        return None
    return owner, _INSTEAD.get(owner.rpartition(".")[2], "")


def _module_at(file: str, line: int) -> str | None:
    """Return the name of the class of torch.nn whose source is around this line of a file of
    torch.nn.modules; None where there is none.
    """
    heads = [
        (number, text.split("class ")[1].split("(")[0].strip(":\n "))
        for number, text in enumerate((_TORCH / "nn" / "modules" / file).open(), 1)
        if text.startswith("class ") and number <= line
    ]
    return f"torch.nn.{heads[-1][1]}" if heads else None
