"""Models that drop parts of what hangs on no parameter: of inputs, of masks, of attention between
inputs. Several of their consumers want it in layouts of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 24


class Dropped(nn.Module):
    """Three linears and what a function of (self, x) makes of them."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)  # whose gradient would be rounding alone
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def attended(model: Any, x: Tensor) -> Tensor:
    y = F.dropout(x, 0.3)
    return (model.q(y) @ model.k(y).mT).softmax(-1) @ y


def added(model: Any, x: Tensor) -> Tensor:
    y = F.dropout(x, 0.3)
    return (model.q(y).mT @ model.k(y.flip(0))).tanh() + (y.mT @ y)


def twice(model: Any, x: Tensor) -> Tensor:
    """Two of one input, and one of the other."""
    y, z = F.dropout(x, 0.3), F.dropout(x, 0.3)
    return (model.q(y) @ model.k(z).mT) @ F.dropout(y * z, 0.5) + model.v(z)


def masked(model: Any, x: Tensor) -> Tensor:
    """A mask that hangs on nothing at all."""
    mask = F.dropout(torch.ones(x.shape[-2:]), 0.4)
    return (model.q(x) * mask) @ (model.k(x) * mask).mT @ (x * mask)


def between(model: Any, x: Tensor) -> Tensor:
    """Attention with dropout between inputs."""
    y = x.view(1, 2, -1, WIDTH)
    z = F.scaled_dot_product_attention(y, y, y, dropout_p=0.4).reshape(x.shape)
    return model.q(z) @ model.k(z).mT @ z


def again(model: Any, x: Tensor) -> Tensor:
    """Within what the model itself runs again in its backward."""

    def block(y: Tensor) -> Tensor:
        z = F.dropout(y, 0.3)
        return (model.q(z) @ model.k(z).mT).softmax(-1) @ z

    result: Tensor = checkpoint(block, x, use_reentrant=False)
    return result


def normed(model: Any, x: Tensor) -> Tensor:
    """Copies of what a whole op makes of it."""
    y = F.layer_norm(F.dropout(x, 0.3), (WIDTH,)).cumsum(0)
    return (model.q(y) @ model.k(y).mT).softmax(-1) @ y


DROPPED = {f.__name__: f for f in (attended, added, twice, masked, between, again, normed)}


class Blocks(nn.Module):
    """Repeated blocks that all take one dropped input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Dropped(self._block) for _ in range(2))

    @staticmethod
    def _block(model: Any, x: Tensor) -> Tensor:
        result: Tensor = (model.q(x) @ model.k(x).mT).softmax(-1) @ x
        return result

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(x, 0.3)
        for block in self.blocks:
            y = F.dropout(block(y), 0.2) + F.dropout(x, 0.1) * y
        return y


def dropout_model(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    model = Blocks() if name == "blocks" else Dropped(DROPPED[name])
    return model, (torch.randn(12, WIDTH),)
