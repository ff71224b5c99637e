"""Models that the command line knows by name: GPT and Llama in published sizes, on the meta device.

Example: `autopar plan llama3-8b` plans `NAMED["llama3-8b"]`. Called by targets.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


# -- the models ------------------------------------------------------------------------------------
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


def _gpt(layers: int, width: int, heads: int) -> Sizes:
    return Sizes("gpt", layers, width, heads, 51200, 2048)


def _llama(layers: int, width: int, heads: int, inner: int) -> Sizes:
    return Sizes("llama", layers, width, heads, 128256, 8192, key_heads=8, inner=inner)


# GPT-2: Radford et al. 2019. Llama 3: arXiv 2407.21783, table 3. GPTs of 5 to 640 billion
# parameters: AxoNN's weak scaling (arXiv 2502.08145), with the vocabulary padded to 51,200.
NAMED = {
    "gpt2": Sizes("gpt", 12, 768, 12, 50257, 1024, tied=True),
    "llama3-8b": _llama(32, 4096, 32, 14336),
    "llama3-70b": _llama(80, 8192, 64, 28672),
    "llama3-405b": _llama(126, 16384, 128, 53248),
    "gpt-5b": _gpt(24, 4096, 32),
    "gpt-10b": _gpt(32, 5120, 40),
    "gpt-20b": _gpt(32, 7168, 56),
    "gpt-40b": _gpt(38, 9216, 72),
    "gpt-60b": _gpt(56, 9216, 72),
    "gpt-80b": _gpt(42, 12288, 96),
    "gpt-160b": _gpt(84, 12288, 96),
    "gpt-320b": _gpt(96, 16384, 128),
    "gpt-640b": _gpt(192, 16384, 128),
}


class GptAttention(nn.Module):
    """Causal self-attention of (batch, sequence, width); query, key and value in one matmul."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.out = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_split_heads(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class GptBlock(nn.Module):
    """One pre-norm layer of a GPT."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(sizes.width)
        self.attention = GptAttention(sizes)
        self.mlp_norm = nn.LayerNorm(sizes.width)
        self.up = nn.Linear(sizes.width, 4 * sizes.width)
        self.down = nn.Linear(4 * sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class Gpt(nn.Module):
    """GPT-2's architecture: `model(tokens, targets)` is the mean cross-entropy in nats."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocabulary, sizes.width)
        self.position = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.ModuleList(GptBlock(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        if sizes.tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy. `tokens` and `targets` are int64 (batch, sequence);
        sequence is at most the context.
        """
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return _loss(self.head(self.norm(x)), targets)


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
        q = _rotate(_split_heads(self.q(x), self.heads), cos, sin)
        k = _rotate(_split_heads(self.k(x), self.key_heads), cos, sin)
        v = _split_heads(self.v(x), self.key_heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class LlamaBlock(nn.Module):
    """One pre-norm layer of Llama, with a gated feed-forward net."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.attention = LlamaAttention(sizes)
        self.mlp_norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.gate = nn.Linear(sizes.width, sizes.inner, bias=False)
        self.up = nn.Linear(sizes.width, sizes.inner, bias=False)
        self.down = nn.Linear(sizes.inner, sizes.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


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


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """Reshape (batch, sequence, heads · size) to (batch, heads, sequence, size)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _angles(sequence: int, size: int, device: torch.device, base: float = 500_000.0) -> Tensor:
    """Return the angle of every position and feature, (sequence, size); each half of the features
    has all of the frequencies (arXiv 2104.09864, in the order of Llama's released weights).
    """
    exponents = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size
    angles = torch.arange(sequence, device=device).unsqueeze(1) * base**-exponents
    return torch.cat((angles, angles), dim=-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
