"""The stage `simulate`: the plan whose step is the shortest when communication runs under
computation.

Example: a plan of 12 ms whose gathers all run under products takes 10 ms, and comes before one of
11 ms of which nothing can be hidden.

The exact search adds up seconds as if nothing overlapped. Of the plans that solve.py found, the
most promising ones, at least one of every named layout, are emitted and run through the simulation
that the scheduler uses (cost/simulator/engine.py). The shortest simulated step comes first; that of
a deep model, which is extrapolated from shorter models, is confirmed on the whole. The proven gap
is one of the summed seconds, not of the simulated ones.

`Contenders` enter, contenders leave in order of their steps. fit.py is the next stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autopar.cost.activations import MidstepMemory, activation_bytes
from autopar.cost.memory import Budget
from autopar.cost.simulator import bucket_seconds
from autopar.ir.deep_models import DeepModel
from autopar.ir.program import Program
from autopar.ir.progress import tell
from autopar.passes import emit_program
from autopar.planner.request import PlanRequest
from autopar.planner.solve import NEAR, Contender, Contenders
from autopar.world import World

_BLOCKS = 4  # at either end of a run, and more: they fill buckets, unless blocks are small
_HARDLY = 1.12  # times the shortest step: steps are up to a tenth shorter than what is exposed
_CONFIRMED = 3  # plans of a deep model simulated whole, at most
_RUN = 6  # plans simulated by either measure: about a second each for a deep model


def simulate(contenders: Contenders, request: PlanRequest) -> list[Contender]:
    """Return the most promising contenders in order of their simulated steps."""
    chosen = most_promising(contenders, request)
    if len(chosen) == 1:
        return chosen
    return _by_step(chosen, contenders.world, contenders.least_share, contenders.steps)


def most_promising(contenders: Contenders, request: PlanRequest) -> list[Contender]:
    """Return the most promising plans that may fit as they are: the best if all that can overlap
    does, the best if half of it does, the best of each named layout by the latter, and the plan of
    the least sum.
    """
    if len(contenders.all) == 1:
        return [contenders.least_sum]
    limit, budget = NEAR * contenders.least_step, request.budget or Budget()
    saved = MidstepMemory(contenders.least_sum.program, budget.optimizer)

    def may_fit(each: Contender) -> bool:
        """Whether the bytes that a plan holds without rematerialization are within the limit; its
        peak is higher.
        """
        most = budget.memory_bytes
        return most is None or activation_bytes(saved, each.plan) <= most

    that_fit = [c for c in contenders.all.values() if c.least_step <= limit and may_fit(c)]
    by_least_step = sorted(that_fit, key=lambda each: each.least_step)[:_RUN]
    by_half_hidden = sorted(that_fit, key=half_hidden)
    best_of_each_name = [
        next((each for each in by_half_hidden if each in of_name.values()), None)
        for of_name in contenders.named.values()
    ]
    selected = (*by_least_step, *by_half_hidden[:_RUN], *filter(None, best_of_each_name))
    return list(dict.fromkeys((*selected, contenders.least_sum)))


def half_hidden(contender: Contender) -> float:
    """Return the seconds of a step if half of what can overlap does."""
    return (contender.least_step + contender.plan.seconds) / 2


def exposed_seconds(contender: Contender, share: float) -> float:
    """Return the seconds of what cannot overlap: `least_step` has a `share` of the others."""
    if share == 1:
        return contender.least_step
    return (contender.least_step - share * contender.plan.seconds) / (1 - share)


def _by_step(
    contenders: Sequence[Contender],
    world: World,
    least_share: float,
    known: dict[Contender, float],
) -> list[Contender]:
    """Return contenders in order of their simulated steps. Those that could hardly be the fastest
    even if what can overlap took no time are not simulated; they come last. `least_share`: of what
    can overlap, in their `least_step`; `known`: steps of some, to which those of others are added.

    A step of many small collectives is shorter than their sum, as buckets join them: EfficientNet's
    on eight H100, 14.5 ms, of which 17.2 are exposed by the sum. So what is exposed is also held
    against what is exposed of the fastest.
    """
    steps: dict[Contender, float] = {}
    longest = 0.0
    for done, contender in enumerate(sorted(contenders, key=lambda each: each.least_step)):
        tell("plans simulated", done, len(contenders))
        if not steps or exposed_seconds(contender, least_share) <= longest:
            if contender not in known:
                known[contender] = _step(contender.deep, world)
            steps[contender] = known[contender]
            fastest = min(steps, key=lambda each: steps[each])
            longest = _HARDLY * max(steps[fastest], exposed_seconds(fastest, least_share))
    _confirm_first(steps, world)
    return sorted(contenders, key=lambda each: (steps.get(each, math.inf), each.least_step))


def _confirm_first(steps: dict[Contender, float], world: World) -> None:
    """Put the step of the whole model in the place of the estimate from shorter ones, for the plan
    that comes first, until that one has it: buckets that span more blocks than the shorter models
    have do not grow in a straight line.
    """
    whole = set[Contender]()
    for _ in range(_CONFIRMED):
        first = min(steps, key=lambda each: steps[each])
        if first in whole or not _blocks_of_step(first.deep).runs:
            return
        whole.add(first)
        steps[first] = min(bucket_seconds(emit_program(first.program, world), world))


def simulate_plan(chosen: Program, world: World) -> float:
    """Return the seconds of a chosen program's step with communication under computation; an
    estimate for a deep model.
    """
    return _step(DeepModel(chosen), world)


def _step(deep: DeepModel, world: World) -> float:
    """Return the simulated seconds of a step, extrapolated from shorter programs."""
    total = np.zeros(())
    for weight, program in _blocks_of_step(deep).samples():
        total = total + weight * np.array(bucket_seconds(emit_program(program, world), world))
    return float(total.min())


def _blocks_of_step(deep: DeepModel) -> DeepModel:
    """Return the model cut to the blocks from which a step is extrapolated."""
    return DeepModel(deep.program, deep, edge=_BLOCKS, more=_BLOCKS)
