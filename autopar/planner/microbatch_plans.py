"""What a plan of a step in micro-batches decides besides the layout of one micro-batch: when
gradients are summed and weights gathered, and whether two micro-batches run in turns.

Example: eight micro-batches whose unsummed gradients fit sum them once, and gather the weights once
where all of them fit as well; two micro-batches run in turns where that is modelled to save a
twentieth of the step, and both fit. planner.py asks, as it chooses a plan and makes it fit.
"""

from __future__ import annotations

import dataclasses

from autopar.cost.microbatches import (
    gathered_bytes,
    gathered_weights,
    unreduced_bytes,
    with_gradients,
)
from autopar.cost.peak import peak
from autopar.cost.simulator import timeline
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.planner.objective import cost_terms
from autopar.planner.request import PlanRequest
from autopar.world import World

_ROOM = 4.0  # of the memory, in all weights: a search counts on gathering them once
_WORTHWHILE = 0.95  # of a step whose micro-batches run one after the other


def plan_of_microbatch(chosen: Program, world: World, request: PlanRequest) -> Program:
    """Return the program with its plan's seconds those of one micro-batch of a step, sums and
    optimizer included; its gap stays. Where it is to fit a budget, the plan holds the least between
    micro-batches: `sums_once` and `gathers_once` say whether there is room for more.
    """
    assert chosen.plan is not None
    seconds = sum(cost_terms(chosen, chosen.plan, world).values())
    bound = chosen.plan.bound * seconds / chosen.plan.seconds if chosen.plan.seconds else 0.0
    plan = dataclasses.replace(
        chosen.plan,
        seconds=seconds,
        bound=bound,
        microbatches=request.microbatches,
        sums_once=chosen.plan.sums_once and request.budget is None,
        gathers_once=chosen.plan.gathers_once and request.budget is None,
    )
    return dataclasses.replace(chosen, plan=plan)


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
    unreduced = unreduced_bytes(once)
    memory = with_gradients(once, plan.memory, unreduced - unreduced_bytes(program), unreduced)
    if not request.budget.fits(memory):
        return program
    chosen = dataclasses.replace(once.plan, memory=memory, peak_bytes=memory.peak)
    return dataclasses.replace(once, plan=chosen)


def may_gather_once(program: Program, request: PlanRequest) -> bool:
    """Whether a search may count on weights that are gathered once a step: all of them take at most
    a fourth of the memory, which leaves room for their unsummed gradients and for activations.
    """
    if request.recompute not in ("auto", "none"):
        return False
    names = {entry.node for entry in program.signature.inputs if entry.kind == "parameter"}
    placeholders = program.module.graph.find_nodes(op="placeholder")
    weights = sum(node.meta["val"].nbytes for node in placeholders if node.name in names)
    return request.memory_bytes is None or _ROOM * weights <= request.memory_bytes


def gathers_once(program: Program, world: World, request: PlanRequest) -> Program:
    """Return the program with a plan that gathers every weight once a step, where all of them fit
    between micro-batches. A plan that gathers weights again in the backward has no room for them.
    """
    plan = program.plan
    assert plan is not None
    if not _is_open(plan, request) or request.budget is None or plan.memory is None:
        return program
    if plan.recompute or plan.regather or not gathered_weights(program):
        return program
    once = dataclasses.replace(program, plan=dataclasses.replace(plan, gathers_once=True))
    assert once.plan is not None
    memory = peak(once, request.budget.optimizer, world)
    if not request.budget.fits(memory):
        return program
    chosen = dataclasses.replace(once.plan, memory=memory, peak_bytes=memory.peak)
    return dataclasses.replace(once, plan=chosen)


def _is_open(plan: Plan, request: PlanRequest) -> bool:
    """Whether it is to be decided how the micro-batches run: a plan from a file has decided."""
    return plan.microbatches > 1 and request.budget is not None and request.layout is not None


def interleave_microbatches(program: Program, world: World, request: PlanRequest) -> Program:
    """Return the program with a plan that runs two micro-batches in turns, where that is faster and
    fits; what a micro-batch keeps for its backward is then there twice, but for weights that are
    gathered once.
    """
    plan = program.plan
    assert plan is not None
    is_allowed = request.overlap and _is_open(plan, request) and plan.memory is not None
    if plan.microbatches % 2 or not plan.mesh.axes or not is_allowed:
        return program
    assert plan.memory is not None and request.budget is not None
    saved = plan.memory.activations - gathered_bytes(program)
    more = saved + plan.memory.transient
    memory = dataclasses.replace(
        plan.memory,
        activations=plan.memory.activations + saved,
        transient=2 * plan.memory.transient,
        peak=plan.memory.peak + more,
    )
    both = dataclasses.replace(plan, interleaved=True, memory=memory, peak_bytes=memory.peak)
    candidate = dataclasses.replace(program, plan=both)
    if not request.budget.fits(memory):
        return program
    seconds = timeline(candidate, world).seconds
    return candidate if seconds <= _WORTHWHILE * timeline(program, world).seconds else program
