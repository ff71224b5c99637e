"""Worlds of another size: a smaller one that would be as fast, a larger one that a model would fit.

Both are looked for quickly, on meshes of at most two axes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from autopar.cost.activations import ActivationMemory, Price
from autopar.cost.memory import Budget
from autopar.cost.summary import summary_rows
from autopar.errors import LayoutError, PlanError
from autopar.ir.plan import Plan
from autopar.ir.plan_table import Memory
from autopar.ir.program import Program
from autopar.passes import emit_program
from autopar.planner.bounds.factor_graph import frame
from autopar.planner.mesh_search import Candidate, best, exact, meshes_by_bound
from autopar.planner.named_layouts import Layouts, candidates
from autopar.planner.rematerialize import effort
from autopar.world import World

_AS_FAST = 1.01  # times the seconds of the plan
_AXES = 2
_TRIES = 3  # larger worlds that are tried
_FRUGAL = 64.0  # price of a byte, in steps per peak: so high that memory is nearly all that counts


def smaller_world(
    program: Program, plan: Plan, layout: Layouts, redundant: bool, budget: Budget
) -> tuple[int, float] | None:
    """(ranks, modelled seconds of a step) of the smallest world that fits the model and is within
    1 % as fast as `plan`, halving its world and whole nodes first; None where not even half is.

    `program`: annotated. A bound settles nearly all cases; only a world that it leaves open is
    searched, on its most promising mesh.
    """
    found = None
    for world in _halves(plan.world):
        tried = _as_fast(program, world, layout, redundant, budget, plan.seconds * _AS_FAST)
        if tried is None:
            break
        found = world.ranks, tried
    return found


def _as_fast(
    program: Program,
    world: World,
    layout: Layouts,
    redundant: bool,
    budget: Budget,
    seconds: float,
) -> float | None:
    """The seconds of a step on this world, if they are no more and it fits."""
    given = _candidates(program, world, layout)
    if not given:
        return None
    whole = frame(program)
    bounds = meshes_by_bound(whole, given, world, redundant)
    least = min(range(len(given)), key=bounds.__getitem__)
    if bounds[least] > seconds:
        return None
    plan, _ = exact(whole, *given[least], world, redundant)
    if plan.seconds > seconds:
        return None
    once = dataclasses.replace(budget, recompute="none")
    made, memory = _emitted(program, plan, world, once)
    total = summary_rows(made, world).seconds
    return total if budget.fits(memory) and total <= seconds else None


def larger_world(
    program: Program, plan: Plan, layout: Layouts, redundant: bool, budget: Budget, needs: Memory
) -> str:
    """The smallest world that the model would fit, as "16 devices"; "" where three doublings that
    could do are not enough. `needs`: what the most frugal plan found takes on the plan's world.
    """
    assert budget.memory_bytes is not None
    doublings = max(1, math.ceil(math.log2(needs.peak / budget.memory_bytes)))
    price = Price(ActivationMemory(program, budget.optimizer), _FRUGAL * plan.seconds / needs.peak)
    for more in range(doublings, doublings + _TRIES):
        world = _times(plan.world, 2**more)
        given = [] if world is None else _candidates(program, world, layout)
        if world is None or not given:
            continue
        try:
            found = best(program, given, world, redundant, price).plan
            _, memory = _emitted(program, found, world, budget)
        except PlanError:
            continue
        if budget.fits(memory):
            return f"{world.ranks} devices"
    return ""


def _emitted(program: Program, plan: Plan, world: World, budget: Budget) -> tuple[Program, Memory]:
    planned = dataclasses.replace(program, plan=plan)
    return effort(emit_program(planned, world), world, budget)


def _candidates(program: Program, world: World, layout: Layouts) -> list[Candidate]:
    try:
        given = list(candidates(layout, world.ranks, program))
    except LayoutError:
        return []
    return [(mesh, rules) for mesh, rules in given if len(mesh.axes) <= _AXES] or given[:1]


def _halves(world: World) -> Iterator[World]:
    """Worlds of a half, a quarter, … of the ranks: fewer nodes, then fewer ranks in a node."""
    while not world.links:
        place = max((i for i, x in enumerate(world.levels) if x.ranks % 2 == 0), default=-1)
        if place < 0 or any(x.ranks > 1 for x in world.levels[place + 1 :]):
            return
        half = dataclasses.replace(world.levels[place], ranks=world.levels[place].ranks // 2)
        levels = (*world.levels[:place], half, *world.levels[place + 1 :])
        kept = tuple(m for m in world.measured if m.reach <= world.ranks // 2)
        world = dataclasses.replace(world, levels=levels, measured=kept)
        yield world


def _times(world: World, times: int) -> World | None:
    """A world of so many times the nodes; None for an irregular network."""
    if world.links:
        return None
    *inner, outer = world.levels
    wider = dataclasses.replace(outer, ranks=outer.ranks * times)
    return dataclasses.replace(world, levels=(*inner, wider))
