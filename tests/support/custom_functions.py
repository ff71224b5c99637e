"""Custom autograd functions, one of each kind, and a model around each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint


class StraightThrough(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: int) -> Tensor:
        return (x * steps).round() / steps

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, None


class Reversed(Function):
    @staticmethod
    def forward(x: Tensor, scale: float = 0.5) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return -ctx.scale * g, None


class Several(Function):
    """Three results: one without a gradient, one that nobody uses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.save_for_backward(x, w)
        signs = x.sign()
        ctx.mark_non_differentiable(signs)
        return x * w, signs, x + w

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor, h: Tensor) -> Any:
        x, w = ctx.saved_tensors
        wanted = (x + w * 0).sum(0) if ctx.needs_input_grad[1] else None
        return 3 * g * w + h, None if wanted is None else (wanted * g.sum(0) + h.sum(0))


class Unmaterialised(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, h: Tensor | None) -> Any:
        return 7 * g if h is None and g is not None else h


class Clipped(Function):
    """A backward that is not linear: a rank's part of a gradient may not be clipped by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g / (1e-3 + g.norm()) + g.clamp(-0.01, 0.01)


class Mixed(Function):
    """Row by row forward, not so backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g + g.flip(0)


class Outer(Function):
    """Calls another in its forward, whose backward does not count."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return StraightThrough.apply(x, 2) * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return 5 * g


class Listed(Function):
    @staticmethod
    def forward(ctx: Any, parts: list[Tensor], x: Tensor, how: dict[str, Any]) -> Any:
        return x * parts[0] + how["shift"], how["name"]

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:
        return None, 2 * g, None


straight_through = StraightThrough.apply


class Inner(nn.Module):
    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.body, self.scale = body, nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, self.scale)


class Net(nn.Module):
    """Linears around a body; `h + f(h)` leaves a gradient to each parameter if f's is lost."""

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.middle, self.down = nn.Linear(8, 8), Inner(body), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.middle(self.up(x)) * self.middle.scale).square().mean()


def without_gradient(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        fixed = straight_through(x, 4)
    return x + fixed


KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "straight through": lambda x, w: x + straight_through(x, 4),
    "reversal": lambda x, w: x * w + Reversed.apply(x),
    "several": lambda x, w: (lambda a, b, c: a + b * x)(*Several.apply(x, w)),
    "unmaterialised": lambda x, w: x + Unmaterialised.apply(x)[0],
    "clipped": lambda x, w: x + Clipped.apply(x * w),
    "mixed": lambda x, w: x + Mixed.apply(x),
    "twice": lambda x, w: straight_through(straight_through(x, 4) * w, 8),
    "nested": lambda x, w: x + Outer.apply(x),
    "listed": lambda x, w: Listed.apply([w], x, {"shift": 1.0, "name": "a"})[0],
    "no grad": without_gradient,
    "frozen operand": lambda x, w: (lambda a, b, c: a + c)(*Several.apply(x, w.detach())),
    "checkpointed": lambda x, w: checkpoint(
        lambda y: y + straight_through(y * w, 4), x, use_reentrant=False
    ),
    "reentrant": lambda x, w: checkpoint(
        lambda y: y * w + straight_through(y, 4), x, use_reentrant=True
    ),
    "reentrant without": lambda x, w: (
        x + checkpoint(lambda y: y * w, x.detach(), use_reentrant=True)
    ),
}


def rows() -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
