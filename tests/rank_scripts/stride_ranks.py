"""What test_strides.py starts, as on_ranks.py says: values that lie in memory otherwise than AOT-
Autograd predicts, in scheduled graphs on gloo ranks, against one device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from on_ranks import Facts, run_tasks
from one_device import joined, together


class Bent(nn.Module):
    """A linear, what is made of its result by `bend`, and a loss against a target in that order."""

    def __init__(self, bend: Callable[[Tensor], Tensor], loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 32), nn.Linear(32, 16)
        self.bend, self.loss = bend, loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.bend(self.down(self.up(x).tanh())), target)


BENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda y: y.mT,
    "permuted": lambda y: y.permute(1, 2, 0),
    "expanded": lambda y: y.mT[:, None].expand(-1, 3, -1, -1),
    "viewed": lambda y: y.view(8, 12, 4, 4).transpose(1, 2).transpose(2, 3),
    "sliced": lambda y: y.mT[:, 1:9, ::2],
}
LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "bce": lambda y, t: F.binary_cross_entropy_with_logits(y, t.sigmoid()),
    "soft_margin": lambda y, t: F.soft_margin_loss(y, t.sign()),
    "kl": lambda y, t: F.kl_div(y, t.exp(), reduction="sum"),
    "classes": lambda y, t: F.cross_entropy(y.float(), t.argmax(1)),
}
CASES = [("transposed", loss) for loss in LOSSES] + [(bend, "mse") for bend in BENDS]


def gradients(module: nn.Module, x: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    module.zero_grad()
    loss = module(x, target)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def compared(model: nn.Module, par: Any, x: Tensor, target: Tensor) -> float:
    """The larger of the errors of the loss and of all gradients together."""
    single_loss, grads = gradients(copy.deepcopy(model), x, target)
    loss, own = gradients(par, x, target)
    assert own.keys() == grads.keys()
    actual = {n: joined(g, par.layout(n)) for n, g in own.items()}
    return max(abs(float((loss - single_loss) / single_loss)), together(actual, grads))


def batch(bend: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 12, 24, generator=torch.Generator().manual_seed(1))
    shape = BENDS[bend](torch.zeros(8, 12, 16)).shape
    return x, torch.randn(shape, generator=torch.Generator().manual_seed(2))


def losses(layout: str, **more: Any) -> Facts:
    facts = {}
    for bend, loss in CASES:
        torch.manual_seed(0)
        model, inputs = Bent(BENDS[bend], LOSSES[loss]), batch(bend)
        par = autopar.parallelize(model, None, inputs, layout=layout, **more)
        facts[f"{layout} {bend} {loss} {more}"] = compared(model, par, *inputs)
    return facts


class Returning(Bent):
    """Gives its input back, flat, and the result."""

    def forward(self, x: Tensor, target: Tensor) -> Any:
        return super().forward(x, target), x.reshape(-1, 24)


def returned() -> Facts:
    """A view of an input that lies otherwise than that of the first step, or than any dense one."""
    torch.manual_seed(0)
    model, (x, target) = Returning(BENDS["transposed"], F.mse_loss), batch("transposed")
    par = autopar.parallelize(model, None, (x, target), layout="ddp")
    facts = {}
    for what, reorder in ORDERS.items():
        loss, flat = par(reorder(x), target)
        loss.backward()
        wanted = reorder(x).reshape(-1, 24)
        whole = flat.full_tensor() if isinstance(flat, DTensor) else flat
        facts[what] = float((whole - wanted).abs().max())
    return facts


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda x: x[:, :1].expand(-1, 12, -1),
    "as planned": lambda x: x,
    "turned": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "expanded again": lambda x: x[:, :1].expand(-1, 12, -1),
}


def inputs() -> Facts:
    """A later step is given inputs that lie otherwise than those of the first."""
    facts = {}
    for layout in ("ddp", "megatron"):
        torch.manual_seed(0)
        model, (x, target) = Bent(BENDS["transposed"], F.mse_loss), batch("transposed")
        par = autopar.parallelize(model, None, (x, target), layout=layout)
        for what, reorder in ORDERS.items():
            turned = target.mT.contiguous().mT
            facts[f"{layout} {what}"] = compared(model, par, reorder(x), turned)
    return facts


TASKS: dict[str, Callable[[], Facts]] = {
    "ddp": lambda: losses("ddp"),
    "fsdp": lambda: losses("fsdp"),
    "megatron": lambda: losses("megatron"),
    "megatron-sp": lambda: losses("megatron-sp"),
    "eager": lambda: losses("ddp", backend="aot_eager"),
    "inputs": inputs,
    "returned": returned,
}


if __name__ == "__main__":
    run_tasks(TASKS)
