"""Small models for pipelines: a GPT with tied embeddings whose loss ignores labels unequally."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, TOKENS, WORDS, ROWS = 16, 8, 32, 8


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.up, self.down = (
            nn.Linear(*sizes) for sizes in ((WIDTH, WIDTH), (WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH))
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    """Returns (loss, logits). The embedding is the head: the first and last stage share it."""

    def __init__(self, layers: int = 4, dropout: float = 0.0, tied: bool = True) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def gpt(seed: int = 0, dropout: float = 0.0, layers: int = 4) -> tuple[GPT, tuple[Tensor, Tensor]]:
    """The model in float64, with numbers from a seed, and its inputs."""
    generator = torch.Generator().manual_seed(5)
    tokens, labels = (torch.randint(WORDS, (ROWS, TOKENS), generator=generator) for _ in range(2))
    labels[:3, 2:] = -100
    torch.manual_seed(seed)
    return GPT(layers, dropout).to(torch.float64), (tokens, labels)


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
