"""Functions of torch that branch on the values of tensors: one is traced without its branch, others
are named, with what to write instead.

Example: `F.gaussian_nll_loss` raises where a variance is negative, so export cannot follow it; its
formula alone can be traced. An `nn.AdaptiveLogSoftmaxWithLoss` picks the rows of each cluster,
whose number depends on the targets: the message says that the branch is torch's, and that
`log_prob` has none. A `torch.distributions.Normal` checks its arguments: `unchecked_distributions`
turns that off. export.py calls `BRANCHLESS` while it traces and `branching_function` where a trace
failed.
"""

from __future__ import annotations

import math
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
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
_CHECKS = ("__init__", "_validate_sample")
_UNCHECKED = (
    "Leave out validate_args=True: without it, the distribution is traced without the checks."
)


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

_TOLD: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # whose distributions a warning has mentioned


class _Unchecked:
    """Stands in for `Distribution._validate_args`, which instances read unless they have their own:
    says False, and remembers that it was asked.
    """

    asked = False

    def __get__(self, instance: Distribution | None, owner: type[Distribution]) -> bool:
        self.asked = True
        return False


@contextmanager
def unchecked_distributions(model: nn.Module) -> Iterator[None]:
    """Let distributions take their arguments unchecked for the time of this context: the checks
    branch on values. The first time for a model that has distributions, this warns.

    A distribution that is made with `validate_args=True` still checks.
    """
    checks, unchecked = vars(Distribution)["_validate_args"], _Unchecked()
    Distribution._validate_args = unchecked  # type: ignore[assignment]
    try:
        yield
    finally:
        Distribution._validate_args = checks
    if checks is True and unchecked.asked and model not in _TOLD:
        _TOLD.add(model)
        warnings.warn(
            f"{type(model).__name__} has torch.distributions: the parallel model does not check "
            "their arguments (Distribution.set_default_validate_args(False) says so too)",
            stacklevel=2,
        )


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
            owner = _class_at("nn", path, frame.lineno or 0)
        elif inside[0] == "distributions":
            if frame.name in _CHECKS and inside[-1] == "distribution.py":
                return owner or "torch.distributions", _UNCHECKED
            owner = _class_at("distributions", path, frame.lineno or 0)
    if owner is None:
        return None
    return owner, _INSTEAD.get(owner.rpartition(".")[2], "")


def _class_at(package: str, file: Path, line: int) -> str | None:
    """Return the name of the class of torch.nn or torch.distributions whose source is around this
    line of a file; None where there is none.
    """
    heads = [
        (number, text.split("class ")[1].split("(")[0].strip(":\n "))
        for number, text in enumerate(file.open(), 1)
        if text.startswith("class ") and number <= line
    ]
    return f"torch.{package}.{heads[-1][1]}" if heads else None
