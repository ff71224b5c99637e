"""The models that are timed, each at one global batch: what makes them differ is where the bytes
are, in weights, activations, the vocabulary, or the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.tools.decoders import Gpt, Llama, Sizes, small_weights


def gpt(vocabulary: int, context: int, width: int, heads: int, layers: int) -> Gpt:
    """Return a GPT of the command line with weights as GPT-2 draws them."""
    model = Gpt(Sizes("gpt", layers, width, heads, vocabulary, context))
    model.apply(small_weights)
    return model


def llama(
    vocabulary: int, context: int, width: int, heads: int, key_heads: int, inner: int, layers: int
) -> Llama:
    """Return a Llama of the command line with weights as GPT-2 draws them."""
    sizes = Sizes("llama", layers, width, heads, vocabulary, context, key_heads, inner)
    model = Llama(sizes)
    model.apply(small_weights)
    return model


class Experts(nn.Module):
    """An MLP of experts by einsum, as GShard has it (arXiv 2006.16668): in a row of the batch each
    expert takes a quarter more tokens than its equal share, those that chose it first.
    """

    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, inner).normal_(std=0.02))
        self.down = nn.Parameter(torch.empty(experts, inner, width).normal_(std=0.02))

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (batch, sequence, width)."""
        capacity = 5 * x.shape[1] // (4 * self.experts)
        gates = self.router(x).softmax(-1)
        chosen = F.one_hot(gates.argmax(-1), self.experts)
        place = chosen.cumsum(1) * chosen - 1
        inside = ((place >= 0) & (place < capacity)).unsqueeze(-1)
        dispatch = (F.one_hot(place.clamp(0, capacity - 1), capacity) * inside).to(x.dtype)
        taken = torch.einsum("btec,btd->ebcd", dispatch, x)
        hidden = F.gelu(torch.einsum("ebcd,edf->ebcf", taken, self.up))
        result = torch.einsum("ebcf,efd->ebcd", hidden, self.down)
        return torch.einsum("btec,ebcd->btd", dispatch * gates.unsqueeze(-1), result)


def mixture_of_experts(
    vocabulary: int, context: int, width: int, heads: int, inner: int, layers: int, experts: int
) -> Llama:
    """Return a Llama whose every MLP is of experts."""
    model = llama(vocabulary, context, width, heads, heads, inner, layers)
    for block in model.blocks:
        block.mlp = Experts(width, inner, experts)
        block.apply(small_weights)
    return model


@dataclass(frozen=True)
class Subject:
    """A model to time: how it is made, its global batch and sequence, and why it is here."""

    make: Callable[[], nn.Module]
    batch: int
    sequence: int
    vocabulary: int
    why: str

    def model(self) -> nn.Module:
        """The same weights at every call, on every rank."""
        torch.manual_seed(0)
        return self.make()

    def batches(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """`count` seeded batches of tokens and targets, int64 (batch, sequence)."""
        generator = torch.Generator().manual_seed(1)
        shape = (count, 2, self.batch, self.sequence)
        drawn = torch.randint(self.vocabulary, shape, generator=generator)
        return [(tokens, targets) for tokens, targets in drawn]


SUBJECTS = {
    "tiny": Subject(
        lambda: gpt(vocabulary=64, context=16, width=64, heads=8, layers=2),
        8,
        16,
        64,
        "to see that all of it runs",
    ),
    "gpt": Subject(
        lambda: gpt(vocabulary=4096, context=128, width=512, heads=8, layers=4),
        16, 128, 4096, "17 M parameters, 2048 tokens: 67 MB of gradients",
    ),
    "wide": Subject(
        lambda: gpt(vocabulary=1024, context=16, width=1024, heads=16, layers=2),
        8, 16, 1024, "27 M parameters, 128 tokens: weights outweigh activations",
    ),
    "llama": Subject(
        lambda: llama(32768, 128, 256, 8, 4, 704, 2),
        8, 128, 32768, "18 M parameters, of which 17 M in a vocabulary of 32,768",
    ),
    "long": Subject(
        lambda: gpt(vocabulary=1024, context=1024, width=256, heads=8, layers=4),
        8, 1024, 1024, "4 M parameters, 8192 tokens in sequences of 1024",
    ),
    "deep": Subject(
        lambda: gpt(vocabulary=256, context=32, width=512, heads=8, layers=12),
        16, 32, 256, "38 M parameters in 12 blocks, 512 tokens: little lies between two blocks",
    ),
    "experts": Subject(
        lambda: mixture_of_experts(1024, 128, 512, 8, 2048, 2, 8),
        48, 128, 1024, "37 M parameters, of which 34 M are 8 experts a layer; 6144 tokens",
    ),
    "context": Subject(
        lambda: llama(1024, 8192, 256, 8, 1, 704, 2),
        1, 8192, 1024, "2 M parameters, one sequence of 8192 tokens, one head of keys and values",
    ),
}  # fmt: skip
TIMED = tuple(n for n in SUBJECTS if n not in ("tiny", "deep", "experts", "context"))
