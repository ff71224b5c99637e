"""The plan whose step is the shortest when communication runs under computation.

The search adds up seconds, as if nothing ran under anything else. What can wait or be fetched
early, gathers of weights and sums of their gradients, may count less in it (`Annotations.share`):
that gives other plans, which lean on what hides. The best plan of the sum, these, and for "auto"
those of the named layouts compete: the most promising, and of each name at least one, are emitted
and run in the simulation that the scheduler goes by (cost/simulator/engine.py); the shortest
step comes first. So the proven gap is one of the summed seconds, not of the simulated ones.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from autopar.cost.activations import Middle, activation_bytes
from autopar.cost.memory import Budget
from autopar.cost.simulator.timeline import bucket_seconds
from autopar.ir.layout import Layout
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes import emit_program
from autopar.planner import choose
from autopar.planner.deep_models import DeepModel, ShortenedModel, sum_of_blocks
from autopar.planner.mesh_search import Candidate, bounds_of, promising_meshes
from autopar.planner.named_layouts import NAMES, Layouts, candidates
from autopar.world import World

SHARES = (0.7, 0.4, 0.1)  # of the seconds of what can hide
_HIDDEN = ("all_gather", "reduce_scatter", "all_reduce")  # of stored weights, gradients
_FREE, _RULED = 4, 2  # meshes, the most promising, that are searched again at every share
_NEAR = 1.5  # times the least: what lies above in the sum, or where what hides counts least, is out
_BLOCKS = 4  # at either end of a run, and more of it: they fill buckets about as all of it do
_RUN = 6  # plans by either measure that are simulated: of a deep model that takes a second each


def plans_by_step(shallow: ShortenedModel, layout: Layouts, budget: Budget | None) -> list[Program]:
    """Chosen programs for the program and the world of `shallow`, the one with the shortest
    simulated step first.
    """
    world = shallow.world
    best = choose.choose(shallow.program, world, layout, shallow.redundant, budget)
    if not _plan(best).mesh.axes:
        return [best]
    others = _Others(best, shallow, budget)
    given = list(candidates(layout, world.ranks, best))
    others.take(given, bounds_of(_plan(best)))
    for name in NAMES[1:] if layout == "auto" else ():
        others.take_named(name)
    near = others.near()
    if len(near) > 1:
        near.sort(key=lambda deep: _step(deep, world))
    return [deep.program for deep in near]


class _Rated(NamedTuple):
    """A plan, what its step takes if all hides that can, and the middle between that and the sum,
    twice: in s.
    """

    light: float
    middle: float
    deep: DeepModel


class _Others:
    """Plans that compete with the best one of the sum."""

    def __init__(self, best: Program, shallow: ShortenedModel, budget: Budget | None) -> None:
        self.best, self.world, self.budget = best, shallow.world, budget
        self.deep, self.shallow = DeepModel(best, shallow.deep), shallow
        self.lighter = [shallow.annotated(_counted(best, share)) for share in shares(self.world)]
        self.kept = Middle(best, "adamw" if budget is None else budget.optimizer)
        self.found: dict[Hashable, _Rated] = {}
        self.names: dict[str, dict[Hashable, _Rated]] = defaultdict(dict)
        self._enter(self.deep)

    @property
    def least(self) -> float:
        return min(rated.light for rated in self.found.values())

    def near(self) -> list[DeepModel]:
        """Of those that may fit as they are the most promising, by what a step takes if all hides
        that can and by the middle between that and the sum; of each name the one that is by the
        middle; and the best of the sum.
        """
        limit = _NEAR * self.least
        fit = [r for r in self.found.values() if r.light <= limit and self._may_fit(r.deep)]
        light = sorted(fit, key=lambda rated: rated.light)[:_RUN]
        middle = sorted(fit, key=lambda rated: rated.middle)
        named = [next((r for r in middle if r in of.values()), None) for of in self.names.values()]
        taken = [rated.deep for rated in (*light, *middle[:_RUN], *filter(None, named))]
        return list(dict.fromkeys((*taken, self.deep)))

    def _may_fit(self, deep: DeepModel) -> bool:
        """By what a plan holds that drops nothing; its peak is above that."""
        if self.budget is None or self.budget.memory_bytes is None:
            return True
        return activation_bytes(self.kept, _plan(deep.program)) <= self.budget.memory_bytes

    def take_named(self, name: str) -> None:
        """A named layout's plan of the sum, and those at the shares."""
        plan = self.shallow.named(name)
        if plan is not None:
            self._enter(self._beside(plan), name)
            given = list(candidates(name, self.world.ranks, self.best))
            self.take(given, bounds_of(plan), name)

    def take(self, given: Sequence[Candidate], bounds: Sequence[float], name: str = "") -> None:
        """The plans on the most promising of these meshes in which what hides counts less: least
        first, and no more where that is not near.
        """
        most = _FREE if all(rules.free for _, rules in given) else _RULED
        near = promising_meshes(bounds, given, most, _NEAR)
        for one in reversed(self.lighter):
            if self._enter(self._beside(one.plan(near)), name) > _NEAR * self.least:
                return

    def _beside(self, plan: Plan) -> DeepModel:
        """Another plan for the same program, at its full price; proven is what is of the sum."""
        deep, known = self.shallow.chosen(plan, self.budget), _plan(self.best)
        plan = dataclasses.replace(_plan(deep.program), bound=known.bound, meshes=known.meshes)
        return deep.under(plan)

    def _enter(self, deep: DeepModel, name: str = "") -> float:
        """Seconds in which what hides counts least."""
        plan = _plan(deep.program)
        looks = _looks(plan)
        if looks not in self.found:
            least = DeepModel(_counted(deep.program, shares(self.world)[-1]), deep)
            light = sum_of_blocks(least, self.world)
            self.found[looks] = _Rated(light, light + plan.seconds, deep)
        if name:
            self.names[name][looks] = self.found[looks]
        return self.found[looks].light


