"""The targets of the command line, by name: a built-in model, or a function that returns (model,
inputs).

Example: resolve("gpt2", Batch(8, 1024), 8) is GPT-2 with a batch of tokens. main.py calls it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.cli.models import NAMED, Gpt, Llama, Sizes
from autopar.errors import AutoparError


class TargetError(AutoparError):
    """A target of the command line that cannot be found, built or given such a batch."""


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
        parts = text.lower().replace("×", "x").split("x")
        if len(parts) != 2 or not all(part.strip().isdigit() and int(part) for part in parts):
            raise TargetError(f"batch {text!r}: write samples x sequence, for example 64x4096")
        return Batch(int(parts[0]), int(parts[1]))


# -- from text to a target -------------------------------------------------------------------------
def resolve(text: str, batch: Batch | None, samples: int, real: bool = False) -> Target:
    """Return the target that `text` names: one of NAMED, or "package.module:function".

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
    if ":" not in text:
        raise TargetError(
            f"unknown target {text!r}: write package.module:function, a function that returns "
            f"(model, inputs), or one of {', '.join(NAMED)}"
        )
    return _call_target(text, _import_function(text), batch)


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


def _import_function(text: str) -> Callable[..., Any]:
    """Import the function, from the current folder too."""
    path, _, name = text.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        function: Any = importlib.import_module(path)
    except ModuleNotFoundError as error:
        missing = f"it imports {error.name!r}, which is not installed"
        if error.name and (path == error.name or path.startswith(error.name + ".")):
            missing = f"there is no module {error.name!r} here or among what is installed"
        raise TargetError(f"target {text!r}: {missing}") from None
    except Exception as error:
        raise _target_error(text, f"importing {path}", error) from error
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        names = ", ".join(_function_names(path)) or "none"
        raise TargetError(f"target {text!r}: {path} has no function {name!r}; it has {names}")
    return function


def _function_names(path: str) -> list[str]:
    """Return the first public functions that a module itself defines, in their order."""
    members = inspect.getmembers(sys.modules[path], inspect.isfunction)
    own = [f for name, f in members if f.__module__ == path and not name.startswith("_")]
    return [f.__name__ for f in sorted(own, key=lambda f: f.__code__.co_firstlineno)][:8]


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
        raise _target_error(text, "calling it", error) from error
    if (
        not isinstance(result, tuple)
        or len(result) != 2
        or not isinstance(result[0], nn.Module)
        or not isinstance(result[1], tuple | list | Mapping | Tensor)
    ):
        parts = result if isinstance(result, tuple) else (result,)
        types = ", ".join(type(part).__name__ for part in parts)
        raise TargetError(
            f"target {text!r} returned ({types}): return (model, inputs), an nn.Module and a tuple "
            "of positional or a dict of keyword arguments"
        )
    return Target(text if batch is None else f"{text}, batch {batch}", *result)


def _target_error(text: str, doing: str, error: Exception) -> TargetError:
    """Return the error with which the target failed, with the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return TargetError(f"target {text!r}: {doing} gave {type(error).__name__}: {error}{place}")
