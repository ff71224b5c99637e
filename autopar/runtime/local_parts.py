"""The rank's own parts of DTensors, as a graph computes with them and autograd follows them.

    parts = state.parts.of(parameters, trained)    # of a module's parameters, at every call
    inputs = to_local(inputs, first_order=True)    # of a call's inputs
    require_unchanged(results, parameters)         # what the backward computes with stays as it is

Gradients of the parts become DTensors that lie as those do. One autograd node serves all parameters
of a module, and stays from call to call: making it and its hundreds of edges anew takes longer than
all else that a call does outside its graph. runtime/training/step_graph.py calls these functions.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from autopar._compat import (
    from_part,
    local_of,
    locals_of,
    not_compiled,
    placing_of,
    storage_key,
    versions_of,
)
from autopar.errors import InputError
from autopar.runtime.parallel_tensor import HOLDERS, ParallelTensor, become_parallel


class ParameterParts:
    """The own parts of the parameters of one module, with the autograd node that follows them.

    They are made anew where a parameter, what it holds or whether it is trained is not what it was,
    and on another stream.
    """

    def __init__(self) -> None:
        self.clear()
        HOLDERS.add(self)

    def clear(self) -> None:
        """Let go of all tensors, so that their memory is free once their parameters have others."""
        self._parameters: list[DTensor] = []
        self._own: list[torch.Tensor] = []  # what the parameters hold
        self._parts: list[torch.Tensor] = []  # the same, where trained as results of the node
        self._trained: list[bool] = []
        self._stream: Any = None
        self._memory: frozenset[int] = frozenset()  # of the parts

    def reuse(
        self, parameters: Sequence[DTensor], trained: list[bool]
    ) -> list[torch.Tensor] | None:
        """Return the parts that were made at an earlier call, None where they are to be made."""
        if (
            not self._parts
            or not all(map(operator.is_, parameters, self._parameters))
            or not all(map(operator.is_, locals_of(parameters), self._own))
        ):
            return None
        if not torch.is_grad_enabled():
            return self._own
        if (
            trained == self._trained
            and _stream_of(self._own) == self._stream
            and not torch.is_anomaly_enabled()
        ):
            return self._parts
        return None

    def of(self, parameters: Sequence[DTensor], trained: list[bool]) -> list[torch.Tensor]:
        """Return the own part of each parameter, differentiably where gradients are recorded. Those
        of a module's own parameters are kept.
        """
        parts = local_parts(parameters)
        if torch.is_grad_enabled() and all(map(_is_own_parameter, parameters)):
            self._parameters, self._own, self._parts = [*parameters], locals_of(parameters), parts
            self._trained, self._stream = trained, _stream_of(self._own)
            self._memory = frozenset(map(storage_key, self._own))
        return parts

    def release(self, results: Sequence[Any]) -> None:
        """Let go of the parts where one of a call's results shares memory with them: autograd would
        record there what a script writes into it.
        """
        if any(isinstance(x, torch.Tensor) and storage_key(x) in self._memory for x in results):
            self.clear()


def _is_own_parameter(x: torch.Tensor) -> bool:
    return type(x) is ParallelTensor and isinstance(x, nn.Parameter) and x.is_leaf


def _stream_of(parts: Sequence[torch.Tensor]) -> Any:
    """Return the stream that a backward of these parts would run on, None on CPUs."""
    if not parts or parts[0].device.type == "cpu":
        return None
    return torch.accelerator.current_stream(parts[0].device)


def to_local(values: Sequence[Any], first_order: bool) -> list[Any]:
    """Return the inputs of a call with the rank's local tensors in place of DTensors. Where there
    are any, or with `first_order`, gradients of gradients are refused for all values.
    """
    values = list(values)
    places = [place for place, value in enumerate(values) if isinstance(value, DTensor)]
    for place, part in zip(places, local_parts([values[place] for place in places]), strict=True):
        values[place] = part
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return values
    for place, value in enumerate(values if places or first_order else ()):
        if place not in places and isinstance(value, torch.Tensor) and value.requires_grad:
            values[place] = value.view_as(value)
            values[place].register_hook(lambda gradient: _first_order([gradient])[0])
    return values


def local_parts(xs: Sequence[DTensor]) -> list[torch.Tensor]:
    """Return `to_local` of each DTensor, differentiably: the gradients are DTensors with the same
    placements. One autograd function serves all of them, as one for each takes as long as a small
    op; the gradients arrive together, at the end.
    """
    if torch.compiler.is_compiling():
        return [x.to_local(grad_placements=x.placements) for x in xs]
    trained = [x for x in xs if x.requires_grad] if torch.is_grad_enabled() else []
    if not trained:
        return locals_of(xs)
    parts = iter(_LocalParts.apply(*trained))
    return [next(parts) if x.requires_grad else local_of(x) for x in xs]


class _LocalParts(Function):
    @staticmethod
    def forward(ctx: Any, *xs: DTensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.placings = [placing_of(x) for x in xs]
        # autograd marks the tensors that a forward returns
        return tuple(part.detach() for part in locals_of(xs))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            gradients = [
                None if grad is None else become_parallel(from_part(grad.contiguous(), placing))
                for grad, placing in zip(grads, ctx.placings, strict=True)
            ]
        twice = any(grad is not None and grad.requires_grad for grad in grads)
        return tuple(_first_order(gradients) if twice else gradients)


# -- what is refused -------------------------------------------------------------------------------
def require_unchanged(results: Sequence[Any], xs: Sequence[DTensor]) -> None:
    """Let a backward from these results raise RuntimeError where one of xs was changed in place
    since now, as autograd does: a DTensor counts such changes, its local tensor does not.
    """
    check = partial(_refuse_changed, xs, versions_of(xs))
    for node in {x.grad_fn for x in results if isinstance(x, torch.Tensor)}:
        if node is not None:
            node.register_prehook(check)


@not_compiled
def _refuse_changed(xs: Sequence[DTensor], before: Sequence[int], _: Any) -> None:
    versions = versions_of(xs)
    if versions == before:
        return
    x = next(x for x, now, then in zip(xs, versions, before, strict=True) if now != then)
    what = "a parameter" if isinstance(x, nn.Parameter) else "an input"
    raise RuntimeError(
        f"{what} of shape {tuple(x.shape)} has been modified by an inplace operation between the "
        "forward and the backward of the parallel model, which computes with its new values: take "
        "the optimizer's step after backward(), or change a clone of it"
    )


def _first_order(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return gradients of which no gradient can be taken: that raises InputError."""
    if not torch.is_grad_enabled():  # create_graph=True enables it in a backward
        return list(gradients)
    leaves = [None if x is None else x.detach().requires_grad_() for x in gradients]
    refused = iter(_NoSecondOrder.apply(*(x for x in leaves if x is not None)))
    return [None if x is None else next(refused) for x in leaves]


class _NoSecondOrder(Function):
    @staticmethod
    def forward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(gradient.view_as(gradient) for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise InputError(
            "a gradient of a gradient was asked for (create_graph=True) of what a parallel model "
            "computes, and its backward is a graph that autograd cannot differentiate again. Take "
            "the first derivative in the model's forward, with torch.autograd.grad(…, "
            "create_graph=True), so that it is planned and differentiated with the rest; or take "
            "this penalty of the original model, before it is parallelized"
        )
