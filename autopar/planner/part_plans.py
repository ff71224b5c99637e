"""What a plan of a step in micro-batches decides besides the layout of one part: when gradients are
summed, and whether two parts run in turns.

Example: eight parts whose unsummed gradients fit sum them once; two of them run in turns where that
is modelled to save a twentieth of the step, and both fit. planner.py asks, as it chooses a plan and
makes it fit.
"""

from __future__ import annotations

import dataclasses

from autopar.cost.parts import unreduced_bytes, with_gradients
from autopar.cost.simulator import timeline
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.planner.objective import cost_terms
from autopar.planner.request import PlanRequest
from autopar.world import World

_WORTHWHILE = 0.95  # of a step whose parts run one after the other


def plan_of_part(chosen: Program, world: World, request: PlanRequest) -> Program:
    """Return the program with its plan's seconds those of one part of a step, sums and optimizer
    included; its gap stays.
    """
    assert chosen.plan is not None
    seconds = sum(cost_terms(chosen, chosen.plan, world).values())
    bound = chosen.plan.bound * seconds / chosen.plan.seconds if chosen.plan.seconds else 0.0
    plan = dataclasses.replace(
        chosen.plan, seconds=seconds, bound=bound, microbatches=request.microbatches
    )
    return dataclasses.replace(chosen, plan=plan)


def sum_each_part(chosen: Program, request: PlanRequest) -> Program:
    """Return the program with a plan that holds the least between micro-batches, before it is made
    to fit the request's budget.
    """
    plan = chosen.plan
    assert plan is not None
    if not _is_open(plan, request):
        return chosen
    return dataclasses.replace(chosen, plan=dataclasses.replace(plan, sums_once=False))


def sums_once(program: Program, request: PlanRequest) -> Program:
    """Return the program with a plan that sums every gradient once a step, where what it holds of
    them between micro-batches fits.
    """
    plan = program.plan
    assert plan is not None
    if not _is_open(plan, request) or request.budget is None or plan.memory is None:
        return program
    once = dataclasses.replace(program, plan=dataclasses.replace(plan, sums_once=True))
    assert once.plan is not None
    held = unreduced_bytes(once)
    memory = with_gradients(once, plan.memory, held - unreduced_bytes(program), held)
    if not request.budget.fits(memory):
        return program
    chosen = dataclasses.replace(once.plan, memory=memory, peak_bytes=memory.peak)
    return dataclasses.replace(once, plan=chosen)


def _is_open(plan: Plan, request: PlanRequest) -> bool:
    """Whether it is to be decided how the parts run: a plan from a file has decided."""
    return plan.microbatches > 1 and request.budget is not None and request.layout is not None


def interleave_parts(program: Program, world: World, request: PlanRequest) -> Program:
    """Return the program with a plan that runs two parts in turns, where that is faster and fits;
    what a part keeps for its backward is then there twice.
    """
    plan = program.plan
    assert plan is not None
    asked = request.overlap and _is_open(plan, request) and plan.memory is not None
    if plan.microbatches % 2 or not plan.mesh.axes or not asked:
        return program
    assert plan.memory is not None and request.budget is not None
    more = plan.memory.activations + plan.memory.transient
    memory = dataclasses.replace(
        plan.memory,
        activations=2 * plan.memory.activations,
        transient=2 * plan.memory.transient,
        peak=plan.memory.peak + more,
    )
    both = dataclasses.replace(plan, interleaved=True, memory=memory, peak_bytes=memory.peak)
    candidate = dataclasses.replace(program, plan=both)
    if not request.budget.fits(memory):
        return program
    seconds = timeline(candidate, world).seconds
    return candidate if seconds <= _WORTHWHILE * timeline(program, world).seconds else program
