"""The fastest plan that fits the memory: time is searched for at several prices of a byte.

A price of bytes gives the fastest plan among those that keep no more than it does (Everett 1963).
Where the plan of least time does not fit, the price goes up until its plan does, and down again
towards the lowest such price. That plan competes with those that recompute blocks: the first one,
and the frugal one, each with as few blocks as it takes. The fastest wins.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from .cost.kept import Kept, Price, bytes_kept
from .cost.memory import Budget
from .fitting import effort
from .hiding import by_step
from .layouts import Layouts, candidates
from .passes import choose, emit, pipeline, rewrite
from .plan import Memory
from .program import Program
from .rating.rate import Candidate
from .report.summary import summarised
from .world import World

_STEP = 8.0  # between the first prices; its square root at every turn
_TRIES = 4
_ROUNDS = 2  # of so many tries each: what a plan holds besides is corrected in between
_MESHES = 24  # that are tried at the second price and later ones: the best at the first


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
    overlap: bool = False,
) -> Program:
    """The program with the fastest plan found that fits the budget; with that of least memory where
    none fits. `budget` None or without a limit: with the plan of least time. `overlap`: by the time
    of a step in which communication runs under computation, else by the sum.
    """
    if overlap and (budget is None or budget.recompute != "full"):
        several = by_step(program, world, layout, redundant, budget)
    else:
        several = [choose.choose(program, world, layout, redundant, budget)]
    if budget is None or budget.memory_bytes is None:
        return several[0]
    for chosen in several:
        least = _try(chosen, world, budget)
        if budget.fits(least.memory):
            return least.program
    if len(several) > 1:
        least = _try(min(several, key=_summed), world, budget)
    frugal = _at_a_price(program, world, layout, redundant, budget, least)
    tried = [frugal]
    if budget.recompute == "auto":
        tried += [_try(one.program, world, budget, again=True) for one in (least, frugal)]
    fitting = [one for one in tried if budget.fits(one.memory)]
    if fitting:
        return min(fitting, key=lambda one: one.seconds).program
    return min(tried, key=lambda one: one.memory.peak).program


def _at_a_price(
    program: Program,
    world: World,
    layout: Layouts,
    redundant: bool,
    budget: Budget,
    least: _Tried,
) -> _Tried:
    """The fastest of the plans that fit, found by bisection; else that of least memory.

    What a plan keeps is known at once; what it holds besides is taken to be as much as in the last
    plan whose peak was worked out.
    """
    kept, given = Kept(program, budget.optimizer), list(candidates(layout, world.ranks, program))
    price, step = least.seconds / max(1.0, least.memory.peak), _STEP
    best, was_enough = least, False
    for _ in range(_ROUNDS):
        besides = best.memory.peak - _kept(kept, best.program)
        found: list[tuple[bool, float, float, Program]] = []
        for _ in range(_TRIES):
            paid = Price(kept, price)
            chosen = choose.choose(program, world, layout, redundant, budget, paid, given)
            given = _promising(chosen, given)
            needs = besides + _kept(kept, chosen)
            enough = needs <= (budget.memory_bytes or 0.0)
            seconds = chosen.plan.seconds if chosen.plan is not None and enough else 0.0
            found.append((not enough, seconds, needs, chosen))
            step = step**0.5 if enough != was_enough else step
            price, was_enough = (price / step if enough else price * step), enough
        best = _try(min(found, key=lambda one: one[:3])[3], world, budget)
        if budget.fits(best.memory):
            return best
    return best


def _summed(chosen: Program) -> float:
    assert chosen.plan is not None
    return chosen.plan.seconds


def _kept(kept: Kept, chosen: Program) -> float:
    assert chosen.plan is not None
    return bytes_kept(kept, chosen.plan)


def _promising(chosen: Program, given: list[Candidate]) -> list[Candidate]:
    """The meshes of the lowest bounds, in their order."""
    assert chosen.plan is not None
    bounds = [bound for _, bound in chosen.plan.meshes]
    low = sorted(range(len(given)), key=bounds.__getitem__)[:_MESHES]
    return [given[i] for i in sorted(low)]


def _try(chosen: Program, world: World, budget: Budget, again: bool = False) -> _Tried:
    """What a chosen program needs; `again`: with as few recomputed blocks as make it fit."""
    emitted = emit.emit(pipeline.pipeline(rewrite.rewrite(chosen, world)))
    if not again:
        budget = dataclasses.replace(budget, memory_bytes=None)
    found, memory = effort(emitted, world, budget)
    made = summarised(found, world)
    plan = dataclasses.replace(
        chosen.plan,
        recompute=made.recompute,
        regather=made.regather,  # type: ignore[type-var]
    )
    return _Tried(dataclasses.replace(chosen, plan=plan), made.seconds, memory)
