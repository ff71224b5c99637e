"""How a step is divided, where that is left open: into micro-batches, and into stages.

Example: a model whose 64 ranks wait for slow links a third of each step takes 4 stages and 16
micro-batches, if the modelled step with its bubble is a twentieth faster than the one without.

One micro-batch without stages is planned first. It stands where it fits, repeats no whole block and
leaves nothing to gain; else more micro-batches are tried, and stages: `with_stages`. What is
computed in a step, and the bubble that a number of stages has at least, tell which need no plan.
api.py asks, and gives what plans.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from autopar.errors import AutoparError, LayoutError, PlanError
from autopar.ir.graph import blocks
from autopar.ir.plan import Plan
from autopar.planner.request import Layouts, MicrobatchCount, PlanRequest, Stages
from autopar.planner.tracing import Inputs, call_arguments, rows_of
from autopar.world import World

_MOST_TRIES = 5
_WORTHWHILE = 0.95  # of the fastest step without stages: a pipeline with a longer one is not taken
_FAILED_TRIES = 2  # numbers of stages after one another that are no faster: no more are tried
_PER_STAGE = 4  # micro-batches for each stage that are tried first: a bubble of a fifth or less


# Plans a step that is divided as the request says; its layout is stages, or there are none.
Attempt = Callable[[PlanRequest], Plan]


def is_open(layout: Layouts, microbatches: MicrobatchCount) -> bool:
    """Whether stages or micro-batches are to be found.

    >>> is_open("fsdp", 4), is_open(Stages(schedule="auto", count=2), 4)
    (False, True)
    """
    staged = isinstance(layout, Stages) and "auto" in (layout.count, layout.schedule)
    return staged or microbatches == "auto"


def in_fastest_division(
    attempt: Attempt,
    world: World,
    request: PlanRequest,
    microbatches: MicrobatchCount,
    inputs: Inputs,
    pipelines: bool = True,
) -> Plan:
    """Return the fastest plan that `attempt` makes for the stages and micro-batches that the
    request's layout and `microbatches` leave open. "auto" has stages where micro-batches are left
    open too, and `pipelines` may run. Raises what the attempt without more stages or micro-batches
    than it must have raises, where no other succeeds.
    """
    rows = rows_of(call_arguments(inputs))
    request = dataclasses.replace(request, seeks_microbatches=microbatches == "auto")
    if isinstance(request.layout, Stages):
        return with_stages(attempt, world, request, microbatches, rows)
    if microbatches != "auto":
        return attempt(request.divided(microbatches))
    best, refused = _plan_or_error(in_fastest_microbatches, attempt, request, rows)
    if request.layout == "auto" and pipelines:
        staged = request.under(Stages(schedule="auto"))
        fastest, error = _plan_or_error(with_stages, attempt, world, staged, "auto", rows, best)
        refused = refused or error
        worthwhile = math.inf if best is None else _WORTHWHILE * best.step_seconds
        if fastest is not None and fastest.step_seconds <= worthwhile:
            return fastest
    if best is None:
        assert refused is not None
        raise refused
    return best


def _plan_or_error(
    search: Callable[..., Plan], *arguments: Any
) -> tuple[Plan | None, AutoparError | None]:
    """Return the plan that a search finds, or the error that says why there is none."""
    try:
        return search(*arguments), None
    except AutoparError as error:
        return None, error


# -- micro-batches ---------------------------------------------------------------------------------
def in_fastest_microbatches(attempt: Attempt, request: PlanRequest, rows: int) -> Plan:
    """Return the fastest plan that `attempt` makes for a number of micro-batches. Raises what it
    raises for one, where no other number does.
    """
    plans: list[Plan] = []
    refused: PlanError | None = None
    try:
        plans.append(attempt(request.divided(1)))
    except PlanError as error:
        refused = error
    if plans and not plans[0].recompute:
        return plans[0]
    for count in _counts(rows):
        try:
            plans.append(attempt(request.divided(count)))
        except AutoparError:  # it cannot be divided so, or does not fit yet
            continue
        if not plans[-1].recompute:
            break
    if not plans:
        assert refused is not None
        raise refused
    return min(plans, key=lambda plan: plan.step_seconds)


def _counts(rows: int) -> Iterator[int]:
    """Yield the numbers of micro-batches to try: those that divide the rows, doubled or more each
    time.
    """
    numbers = [n for n in range(2, rows + 1) if rows % n == 0]
    yield from itertools.islice(_further(numbers, 1, True), _MOST_TRIES)


# -- stages ----------------------------------------------------------------------------------------
def with_stages(
    attempt: Attempt,
    world: World,
    request: PlanRequest,
    microbatches: MicrobatchCount,
    rows: int,
    best: Plan | None = None,
) -> Plan:
    """Return the fastest plan with stages, of those that are left open: they are planned quickly,
    the fastest one then as any plan. Where one division alone is left, it is planned once. `best`:
    a plan without stages, which it is to beat: numbers of stages whose bubble alone makes them
    slower are not planned. Raises what the attempt with the least number of stages raises, where no
    other succeeds.
    """
    requested = request.layout
    assert isinstance(requested, Stages)
    if not is_open(requested, microbatches):
        assert microbatches != "auto"
        return attempt(request.divided(microbatches))
    counts = [n for n in range(2, world.ranks + 1) if world.ranks % n == 0]
    if requested.count != "auto":
        counts = [requested.count]
    if best is not None:
        limit = _WORTHWHILE * best.step_seconds
        counts = [n for n in counts if _least_seconds(best, n, rows) <= limit]
    if len(counts) == 1 and microbatches != "auto":  # one division: `attempt` finds its schedule
        stages = dataclasses.replace(requested, count=counts[0])
        return attempt(request.under(stages).divided(microbatches))
    summed = dataclasses.replace(request, overlap=False)  # quickly: no layout is simulated
    plans: list[Plan] = []
    refused: AutoparError | None = None
    failed = 0  # numbers of stages since the last one that was faster than all before it
    for count in counts:
        stages = dataclasses.replace(requested, count=count)
        tried = summed.under(stages)
        plan, error = _plan_or_error(_in_fastest_number, attempt, tried, microbatches, rows)
        refused = refused or error
        failed += 1
        if plan is not None and all(plan.step_seconds < other.step_seconds for other in plans):
            failed = 0
        plans += [] if plan is None else [plan]
        # the bubble grows with the stages, and what they save shrinks
        if failed == _FAILED_TRIES and (plans or best is not None):
            break
    if not plans:
        reason = "a pipeline has 2 or more ranks, and this world has fewer"
        if best is not None:
            reason = "no number of stages can be faster than none"
        raise refused or LayoutError(f"{requested}: {reason}")
    quick = min(plans, key=lambda plan: plan.step_seconds)
    return attempt(request.divided(quick.microbatches, Stages.of(quick, requested.within)))


def _least_seconds(best: Plan, count: int, rows: int) -> float:
    """Return the least seconds of a step with so many stages: what a rank of `best` computes, and
    the bubble of as many micro-batches as there are rows, and of as many stages as blocks.
    """
    assert best.context is not None
    rounds = max(1, len(blocks(best.context.source.module.graph.nodes)) // count)
    return computed_seconds(best) * (1 + (count - 1) / (max(1, rows) * rounds))


def computed_seconds(plan: Plan) -> float:
    """Return the seconds of a step in which a rank computes; the rest it waits for others."""
    return sum(row.seconds if row.computation is None else row.computation for row in plan.rows)


def _in_fastest_number(
    attempt: Attempt, request: PlanRequest, microbatches: MicrobatchCount, rows: int
) -> Plan:
    """Return the fastest plan with the request's stages: of the micro-batches that are asked for,
    or of four for each stage, fewer where their rows are too few, then of more or fewer as long as
    the step gets shorter.
    """
    if microbatches != "auto":
        return attempt(request.divided(microbatches))
    stages = request.layout
    assert isinstance(stages, Stages) and stages.count != "auto"
    numbers = [n for n in range(2, rows + 1) if rows % n == 0]
    if not numbers:
        return attempt(request.divided(1))  # which says why not
    usual = next((n for n in numbers if n >= _PER_STAGE * stages.count), numbers[-1])
    refused: LayoutError | None = None
    for first in (usual, *_further(numbers, usual, False)):
        try:
            best = start = attempt(request.divided(first))
            break
        except LayoutError as error:  # a micro-batch has too few rows
            refused = refused or error
    else:
        assert refused is not None
        raise refused
    for more in (True, False):
        for number in _further(numbers, first, more):
            plan, _ = _plan_or_error(attempt, request.divided(number))
            if plan is None or plan.step_seconds >= best.step_seconds:
                break
            best = plan
        if best is not start:
            break
    return best


def _further(numbers: Sequence[int], first: int, more: bool) -> Iterator[int]:
    """Yield those of the numbers, in ascending order, that are at least twice the one before, from
    the first on, or at most half of it.
    """
    last = first
    for number in numbers if more else reversed(numbers):
        if number >= 2 * last if more else 2 * number <= last:
            yield number
            last = number
