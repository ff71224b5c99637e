"""Results beside the loss, such as logits: hardly a script asks for their gradient.

A backward derived by AOTAutograd takes a gradient of every result. Where nobody asks for one,
autograd makes zeros: of logits as many bytes again, and a pass over them. So the graphs are derived
as if these results were constants. Where the gradient of one is asked for after all, it is taken
through the emitted graph, which runs once more; from the next step on the graphs are derived with
it. As with any gradient, all ranks ask for it or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.graph import copied
from autopar.ir.program import Program

Gradients = tuple[Tensor | None, ...]
Asked = Callable[[int, Tensor, Sequence[Tensor]], Gradients]


def beside_the_loss(program: Program) -> frozenset[int]:
    """The places among the graph's results of what a user gets besides a scalar."""
    outputs = [(o.kind, o.node) for o in program.signature.outputs if o.node is not None]
    dims = {
        place: len(program.layouts[node].shape)
        for place, (kind, node) in enumerate(outputs)
        if kind == "user"
    }
    return frozenset(place for place, n in dims.items() if n) if 0 in dims.values() else frozenset()


def as_constants(module: fx.GraphModule, places: frozenset[int]) -> tuple[fx.GraphModule, set[int]]:
    """The same module, but no gradient goes through these results; and a set that fills with the
    places of those that would have one, when the module is traced.
    """
    graph, found = copied(module.graph), set[int]()
    output = graph.output_node()
    given: Any = output.args[0]
    results = list(given)
    with graph.inserting_before(output):
        for place in sorted(places):
            results[place] = graph.call_function(_noted(place, found), (results[place],))
    output.args = (tuple(results),)
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
