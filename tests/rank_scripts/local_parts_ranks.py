"""What test_local_parts.py starts on ranks: `local_parts_ranks.py FILE TASK…`. The parts of
parameters that a parallel module hands to autograd stay from call to call; FILE has what a script
sees of that, in pairs: parallel, plain.
"""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import autopar
from autopar._compat import local_of, storage_key
from on_ranks import run_tasks

Facts = dict[str, Any]


class Net(nn.Module):
    """Returns a loss and, where `shares`, one of its weights or a view of it."""

    def __init__(self, shares: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.shares = nn.Linear(8, 16), nn.Linear(16, 4), shares

    def forward(self, x: Tensor) -> Any:
        loss = self.down(self.up(x).tanh()).square().mean()
        if self.shares == "weight":
            return loss, self.up.weight
        return (loss, self.up.weight.flatten()) if self.shares == "view" else loss


def batch(number: int = 0) -> Tensor:
    return (torch.arange(32.0).view(4, 8) + number).sin()


def pair(shares: str = "", layout: str = "fsdp") -> tuple[Any, Any]:
    net = Net(shares)
    return autopar.parallelize(copy.deepcopy(net), inputs=(batch(),), layout=layout), net


def gather(x: Tensor | None) -> Any:
    return None if x is None else (x.full_tensor() if hasattr(x, "full_tensor") else x).tolist()


def gradients(model: nn.Module) -> list[Any]:
    return [gather(p.grad) for p in model.parameters()]


def two_calls(model: nn.Module) -> list[Any]:
    """Two forwards before a backward, one backward twice, gradients that are asked for."""
    first, second = model(batch(1)), model(batch(2))
    (first + 2 * second).backward()
    results = [gradients(model)]
    loss = model(batch(3))
    loss.backward(retain_graph=True)
    loss.backward()
    later, earlier = model(batch(4)), model(batch(5))
    later.backward()
    earlier.backward()
    results.append(gradients(model))
    by_autograd = torch.autograd.grad(model(batch(6)), list(model.parameters()))
    return [*results, [gather(x) for x in by_autograd]]


def hooks(model: nn.Module) -> list[Any]:
    """Hooks that come and go between calls."""
    weight, seen = model.get_parameter("up.weight"), []
    handle = weight.register_hook(lambda g: g * 3)
    model(batch()).backward()
    after = weight.register_post_accumulate_grad_hook(lambda p: seen.append(gather(p.grad)))
    handle.remove()
    model(batch(1)).backward()
    after.remove()
    model(batch(2)).backward()
    return [gradients(model), seen]


def trained(model: nn.Module) -> list[Any]:
    """Frozen and trained again, without gradients in between, with other numbers."""
    results = []
    for frozen in (False, True, False):
        model.get_parameter("up.weight").requires_grad_(not frozen)
        model.zero_grad()
        model(batch()).backward()
        with torch.no_grad():
            results.append(model(batch(1)).item())
        results.append(gradients(model))
        bias = model.get_parameter("down.bias")
        bias.data = bias.data + 1
    return results


def others(model: nn.Module) -> list[Any]:
    """Other tensors in the place of parameters for one call."""
    results = []
    for factor in (2.0, 3.0):
        model.zero_grad()
        model(batch()).backward()
        put = {n: (p.detach() * factor).requires_grad_() for n, p in model.named_parameters()}
        functional_call(model, put, (batch(1),)).backward()
        results += [gradients(model), [gather(x.grad) for x in put.values()]]
    return results


def written(shares: str) -> Facts:
    """A result that is a weight, or a view of one, and that a script hooks and writes into: what
    later calls give is what they gave before.
    """
    par, _ = pair(shares, "ddp")
    weight = par.get_parameter("up.weight")
    before, results = weight.detach().clone(), []
    for number in (0, 1, 0):
        par.zero_grad()
        par(batch())[0].backward()
        results.append(gradients(par))
        loss, shared = par(batch(number))
        shared.register_hook(lambda g: g * 5)
        with suppress(RuntimeError):  # torch refuses it until a gradient of it was asked for
            shared.mul_(2)
        (loss + shared.sum()).backward()
        with torch.no_grad():
            weight.copy_(before)
    return {"pair": [results[1:], [results[0], results[0]]]}


one_pair = functools.cache(pair)


def on_pair(act: Callable[[nn.Module], Any]) -> Facts:
    """What both of one pair give, as earlier tasks left them."""
    par, net = one_pair()
    par.zero_grad(), net.zero_grad()
    return {"pair": [act(par), act(net)]}


def node() -> Facts:
    """How many nodes hand parameters out in several calls, and whether memory comes back."""
    par, _ = pair()
    nodes = set()
    for number in range(4):
        loss = par(batch(number))
        above = [loss.grad_fn]
        while above:
            inner = above.pop()
            nodes |= {inner} if "LocalParts" in type(inner).__name__ else set()
            above += [n for n, _ in inner.next_functions if n is not None]
        loss.backward()
    weight = par.get_parameter("up.weight")
    before = storage_key(local_of(weight))
    weight.data = weight.data * 2
    del loss, above, inner
    nodes_count = len(nodes)
    nodes.clear()
    gc.collect()
    alive = [
        x for x in gc.get_objects()
        if isinstance(x, Tensor) and type(x) is Tensor and storage_key(x) == before
    ]  # fmt: skip
    return {"nodes": nodes_count, "alive": len(alive)}


TASKS: dict[str, Callable[[], Facts]] = {
    "two calls": lambda: on_pair(two_calls),
    "hooks": lambda: on_pair(hooks),
    "trained": lambda: on_pair(trained),
    "others": lambda: on_pair(others),
    "a weight is returned": lambda: written("weight"),
    "a view is returned": lambda: written("view"),
    "node": node,
}

if __name__ == "__main__":
    run_tasks(TASKS)
