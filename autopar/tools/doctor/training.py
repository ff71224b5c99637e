"""The doctor's checks of training: each layout against one device, and a step against its plan.

- `parity` compares the loss and every gradient of a small GPT in float32 with one device.
- `step`, `peak` and `synchronisation` measure a training step: its seconds and its peak of memory
  beside the plan's, and whether the host waits for the device within it.

examination.py runs them; each takes a Session and returns a Finding.
"""

from __future__ import annotations

import copy
import gc
import math
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar import api
from autopar.cost.calibration import measure
from autopar.errors import LayoutError, PlanError
from autopar.ir.plan import Plan
from autopar.planner.request import Grid, Grid25D
from autopar.runtime.module import ParallelModule
from autopar.tools.doctor import (
    Absent,
    Finding,
    Session,
    grid_4d,
    parallel,
    small_model,
    timed_model,
)
from autopar.world import ranks

LIMIT = 1e-4  # the largest relative error of the loss, and of each gradient's norm
# An error is relative to at least this part of the largest gradient: the gradient of the bias of
# keys is zero but for rounding.
FLOOR = 1e-2


def layouts(ranks: int) -> dict[str, str | Grid]:
    """Return five layouts for so many ranks, and 2.5D where they are a square; one rank alone has
    nothing to shard.

    >>> list(layouts(4)), list(layouts(8)), layouts(1)
    (['ddp', 'fsdp', 'megatron', 'megatron-sp', '4d', '2.5d'], ['ddp', ... '4d'], {'auto': 'auto'})
    """
    if ranks == 1:
        return {"auto": "auto"}
    by_name: dict[str, str | Grid] = {n: n for n in ("ddp", "fsdp", "megatron", "megatron-sp")}
    by_name["4d"] = grid_4d(ranks)
    side = math.isqrt(ranks)
    if side * side == ranks:
        by_name["2.5d"] = Grid25D(side)
    return by_name


def parity(session: Session, layout: str | Grid) -> Finding:
    """Check a layout: return how far the loss and every gradient of two steps are from the same
    model in float64 on one device; it is a fault where one is further than LIMIT.
    """
    model, inputs = small_model(session)
    expected_loss, expected = _one_device(model, inputs, session)
    try:
        module = parallel(session, layout)
    except (LayoutError, PlanError) as error:
        raise Absent(f"{session.ranks} ranks cannot have it: {error}") from None
    for _ in range(2):  # the first derives the scheduled graphs
        module.zero_grad()
        loss = module(*inputs)
        loss.backward()
    gradients = {name: _unsharded_gradient(p.grad) for name, p in module.named_parameters()}
    errors = {"loss": abs(float(loss.detach().double()) / expected_loss - 1)}
    errors |= _relative_errors(gradients, expected)
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else math.inf)
    fault = ""
    if not errors[worst] <= LIMIT:
        fault = f"{worst} is off by {errors[worst]:.1e} relative, the limit is {LIMIT:.0e}"
    mesh = str(module.plan.mesh) or "of one rank"
    figure = f"largest error {errors[worst]:.1e}, limit {LIMIT:.0e}; mesh {mesh}"
    facts = {
        "mesh": str(module.plan.mesh),
        "groups": list(module.plan.groups),
        "limit": LIMIT,
        "floor": FLOOR,
        "worst": worst,
        "errors": errors,
    }
    return Finding(figure, facts, fault)


def _one_device(model: Any, inputs: Any, session: Session) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of one device, in float64, so that the errors are the
    ranks' alone.
    """
    single = copy.deepcopy(model).double().to(session.device)
    loss = single(*(x.to(session.device) for x in inputs))
    loss.backward()
    gradients = {name: p.grad.detach().cpu() for name, p in single.named_parameters()}
    return float(loss.detach()), gradients


def _unsharded_gradient(gradient: Any) -> Tensor:
    """Return the unsharded gradient, in float64 on the CPU."""
    unsharded = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    exact: Tensor = unsharded.detach().double().cpu()
    return exact


def _relative_errors(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return, by parameter, the norm of the difference over that of the gradient, or over FLOOR of
    the largest gradient's.
    """
    largest = max(float(gradient.norm()) for gradient in expected.values())
    return {
        name: float((gradients[name] - gradient).norm())
        / max(float(gradient.norm()), FLOOR * largest)
        for name, gradient in expected.items()
    }


WARM_STEPS = 4  # the first derives the graphs and makes the optimizer's states
ROUNDS = 7
STEPS_OF_A_ROUND = {"cuda": 5, "cpu": 1}  # between two waits for the device
WITHIN = 0.1  # a measured peak may exceed the planned one by this part
SYNC_STEPS, SYNC_WARM = 10, 2
# This file compares the ranks' inputs from time to time, and waits for the device then.
_BY_DESIGN = "runtime/agreement.py"


