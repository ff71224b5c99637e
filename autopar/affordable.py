"""The fastest plan that fits the memory: time is searched for at several prices of a byte.

A price of bytes gives the fastest plan among those that keep no more than it does (Everett 1963).
Where the plan of least time does not fit, prices are halved and doubled towards the lowest one
whose plan fits; each plan is tried with as few recomputed blocks as it takes, and the fastest wins.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from .cost.kept import Kept, Price
from .cost.memory import Budget
from .fitting import effort
from .layouts import Layouts
from .passes import choose, emit, pipeline, rewrite
from .plan import Memory
from .program import Program
from .report.summary import summarised
from .world import World

_STEP = 8.0  # between the first prices; its square root, then its fourth root, once one fits
_TRIES = 6


class _Tried(NamedTuple):
    """A chosen program, the seconds of its step with what is recomputed, and its memory."""

    program: Program
    seconds: float
    memory: Memory


def affordable(
    program: Program,
    world: World,
    layout: Layouts,
    redundant: bool = False,
    budget: Budget | None = None,
) -> Program:
    """The program with the fastest plan found that fits the budget; with that of least memory where
    none fits. `budget` None or without a limit: with the plan of least time.
    """
    chosen = choose.choose(program, world, layout, redundant, budget)
    if budget is None or budget.memory_bytes is None:
        return chosen
    tried = [_try(chosen, world, budget)]
    if budget.fits(tried[0].memory) and not _recomputes(tried[0], budget):
        return tried[0].program
    kept = Kept(program, budget.optimizer)
    price, step = tried[0].seconds / max(1.0, tried[0].memory.peak), _STEP
    for _ in range(_TRIES):
        paid = Price(kept, price)
        found = _try(choose.choose(program, world, layout, redundant, budget, paid), world, budget)
        tried.append(found)
        enough = budget.fits(found.memory) and not _recomputes(found, budget)
        step = step**0.5 if enough != budget.fits(tried[-2].memory) else step
        price = price / step if enough else price * step
    fitting = [one for one in tried if budget.fits(one.memory)]
    if not fitting:
        return min(tried, key=lambda one: one.memory.peak).program
    return min(fitting, key=lambda one: one.seconds).program


def _recomputes(tried: _Tried, budget: Budget) -> bool:
    """Whether blocks are recomputed that need not be if the plan kept less."""
    assert tried.program.plan is not None
    return bool(tried.program.plan.recompute) and budget.recompute != "full"


def _try(chosen: Program, world: World, budget: Budget) -> _Tried:
    emitted = emit.emit(pipeline.pipeline(rewrite.rewrite(chosen, world)))
    found, memory = effort(emitted, world, budget)
    made = summarised(found, world)
    plan = dataclasses.replace(chosen.plan, recompute=made.recompute)  # type: ignore[type-var]
    return _Tried(dataclasses.replace(chosen, plan=plan), made.seconds, memory)
