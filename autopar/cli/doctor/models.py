"""The models that checks run: small ones whose sizes every layout can split over the ranks, and one
that keeps a GPU busy.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar import api
from autopar.cli.doctor.session import Session
from autopar.cli.models import Gpt, GptAttention, Sizes
from autopar.planner.named_layouts import Grid, Grid4D

Inputs = tuple[Tensor, Tensor]


class Attended(nn.Module):
    """Causal attention with its projections: the mean square of what comes out, and that itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = GptAttention(Sizes("gpt", 1, width, heads, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.attention(x)
        return y.square().mean(), y


class Dropped(nn.Module):
    """Dropout of ones, so that what comes out is the mask: its sum, and that itself. The linear
    behind it gives layouts a product to split; its weight is zero.
    """

    def __init__(self, features: int, p: float) -> None:
        super().__init__()
        self.p = p
        self.ones = nn.Parameter(torch.ones(features))
        self.behind = nn.Linear(features, features, bias=False)
        nn.init.zeros_(self.behind.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.dropout(x * self.ones, self.p, self.training)
        return y.sum() + self.behind(y).sum(), y


def multiple(of: int, least: int) -> int:
    """
    >>> multiple(3, 8), multiple(8, 8)
    (9, 8)
    """
    return -(-least // of) * of


def small(session: Session) -> tuple[Gpt, Inputs]:
    """A GPT in float32 of two layers, the same on all ranks; every size is a multiple of the number
    of ranks. It is made on the CPU, as a model that is larger than any GPU would be.
    """
    ranks = session.ranks
    heads = multiple(ranks, 4)
    context, vocabulary = multiple(ranks, 16), multiple(ranks, 96)
    sizes = Sizes("gpt", 2, 8 * heads, heads, vocabulary, context)
    return _gpt(sizes, multiple(ranks, 8), torch.float32)


def parallel(session: Session, layout: str | Grid) -> Any:
    """The small model under a layout on the running ranks; made once for all checks. Collective."""
    name = f"small {layout}"
    if name not in session.kept:
        model, inputs = small(session)
        session.kept[name] = api.parallelize(
            model, session.world, inputs, layout=layout, device=session.device
        )
    return session.kept[name]


def grid_4d(count: int) -> Grid4D:
    """So many ranks on all four axes, as far as their prime factors go.

    >>> grid_4d(4), grid_4d(24)
    (Grid4D(x=2, y=2, z=1, data=1), Grid4D(x=3, y=2, z=2, data=2))
    """
    sizes = [1, 1, 1, 1]
    for place, factor in enumerate(_prime_factors(count)):
        sizes[place % 4] *= factor
    return Grid4D(*sizes)


def _prime_factors(count: int) -> list[int]:
    """The largest first."""
    found = []
    for factor in range(2, math.isqrt(count) + 1):
        while count % factor == 0:
            found.append(factor)
            count //= factor
    return sorted([*found, *([count] if count > 1 else [])], reverse=True)


def timed(session: Session) -> tuple[Gpt, Inputs]:
    """A GPT whose step is timed: on a GPU one of 0.12 billion parameters in bfloat16 that leaves it
    little time to idle, on a CPU one of a few tenths of a second.
    """
    ranks = session.ranks
    if session.cuda:
        sizes = Sizes("gpt", 8, 64 * multiple(ranks, 16), multiple(ranks, 16), 8192, 1024)
        return _gpt(sizes, 4 * ranks, torch.bfloat16)
    heads = multiple(ranks, 4)
    sizes = Sizes("gpt", 2, 32 * heads, heads, multiple(ranks, 512), 64)
    return _gpt(sizes, multiple(ranks, 16), torch.float32)


def _gpt(sizes: Sizes, batch: int, dtype: torch.dtype) -> tuple[Gpt, Inputs]:
    torch.manual_seed(0)
    model = Gpt(sizes).to(dtype)
    generator = torch.Generator().manual_seed(1)
    shape = (batch, sizes.context)
    tokens = torch.randint(0, sizes.vocabulary, shape, generator=generator)
    return model, (tokens, tokens.roll(-1, 1))