class TimedModel:
    """The model that is timed, with its optimizer and inputs on the rank's device. `before`: bytes
    that torch had allocated on the GPU before the model was made.
    """

    def __init__(self, session: Session) -> None:
        model, inputs = timed_model(session)
        self.device = session.device
        self.inputs = tuple(x.to(session.device) for x in inputs)
        gc.collect()
        self.before = torch.cuda.memory_allocated(session.device) if session.cuda else 0
        self.parameters = sum(p.numel() for p in model.parameters())
        parallel_model = api.parallelize(model, session.world, inputs, device=session.device)
        self.module: Any = parallel_model
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4)
        assert isinstance(parallel_model, ParallelModule)
        self.plan: Plan = parallel_model.plan
        for _ in range(WARM_STEPS):
            self.step()

    def step(self) -> Tensor:
        """Run one step, as anybody would write it; nothing in it waits for the device."""
        self.optimizer.zero_grad()
        loss: Tensor = self.module(*self.inputs)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def step(session: Session) -> Finding:
    """Check the speed: return the median seconds of a training step of a GPT under "auto" on the
    slowest rank, beside the planned seconds; it is a fault where the loss is not finite.
    """
    trained = _shared_model(session)
    count, round_seconds = STEPS_OF_A_ROUND[session.device.type], []
    for _ in range(ROUNDS):
        measure.barrier()
        round_seconds.append(measure.seconds(trained.step, count, session.device))
    took = float(max(ranks.all_of(sorted(round_seconds)[ROUNDS // 2])))
    loss, plan = float(trained.step()), trained.plan
    planned = plan.step_seconds
    figure = (
        f"planned {planned * 1e3:.1f} ms, measured {took * 1e3:.1f} ms ({took / planned:.2f} ×); "
        f"mesh {str(plan.mesh) or 'of one rank'}"
    )
    facts = {
        "planned_seconds": planned,
        "summed_seconds": plan.seconds,
        "measured_seconds": took,
        "measured_over_planned": took / planned,
        "rounds": round_seconds,
        "mesh": str(plan.mesh),
        "groups": list(plan.groups),
        "sent_bytes": plan.comm_bytes,
        "parameters": trained.parameters,
        "world": str(plan.world),
        "loss": loss,
    }
    return Finding(figure, facts, "" if loss - loss == 0 else f"the loss is {loss}")


def peak(session: Session) -> Finding:
    """Check the memory: return the bytes at the peak of a step on the rank that needs most, by
    torch's counter, beside the planned bytes; it is a fault where they are over a tenth more than
    planned.
    """
    if not session.cuda:
        raise Absent(
            "not measured on a CPU, where torch counts no memory: "
            "python -m benchmarks.model.memory does"
        )
    trained = _shared_model(session)
    trained.optimizer.zero_grad()
    torch.cuda.synchronize(session.device)
    gc.collect()
    torch.cuda.reset_peak_memory_stats(session.device)
    trained.step()
    torch.cuda.synchronize(session.device)
    own = torch.cuda.max_memory_allocated(session.device) - trained.before
    reserved = torch.cuda.max_memory_reserved(session.device)
    by_rank, planned = ranks.all_of([own, reserved]), trained.plan.peak_bytes
    measured = max(rank_bytes[0] for rank_bytes in by_rank)
    ratio = measured / planned
    figure = (
        f"planned {planned / 2**20:,.1f} MiB, measured {measured / 2**20:,.1f} MiB ({ratio:.3f} ×)"
    )
    fault = f"{figure}, more than {1 + WITHIN:g} ×" if ratio > 1 + WITHIN else ""
    memory = trained.plan.memory
    facts = {
        "planned_bytes": planned,
        "measured_bytes": measured,
        "measured_over_planned": ratio,
        "by_rank": [{"allocated_bytes": a, "reserved_bytes": b} for a, b in by_rank],
        "parts": None if memory is None else vars(memory),
    }
    return Finding(figure, facts, fault)


def synchronisation(session: Session) -> Finding:
    """Check for waits: return how often the host waited for the device in ten steps, by place, the
    first two apart; it is a fault where it did after these. The comparison of the ranks' inputs
    waits by design and is counted separately.
    """
    if not session.cuda:
        raise Absent("a CPU waits for nothing: torch warns of synchronisation on GPUs alone")
    trained = _shared_model(session)
    counts = [_count_waits(trained) for _ in range(SYNC_STEPS)]
    first, later = sum(counts[:SYNC_WARM], Counter()), sum(counts[SYNC_WARM:], Counter())
    compared = sum(n for place, n in later.items() if place.startswith(_BY_DESIGN))
    unplanned = {place: n for place, n in later.items() if not place.startswith(_BY_DESIGN)}
    waits = sum(unplanned.values())
    figure = f"{waits} waits in {SYNC_STEPS - SYNC_WARM} steps, {compared} to compare inputs"
    facts = {"first_steps": dict(first), "later_steps": dict(later), "compared": compared}
    return Finding(figure, facts, f"the host waits in {_places_text(unplanned)}" if waits else "")


def _shared_model(session: Session) -> TimedModel:
    """Return the model that all checks of a session share."""
    if "trained" not in session.shared:
        session.shared["trained"] = TimedModel(session)
    shared: TimedModel = session.shared["trained"]
    return shared


def _count_waits(trained: TimedModel) -> Counter[str]:
    """Return where torch warns of a synchronisation within one step, as "folder/file.py:line", and
    how often.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trained.step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return Counter(
        f"{'/'.join(Path(warning.filename).parts[-2:])}:{warning.lineno}"
        for warning in caught
        if "synchronizing" in str(warning.message)
    )


def _places_text(places: dict[str, int]) -> str:
    return ", ".join(f"{place} ({count} ×)" for place, count in places.items())
