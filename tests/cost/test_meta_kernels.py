"""Kernels of meta tensors: those that the device takes, and nobody hears of the choice."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import autopar
from autopar.cost import meta_kernels
from autopar.cost.peak import LifetimeRecorder
from autopar.world import World

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

    with LifetimeRecorder() as lives, saved_tensors_hooks(pack, lambda x: x):
        run(q, k, v, mask, **more).sum().backward()
    assert q.grad is not None
    sizes = sorted(life.size for life in lives.lifetimes if life.size > 1 << 10)
    return sizes, len(saved), list(q.grad.shape)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_it_makes_and_saves_what_a_cpu_does(masked: bool, dropout: float) -> None:
    meta_kernels._by_flash.cache_clear()
    real = ran("cpu", aten.scaled_dot_product_attention.default, masked, dropout_p=dropout)
    assert ran("meta", meta_kernels.attention, masked, dropout_p=dropout) == real
    assert (SCORES in real[0]) == (dropout > 0)  # the plain formula makes them


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_saves_operands_and_scales_of_rms_norm(dtype: torch.dtype) -> None:
    """A CPU saves what four operators need; a GPU's kernel one number for each row."""

    def saved(run: Any, weights: torch.dtype) -> list[int]:
        x = torch.empty(8, 32, 64, dtype=dtype, device="meta", requires_grad=True)
        weight = torch.empty(64, dtype=weights, device="meta", requires_grad=True)
        tensors: list[torch.Tensor] = []
        with saved_tensors_hooks(lambda t: tensors.append(t) or t, lambda t: t):
            run(x, [64], weight, 1e-5).sum().backward()
        assert x.grad is not None and weight.grad is not None
        assert (x.grad.dtype, weight.grad.dtype) == (dtype, weights)
        return sorted(t.nbytes for t in {id(t): t for t in tensors}.values())

    tokens, size = 8 * 32, dtype.itemsize
    assert saved(meta_kernels.rms_norm, dtype) == sorted(
        [64 * size, tokens * 4, tokens * 64 * size]
    )
    assert sum(saved(aten.rms_norm.default, dtype)) > 2 * tokens * 64 * size
    other = torch.float64  # of the weights: then a GPU has no kernel either
    assert saved(meta_kernels.rms_norm, other) == saved(aten.rms_norm.default, other)


def test_the_peak_of_a_plan_hangs_on_the_device() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.Sequential(*(nn.RMSNorm(64) for _ in range(8)))
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.norms(x)).square().mean()

    with torch.device("meta"):
        model, inputs = Model(), (torch.empty(64, 32, 64),)
    gpu = World.preset("dgx-h100", ranks=2)
    cpu = dataclasses.replace(gpu, device=dataclasses.replace(gpu.device, name="cpu"))
    on_gpu, on_cpu = (autopar.plan(model, world, inputs, "ddp").memory for world in (gpu, cpu))
    assert on_gpu is not None and on_cpu is not None
    assert on_gpu.activations < 0.6 * on_cpu.activations


def test_a_mask_of_a_window_alone_is_made_on_the_meta_device() -> None:
    """A sliding window takes no tensor and has its device by position."""
    graph = torch.fx.Graph()
    mask: Any = (
        [], [], "", 3, 0, SIZE, SIZE, torch.device("cpu"), [], [],
    )  # fmt: skip
    graph.output(graph.call_function(torch.ops.autopar.block_mask.default, mask))
    module = torch.fx.GraphModule(nn.Module(), graph)
    block = meta_kernels.run_on_meta(module)()
    assert (block.device.type, block.shape) == ("meta", (1, 1, SIZE, SIZE))
