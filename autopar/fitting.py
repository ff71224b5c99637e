"""Making a plan fit: the modelled peak against the memory that there is, and as few recomputed
blocks as it takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from .cost.memory import Budget, refusal
from .cost.peak import peak
from .graphs import blocks
from .passes import recompute
from .plan import Memory
from .program import Program
from .world import World


def fitted(
    program: Program,
    world: World,
    budget: Budget | None,
    larger: Callable[[Memory], str] = lambda memory: "",
) -> Program:
    """The emitted program with its blocks recomputed as planned, and the plan with its memory.

    Where that does not fit and recompute is "auto": with the fewest blocks recomputed, the first
    ones, that fit. Raises PlanError where nothing does. `budget` None: as planned, whatever it
    needs. `larger`: from what is needed here to the smallest world that it would fit, in words.
    """
    assert program.plan is not None
    if budget is None:
        return recompute.recompute(program)
    found, memory = effort(program, world, budget)
    if not budget.fits(memory):
        assert budget.memory_bytes is not None and found.plan is not None
        every = len(found.plan.recompute) == len(blocks(program.module.graph.nodes))
        name, advice = program.plan.layout, larger(memory)
        raise refusal(memory, budget.memory_bytes, world, name, every, advice)
    return found


def effort(program: Program, world: World, budget: Budget) -> tuple[Program, Memory]:
    """As `fitted`, but where nothing fits what comes nearest."""
    assert program.plan is not None
    found, memory = _tried(program, program.plan.recompute, world, budget)
    if not budget.fits(memory) and budget.recompute == "auto":
        return _fewest(program, blocks(program.module.graph.nodes), world, budget)
    return found, memory


def _tried(
    program: Program, names: tuple[str, ...], world: World, budget: Budget
) -> tuple[Program, Memory]:
    """The program with these blocks recomputed, and what that needs."""
    assert program.plan is not None
    plan = dataclasses.replace(program.plan, recompute=names)
    made = recompute.recompute(dataclasses.replace(program, plan=plan))
    recompute.check(made)
    memory = peak(made, budget.optimizer, world.backend)
    plan = dataclasses.replace(
        plan, memory=memory, peak_bytes=memory.peak, optimizer=budget.optimizer
    )
    return dataclasses.replace(made, plan=plan), memory


def _fewest(
    program: Program, names: tuple[str, ...], world: World, budget: Budget
) -> tuple[Program, Memory]:
    """By halving; all blocks where not even that fits."""
    best = _tried(program, names, world, budget)
    few, many = 0, len(names)  # too few, enough
    while budget.fits(best[1]) and many - few > 1:
        middle = (few + many) // 2
        tried = _tried(program, names[:middle], world, budget)
        if budget.fits(tried[1]):
            best, many = tried, middle
        else:
            few = middle
    return best
