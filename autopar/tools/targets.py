"""The targets of the command line, by name: a built-in model, a function that returns (model,
inputs), or a Hugging Face config.json (huggingface.py).

Example: resolve("gpt2", Batch(8, 1024), 8) is GPT-2 with a batch of tokens. The built-in ones are
GPT and Llama in published sizes, on the meta device: `autopar plan llama3-8b` plans
`NAMED["llama3-8b"]`. command.py calls `resolve`; decoders.py has the models.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.tools import huggingface
from autopar.tools.decoders import Gpt, Llama, Sizes
from autopar.tools.target_function import (
    TargetError,
    function_names,
    import_function,
    target_error,
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
