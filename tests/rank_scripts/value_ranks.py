"""What test_value_ranks.py starts, as on_ranks.py says: trains modules whose arguments, buffers or
backward change what is right, on real ranks and on one device.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from on_ranks import Facts, everywhere, run_tasks
from value_models import Wrapped, doubled, encoder

LAYOUTS = ("auto", "ddp", "fsdp", "megatron")


def table() -> tuple[nn.Module, tuple[Tensor, ...]]:
    model = nn.Sequential(nn.Embedding(12, 8, scale_grad_by_freq=True), nn.Linear(8, 4))
    return model, (torch.randint(0, 5, (4, 6)),)


def norm() -> tuple[nn.Module, tuple[Tensor, ...]]:
    inner = nn.InstanceNorm1d(6, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 4)), (torch.randn(4, 6, 8) + 2,)


def clipped() -> tuple[nn.Module, tuple[Tensor, ...]]:
    def call(self: Wrapped, x: Tensor) -> Any:
        return self.inner[1](doubled(self.inner[0](x), "clipped by norm"))

    return Wrapped(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)), call), (torch.randn(8, 6),)


def masked() -> tuple[nn.Module, tuple[Tensor, ...]]:
    model = Wrapped(encoder(), lambda self, x, mask: self.inner(x, mask))
    return model, (torch.randn(4, 6, 8), torch.randn(6, 6))


class Alone(nn.Module):
    """No inputs: what it returns depends on its parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.down = nn.Parameter(torch.randn(8, 16)), nn.Linear(16, 4)

    def forward(self) -> Tensor:
        return self.down(self.table)


def alone() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Alone(), ()


def steps(module: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Parameters and buffers after two steps."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        module(*inputs).square().mean().backward()
        optimizer.step()
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}


def task(make: Any) -> Facts:
    """By layout: the largest difference of any parameter or buffer on any rank."""
    torch.manual_seed(7)  # the same weights and inputs on every rank
    model, inputs = make()
    expected = steps(copy.deepcopy(model), inputs)
    facts = {}
    for layout in LAYOUTS:
        par = autopar.parallelize(copy.deepcopy(model), None, inputs, layout=layout)
        actual = steps(par, inputs)
        assert expected.keys() <= actual.keys(), expected.keys() - actual.keys()
        errors = [float((actual[n] - expected[n]).abs().max()) for n in expected]
        facts[layout] = max(everywhere(max(errors)))
    return facts


if __name__ == "__main__":
    makers = (table, norm, clipped, masked, alone)
    run_tasks({make.__name__: functools.partial(task, make) for make in makers})
