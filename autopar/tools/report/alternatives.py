"""The named layouts beside a plan: what each would take on the same ranks, or what it lacks.

Example: `alternatives(plan)` of a plan for eight ranks has DDP, FSDP, Megatron and others, each
with its modelled step and memory, or the reason why it cannot be. facts.py calls it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from autopar.cost.memory import Budget
from autopar.errors import LayoutError, PlanError
from autopar.ir.plan import Plan
from autopar.passes.pass_manager import PassManager
from autopar.planner.confirm import finish_plan
from autopar.planner.planner import choose_plan
from autopar.planner.request import PlanRequest
from autopar.planner.space import rivals

NAMED = ("ddp", "fsdp", "megatron-sp", "4d", "megatron", "ep", "cp", "atp", "3d", "2.5d")
_PATIENCE_S = 30.0  # after which no further layout is begun


@dataclass(frozen=True)
class Alternative:
    """A named layout: the seconds of its step and the bytes at its peak, None where it cannot be
    planned, for the reason `why`.
    """

    layout: str
    mesh: str = ""
    seconds: float | None = None
    peak_bytes: float | None = None
    why: str = ""


def alternatives(
    plan: Plan, patience: float = _PATIENCE_S, progress: Callable[[str], None] | None = None
) -> list[Alternative]:
    """Return the named layouts beside a plan of this process, each planned for the same request
    within the same memory; none for a plan from a file and for one rank. After `patience` seconds
    no other one is begun.
    """
    if plan.context is None or not plan.mesh.axes:
        return []
    begin, others = time.monotonic(), []
    rival_names = rivals(plan.context.source)
    for layout in (name for name in NAMED if name in rival_names):
        if time.monotonic() - begin > patience:
            others.append(Alternative(layout, why="not planned, to save time"))
            continue
        if progress is not None:
            progress(f"layout {layout}")
        others.append(_alternative(plan, layout))
    return others


def _alternative(plan: Plan, layout: str) -> Alternative:
    context = plan.context
    assert context is not None
    budget = Budget(plan.device_limit, plan.optimizer, "auto")
    request, manager = PlanRequest.like(plan, layout, budget), PassManager()
    annotated = replace(context.source, plan=None)
    try:
        chosen = choose_plan(manager, annotated, context.world, request)
        other = finish_plan(manager, annotated, chosen, context.world, request)
    except (LayoutError, PlanError) as error:
        return Alternative(layout, why=str(error))
    return Alternative(layout, str(other.mesh), other.step_seconds, other.peak_bytes)
