"""A GPT and a Llama for one device: nothing in this file knows of ranks, meshes or shards.

Example: `Gpt(Sizes("gpt", 4, 256, 8, 256, 128)).apply(small_weights)` has 3.3 M parameters and
reads bytes; `model(tokens, targets)` is its loss. The command line plans them in published sizes
(targets.NAMED); doctor/, the examples, the benchmarks and the tests train small ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ROTARY_BASE = 500_000.0  # of the angles of positions, as in Llama 3


@dataclass(frozen=True)
class Sizes:
    """A decoder's sizes. `key_heads` and `inner` are Llama's; a GPT has as many key heads as heads
    and an inner width of 4 · width.
    """

    family: str  # "gpt" or "llama"
    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    key_heads: int = 0
    inner: int = 0
    tied: bool = False  # the output's weight is the embedding's

    def small(self) -> Sizes:
        """Return the same architecture in a size that one machine can train in float64: all the
        heads, but of 4 features, two layers, a vocabulary with the same remainder to 256.
        """
        width = 4 * self.heads
        return replace(
            self,
            layers=2,
            width=width,
            vocabulary=256 + self.vocabulary % 256,
            inner=self.inner * width // self.width,
        )


class GptAttention(nn.Module):
    """Causal self-attention of (batch, sequence, width); query, key and value in one matmul."""

    def __init__(self, sizes: Sizes, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = sizes.heads, dropout
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.out = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(y, self.heads) for y in self.qkv(x).chunk(3, dim=-1))
        p = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class GptBlock(nn.Module):
    """One pre-norm layer of a GPT."""

    def __init__(self, sizes: Sizes, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(sizes.width)
        self.attention = GptAttention(sizes, dropout)
        self.mlp_norm = nn.LayerNorm(sizes.width)
        self.up = nn.Linear(sizes.width, 4 * sizes.width)
        self.down = nn.Linear(4 * sizes.width, sizes.width)
        self.drop = _dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.attention_norm(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.mlp_norm(x)))))


class Gpt(nn.Module):
    """GPT-2's architecture, with an exact GELU: `model(tokens, targets)` is the mean cross-entropy
    in nats. `dropout` is the probability with which features of the embedding and of residual
    branches, and weights of attention, are zeroed.
    """

    def __init__(self, sizes: Sizes, dropout: float = 0.0) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocabulary, sizes.width)
        self.position = nn.Embedding(sizes.context, sizes.width)
        self.drop = _dropout(dropout)
        self.blocks = nn.ModuleList(GptBlock(sizes, dropout) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        if sizes.tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy. `tokens` and `targets` are int64 (batch, sequence);
        sequence is at most the context.
        """
        return _loss(self.logits(tokens), targets)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the scores of every next token, (batch, sequence, vocabulary)."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LlamaAttention(nn.Module):
    """Causal grouped-query attention of (batch, sequence, width) with rotary positions."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.key_heads = sizes.heads, sizes.key_heads
        size = sizes.width // sizes.heads
        self.q = nn.Linear(sizes.width, sizes.width, bias=False)
        self.k = nn.Linear(sizes.width, sizes.key_heads * size, bias=False)
        self.v = nn.Linear(sizes.width, sizes.key_heads * size, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = _rotate(split_heads(self.q(x), self.heads), cos, sin)
        k = _rotate(split_heads(self.k(x), self.key_heads), cos, sin)
        v = split_heads(self.v(x), self.key_heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class GatedMlp(nn.Module):
    """The feed-forward net of Llama, on (batch, sequence, width): down(silu(gate(x)) · up(x))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    """One pre-norm layer of Llama."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.attention = LlamaAttention(sizes)
        self.mlp_norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.mlp = GatedMlp(sizes.width, sizes.inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Llama 3's architecture: `model(tokens, targets)` is the mean cross-entropy in nats."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_size = sizes.width // sizes.heads
        self.token = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(LlamaBlock(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy. `tokens` and `targets` are int64 (batch, sequence)."""
        x = self.token(tokens)
        angles = _angles(tokens.shape[1], self.head_size, tokens.device)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return _loss(self.head(self.norm(x)), targets)


def small_weights(module: nn.Module) -> None:
    """Draw weights with a standard deviation of 0.02, as GPT-2 does, and set biases to zero: for
    `model.apply`.
    """
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _dropout(probability: float) -> nn.Module:
    """Return the module that zeroes features, none where the probability is 0: a plan has no op."""
    return nn.Dropout(probability) if probability else nn.Identity()


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Reshape (batch, sequence, heads · size) to (batch, heads, sequence, size)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _angles(sequence: int, size: int, device: torch.device) -> Tensor:
    """Return the angle of every position and feature, (sequence, size); each half of the features
    has all of the frequencies (arXiv 2104.09864, in the order of Llama's released weights).
    """
    exponents = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size
    angles = torch.arange(sequence, device=device).unsqueeze(1) * _ROTARY_BASE**-exponents
    return torch.cat((angles, angles), dim=-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
