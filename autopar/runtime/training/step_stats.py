"""How training goes beside its plan: the seconds of a step, tokens/s, utilisation, peak memory.

A `StepClock` counts the training steps of a module, which costs a step an addition; `stats` reads
it. A plan and a clock enter, `StepStats` leaves. `ParallelModule.stats` calls this module.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from autopar.cost.throughput import Throughput, throughput
from autopar.ir.plan import Plan
from autopar.ir.plan_table import format_bytes, format_seconds


@dataclass(frozen=True)
class StepStats:
    """What was measured over `steps` training steps, in the mean, and what was planned.

    `seconds` of a step and `planned_seconds`; `measured` and `planned` are tokens/s (or samples/s)
    of all ranks and model FLOPs utilisation, None for a plan from a file or inputs without a batch;
    `peak_bytes` of this rank since the process began, None on CPUs, and `planned_peak_bytes`.
    """

    steps: int
    seconds: float
    planned_seconds: float
    measured: Throughput | None
    planned: Throughput | None
    peak_bytes: float | None
    planned_peak_bytes: float

    def __str__(self) -> str:
        lines = [
            f"{self.steps} steps of {format_seconds(self.seconds)} "
            f"(planned {format_seconds(self.planned_seconds)})"
        ]
        if self.measured is not None:
            lines.append(f"{self.measured} (planned {self.planned})")
        peak = "not counted on CPUs" if self.peak_bytes is None else format_bytes(self.peak_bytes)
        lines.append(f"peak {peak} (planned {format_bytes(self.planned_peak_bytes)})")
        return "; ".join(lines)


class StepClock:
    """Counts training steps between two laps. The first step, which warms up, is left out."""

    def __init__(self) -> None:
        self._steps = -1
        self._begin = 0.0

    def count(self) -> None:
        """Note that a training step begins."""
        self._steps += 1
        if self._steps == 0:
            self._begin = time.perf_counter()

    def lap(self) -> tuple[int, float]:
        """Return the steps since the last lap and the seconds of each; begin anew."""
        now = time.perf_counter()
        steps, seconds = self._steps, now - self._begin
        if steps > 0:
            self._steps, self._begin = 0, now
        return max(0, steps), seconds / max(1, steps)


def stats(plan: Plan, clock: StepClock, device: torch.device) -> StepStats | None:
    """Return what the clock saw beside the plan; None before the second step. Waits for the device,
    so that all that was started is in the seconds.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
    steps, seconds = clock.lap()
    if not steps:
        return None
    inputs = _inputs(plan)
    return StepStats(
        steps,
        seconds,
        plan.step_seconds,
        throughput(plan, inputs, seconds),
        throughput(plan, inputs),
        float(torch.cuda.max_memory_allocated(device)) if on_gpu else None,
        plan.peak_bytes,
    )


def _inputs(plan: Plan) -> list[torch.Tensor]:
    """Return the inputs that were traced, without their numbers; none for a plan from a file."""
    if plan.context is None:
        return []
    program = plan.context.source
    names = [entry.node for entry in program.signature.inputs if entry.kind == "user"]
    nodes = {node.name: node for node in program.module.graph.nodes if node.op == "placeholder"}
    values = [nodes[name].meta.get("val") for name in names if name in nodes]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return [_of_all_microbatches(x, plan.microbatches) for x in tensors if x.dim()]


def _of_all_microbatches(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return an input of a whole step, of one of a micro-batch: as many rows for each."""
    return (
        x
        if count == 1
        else torch.empty((count * x.shape[0], *x.shape[1:]), dtype=x.dtype, device="meta")
    )
