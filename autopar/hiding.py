"""The plan whose step is the shortest when communication runs under computation.

The search adds up seconds, as if nothing ran under anything else. What can wait or be fetched
early, gathers of weights and sums of their gradients, may count less in it (`Annotations.share`):
that gives other plans, which lean on what hides. The best plan of the sum, these, and for "auto"
those of the layouts that people name first compete: the most promising are emitted and run in the
simulation that the scheduler goes by (cost/simulate.py); the shortest step comes first. So the
proven gap is one of the summed seconds, not of the simulated ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator

import numpy as np

from .cost.memory import Budget
from .cost.timeline import timeline
from .depth import Deep
from .errors import LayoutError
from .layouts import Layouts, candidates
from .passes import choose, emitted
from .plan import Plan
from .price import terms
from .program import Program
from .rating.rate import promising
from .world import World

SHARES = (0.4, 0.1)  # of the seconds of what can hide
_HIDDEN = ("all_gather", "reduce_scatter", "all_reduce")  # of stored weights, gradients
_NAMED = ("ddp", "fsdp", "megatron", "megatron-sp")  # of one axis: found in no time
_FREE, _RULED = 4, 2  # meshes, the most promising, that are searched again at every share
_NEAR = 1.5  # times the best bound: a mesh above is not searched again
_RUN = 4  # plans that are emitted and simulated: of a deep model that takes seconds each


def by_step(
    program: Program, world: World, layout: Layouts, redundant: bool, budget: Budget | None
) -> list[Program]:
    """Chosen programs, the one with the shortest simulated step first."""
    summed = choose.choose(program, world, layout, redundant, budget)
    assert summed.plan is not None
    if not summed.plan.mesh.axes:
        return [summed]
    found = {_looks(summed.plan): summed}
    others = [*_shared(summed, world, layout, redundant, budget)]
    if layout == "auto":
        others += _named(summed, world, redundant, budget)
    hidden = _counted(program, shares(world)[-1])
    for one in sorted(others, key=lambda one: _seconds(hidden, one, world)):
        if len(found) < _RUN:
            found.setdefault(_looks(_plan(one)), one)
    return sorted(found.values(), key=lambda one: simulated(one, world))


def _shared(
    summed: Program, world: World, layout: Layouts, redundant: bool, budget: Budget | None
) -> Iterator[Program]:
    """The plans of least sum where what can hide counts a share, on the most promising meshes."""
    given = list(candidates(layout, world.ranks, summed))
    most = _FREE if all(rules.free for _, rules in given) else _RULED
    given = promising(_plan(summed), given, most, _NEAR)
    for share in shares(world):
        light = _counted(summed, share)
        other = choose.choose(light, world, layout, redundant, budget, None, given, thorough=False)
        yield _beside(summed, other, world)


def shares(world: World) -> tuple[float, ...]:
    """SHARES, but not less than what hides takes from computing anyway."""
    lost = [one.slows for one in world.measured if one.together and one.kind in _HIDDEN]
    least = float(np.median(lost)) if lost else 0.0
    return tuple(dict.fromkeys(max(share, least) for share in SHARES))


def _named(
    summed: Program, world: World, redundant: bool, budget: Budget | None
) -> Iterator[Program]:
    for name in _NAMED:
        try:
            yield _beside(summed, choose.choose(summed, world, name, redundant, budget), world)
        except LayoutError:
            continue


def _beside(summed: Program, other: Program, world: World) -> Program:
    """Another plan for the same program, at its full price; proven is what is of the sum."""
    bound, meshes = _plan(summed).bound, _plan(summed).meshes
    seconds = _seconds(summed, other, world)
    plan = dataclasses.replace(_plan(other), seconds=seconds, bound=bound, meshes=meshes)
    return dataclasses.replace(summed, plan=plan)


def _counted(program: Program, share: float) -> Program:
    """The program in which what can hide counts so much of its seconds."""
    assert program.annotations is not None
    notes = dataclasses.replace(program.annotations, share=share)
    return dataclasses.replace(program, annotations=notes)


def _seconds(program: Program, chosen: Program, world: World) -> float:
    return sum(terms(program, _plan(chosen), world).values())


def simulated(chosen: Program, world: World) -> float:
    """Seconds of the step of a chosen program, with communication under computation; of one with
    many equal blocks about that.
    """

    def seconds(chosen: Program) -> tuple[float]:
        return (timeline(emitted(chosen, world), world).seconds,)

    return float(Deep(chosen).extrapolated(seconds)[0])


def _looks(plan: Plan) -> Hashable:
    """Plans that look alike are one."""
    layouts = plan.choices.items(), plan.stored.items(), plan.copies.items(), plan.outputs.items()
    return plan.mesh, *(frozenset(each) for each in layouts)


def _plan(program: Program) -> Plan:
    assert program.plan is not None
    return program.plan
