"""The overlap search: the plan whose step is the shortest when communication runs under
computation.

The exact search adds up seconds as if nothing overlapped. Here, collectives that can overlap
(gathers of weights, reductions of their gradients) count only a share of their seconds
(`Annotations.share`), which gives other plans, with more of what can be hidden. The best plan of
the full sum, these plans and, for "auto", those of the named layouts compete: the most promising
ones, at least one per name, are emitted and run through the simulation that the scheduler uses
(cost/simulator/engine.py). The shortest simulated step comes first; that of a deep model, which is
extrapolated from shorter models, is confirmed on the whole. The proven gap is one of the summed
seconds, not of the simulated ones.

A ShortenedModel and its plan of the least sum enter, chosen programs leave in order of their
steps. Called by planner.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from autopar.cost.activations import Middle, activation_bytes
from autopar.cost.simulator import bucket_seconds
from autopar.ir.layout import Layout
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.progress import tell
from autopar.passes import emit_program
from autopar.planner.deep_models import DeepModel, ShortenedModel, sum_of_blocks, with_share
from autopar.planner.mesh_search import Candidate, bounds_of, promising_meshes
from autopar.planner.named_layouts import rivals
from autopar.planner.request import PlanRequest
from autopar.world import World

SHARES = (0.7, 0.4, 0.1)  # of the seconds of collectives that can overlap
_FREE, _RULED = 4, 2  # most promising meshes searched at every share
_NEAR = 1.5  # times the least: plans above it are not tried
_BLOCKS = 4  # at either end of a run, and more: they fill buckets, unless blocks are small
_HARDLY = 1.12  # times the shortest step: steps are up to a tenth shorter than their `bare`
_CONFIRMED = 3  # plans of a deep model simulated whole, at most
_RUN = 6  # plans simulated by either measure: about a second each for a deep model


def plans_by_step(model: ShortenedModel, best: Program, request: PlanRequest) -> list[Program]:
    """Return chosen programs for the program and world of `model` in order of their simulated
    steps. `best`: the program with the plan of the least sum.
    """
    world = model.world
    if not _plan(best).mesh.axes:
        return [best]
    assert request.layout is not None
    contenders = _Others(best, model, request)
    contenders.take(model.candidates(request.layout), bounds_of(_plan(best)))
    names = rivals(best) if request.layout == "auto" else ()
    for done, name in enumerate(names):
        tell("named layouts tried", done, len(names))
        contenders.take_named(name)
    promising = contenders.near()
    if len(promising) > 1:
        promising = _by_step(promising, world)
    return [rated.deep.program for rated in promising]


def _by_step(promising: Sequence[_Rated], world: World) -> list[_Rated]:
    """Return plans in order of their simulated steps. Those that could hardly be the fastest even
    if what can overlap took no time are not simulated; they come last.
    """
    steps: dict[int, float] = {}
    least = shares(world)[-1]
    in_order = sorted(enumerate(promising), key=lambda pair: pair[1].light)
    for done, (index, rated) in enumerate(in_order):
        tell("plans simulated", done, len(promising))
        if not steps or rated.bare(least) <= _HARDLY * min(steps.values()):
            steps[index] = _step(rated.deep, world)
    _confirm(promising, steps, world)
    order = sorted(
        range(len(promising)), key=lambda i: (steps.get(i, math.inf), promising[i].light)
    )
    return [promising[i] for i in order]


def _confirm(promising: Sequence[_Rated], steps: dict[int, float], world: World) -> None:
    """Put the step of the whole model in the place of the estimate from shorter ones, for the plan
    that comes first, until that one has it: buckets that span more blocks than the shorter models
    have do not grow in a straight line.
    """
    whole = set[int]()
    for _ in range(_CONFIRMED):
        first = min(steps, key=lambda index: steps[index])
        deep = promising[first].deep
        if first in whole or not _blocks_of_step(deep).runs:
            return
        whole.add(first)
        steps[first] = min(bucket_seconds(emit_program(deep.program, world), world))


class _Rated(NamedTuple):
    """A plan with two figures in seconds: `light`, its step if all that can overlap does, and
    `middle`, `light` plus the full sum, which is twice the mean of the two.
    """

    light: float
    middle: float
    deep: DeepModel

    def bare(self, share: float) -> float:
        """Return the seconds of what cannot overlap: `light` has a `share` of the others."""
        full = self.middle - self.light
        return (self.light - share * full) / (1 - share) if share < 1 else self.light


class _Others:
    """Plans that compete with the best plan of the sum."""

    def __init__(self, best: Program, model: ShortenedModel, request: PlanRequest) -> None:
        self.best, self.world, self.request = best, model.world, request
        self.deep, self.model = DeepModel(best, model.deep), model
        self.saved = Middle(best, "adamw" if request.budget is None else request.budget.optimizer)
        self.found: dict[Hashable, _Rated] = {}
        self.names: dict[str, dict[Hashable, _Rated]] = defaultdict(dict)
        self._enter(self.deep)

    @property
    def least(self) -> float:
        """The fewest seconds of all plans if everything that can overlap does."""
        return min(rated.light for rated in self.found.values())

    def near(self) -> list[_Rated]:
        """Return the most promising plans that may fit as they are: the best by `light`, the best
        by `middle`, the best by `middle` of each named layout, and the best plan of the sum.
        """
        limit = _NEAR * self.least
        fit = [r for r in self.found.values() if r.light <= limit and self._may_fit(r.deep)]
        light = sorted(fit, key=lambda rated: rated.light)[:_RUN]
        middle = sorted(fit, key=lambda rated: rated.middle)
        best_of_each_name = [
            next((r for r in middle if r in of.values()), None) for of in self.names.values()
        ]
        best = next(rated for rated in self.found.values() if rated.deep is self.deep)
        selected = (*light, *middle[:_RUN], *filter(None, best_of_each_name), best)
        return list({id(rated): rated for rated in selected}.values())

    def _may_fit(self, deep: DeepModel) -> bool:
        """Whether the bytes that a plan holds without rematerialization are within the limit; its
        peak is higher.
        """
        limit = self.request.memory_bytes
        return limit is None or activation_bytes(self.saved, _plan(deep.program)) <= limit

    def take_named(self, name: str) -> None:
        """Enter a named layout's plan of the sum and its plans at the shares."""
        plan = self.model.named(name)
        if plan is not None:
            self._enter_plan(plan, name)
            self.take(self.model.candidates(name), bounds_of(plan), name)

    def take(self, given: Sequence[Candidate], bounds: Sequence[float], name: str = "") -> None:
        """Enter the plans on the most promising of these meshes at the shares, the least share
        first; stop where that is not promising.
        """
        most = _FREE if all(rules.free for _, rules in given) else _RULED
        meshes = promising_meshes(bounds, given, most, _NEAR)
        for plan in self.model.at_shares(shares(self.world)[::-1], meshes):
            if self._enter_plan(plan, name) > _NEAR * self.least:
                return

    def _beside(self, plan: Plan) -> DeepModel:
        """Return another plan for the same program at its full price, with the bound proven for the
        sum.
        """
        deep, best_plan = self.model.chosen(plan, self.request), _plan(self.best)
        plan = dataclasses.replace(
            _plan(deep.program), bound=best_plan.bound, meshes=best_plan.meshes
        )
        return deep.under(plan)

    def _enter_plan(self, plan: Plan, name: str) -> float:
        """Add a plan at its full price, unless one like it is there; return its seconds when what
        can overlap counts least.
        """
        rated = self.found.get(_plan_look(plan))
        return self._enter(self._beside(plan) if rated is None else rated.deep, name)

    def _enter(self, deep: DeepModel, name: str = "") -> float:
        """Add a plan, and return its seconds when what can overlap counts least."""
        plan = _plan(deep.program)
        look = _plan_look(plan)
        if look not in self.found:
            lightest = DeepModel(with_share(deep.program, shares(self.world)[-1]), deep)
            light = sum_of_blocks(lightest, self.world)
            self.found[look] = _Rated(light, light + plan.seconds, deep)
        if name:
            self.names[name][look] = self.found[look]
        return self.found[look].light


def shares(world: World) -> tuple[float, ...]:
    """Return SHARES, none below the share of computing that is lost to what overlaps with it."""
    return tuple(dict.fromkeys(max(share, world.contention) for share in SHARES))


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


def _plan_look(plan: Plan) -> Hashable:
    """Return a key that is equal for plans that differ only in the names of their axes."""
    sizes = tuple(axis.size for axis in plan.mesh.axes)
    choices = {
        (name, choice.splits, *map(_states, choice.operands), *map(_states, choice.results))
        for name, choice in plan.choices.items()
    }
    other_items = plan.stored.items(), plan.copies.items(), plan.outputs.items()
    other_layouts = (frozenset((key, _states(at)) for key, at in each) for each in other_items)
    return sizes, frozenset(choices), *other_layouts


def _states(layout: Layout | None) -> Hashable:
    return None if layout is None else layout.states


def _plan(program: Program) -> Plan:
    assert program.plan is not None
    return program.plan
