"""Treats auxiliary outputs, results beside the loss such as logits, as constants in the backward.

A backward that AOTAutograd derives takes a gradient of every result. Where the loss alone is
differentiated, autograd makes zeros for the others: for logits as many bytes again, and a pass over
them. So the graphs are derived as if auxiliary outputs were constants. Where the gradient of one is
taken after all, it is computed through the emitted graph, which runs once more; from the next step
on the graphs are derived with it. As with any gradient, all ranks take it or none.

runtime/backends.py calls these functions when it derives the graphs and when it returns results.
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


def aux_output_places(program: Program) -> frozenset[int]:
    """Return the places of the auxiliary outputs among the graph's results: what a user gets
    besides a scalar. Empty where no result is a scalar.
    """
    outputs = [(o.kind, o.node) for o in program.signature.outputs if o.node is not None]
    dims = {
        place: len(program.layouts[node].shape)
        for place, (kind, node) in enumerate(outputs)
        if kind == "user"
    }
    return frozenset(place for place, n in dims.items() if n) if 0 in dims.values() else frozenset()


def as_constants(module: fx.GraphModule, places: frozenset[int]) -> tuple[fx.GraphModule, set[int]]:
    """Return the module with these results detached, and a set. Tracing the module fills the set
    with the places of those that would have a gradient.
    """
    graph, differentiable = copied(module.graph), set[int]()
    output = graph.output_node()
    returned: Any = output.args[0]
    results = list(returned)
    with graph.inserting_before(output):
        for place in sorted(places):
            results[place] = graph.call_function(
                _detach_and_note(place, differentiable), (results[place],)
            )
    output.args = (tuple(results),)
    return fx.GraphModule(module, graph), differentiable


def _detach_and_note(place: int, found: set[int]) -> Callable[[Tensor], Tensor]:
    """Return a function that detaches a result, and notes its place if it had a gradient."""

    def constant(value: Tensor) -> Tensor:
        if value.requires_grad:
            found.add(place)
        return value.detach()

    return constant


class Late(torch.autograd.Function):
    """Returns a result whose gradient no derived backward takes. In the backward, `asked` computes
    the gradients of the values that the result was made of.
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
    """Return gradients of the values by running the emitted graph once more. None where there is
    none.
    """
    leaves = [value.detach().requires_grad_(value.requires_grad) for value in values]
    differentiable = [value for value in leaves if value.requires_grad]
    with torch.enable_grad():
        result = module(*leaves)[place]
    gradients = iter(torch.autograd.grad(result, differentiable, gradient, allow_unused=True))
    return tuple(next(gradients) if value.requires_grad else None for value in leaves)
