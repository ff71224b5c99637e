"""How a step of a ParallelModule runs on this rank, op by op.

A module and a call enter, a MeasuredStep of runtime/profiler.py leaves for each step that was run.
runtime/module.py calls `timelines`, and so do benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.errors import PlanError
from autopar.ir.program import without_autocast
from autopar.runtime.profiler import MeasuredStep, backward, measure_step, phase, restore_after
from autopar.runtime.training.other_calls import CallKey
from autopar.runtime.training.step_graph import StepGraph
from autopar.world import ranks


def timelines(module: Any, times: int, args: Any, kwargs: Any) -> list[MeasuredStep]:
    """Return the timelines of `times` steps of a ParallelModule. Collective. Raises InputError as a
    call does, PlanError on GPUs.
    """
    device = module.device
    if device.type != "cpu":
        raise PlanError(
            f"a timeline is read off what the CPU does, and this step runs on {device}: "
            "what runs on its streams would not be seen. Profile the step with torch.profiler "
            "and its CUDA activity"
        )
    ranks.agree("call", str(CallKey.of(module.training, device, args, kwargs)))
    graph, leaves = module._graph_for(args, kwargs)
    ranks.together("reading the inputs", lambda: graph.values(leaves, module))
    with restore_after(module):
        return measure_step(graph.run, lambda run: _step(module, graph, run, leaves), times)


def _step(module: Any, graph: StepGraph, run: Callable[..., Any], leaves: list[Any]) -> None:
    module.zero_grad()
    with phase("forward"):
        values = graph.values(leaves, module)
        with without_autocast(graph.autocast):
            results = graph.outputs(run(*values), module)
    with phase("backward"):
        backward(results)
