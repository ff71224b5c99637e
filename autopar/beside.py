"""Results beside the loss, such as logits: hardly a script asks for their gradient.

A backward derived by AOTAutograd takes a gradient of every result. Where nobody asks for one,
autograd makes zeros: of logits as many bytes again, and a pass over them. So the graphs are derived
as if these results were constants. Where the gradient of one is asked for after all, it is taken
through the emitted graph, which runs once more; from the next step on the graphs are derived with
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .program import Program

Gradients = tuple[Tensor | None, ...]
Asked = Callable[[int, Tensor, Sequence[Tensor]], Gradients]


def beside_the_loss(program: Program) -> frozenset[int]:
    """The places among the graph's results of those that are not the loss: what buffers become,
    and whatever is no scalar where a scalar is returned.
    """
    outputs = [output for output in program.signature.outputs if output.node is not None]
    whole = [program.layouts[output.node].shape for output in outputs if output.node is not None]
    loss = any(not shape and o.kind == "user" for shape, o in zip(whole, outputs, strict=True))
    return frozenset(
        place
        for place, (shape, output) in enumerate(zip(whole, outputs, strict=True))
        if output.kind == "mutation" or (loss and shape)
    )


def as_constants(module: fx.GraphModule, places: frozenset[int]) -> tuple[fx.GraphModule, set[int]]:
    """The same module, but no gradient goes through these results; and a set that fills with the
    places of those that would have one, when the module is traced.
    """
    graph, found = fx.Graph(), set[int]()
    results = list(graph.graph_copy(module.graph, {}))  # type: ignore[arg-type]
    for place in sorted(places):
        results[place] = graph.call_function(_noted(place, found), (results[place],))
    graph.output(tuple(results))
    return fx.GraphModule(module, graph), found


def _noted(place: int, found: set[int]) -> Callable[[Tensor], Tensor]:
    def constant(value: Tensor) -> Tensor:
        if value.requires_grad:
            found.add(place)
        return value.detach()

    return constant


class Late(torch.autograd.Function):
    """Hands out a result whose gradient no derived backward takes: `asked` gives those of the
    values that it was made of.
    """

    @staticmethod
    def forward(ctx: Any, asked: Asked, place: int, result: Tensor, *values: Tensor) -> Tensor:
        ctx.asked, ctx.place = asked, place
        ctx.save_for_backward(*values)
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, None, *ctx.asked(ctx.place, gradient, ctx.saved_tensors)


def through(
    module: fx.GraphModule, place: int, gradient: Tensor, values: Sequence[Tensor]
) -> Gradients:
    """Gradients of the values by running the emitted graph once more."""
    own = [value.detach().requires_grad_(value.requires_grad) for value in values]
    wanted = [value for value in own if value.requires_grad]
    with torch.enable_grad():
        result = module(*own)[place]
    found = iter(torch.autograd.grad(result, wanted, gradient, allow_unused=True))
    return tuple(next(found) if value.requires_grad else None for value in own)
