"""Runs the graphs that AOTAutograd derives on the ranks of a lockstep run.

A lockstep run has its ranks run emitted graphs, whose collectives ask `comm.simulator`. Derived
graphs have torch's functional collectives, which know process groups alone: here each is replaced
by an exchange of the run. So a zero bubble schedule is compared with one device in the two halves
of a backward that real ranks run. stages_check.py has one DerivedInLockstep for each stage, on
which the threads of its ranks take turns.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.cost.simulator.graph_events import Phase
from autopar.cost.simulator.liveness import StepMemory
from autopar.ir.program import Program
from autopar.ops import comm
from autopar.passes.overlap import DerivedGraph, erase_unused
from autopar.runtime.backends import Scheduled
from autopar.runtime.reference import tensor_to_float64
from autopar.world import World

functional = torch.ops._c10d_functional


def _exchange(kind: str, x: Tensor, group: str) -> Tensor:
    assert comm.simulator is not None
    return comm.simulator.exchange(kind, x, group)


def _all_to_all(x: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    assert len({*received, *sent}) == 1, "ranks exchange equal pieces"
    return _exchange("all-to-all", x.unflatten(0, (len(sent), -1)), group).flatten(0, 1)


_EXCHANGES: Mapping[Any, Callable[..., Tensor]] = {
    functional.all_gather_into_tensor.default: lambda x, size, group: _exchange(
        "all-gather", x, group
    ),
    functional.reduce_scatter_tensor.default: lambda x, op, size, group: _exchange(
        "reduce-scatter", x, group
    ),
    functional.all_reduce.default: lambda x, op, group: _exchange(f"all-reduce {op}", x, group),
    functional.all_to_all_single.default: _all_to_all,
    functional.broadcast.default: lambda x, root, group: _exchange(
        f"broadcast root {root}", x, group
    ),
    torch.ops.autopar.reduce.default: lambda x, root, group: _exchange(
        f"reduce root {root}", x, group
    ),
    functional.wait_tensor.default: lambda x: x,
}


class _OfRank:
    """An attribute of which each rank, a thread of the run, has its own value; None before it has
    one.
    """

    def __set_name__(self, kind: type[DerivedInLockstep], name: str) -> None:
        self._name = name

    def __get__(self, run: DerivedInLockstep, kind: type[DerivedInLockstep]) -> Any:
        return getattr(run.of_rank, self._name, None)

    def __set__(self, run: DerivedInLockstep, value: Any) -> None:
        setattr(run.of_rank, self._name, value)


class DerivedInLockstep(Scheduled):
    """A Scheduled for ranks in one process, whose graphs run in the order in which they were
    derived. What a step leaves in it is each rank's own.
    """

    accumulator: Any = _OfRank()
    weights: Any = _OfRank()
    rest: Any = _OfRank()

    def __init__(self, program: Program, world: World) -> None:
        self.of_rank = threading.local()
        super().__init__(program, world, ())

    def prepare(self, values: Sequence[Any]) -> None:
        """Derive the graphs in float64, with torch's collectives in them; once for all ranks."""
        if self._run is not None:
            return
        simulator, comm.simulator = comm.simulator, None
        try:
            super().prepare([_in_float64(x) for x in values])
        finally:
            comm.simulator = simulator

    def _scheduled(self, graph: fx.Graph, phase: Phase, step: StepMemory) -> DerivedGraph:
        erase_unused(graph)
        for node in graph.nodes:
            node.target = _EXCHANGES.get(node.target, node.target)
        return DerivedGraph(graph, phase, frozenset(), step, math.inf, "")


def _in_float64(x: Any) -> Any:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return tensor_to_float64(x).requires_grad_(x.requires_grad)
