"""Worlds of another size: a smaller one that would be as fast, and a larger one that a model would
fit.

Example: "8 devices" instead of 16, within 1 % of the step time. Both are searched quickly, on
meshes of at most two axes. An annotated program and its plan enter. `smaller_world` is called by
api.py, `larger_world` by confirm.py, for the refusal of a plan that does not fit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from autopar.cost.least_bytes import is_excluded
from autopar.cost.memory import Budget
from autopar.cost.simulator import timeline
from autopar.cost.summary import summary_rows
from autopar.errors import LayoutError, PlanError
from autopar.ir.plan import Plan
from autopar.ir.plan_table import Memory
from autopar.ir.program import Program
from autopar.passes import emit_program
from autopar.planner.bound import lower_bounds
from autopar.planner.fit import LimitedSearch
from autopar.planner.rematerialize import effort
from autopar.planner.request import PlanRequest
from autopar.planner.solve import ShortenedModel, exact
from autopar.planner.space import Candidate, searched_candidates
from autopar.world import Level, World

_AS_FAST = 1.01  # times the plan's seconds
_AXES = 2
_TRIES = 3  # larger worlds that are tried


def smaller_world(program: Program, plan: Plan, request: PlanRequest) -> tuple[int, float] | None:
    """Return (ranks, modelled seconds of a step) of the smallest world that fits the model and is
    within 1 % as fast as `plan`; None where not even half of its world is. Worlds are halved, whole
    nodes first. Both steps are of one kind: with communication hidden where the plan hides it.

    `program`: annotated. A bound settles nearly all cases; only a world that it leaves open is
    searched, on its most promising mesh. One rank is always considered, even where a half is not as
    fast or the layout is for more ranks: it sends nothing.
    """
    smallest = None
    for world in _halves(plan.world):
        seconds = _seconds_if_as_fast(program, world, request, plan)
        if seconds is None:
            break
        smallest = world.ranks, seconds
    if 1 in (plan.world.ranks, smallest and smallest[0]):
        return smallest
    any_layout = dataclasses.replace(request, layout="auto")
    seconds = _seconds_if_as_fast(program, _one_rank(plan.world), any_layout, plan)
    return smallest if seconds is None else (1, seconds)


def _seconds_if_as_fast(
    program: Program, world: World, request: PlanRequest, plan: Plan
) -> float | None:
    """Return the seconds of a step on this world, if it fits and is as fast as `plan`; else None.

    One rank hides nothing, so its sum is its step. Of several ranks, those whose sum is above the
    plan's sum are left out: their step would have to hide more than the plan's.
    """
    assert request.budget is not None
    layout_candidates = _small_candidates(program, world, request)
    if not layout_candidates:
        return None
    step_limit = plan.step_seconds * _AS_FAST
    sum_limit = step_limit if world.ranks == 1 else plan.seconds * _AS_FAST
    bounds = lower_bounds(program, layout_candidates, world)
    most_promising = min(range(len(layout_candidates)), key=bounds.__getitem__)
    if bounds[most_promising] > sum_limit:
        return None
    least, _ = exact(program, *layout_candidates[most_promising], world)
    if least.seconds > sum_limit:
        return None
    budget_without_recompute = dataclasses.replace(request.budget, recompute="none")
    emitted, memory = _emit_to_fit(program, least, world, budget_without_recompute)
    overlaps = plan.overlapped is not None and world.ranks > 1
    step = timeline(emitted, world) if overlaps else None
    seconds = summary_rows(emitted, world, step).step_seconds
    return seconds if request.budget.fits(memory) and seconds <= step_limit else None


def larger_world(program: Program, plan: Plan, request: PlanRequest, needs: Memory) -> str:
    """Return the smallest world that the model would fit, as "16 devices"; "" where three doublings
    that could do are not enough. `needs`: the memory of the most frugal plan found on the plan's
    world.
    """
    budget = request.budget
    assert budget is not None and budget.memory_bytes is not None and request.layout is not None
    doublings = max(1, math.ceil(math.log2(needs.peak / budget.memory_bytes)))
    for exponent in range(doublings, doublings + _TRIES):
        world = _times(plan.world, 2**exponent)
        if world is None or is_excluded(program, world.ranks, budget):
            continue
        model = ShortenedModel(program, world)
        for layout in ("fsdp", "auto") if request.layout == "auto" else (request.layout,):
            search = LimitedSearch(model, request.under(layout), budget)
            search.meshes = _small_candidates(program, world, search.request)
            if search.meshes and _fits_a_frugal_plan(search, plan.seconds, needs):
                return f"{world.ranks} devices"
    return ""


def _fits_a_frugal_plan(search: LimitedSearch, seconds: float, needs: Memory) -> bool:
    """Whether a plan searched for its memory fits, by its exact peak. `seconds`, `needs`: of any
    plan, to set the price of a byte by.
    """
    try:
        frugal = search.frugal(seconds, needs.peak)
        return frugal.fits(search.aim) and search.worked_out(frugal).fits(search.budget)
    except PlanError:
        return False


def _emit_to_fit(
    program: Program, plan: Plan, world: World, budget: Budget
) -> tuple[Program, Memory]:
    """Return the emitted program with just enough rematerialization to fit, and its memory."""
    planned = dataclasses.replace(program, plan=plan)
    return effort(emit_program(planned, world), world, budget)


def _small_candidates(program: Program, world: World, request: PlanRequest) -> list[Candidate]:
    """Return the candidates of at most two axes, or the first one; none where the layout has no
    mesh.
    """
    try:
        all_candidates = searched_candidates(request.layout or "auto", world, program)
    except LayoutError:
        return []
    return [
        (mesh, rules) for mesh, rules in all_candidates if len(mesh.axes) <= _AXES
    ] or all_candidates[:1]


def _halves(world: World) -> Iterator[World]:
    """Yield worlds of a half, a quarter, … of the ranks: with fewer nodes, then with fewer ranks
    per node.
    """
    while not world.links:
        level = max((i for i, x in enumerate(world.levels) if x.ranks % 2 == 0), default=-1)
        if level < 0 or any(x.ranks > 1 for x in world.levels[level + 1 :]):
            return
        half = dataclasses.replace(world.levels[level], ranks=world.levels[level].ranks // 2)
        levels = (*world.levels[:level], half, *world.levels[level + 1 :])
        measured = tuple(m for m in world.measured if m.reach <= world.ranks // 2)
        world = dataclasses.replace(world, levels=levels, measured=measured)
        yield world


def _one_rank(world: World) -> World:
    """Return the world of one of these devices."""
    return dataclasses.replace(world, levels=(Level(1, 1e9, 0.0),), links=(), measured=())


def _times(world: World, times: int) -> World | None:
    """Return a world of `times` times the nodes; None for an irregular network."""
    if world.links:
        return None
    *inner, outer = world.levels
    wider = dataclasses.replace(outer, ranks=outer.ranks * times)
    return dataclasses.replace(world, levels=(*inner, wider))
