"""Values that are zero but for rounding raise no alarm, and nothing else gets more room by that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from odd_models import Simple, rows


def normed(m: Any, x: Tensor) -> Tensor:
    """The loss and every gradient."""
    return m.norm(m.down(m.up(x))).sum()


def biased(m: Any, x: Tensor) -> Tensor:
    """A bias whose gradient cancels, next to gradients that do not."""
    return m.norm(m.down(m.up(x))).square().mul(m.norm.weight).sum()


def centred(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """A node in the middle, and what hangs on it."""
    y = m.down(m.up(x))
    rest = (y - y.mean(-1, keepdim=True)).sum(-1)
    return (y.square().sum(-1) + rest * 5).sum(), rest


def logits(m: Any, x: Tensor) -> Tensor:
    """Probabilities sum to one: what all share has no gradient."""
    return (
        F.cross_entropy(m.up(x) + m.down.bias.sum(), torch.arange(12)) + m.up(x).softmax(-1).sum()
    )


BODIES = [normed, biased, centred, logits]


def simple(body: Any) -> nn.Module:
    torch.manual_seed(0)
    return Simple(body, norm=nn.LayerNorm(24))


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "megatron", "auto"])
@pytest.mark.parametrize("body", BODIES)
def test_what_is_zero_but_for_rounding_raises_no_alarm(body: Any, layout: str) -> None:
    autopar.verify(simple(body), 4, (rows(),), layout=layout)