def shares(world: World) -> tuple[float, ...]:
    """SHARES, but not less than what hides takes from computing anyway."""
    lost = [one.slows for one in world.measured if one.together and one.kind in _HIDDEN]
    least = float(np.median(lost)) if lost else 0.0
    return tuple(dict.fromkeys(max(share, least) for share in SHARES))


def _counted(program: Program, share: float) -> Program:
    """The program in which what can hide counts so much of its seconds."""
    assert program.annotations is not None
    notes = dataclasses.replace(program.annotations, share=share)
    return dataclasses.replace(program, annotations=notes)


def simulate_plan(chosen: Program, world: World) -> float:
    """Seconds of the step of a chosen program, with communication under computation; of one with
    many equal blocks about that.
    """
    return _step(DeepModel(chosen), world)


def _step(deep: DeepModel, world: World) -> float:
    def seconds(chosen: Program) -> tuple[float, ...]:
        return bucket_seconds(emit_program(chosen, world), world)

    blocks = DeepModel(deep.program, deep, edge=_BLOCKS, more=_BLOCKS)
    return float(blocks.extrapolated(seconds).min())


def _looks(plan: Plan) -> Hashable:
    """Plans that look alike are one, whatever their axes are called."""
    sizes = tuple(axis.size for axis in plan.mesh.axes)
    choices = {
        (name, choice.splits, *map(_states, choice.operands), *map(_states, choice.results))
        for name, choice in plan.choices.items()
    }
    others = plan.stored.items(), plan.copies.items(), plan.outputs.items()
    held = (frozenset((key, _states(at)) for key, at in each) for each in others)
    return sizes, frozenset(choices), *held


def _states(layout: Layout | None) -> Hashable:
    return None if layout is None else layout.states


def _plan(program: Program) -> Plan:
    assert program.plan is not None
    return program.plan
