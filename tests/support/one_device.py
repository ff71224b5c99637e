"""Trains a model on one device or on all ranks, and compares the two."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.ir.layout import Layout
from autopar.ir.padding import filled_up
from on_ranks import Facts, gathered

STEPS = 3


ADAM_W = partial(torch.optim.AdamW, lr=1e-3)


def called(module: nn.Module, inputs: Any) -> tuple[Tensor, Tensor]:
    """(loss, logits) of a model of models.py, or of the parallel one; the loss twice where that is
    all that it returns.
    """
    outputs = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
    if isinstance(outputs, Tensor):
        return outputs, outputs
    return (
        (outputs[1], outputs[0]) if isinstance(outputs, tuple) else (outputs.loss, outputs.logits)
    )


def trained(
    module: nn.Module,
    inputs: Any,
    gather: Callable[[str, Tensor], Tensor],
    optimizer_of: Callable[..., torch.optim.Optimizer] = ADAM_W,
) -> tuple[Tensor, Tensor, dict, dict]:
    """(first loss, first logits, first gradients, parameters after STEPS steps), all whole."""
    optimizer = optimizer_of(module.parameters())
    first: tuple[Any, ...] = ()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss, logits = called(module, inputs)
        loss.backward()
        if not first:
            grads = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
            gradients = {n: gather(n, grad) for n, grad in grads.items()}
            first = loss.detach().clone(), logits.detach(), gradients
        optimizer.step()
    return *first, {n: gather(n, p.detach()) for n, p in module.named_parameters()}  # type: ignore[return-value]


def joined(value: Tensor, layout: Layout) -> Tensor:
    """The whole of a DTensor, by autopar's own arithmetic. Parts of a parameter that is padded in
    the graph are filled up, as its last ranks hold fewer rows.
    """
    assert isinstance(value, DTensor), type(value)
    gather = layout.join(gathered(filled_up(value.to_local(), layout.local_shape)))
    return gather[tuple(map(slice, value.shape))].clone()


def error(actual: Tensor, expected: Tensor) -> float:
    """‖found - expected‖ / ‖expected‖, in L2."""
    return float((actual - expected).norm() / expected.norm())


def worst(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    return max((error(actual[name], expected[name]), name) for name in expected)


def together(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The error of all tensors as one long vector, which itself would be as large as the model."""
    assert all(actual[n].shape == e.shape for n, e in expected.items())

    def length(tensors: Iterable[Tensor]) -> float:
        return math.hypot(*(float(t.norm()) for t in tensors))

    return length(actual[n] - e for n, e in expected.items()) / length(expected.values())


def significant(parameter: Tensor, gradient: Tensor, least: float) -> Tensor:
    """The parameter, zero where the gradient is rounding noise: AdamW takes a step of full length
    whatever the gradient's size, so those entries go anywhere (the bias of attention's keys, which
    softmax does not see).
    """
    return torch.where(gradient.abs() > least, parameter, 0.0)


def noise(gradients: dict[str, Tensor]) -> float:
    """The size of an entry that may be rounding noise."""
    return 1e-6 * max(float(g.abs().max()) for g in gradients.values())


def compared(single: tuple[Any, ...], actual: tuple[Any, ...]) -> Facts:
    """Relative errors of what `trained` returned: of gradients and parameters the worst one with
    its name, of gradients that are more than noise, and all in one.
    """
    loss, _, gradients, parameters = actual
    assert gradients.keys() == single[2].keys(), gradients.keys() ^ single[2].keys()
    least = noise(single[2])
    counted_gradients = {n: g for n, g in single[2].items() if float(g.abs().max()) > least}
    parameter_errors = (
        (error(significant(parameters[n], g, least), significant(single[3][n], g, least)), n)
        for n, g in single[2].items()
    )
    return {
        "loss": abs(float(loss - single[0]) / float(single[0])),
        "gradients": worst({n: gradients[n] for n in counted_gradients}, counted_gradients),
        "all gradients": together(gradients, single[2]),
        "parameters": max(parameter_errors),
        "all parameters": together(parameters, single[3]),
    }
