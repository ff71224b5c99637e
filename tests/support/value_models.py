"""Modules that a function calls, and an op of ours whose backward is chosen by a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Wrapped(nn.Module):
    """A module called by a function of ours."""

    def __init__(self, inner: nn.Module, call: Callable[..., Any], **buffers: Tensor) -> None:
        super().__init__()
        self.inner, self.call = inner, call
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(self, *inputs)


def encoder(**options: Any) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2, **options
    )


@torch.library.custom_op("autopar_values::doubled", mutates_args=())
def doubled(x: Tensor, mode: str) -> Tensor:
    return 2 * x


doubled.register_fake(lambda x, mode: torch.empty_like(x))


MODES: dict[str, Callable[[Tensor], Tensor]] = {
    "own": lambda g: 2 * g,
    "mixed": lambda g: g - g.mean(0),
    "clipped": lambda g: g.clamp(-1e-4, 1e-4),
    "clipped by norm": lambda g: g / g.norm(),
    "cast": lambda g: (2 * g.float()).to(g.dtype),
}


doubled.register_autograd(
    lambda ctx, grad: (MODES[ctx.way](grad), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "way", inputs[1]),
)
