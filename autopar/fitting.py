"""Making a plan fit: the modelled peak against the memory that there is, and as few recomputed
blocks as it takes.
"""

from __future__ import annotations

import dataclasses
import math
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
        return _fewest(program, memory.peak, world, budget)
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
    program: Program, without: float, world: World, budget: Budget
) -> tuple[Program, Memory]:
    """All blocks, where not even that fits. Every block that is recomputed takes about as much off
    the peak `without` any, so the guess is a straight line; it is raised until it fits.
    """
    names = blocks(program.module.graph.nodes)
    every = _tried(program, names, world, budget)
    limit, least = budget.memory_bytes, every[1].peak
    if limit is None or not budget.fits(every[1]) or without <= least:
        return every
    few = max(1, math.ceil(len(names) * (without - limit) / (without - least)))
    while few < len(names):
        tried = _tried(program, names[:few], world, budget)
        if budget.fits(tried[1]):
            return tried
        few += max(1, len(names) // 16)
    return every
