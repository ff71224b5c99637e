"""What test_derivative_ranks.py starts, as on_ranks.py says: trains models that take derivatives in
their forward on real ranks and on one device.
"""

from __future__ import annotations

import copy
import functools

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import autopar
from derivative_models import MODELS, model_and_inputs
from on_ranks import Facts, everywhere, run_tasks


def steps(module: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Parameters and buffers after three steps, and the losses."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        with sdpa_kernel(SDPBackend.MATH):  # eager has no second derivative of another kernel
            loss = module(*inputs)
            loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}
    return {**whole, "losses": torch.stack(losses)}


def task(name: str, layout: str) -> Facts:
    """The largest difference of any value on any rank, and how far one device moved."""
    model, inputs = model_and_inputs(name)  # the same weights and inputs on every rank
    before = [p.detach().clone() for p in model.parameters()]
    expected = steps(copy.deepcopy(model), inputs)
    own = [expected[n].detach() for n, _ in model.named_parameters()]
    moved = max(float((a - b).abs().max()) for a, b in zip(own, before, strict=True))
    par = autopar.parallelize(copy.deepcopy(model), None, inputs, layout=layout)
    actual = steps(par, inputs)
    assert expected.keys() <= actual.keys(), expected.keys() - actual.keys()
    errors = [float((actual[n] - expected[n]).abs().max()) for n in expected]
    return {"moved": moved, "error": max(everywhere(max(errors)))}


if __name__ == "__main__":
    run_tasks(
        {
            f"{name} {layout}": functools.partial(task, name, layout)
            for name in MODELS
            for layout in ("fsdp", "megatron")
        }
    )
