"""Attention of meta tensors: by the kernel that a CPU takes, and nobody hears of the choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from autopar.cost import peak
from autopar.cost.peak import Lives

SIZE, WIDTH = 64, 16
SCORES = 2 * 4 * SIZE * SIZE * 4  # bytes
aten = torch.ops.aten


def ran(device: str, run: Any, masked: bool, **more: Any) -> tuple[list[int], int, list[int]]:
    """Bytes of the memories that are made, how many tensors are saved, and the gradient's shape."""
    q, k, v = (torch.zeros(2, 4, SIZE, WIDTH, device=device, requires_grad=True) for _ in range(3))
    mask = torch.ones(SIZE, SIZE, dtype=torch.bool, device=device) if masked else None
    saved: list[int] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(1)
        return x.detach()

    with Lives() as lives, saved_tensors_hooks(pack, lambda x: x):
        run(q, k, v, mask, **more).sum().backward()
    assert q.grad is not None
    sizes = sorted(life.size for life in lives.lives if life.size > 1 << 10)
    return sizes, len(saved), list(q.grad.shape)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_it_makes_and_saves_what_a_cpu_does(masked: bool, dropout: float) -> None:
    peak._by_flash.cache_clear()
    real = ran("cpu", aten.scaled_dot_product_attention.default, masked, dropout_p=dropout)
    assert ran("meta", peak.attention, masked, dropout_p=dropout) == real
    assert (SCORES in real[0]) == (dropout > 0)  # the plain formula makes them
