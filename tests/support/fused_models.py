"""Models with weights of several pieces: what their products want is no contiguous part of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Example = tuple[nn.Module, tuple[Tensor, ...]]
FUSED: dict[str, Callable[[], Example]] = {}


def fused(build: Callable[[], Example]) -> Callable[[], Example]:
    def seeded() -> Example:
        torch.manual_seed(0)
        return build()

    FUSED[build.__name__] = seeded
    return seeded


class Attention(nn.Module):
    """`heads` queries of six numbers for `groups` keys and values, from one weight."""

    def __init__(self, heads: int = 4, groups: int = 4) -> None:
        super().__init__()
        self.sizes = (6 * heads, 6 * groups, 6 * groups)
        self.qkv, self.out = nn.Linear(24, sum(self.sizes)), nn.Linear(6 * heads, 24)

    def forward(self, x: Tensor) -> Tensor:
        pieces = self.qkv(x).split(self.sizes, -1)
        q, k, v = (piece.unflatten(-1, (-1, 6)).transpose(1, 2) for piece in pieces)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, inner: int = 48) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 2 * inner), nn.Linear(inner, 24)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Tied(nn.Module):
    """An embedding that is the head, too, around `body`."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(32, 24), nn.Linear(24, 32, bias=False)
        self.head.weight = self.token.weight
        self.body, self.norm = nn.Sequential(*body), nn.LayerNorm(24)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.norm(self.body(self.token(ids))))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Loss(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


def rows() -> Tensor:
    return torch.randn(8, 6, 24)


@fused
def queries_keys_values() -> Example:
    return Loss(Attention()), (rows(),)


@fused
def grouped_queries() -> Example:
    return Loss(Attention(groups=2)), (rows(),)


@fused
def gated_products() -> Example:
    return Loss(Gated()), (rows(),)


@fused
def odd_sizes() -> Example:
    return Loss(nn.Sequential(Gated(inner=15), nn.Linear(24, 9), nn.Linear(9, 10))), (rows(),)


@fused
def tied_and_fused() -> Example:
    return Tied(Attention(), Gated()), (torch.randint(0, 32, (8, 6)),)
