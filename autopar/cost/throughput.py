"""What a plan's modelled step means for training: tokens/s, and the share of the devices' FLOP/s
that goes into the model.

Example: 2.79 M tokens/s, 43% model FLOPs utilisation. A plan of this
process and its inputs enter, `Throughput` leaves. Called by cli/, tools/ and
runtime/training/step_stats.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.containers import tensors_in
from autopar.ir.graph import carries_gradient
from autopar.ir.plan import Plan
from autopar.ir.plan_table import format_count
from autopar.ir.program import Program
from autopar.ir.sharding_rule import ATTENTION_BACKWARD, results_of
from autopar.world import Device
from autopar.world.gpu_kernel_rates import OFF_PUBLISHED
from autopar.world.gpus import GPUS

_BACKWARD = 2.0  # a matmul has two in its backward


@dataclass(frozen=True)
class Throughput:
    """`rate` of `unit` ("tokens" or "samples") a second on all ranks; `utilization`: of the peak of
    all devices, as a fraction, by the FLOPs of the model's own matmuls, none twice; `off`: how far
    such figures were from published runs in the mean, as a fraction, None where none were compared.
    """

    rate: float
    unit: str
    utilization: float
    off: float | None

    def __str__(self) -> str:
        error = ""
        if self.off is not None:
            error = f"; published runs on such devices were {self.off:.0%} off the model on average"
        share = f"{self.utilization:.0%} model FLOPs utilisation"
        return f"{format_count(round(self.rate))} {self.unit}/s, {share}{error}"


def throughput(plan: Plan, inputs: Any, seconds: float | None = None) -> Throughput | None:
    """Return what a plan of this process gives for these inputs, by its modelled step, or by a step
    of so many `seconds`, which has no error; None for inputs without a batch, and for a plan from a
    file.
    """
    step = plan.step_seconds if seconds is None else seconds
    batch = _batch(inputs)
    if plan.context is None or batch is None or not step:
        return None
    count, unit = batch
    device = plan.world.device
    ideal_seconds = plan.microbatches * _ideal_seconds(plan.context.source, device)
    ideal_seconds /= plan.ranks
    return Throughput(
        count / step,
        unit,
        ideal_seconds / step,
        _published_error(device) if seconds is None else None,
    )


def _batch(inputs: Any) -> tuple[int, str] | None:
    """Return what a batch has, and of what: the tokens of its first integers of two dims, else the
    samples of its first tensor.
    """
    tensors = [x for x in tensors_in(inputs) if x.dim()]
    for x in tensors:
        if x.dim() == 2 and x.dtype in (torch.int64, torch.int32):
            return x.numel(), "tokens"
    return (tensors[0].shape[0], "samples") if tensors else None


def _ideal_seconds(program: Program, device: Device) -> float:
    """Return the seconds that one device at its peak would take for the model's matmuls and
    attention, forward and backward.
    """
    notes = program.annotations
    assert notes is not None
    total = 0.0
    for node in program.module.graph.nodes:
        rule = notes.specs.get(node.name)
        if rule is None or not rule.flops:
            continue
        dtype = next(x.dtype for x in results_of(node) if isinstance(x, torch.Tensor))
        backward = _BACKWARD if rule.attends is None else ATTENTION_BACKWARD
        times = 1 + backward * carries_gradient(notes, node)
        total += times * float(rule.flops) / device.rate(dtype)
    return total


def _published_error(device: Device) -> float | None:
    """Return the mean error that benchmarks.model.published found for this nominal device."""
    return OFF_PUBLISHED.get(device.name) if GPUS.get(device.name) == device else None
