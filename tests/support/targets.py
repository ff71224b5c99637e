"""Targets of the command line, which the tests name as "targets:tiny"."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from models import Mlp as MseMlp


class Mlp(MseMlp):
    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        y = self.down(nn.functional.gelu(self.up(x)))
        return (y - target).square().mean()


def tiny() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    print("a model that talks")
    return Mlp(), (torch.randn(16, 64), torch.randn(16, 64))


def tiny_of(batch: int, sequence: int) -> tuple[nn.Module, Any]:
    return Mlp(sequence), {"x": torch.randn(batch, sequence), "target": torch.randn(1, sequence)}


def wide() -> tuple[nn.Module, Any]:
    return Mlp(128), (torch.randn(16, 128), torch.randn(16, 128))


def on_meta() -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        return Mlp(), (torch.randn(16, 64), torch.randn(16, 64))


def broken() -> tuple[nn.Module, Any]:
    raise RuntimeError("no weights today")


def no_pair() -> nn.Module:
    return Mlp()
