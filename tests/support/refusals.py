"""A refusal is a ValueError with what, where and which sizes; and small models to refuse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from odd_models import Simple


def two_layers() -> Simple:
    torch.manual_seed(0)
    return Simple(lambda m, x: m.down(m.up(x).relu()).square().mean())


@contextmanager
def refused(kind: type[Exception], *says: str, model: nn.Module | None = None) -> Iterator[None]:
    """Raises `kind`, a ValueError, whose text has all of `says`; the model is as it was."""
    before = None if model is None else _state_of(model)
    with pytest.raises(kind) as caught:
        yield
    assert isinstance(caught.value, autopar.AutoparError) and isinstance(caught.value, ValueError)
    for text in says:
        assert text in str(caught.value), f"{text!r} is not in {caught.value}"
    assert model is None or before == _state_of(model)


def _state_of(model: nn.Module) -> list[Any]:
    """All that a model holds, tensors by identity and value."""
    seen: list[Any] = []
    for module in model.modules():
        names = ("_parameters", "_buffers", "_modules", "_forward_hooks")
        seen += [(name, dict(module.__dict__[name]).keys()) for name in names]
        seen += [(name, id(value)) for name, value in module.__dict__.items()]
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    seen += [(n, id(t), str(t.device), t.requires_grad, t.tolist()) for n, t in tensors]
    return seen


class Options(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)

    def forward(self, x: Tensor, scale: float = 1.0, mode: str = "sum") -> Tensor:
        y = self.linear(x) * scale
        return y.sum() if mode == "sum" else y.mean()
