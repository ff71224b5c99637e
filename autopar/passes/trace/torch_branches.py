"""Functions of torch that branch on the values of tensors: some are traced without their branch,
others are named, with what to write instead.

Example: `F.gaussian_nll_loss` raises where a variance is negative, so export cannot follow it; its
formula alone can be traced. `F.ctc_loss` becomes one operator. An `nn.AdaptiveLogSoftmaxWithLoss`
picks the rows of each cluster, whose number depends on the targets: `without_branches` computes
every cluster for every row. A batch norm with `momentum` None divides by the number of batches
so far. A `torch.distributions.Normal` checks its arguments: `without_branches` turns that off.
export.py calls `BRANCHLESS` and `without_branches` while it traces, `branching_function` and
`packs_sequences` where a trace failed.
"""

from __future__ import annotations

import math
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from autopar._compat import AdaptiveOutput
from autopar.ops.ctc import ctc_losses

_TORCH = Path(torch.__file__).parent
_PACKING = _TORCH / "nn" / "utils" / "rnn.py"
_INSTEAD = {
    "AdaptiveLogSoftmaxWithLoss": (
        "Take the most probable of all classes, without a branch: m.log_prob(x).argmax(dim=1)."
    ),
}
PACKED_ADVICE = (
    "Give the layer the padded batch. Up to each length, one that reads forward gives the same: "
    "mask what lies behind it, and take the last output by gather. One that reads backward takes "
    "each row flipped up to its length, by gather, and its outputs flipped back."
)
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


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Return torch's ctc_loss with the losses of the samples as one operator (ops/ctc.py).

    Targets that stand one after the other, (sum of lengths), become a row for each sample: its own
    and what comes behind it, which nobody reads. A mean divides each sample's loss by the length of
    its target first.
    """
    lengths = [
        torch.as_tensor(own, dtype=torch.long, device=targets.device).reshape(-1)
        for own in (input_lengths, target_lengths)
    ]
    one_sample = log_probs.dim() == 2
    if one_sample:
        log_probs, targets = log_probs.unsqueeze(1), targets.unsqueeze(0)
    elif targets.dim() == 1:
        starts = lengths[1].cumsum(0) - lengths[1]
        places = starts[:, None] + torch.arange(len(targets), device=targets.device)
        targets = targets[places.clamp(max=len(targets) - 1)]
    losses = ctc_losses(log_probs, targets, *lengths, blank, zero_infinity)
    if reduction == "mean":
        return (losses / lengths[1].clamp(min=1).to(losses)).mean()
    if reduction == "sum":
        return losses.sum()
    return losses.squeeze(0) if one_sample else losses


def adaptive_log_softmax(
    module: nn.AdaptiveLogSoftmaxWithLoss, input_: Tensor, target_: Tensor
) -> Any:
    """Return what the module's forward does, with every cluster computed for every row: (n, width)
    and (n) give log-probabilities (n) and their negative mean.

    The log-probability of a class of a cluster is that of the cluster, one of the head's classes,
    plus the class's own in it. A target out of range gives NaN, where the module raises an error.
    """
    one_row = target_.dim() == 0
    rows, classes = (input_[None], target_[None]) if one_row else (input_, target_)
    if rows.dim() != 2 or classes.shape != rows.shape[:1]:
        raise RuntimeError(
            "AdaptiveLogSoftmaxWithLoss takes an input (n, width) with a target (n), or (width) "
            f"with (), not {tuple(input_.shape)} with {tuple(target_.shape)}"
        )
    place_in_head = classes
    of_cluster = torch.zeros_like(rows[:, 0])
    for number, (low, high) in enumerate(pairwise(module.cutoffs)):
        inside = (classes >= low) & (classes < high)
        place = torch.where(inside, classes - low, 0)
        loss = F.cross_entropy(module.tail[number](rows), place, reduction="none")
        of_cluster = of_cluster - torch.where(inside, loss, 0)
        place_in_head = torch.where(inside, module.shortlist_size + number, place_in_head)
    known = (classes >= 0) & (classes < module.n_classes)
    of_head = -F.cross_entropy(
        module.head(rows), torch.where(known, place_in_head, 0), reduction="none"
    )
    output = torch.where(known, of_head + of_cluster, math.nan)
    return AdaptiveOutput(output.squeeze(0) if one_row else output, -output.mean())


def batch_norm(module: Any, input: Tensor) -> Tensor:
    """Return what the forward of a BatchNorm does. With `momentum` None its running statistics are
    the means of those of all batches since they were reset, so this batch's share is one over
    their number, which torch reads on the host.
    """
    averages = module.momentum is None and module.training and module.track_running_stats
    if not averages:
        return _BATCH_NORM(module, input)
    mean, variance = module.running_mean.clone(), module.running_var.clone()
    result = F.batch_norm(
        input, mean, variance, module.weight, module.bias, True, 1.0, module.eps
    )  # mean and variance are now this batch's
    with torch.no_grad():
        module.num_batches_tracked.add_(1)
        share = module.num_batches_tracked.to(mean).reciprocal()
        module.running_mean.lerp_(mean, share)
        module.running_var.lerp_(variance, share)
    return result


_BATCH_NORM = nn.BatchNorm1d.forward  # that of all three
_FORWARDS: dict[Any, Callable[..., Any]] = {
    nn.AdaptiveLogSoftmaxWithLoss: adaptive_log_softmax,
    nn.BatchNorm1d: batch_norm,
    nn.BatchNorm2d: batch_norm,
    nn.BatchNorm3d: batch_norm,
}
BRANCHLESS: dict[Any, Callable[..., Any]] = {
    F.gaussian_nll_loss: gaussian_nll_loss,
    F.ctc_loss: ctc_loss,
}

_WARNED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the models that a warning has mentioned


class _Unchecked:
    """Stands in for `Distribution._validate_args`, which instances read unless they have their own:
    says False, and remembers that it was asked.
    """

    was_read = False

    def __get__(self, instance: Distribution | None, owner: type[Distribution]) -> bool:
        self.was_read = True
        return False


@contextmanager
def without_branches(model: nn.Module) -> Iterator[None]:
    """For the time of this context, let distributions take their arguments unchecked, as the checks
    branch on values, and let modules of torch that branch have the forwards above. The first time
    for a model that has distributions or adaptive softmaxes, this warns.

    A distribution that is made with `validate_args=True` still checks.
    """
    checks, unchecked = vars(Distribution)["_validate_args"], _Unchecked()
    own = {kind: vars(kind).get("forward") for kind in _FORWARDS}
    called: set[Any] = set()

    def noted(kind: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(kind)
            return forward(*args, **kwargs)

        return call

    Distribution._validate_args = unchecked  # type: ignore[assignment]
    for kind, forward in _FORWARDS.items():
        kind.forward = noted(kind, forward)
    try:
        yield
    finally:
        Distribution._validate_args = checks
        for kind, forward in own.items():
            if forward is None:  # it is inherited
                del kind.forward
            else:
                kind.forward = forward
    mentioned: list[str] = []
    if checks is True and unchecked.was_read:
        mentioned.append(
            "has torch.distributions: the parallel model does not check their arguments "
            "(Distribution.set_default_validate_args(False) says so too)"
        )
    if nn.AdaptiveLogSoftmaxWithLoss in called:
        mentioned.append(
            "has an AdaptiveLogSoftmaxWithLoss: the parallel model computes every cluster for "
            "every row, as it cannot branch on the targets, and gives NaN for a target out of range"
        )
    if mentioned and model not in _WARNED:
        _WARNED.add(model)
        for text in mentioned:
            warnings.warn(f"{type(model).__name__} {text}", stacklevel=2)


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


def packs_sequences(error: Exception) -> bool:
    """Whether an error was raised where sequences are packed, or with a packed one at hand."""
    return any(
        (Path(frame.f_code.co_filename) == _PACKING and "pack" in frame.f_code.co_name)
        or any(isinstance(value, PackedSequence) for value in frame.f_locals.values())
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


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
