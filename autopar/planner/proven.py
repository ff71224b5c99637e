"""The fastest plan that fits, proven: the plans of a small graph are tried one after the other, the
fastest first, until one fits by its exact peak.

What a plan stores of its parameters, and what one that drops nothing keeps for its backward, are
bytes that no peak is below: a plan that exceeds the limit with these is never made.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterator, Sequence

from autopar.cost.activations import Middle, Stored
from autopar.cost.memory import Budget
from autopar.errors import PlanError
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes import emit_program
from autopar.planner import choose
from autopar.planner.ascending import Cap, ascending
from autopar.planner.bounds.factor_graph import frame
from autopar.planner.mesh_search import Candidate
from autopar.planner.rematerialize import RematerializationSteps, TriedRematerialization
from autopar.world import World

_VARIABLES, _MESHES, _AXES = 16, 6, 2  # of a graph that counts as small
_TRIES = 1000  # plans whose peak is worked out


def is_small(program: Program, given: Sequence[Candidate]) -> bool:
    """Whether there are few plans enough to try all that are faster than the best that fits."""
    few = len(given) <= _MESHES and all(len(mesh.axes) <= _AXES for mesh, _ in given)
    return few and len(frame(program).variables) <= _VARIABLES


def fastest(
    program: Program,
    given: Sequence[Candidate],
    world: World,
    redundant: bool,
    budget: Budget,
    below: float,
) -> tuple[Program | None, TriedRematerialization | None, float]:
    """The fastest plan that fits of those that take fewer than `below` seconds (None where there is
    none) as chosen, and what it drops, and a proven bound: no plan within the limit
    takes fewer seconds. It is `below` or the seconds of that plan, unless there were too many.
    """
    best: tuple[Program, TriedRematerialization] | None = None
    bound = below
    try:
        several = _ascending(program, given, world, redundant, budget)
    except PlanError:  # too entangled to look at all of it
        return None, None, 0.0
    for number, plan in enumerate(several):
        if plan.seconds >= below * (1 - 1e-12) or number == _TRIES:
            bound = min(bound, plan.seconds)
            break
        chosen = choose.unmet_constraints(dataclasses.replace(program, plan=plan), budget)
        found = RematerializationSteps(emit_program(chosen, world), world, budget).least(
            below - plan.seconds
        )
        if found is not None and budget.fits(found.memory):
            best, below = (chosen, found), plan.seconds + found.seconds
            bound = below
    return (*best, bound) if best else (None, None, bound)


def _ascending(
    program: Program,
    given: Sequence[Candidate],
    world: World,
    redundant: bool,
    budget: Budget,
) -> Iterator[Plan]:
    """The plans of all meshes; ties go to the first. Raises PlanError before the first plan."""
    assert budget.memory_bytes is not None
    caps: list[Cap] = [(Stored(program, budget.optimizer), budget.memory_bytes)]
    if budget.recompute == "none":
        caps.append((Middle(program, budget.optimizer), budget.memory_bytes))
    several = [ascending(program, mesh, world, rules, redundant, caps) for mesh, rules in given]
    first = [list(itertools.islice(plans, 1)) for plans in several]
    joined = [itertools.chain(*pair) for pair in zip(first, several, strict=True)]
    return heapq.merge(*joined, key=lambda plan: plan.seconds)
