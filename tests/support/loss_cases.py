"""Calls of the losses with every reduction, for rule_cases.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shards import Case, call, flags, integers, real

aten = torch.ops.aten
REDUCTIONS = (0, 1, 2)  # none, mean, sum


def every(target: Any, *args: Any, note: str = "", **kwargs: Any) -> list[Case]:
    """The call with each reduction."""
    return [
        call(target, *args, reduction=reduction, note=f"{note} {reduction}".strip(), **kwargs)
        for reduction in REDUCTIONS
    ]


def signs(*shape: int) -> Tensor:
    return flags(*shape).double() * 2 - 1


def tokens(shape: tuple[int, ...], ignored: int = -100) -> Tensor:
    """Class indices of tokens with unequal numbers of ignored ones on the shards."""
    target = integers(shape[min(1, len(shape) - 1)], *shape[:1], *shape[2:])
    target.view(-1)[1:4] = ignored
    return target


A, B = real(6, 12), real(6, 12).flip(0).detach().requires_grad_()
PROBABILITY = A.detach().sigmoid().requires_grad_()
ROW_CASES = [
    *every(aten.cosine_embedding_loss.default, A, B, signs(6)),
    *every(aten.cosine_embedding_loss.default, A, B, signs(6), 0.3, note="margin"),
    call(aten.cosine_embedding_loss.default, real(12), real(12).flip(0), signs(), note="one row"),
    *every(aten.triplet_margin_loss.default, A, B, real(6, 12).roll(1)),
    *every(aten.triplet_margin_loss.default, real(2, 6, 4), real(2, 6, 4).flip(0),
           real(2, 6, 4).roll(1), 2.0, 1.0, 0.1, True, note="swap"),
    *every(aten.multilabel_margin_loss.default, A, integers(12, 6, 12)),
    call(aten.multilabel_margin_loss.default, real(12), integers(12, 12), note="one row"),
]  # fmt: skip
ENTRY_CASES = [
    *every(aten.binary_cross_entropy.default, PROBABILITY, B.detach().sigmoid()),
    *every(aten.binary_cross_entropy.default, PROBABILITY, B.detach().sigmoid(),
           real(12, low=0.1).detach(), note="weighted"),
    *every(aten.kl_div.default, A, B.detach().sigmoid()),
    *every(aten.kl_div.default, A, B, log_target=True, note="log target"),
    *every(aten.kl_div.default, A, real(1, 12, low=0.1), note="broadcast"),
    *(call(aten.poisson_nll_loss.default, A, real(6, 12, low=0.1), True, False, 1e-8, r,
           note=str(r)) for r in REDUCTIONS),
    *(call(aten.poisson_nll_loss.default, real(6, 12, low=0.1), real(12, low=0.1).detach(), False,
           True, 0.1, r, note=f"full {r}") for r in REDUCTIONS),
    *every(aten.soft_margin_loss.default, A, signs(6, 12)),
    *every(aten.hinge_embedding_loss.default, A, signs(6, 12)),
    *every(aten.hinge_embedding_loss.default, A, signs(6, 12), 2.0, note="margin"),
    *every(aten.margin_ranking_loss.default, A, B, signs(6, 12)),
    *every(aten.margin_ranking_loss.default, A, B, signs(12), 0.3, note="broadcast"),
    *every(aten.binary_cross_entropy_with_logits.default, A, B.detach().sigmoid(),
           real(6, 12, low=0.1).detach(), real(12, low=0.1).detach(), note="weighted"),
    *every(aten.mse_loss.default, A, real(6, 1), note="broadcast"),
]  # fmt: skip
TOKEN_CASES = [
    *every(aten.nll_loss_nd.default, A, tokens((6, 12))),
    *every(aten.nll_loss_nd.default, A, tokens((6, 12), 3), real(12, low=0.1).detach(),
           ignore_index=3, note="weighted"),
    *every(aten.nll_loss_nd.default, real(4, 12, 6), tokens((4, 12, 6)), note="three dims"),
    *every(aten.nll_loss_nd.default, real(2, 5, 3, 4), tokens((2, 5, 3, 4)),
           real(5, low=0.1).detach(), note="four dims"),
    call(aten.nll_loss_nd.default, real(12), integers(12), note="one token"),
    *every(aten.cross_entropy_loss.default, A, B.detach().softmax(1), note="probabilities"),
    *every(aten.cross_entropy_loss.default, real(4, 5, 6), real(4, 5, 6).flip(0).softmax(1),
           real(5, low=0.1).detach(), label_smoothing=0.1, note="weighted probabilities"),
]  # fmt: skip
CTC = torch.ops.autopar.ctc_loss.default
LENGTHS = torch.tensor([9, 7, 9, 8, 3, 9]), torch.tensor([3, 0, 4, 2, 3, 1])
CTC_CASES = [
    call(CTC, real(9, 6, 5).log_softmax(2).detach().requires_grad_(),
         integers(4, 6, 4) + 1, *LENGTHS, 0, False),
    # the fifth sample has fewer steps than it needs, so that its loss is infinite
    call(CTC, real(9, 6, 5).log_softmax(2).detach().requires_grad_(),
         torch.full((6, 4), 3), *LENGTHS, 2, True, note="infinite"),
]  # fmt: skip
LOSS_CASES = [*ROW_CASES, *ENTRY_CASES, *TOKEN_CASES, *CTC_CASES]

# For meshes of three axes, all on one dim.
LOSS_DIGITS = [
    *every(aten.nll_loss_nd.default, real(12, 4), tokens((12, 4)), real(4, low=0.1).detach()),
    *every(aten.kl_div.default, real(12, 4), real(12, 4, low=0.1).detach()),
    *every(aten.cosine_embedding_loss.default, real(12, 4), real(12, 4).flip(0), signs(12)),
]
