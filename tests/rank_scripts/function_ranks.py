"""What test_function_ranks.py starts, as on_ranks.py says: models with custom autograd functions
and checkpointed blocks, on all ranks and on one device.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

import autopar
import models
from custom_functions import KINDS, Net, rows
from on_ranks import Facts, everywhere, run_tasks
from one_device import joined


def loss(module: nn.Module, inputs: Any) -> Tensor:
    outputs = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
    return getattr(outputs, "loss", outputs)


def errors(model: nn.Module, par: Any, inputs: Any) -> list[float]:
    """Of every gradient, as a part of its largest entry; the infinite one where there is none."""
    model.zero_grad()
    loss(model, inputs).backward()
    loss(par, inputs).backward()
    expected, distances = dict(model.named_parameters()), []
    for name, parameter in par.named_parameters():
        right = expected[name].grad
        if right is None or parameter.grad is None:
            both = right is None or not right.any()
            own = parameter.grad is None or not joined(parameter.grad, par.layout(name)).any()
            distances.append(0.0 if both and own else float("inf"))
            continue
        error = (joined(parameter.grad, par.layout(name)) - right).abs().max()
        distances.append(float(error / right.abs().max().clamp(min=1e-6)))
    return distances


def functions(*kinds: str) -> Facts:
    facts: Facts = {}
    for place, kind in enumerate(kinds or KINDS):
        layout = ("ddp", "fsdp", "megatron")[place % 3]
        model, x = Net(KINDS[kind]), rows()
        for overlap in (True, False) if place < 6 else (True,):
            par = autopar.parallelize(model, inputs=(x,), layout=layout, overlap=overlap)
            distances = errors(model, par, (x,))
            facts[f"{kind}, {layout}, overlap {overlap}"] = max(map(max, everywhere(distances)))
    return facts


def gpt2() -> Facts:
    facts: Facts = {}
    for reentrant in (True, False):
        model, _, inputs = models.gpt2()
        model.config.use_cache = False
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        par = autopar.parallelize(model, inputs=inputs, layout="fsdp")
        distances = errors(model, par, inputs)
        facts[str(reentrant)] = {
            "parameters": len(distances),
            "error": max(map(max, everywhere(distances))),
        }
    return facts


if __name__ == "__main__":
    few = lambda: functions("straight through", "clipped")  # noqa: E731
    run_tasks({"functions": functions, "few": few, "gpt2": gpt2})
