"""`par.no_sync()`: gradients of several backwards, which the ranks sum once.

    with par.no_sync():
        par(first_half).backward()
    par(second_half).backward()    # sums both across ranks

Within the context a parameter's gradient is a DTensor that is Partial on the axes that were not
summed over: each rank holds its own part of the sum. So zero_grad, clipping and optimizers see what
it is, and DTensor sums what one of them needs. The next backward outside takes these gradients and
sums them with its own. Where it cannot, as another graph may sum other things, they are summed
first. Source: DistributedDataParallel.no_sync.

runtime/module.py has one NoSync; it sets an `Accumulator` at each graph that runs
(runtime/deferred_backward.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from autopar._compat import scales_partial_gradients
from autopar.passes.overlap.accumulation import Tail
from autopar.runtime.apply import placements, to_dtensor
from autopar.runtime.backends import Scheduled
from autopar.runtime.deferred_backward import Form
from autopar.runtime.training.step_graph import StepGraph
from autopar.world.world import say_once


class NoSync:
    """Whether a module's backwards hold their gradients now, and those that it holds."""

    def __init__(self, owner: nn.Module) -> None:
        self._owner, self.depth, self._used = owner, 0, False

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Hold gradients within the context; where torch would lose what a script writes into
        them, leave every backward to sum its own.
        """
        if not scales_partial_gradients():
            say_once(
                f"torch {torch.__version__} does not clip gradients that are not summed yet: "
                "no_sync() lets every backward sum its own, as torch 2.13 need not"
            )
            yield
            return
        self.depth, self._used = self.depth + 1, True
        try:
            yield
        finally:
            self.depth -= 1

    def before(self, graph: StepGraph) -> None:
        """Prepare a graph that is about to run."""
        if self._used and isinstance(graph.run, Scheduled) and graph.run.accumulator is None:
            graph.run.accumulator = _GraphAccumulator(self, graph)

    def after(self, graph: StepGraph) -> None:
        """Sum what is held of parameters that the backward of this graph does not sum. Collective
        where there is any.
        """
        if self.depth or not self._used or not torch.is_grad_enabled():
            return
        run = graph.run
        ends = run.ends if isinstance(run, Scheduled) and not torch.is_anomaly_enabled() else ()
        closed = {graph.signature.inputs[tail.place].target: tail for tail in ends}
        for name, parameter in self._owner.named_parameters():
            if is_unreduced(parameter) and not lies_as(parameter, closed.get(name)):
                assert isinstance(parameter.grad, DTensor) and isinstance(parameter, DTensor)
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)

    def parameters(self, graph: StepGraph, ends: Sequence[Tail]) -> list[nn.Parameter]:
        """Return the parameters whose gradients these tails sum."""
        return [
            self._owner.get_parameter(graph.signature.inputs[tail.place].target) for tail in ends
        ]


class _GraphAccumulator:
    """The Accumulator of one graph: it keeps gradients at the parameters."""

    def __init__(self, owner: NoSync, graph: StepGraph) -> None:
        self._owner, self._graph = owner, graph

    def form(self) -> Form:
        if self._owner.depth:
            return "deferred"
        run = self._graph.run
        assert isinstance(run, Scheduled)
        unreduced = any(is_unreduced(p) for p in self._owner.parameters(self._graph, run.ends))
        return "final" if unreduced else "reduced"

    @torch.no_grad()
    def put(self, ends: Sequence[Tail], own: Sequence[torch.Tensor]) -> None:
        parameters = self._owner.parameters(self._graph, ends)
        for parameter, tail, part in zip(parameters, ends, own, strict=True):
            part = part.to(parameter.dtype).contiguous()
            gradient = to_dtensor(part, tail.layout, self._graph.device_mesh)
            before = parameter.grad
            parameter.grad = gradient if before is None else before + gradient

    @torch.no_grad()
    def take(self, ends: Sequence[Tail]) -> list[torch.Tensor | None]:
        parameters = self._owner.parameters(self._graph, ends)
        return [_take_unreduced(p, tail) for p, tail in zip(parameters, ends, strict=True)]


def is_unreduced(parameter: torch.Tensor) -> bool:
    """Whether a parameter's gradient is not summed over all axes yet."""
    gradient = parameter.grad
    return isinstance(gradient, DTensor) and any(
        isinstance(p, Partial) for p in gradient.placements
    )


def lies_as(parameter: torch.Tensor, tail: Tail | None) -> bool:
    """Whether what is held of a parameter is what this tail sums."""
    gradient = parameter.grad
    assert isinstance(gradient, DTensor)
    return tail is not None and gradient.placements == placements(tail.layout)


def _take_unreduced(parameter: nn.Parameter, tail: Tail) -> torch.Tensor | None:
    """Return what is held of a parameter, of which it forgets it; None where nothing is."""
    gradient = parameter.grad
    if not is_unreduced(parameter) or not lies_as(parameter, tail):
        return None
    assert isinstance(gradient, DTensor)
    parameter.grad = None
    return gradient.to_local().to(tail.dtype)
