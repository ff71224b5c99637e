"""What test_state.py starts, as on_ranks.py says: autocast around calls, and what is changed in
place between a forward and its backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from on_ranks import Facts, run_tasks

CASES = {"ddp": True, "fsdp": True, "megatron": False}  # a layout, and whether it overlaps


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(self.up(x).tanh()).softmax(-1), y)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 16), torch.randn(8, 16)


def parallel(layout: str, overlap: bool) -> Any:
    return autopar.parallelize(Net(), None, batch(), layout=layout, overlap=overlap)


def gradients(model: nn.Module) -> list[Tensor]:
    grads = [p.grad for p in model.parameters()]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]


def error(actual: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(actual, expected, strict=True))


def under_autocast(work: Callable[[], Any]) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return work()


def refused(work: Callable[[], Any]) -> str:
    try:
        work()
    except (autopar.InputError, RuntimeError) as raised:
        return f"{type(raised).__name__}: {raised}"
    return ""


def autocast(layout: str) -> Facts:
    """The dtype and errors of the planned one, and those of calls under another."""
    single, inputs = Net(), batch()
    expected = under_autocast(lambda: single(*inputs))
    expected.backward()
    return compare(single, expected, layout, CASES[layout])


def compare(single: nn.Module, expected: Tensor, layout: str, overlap: bool) -> Facts:
    inputs = batch()
    planned = autopar.parallelize(Net(), layout=layout, overlap=overlap)
    loss = under_autocast(lambda: planned(*inputs))
    loss.backward()
    run = planned.module._autopar.first.run
    run._plain = None  # the graph as it is, every collective waited for: not called again
    again = under_autocast(lambda: planned(*inputs)) if overlap else loss
    plain = parallel(layout, overlap)
    return {
        "dtypes": [str(loss.dtype), str(expected.dtype)],
        "loss": abs(float(loss / expected) - 1),
        "gradients": error(gradients(planned.module), gradients(single)),
        "again": abs(float(again / loss) - 1),
        "without": abs(float(planned(*inputs) / single(*inputs)) - 1),
        "with": abs(float(under_autocast(lambda: plain(*inputs)) / expected) - 1),
    }


def shift(tensors: Any) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.add_(1)


def step(par: nn.Module) -> None:
    for parameter in par.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(par.parameters(), lr=0.1).step()
    par.zero_grad()


EDITS: dict[str, Callable[[Any, Any], None]] = {
    "parameters": lambda par, inputs: shift(par.parameters()),
    "optimizer": lambda par, inputs: step(par),
    "inputs": lambda par, inputs: shift(inputs),
    "nothing": lambda par, inputs: None,
}


def changed(layout: str) -> Facts:
    """By change and sharded inputs: what backward raises, or else how far its gradients are from
    those of the values at the forward.
    """
    single = Net()
    single(*batch()).backward()
    expected = gradients(single)
    facts: Facts = {}
    par = parallel(layout, CASES[layout])
    weights = {name: p.detach().clone() for name, p in par.named_parameters()}
    for what, change in EDITS.items():
        for sharded in (False, True):
            par.load_state_dict(weights)
            par.zero_grad()
            inputs = par.shard(*batch()) if sharded else batch()
            loss = par(*inputs)
            change(par, inputs)
            said = refused(loss.backward)
            away = 0.0 if said else error(gradients(par), expected)
            facts[f"{what} {sharded}"] = {"said": said, "error": away}
    return facts


if __name__ == "__main__":
    run_tasks(
        {
            f"{task.__name__} {layout}": functools.partial(task, layout)
            for task in (autocast, changed)
            for layout in CASES
        }
    )
