"""The plan whose step is the shortest when communication runs under computation.

The search adds up seconds, as if nothing ran under anything else. What can wait or be fetched
early, gathers of weights and sums of their gradients, may count less in it (`Annotations.share`):
that gives other plans, which lean on what hides. The best plan of the sum, these, and for "auto"
those of the named layouts that compute no longer than a step found, are emitted and run in the
simulation that the scheduler goes by (cost/simulate.py); the shortest step comes first. So the
proven gap is one of the summed seconds, not of the simulated ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator

from .cost.memory import Budget
from .cost.timeline import timeline
from .errors import LayoutError
from .layouts import NAMES, Layouts, candidates
from .passes import choose, emitted
from .plan import Plan
from .price import COMPUTE, terms
from .program import Program
from .rating.rate import promising
from .world import World

SHARES = (0.4, 0.1)  # of the seconds of what can hide
_FREE, _NAMED = 4, 2  # meshes, the most promising, that are searched again at every share
_NEAR = 1.5  # times the best bound: a mesh above is not searched again


def by_step(
    program: Program, world: World, layout: Layouts, redundant: bool, budget: Budget | None
) -> list[Program]:
    """Chosen programs, the one with the shortest simulated step first."""
    summed = choose.choose(program, world, layout, redundant, budget)
    assert summed.plan is not None and program.annotations is not None
    if not summed.plan.mesh.axes:
        return [summed]
    found = {_looks(summed.plan): summed}
    given = list(candidates(layout, world.ranks, program))
    most = _FREE if all(rules.free for _, rules in given) else _NAMED
    given = promising(summed.plan, given, most, _NEAR)
    for share in SHARES:
        notes = dataclasses.replace(program.annotations, share=share)
        light = dataclasses.replace(program, annotations=notes)
        other = choose.choose(light, world, layout, redundant, budget, None, given, thorough=False)
        assert other.plan is not None
        seconds = sum(terms(program, other.plan, world).values())
        made = dataclasses.replace(
            other.plan, seconds=seconds, bound=summed.plan.bound, meshes=summed.plan.meshes
        )
        found.setdefault(_looks(made), dataclasses.replace(program, plan=made))
    steps = {look: simulated(one, world) for look, one in found.items()}
    for one in _named(program, world, redundant, budget) if layout == "auto" else ():
        assert one.plan is not None
        look, spent = _looks(one.plan), terms(program, one.plan, world)
        if look not in found and spent[COMPUTE] < min(steps.values()):
            found[look] = dataclasses.replace(
                one,
                plan=dataclasses.replace(
                    one.plan, bound=summed.plan.bound, meshes=summed.plan.meshes
                ),
            )
            steps[look] = simulated(one, world)
    return [found[look] for look in sorted(found, key=steps.__getitem__)]


def _named(
    program: Program, world: World, redundant: bool, budget: Budget | None
) -> Iterator[Program]:
    """The plan of least summed time of every named layout that fits the world."""
    for name in NAMES[1:]:
        try:
            yield choose.choose(program, world, name, redundant, budget, thorough=False)
        except LayoutError:
            continue


def simulated(chosen: Program, world: World) -> float:
    """Seconds of the step of a chosen program, with communication under computation."""
    return timeline(emitted(chosen, world), world).seconds


def _looks(plan: Plan) -> Hashable:
    """Plans that look alike are one."""
    layouts = plan.choices.items(), plan.stored.items(), plan.copies.items(), plan.outputs.items()
    return plan.mesh, *(frozenset(each) for each in layouts)
