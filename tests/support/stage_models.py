"""Small models for pipelines: a GPT whose loss ignores labels unequally, two stacks, and models of
transformers in float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from models import GptWithLogits

WIDTH, HEADS, TOKENS, WORDS, ROWS = 16, 4, 8, 32, 8


def gpt(
    seed: int = 0, dropout: float = 0.0, layers: int = 4, rows: int = ROWS
) -> tuple[GptWithLogits, tuple[Tensor, Tensor]]:
    """The model in float64, with numbers from a seed, and its inputs. The first and the last stage
    share the embedding.
    """
    generator = torch.Generator().manual_seed(5)
    tokens, labels = (torch.randint(WORDS, (rows, TOKENS), generator=generator) for _ in range(2))
    labels[:3, 2:] = -100
    torch.manual_seed(seed)
    model = GptWithLogits(WORDS, TOKENS, WIDTH, HEADS, layers, dropout)
    return model.to(torch.float64), (tokens, labels)


def apart_towers() -> tuple[nn.Module, tuple[Any, ...]]:
    """Two stacks of blocks, the second of which reads the end of the first in every block."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.start = nn.Linear(WIDTH, WIDTH)
            self.decoder = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            for layer in self.encoder:
                x = layer(x).tanh()
            y = self.start(y)
            for layer in self.decoder:
                y = y + layer(torch.cat([x, y], -1)).tanh()
            return (y - 1).square().mean()

    torch.manual_seed(0)
    model = Towers().to(torch.float64)
    return model, (torch.randn(8, WIDTH).double(), torch.randn(8, WIDTH).double())


class InFloat64(nn.Module):
    """A model of transformers all of which is computed in float64: what its forward casts to
    float32, as norms and losses do, too.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.double()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        with _CastToFloat64():
            return self.model(input_ids=input_ids, labels=labels)


class _CastToFloat64(TorchFunctionMode):
    """Makes every cast to float32 one to float64."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def widen(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        function = Tensor.double if function is Tensor.float else function
        named = {name: widen(x) for name, x in (kwargs or {}).items()}
        return function(*map(widen, args), **named)
