"""README's program, and the `mymodel` that it imports."""

from __future__ import annotations

import re
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

import models
from autopar._compat import pytree

README = Path(__file__).parent.parent.parent / "README.md"


def scalar(results: Any) -> Tensor:
    return next(x for x in pytree.tree_leaves(results) if isinstance(x, Tensor) and not x.dim())


class Model(nn.Module):
    """The small GPT: its loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.gpt()[0]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return scalar(self.inner(tokens, targets))


def batches(count: int) -> list[tuple[Tensor, ...]]:
    """The same batch as often."""
    return [models.gpt()[1]] * count


def block(words: str) -> str:
    """The block of Python that has these words."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    (code,) = (block for block in blocks if words in block)
    return code


def commands() -> list[list[str]]:
    """The commands of the shell that name the model of one's own, as words, in their order."""
    text = README.read_text()
    lines = re.findall(r"^    (?:[A-Z_]+=\S+ )?((?:autopar|torchrun) .*)$", text, re.MULTILINE)
    own = [line for line in lines if "mymodel.py" in line or "mine.py" in line]
    return [shlex.split(line, comments=True) for line in own]


def run(count: int) -> dict[str, Any]:
    """The program, word for word, with so many batches: its names when it is done. The process
    group stays open, to compare what ranks have.
    """
    mine: Any = types.ModuleType("mymodel")
    mine.Model, mine.batches = Model, batches(count)
    sys.modules["mymodel"] = mine
    names: dict[str, Any] = {}
    destroy, dist.destroy_process_group = dist.destroy_process_group, lambda: None
    try:
        exec(compile(block("init_process_group"), "README.md", "exec"), names)
    finally:
        dist.destroy_process_group = destroy
    return names
