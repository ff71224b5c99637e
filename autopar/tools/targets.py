"""The targets of the command line, by name: a built-in model, a function that returns (model,
inputs), or a Hugging Face config.json (huggingface.py).

Example: resolve("gpt2", Batch(8, 1024), 8) is GPT-2 with a batch of tokens. The built-in ones are
GPT and Llama in published sizes, on the meta device: `autopar plan llama3-8b` plans
`NAMED["llama3-8b"]`. command.py calls `resolve`; doctor/ trains small ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.tools import huggingface
from autopar.tools.target_function import (
    TargetError,
    function_names,
    import_function,
    target_error,
)


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
        q, k, v = (_split_heads(y, self.heads) for y in self.qkv(x).chunk(3, dim=-1))
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


@dataclass(frozen=True)
class Target:
    """A model with its inputs, as `autopar.plan` takes them, and its name in the output."""

    name: str
    model: nn.Module
    inputs: Any

    @property
    def parameters(self) -> int:
        """The number of parameters; tied ones count once."""
        return sum(p.numel() for p in self.model.parameters())


@dataclass(frozen=True)
class Batch:
    """The global batch of one step: samples of so many tokens each."""

    samples: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.samples}x{self.sequence}"

    @staticmethod
    def parse(text: str) -> Batch:
        """Read "samples x sequence", as "64x4096". Raises TargetError for anything else."""
        numbers = text.lower().replace("×", "x").split("x")
        if len(numbers) != 2 or not all(n.strip().isdigit() and int(n) for n in numbers):
            raise TargetError(f"batch {text!r}: write samples x sequence, for example 64x4096")
        return Batch(int(numbers[0]), int(numbers[1]))


# -- from text to a target -------------------------------------------------------------------------
def resolve(text: str, batch: Batch | None, samples: int, real: bool = False) -> Target:
    """Return the target that `text` names: one of NAMED, "package.module:function",
    "file.py:function", or a path of a config.json of transformers (`huggingface.build`).

    A named model has bfloat16 parameters on the meta device. Where values are needed (`real`), it
    is cut down by `Sizes.small`, in float32 on the CPU, and its name says so. `batch` None:
    `samples` of the model's full context (of 16 tokens where `real`). A function that takes `batch`
    and `sequence` is called with them. Raises TargetError.

    >>> resolve("gpt2", Batch(8, 1024), 8).parameters
    124439808
    """
    sizes = NAMED.get(text.lower())
    if sizes is not None:
        return _named_target(text.lower(), sizes, batch, samples, real)
    if huggingface.names_config(text):
        size = None if batch is None else (batch.samples, batch.sequence)
        return Target(*huggingface.build(text, size, samples, real))
    if ":" not in text:
        raise _no_function(text)
    return _call_target(text, import_function(text), batch)


def makes_smaller(text: str) -> bool:
    """Whether `resolve` makes the target that `text` names smaller where values are needed."""
    return text.lower() in NAMED or huggingface.names_config(text)


def _no_function(text: str) -> TargetError:
    """Return the error for a target that names no function and nothing else that is known."""
    if text.endswith(".py"):
        return TargetError(
            f"target {text!r}: name the function, too, which returns (model, inputs), as "
            f"{text}:make; it has {', '.join(function_names(text)) or 'none'}"
        )
    hub = "; nothing is downloaded: fetch its config.json first" if "/" in text else ""
    return TargetError(
        f"unknown target {text!r}: write file.py:function or package.module:function, a function "
        "that returns (model, inputs); a path of a config.json of transformers, or of a folder "
        f"with one; or one of {', '.join(NAMED)}{hub}"
    )


def _named_target(name: str, sizes: Sizes, batch: Batch | None, samples: int, real: bool) -> Target:
    if real:
        sizes = sizes.small()
        name += f" cut down to {sizes.layers} layers of width {sizes.width}"
    batch = batch or Batch(samples, 16 if real else sizes.context)
    if batch.sequence > sizes.context:
        raise TargetError(
            f"batch {batch}: {name} reads at most {sizes.context} tokens, not {batch.sequence}"
        )
    family = {"gpt": Gpt, "llama": Llama}[sizes.family]
    torch.manual_seed(0)
    shape = (batch.samples, batch.sequence)
    with torch.device("cpu" if real else "meta"):
        model = family(sizes) if real else family(sizes).to(torch.bfloat16)
        tokens, targets = (torch.randint(0, sizes.vocabulary, shape) for _ in range(2))
    return Target(f"{name}, batch {batch}", model, (tokens, targets))


def _call_target(text: str, function: Callable[..., Any], batch: Batch | None) -> Target:
    arguments: dict[str, int] = {}
    if batch is not None:
        arguments = {"batch": batch.samples, "sequence": batch.sequence}
        if not arguments.keys() <= inspect.signature(function).parameters.keys():
            raise TargetError(
                f"target {text!r} makes its own batch: leave --batch out, or let the function "
                "take `batch` and `sequence`"
            )
    try:
        result = function(**arguments)
    except Exception as error:
        raise target_error(text, "calling it", error) from error
    if (
        not isinstance(result, tuple)
        or len(result) != 2
        or not isinstance(result[0], nn.Module)
        or not isinstance(result[1], tuple | list | Mapping | Tensor)
    ):
        results = result if isinstance(result, tuple) else (result,)
        types = ", ".join(type(x).__name__ for x in results)
        raise TargetError(
            f"target {text!r} returned ({types}): return (model, inputs), an nn.Module and a tuple "
            "of positional or a dict of keyword arguments"
        )
    return Target(text if batch is None else f"{text}, batch {batch}", *result)
