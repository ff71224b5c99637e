"""A training step as planned and as measured: its seconds, its peak of memory, and whether the host
waits for the device within it.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar import api
from autopar.cost.calibration import measure
from autopar.doctor.models import timed
from autopar.doctor.result import Absent, Finding
from autopar.doctor.session import Session
from autopar.ir.plan import Plan
from autopar.runtime.module import ParallelModule
from autopar.world import ranks

WARM_STEPS = 4  # the first derives the graphs and makes the optimizer's states
ROUNDS = 7
STEPS_OF_A_ROUND = {"cuda": 5, "cpu": 1}  # between two waits for the device
WITHIN = 0.1  # by what part a measured peak may be above the planned one
SYNC_STEPS, SYNC_WARM = 10, 2
_BY_DESIGN = "autopar/runtime/agreement.py"  # compares the ranks' inputs from time to time, and waits for that


class Trained:
    """The model that is timed, with its optimizer and inputs on the rank's device. `before`: bytes
    that torch held on the GPU before it was made.
    """

    def __init__(self, session: Session) -> None:
        model, inputs = timed(session)
        self.device = session.device
        self.inputs = tuple(x.to(session.device) for x in inputs)
        gc.collect()
        self.before = torch.cuda.memory_allocated(session.device) if session.cuda else 0
        self.parameters = sum(p.numel() for p in model.parameters())
        made = api.parallelize(model, session.world, inputs, device=session.device)
        self.module: Any = made
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4)
        assert isinstance(made, ParallelModule)
        self.plan: Plan = made.plan
        for _ in range(WARM_STEPS):
            self.step()

    def step(self) -> Tensor:
        """One step, as anybody would write it; nothing in it waits for the device."""
        self.optimizer.zero_grad()
        loss: Tensor = self.module(*self.inputs)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def step(session: Session) -> Finding:
    """Enter: nothing. Leave: the median seconds of a training step of a GPT under "auto" on the
    slowest rank, beside what the plan says; a fault where the loss is not finite.
    """
    trained = _trained(session)
    count, found = STEPS_OF_A_ROUND[session.device.type], []
    for _ in range(ROUNDS):
        measure.barrier()
        found.append(measure.seconds(trained.step, count, session.device))
    took = float(max(ranks.all_of(sorted(found)[ROUNDS // 2])))
    loss, plan = float(trained.step()), trained.plan
    planned = plan.seconds if plan.overlapped is None else plan.overlapped
    figure = (
        f"planned {planned * 1e3:.1f} ms, measured {took * 1e3:.1f} ms ({took / planned:.2f} ×); "
        f"mesh {str(plan.mesh) or 'of one rank'}"
    )
    facts = {
        "planned_seconds": planned,
        "summed_seconds": plan.seconds,
        "measured_seconds": took,
        "measured_over_planned": took / planned,
        "rounds": found,
        "mesh": str(plan.mesh),
        "groups": list(plan.groups),
        "sent_bytes": plan.comm_bytes,
        "parameters": trained.parameters,
        "world": str(plan.world),
        "loss": loss,
    }
    return Finding(figure, facts, "" if loss - loss == 0 else f"the loss is {loss}")


def peak(session: Session) -> Finding:
    """Enter: nothing. Leave: bytes at the peak of a step on the rank that holds most, by torch's
    counter, beside the planned ones; a fault where they are over a tenth more than planned.
    """
    if not session.cuda:
        raise Absent(
            "not measured on a CPU, where torch counts no memory: python -m benchmarks.memory does"
        )
    trained = _trained(session)
    trained.optimizer.zero_grad()
    torch.cuda.synchronize(session.device)
    gc.collect()
    torch.cuda.reset_peak_memory_stats(session.device)
    trained.step()
    torch.cuda.synchronize(session.device)
    own = torch.cuda.max_memory_allocated(session.device) - trained.before
    reserved = torch.cuda.max_memory_reserved(session.device)
    each, planned = ranks.all_of([own, reserved]), trained.plan.peak_bytes
    measured = max(one[0] for one in each)
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
        "by_rank": [{"allocated_bytes": a, "reserved_bytes": b} for a, b in each],
        "parts": None if memory is None else vars(memory),
    }
    return Finding(figure, facts, fault)


def synchronisation(session: Session) -> Finding:
    """Enter: nothing. Leave: how often the host waited for the device in ten steps, by place, the
    first two apart; a fault where it did after these. What compares the ranks' inputs from time to
    time waits by design and is counted for itself.
    """
    if not session.cuda:
        raise Absent("a CPU waits for nothing: torch warns of synchronisation on GPUs alone")
    trained = _trained(session)
    counts = [_waits(trained) for _ in range(SYNC_STEPS)]
    first, later = sum(counts[:SYNC_WARM], Counter()), sum(counts[SYNC_WARM:], Counter())
    compared = sum(n for place, n in later.items() if place.startswith(_BY_DESIGN))
    rest = {place: n for place, n in later.items() if not place.startswith(_BY_DESIGN)}
    waits = sum(rest.values())
    figure = f"{waits} waits in {SYNC_STEPS - SYNC_WARM} steps, {compared} to compare inputs"
    facts = {"first_steps": dict(first), "later_steps": dict(later), "compared": compared}
    return Finding(figure, facts, f"the host waits in {_listed(rest)}" if waits else "")


def _trained(session: Session) -> Trained:
    """The same for all checks of a session."""
    if "trained" not in session.kept:
        session.kept["trained"] = Trained(session)
    found: Trained = session.kept["trained"]
    return found


def _waits(trained: Trained) -> Counter[str]:
    """Where torch warns of a synchronisation within one step, as "folder/file.py:line", and how
    often.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trained.step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return Counter(
        f"{'/'.join(Path(one.filename).parts[-2:])}:{one.lineno}"
        for one in said
        if "synchronizing" in str(one.message)
    )


def _listed(places: dict[str, int]) -> str:
    return ", ".join(f"{place} ({count} ×)" for place, count in places.items())
