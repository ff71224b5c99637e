"""Plans for a deep model, searched on a shorter one.

Of many equal blocks in a row all but the outer ones are left out, the rest is searched, and those
that were left out get the layouts of the one that stands for them. That takes as long for 80 blocks
as for 8. A plan found so is a real one at its full price, but not proven to be the best: such plans
compete with the one that was searched for on the whole graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property

from .cost.kept import Price, bytes_kept
from .cost.memory import Budget
from .depth import Deep
from .passes import choose
from .plan import Plan
from .price import terms
from .program import Program
from .rating.frame import Frame, frame
from .rating.rate import Candidate, best, bounded, promising
from .unsplit import unsplit
from .world import World

_TRIES = 2  # meshes that are searched of many


class Shallow:
    """An annotated program without a plan, and a shorter one to search."""

    def __init__(self, program: Program) -> None:
        self.deep = Deep(dataclasses.replace(program, plan=None))
        self.program = self.deep.program

    def bounds(
        self,
        given: Sequence[Candidate],
        world: World,
        redundant: bool = False,
        price: Price | None = None,
    ) -> list[float]:
        """A lower bound of the step of the whole program in seconds, of every candidate; 0 of a
        single one, which needs none.
        """
        if len(given) == 1:
            return [0.0]
        return bounded(self._frame, given, world, redundant, price)

    @cached_property
    def _frame(self) -> Frame:
        return frame(self.program)

    def plan(
        self,
        given: Sequence[Candidate],
        world: World,
        redundant: bool = False,
        price: Price | None = None,
    ) -> Plan:
        """The plan found on these meshes; its seconds are not worked out: `chosen` does that."""
        found = best(self.deep.longer, given, world, redundant, price, thorough=False)
        meshes = tuple((str(m), s) for (m, _), s in zip(given, found.bounds, strict=True))
        return dataclasses.replace(self.deep.whole(found.plan), meshes=meshes)

    def best(
        self,
        given: Sequence[Candidate],
        world: World,
        redundant: bool = False,
        price: Price | None = None,
    ) -> Plan:
        """The plan found on the most promising of these meshes, with the bounds of all."""
        if not self.deep.runs:
            return self.plan(given, world, redundant, price)
        bounds = self.bounds(given, world, redundant, price)
        near = promising(bounds, given, _TRIES)
        plans = [self.plan([one], world, redundant, price) for one in near]
        plan = min(plans, key=lambda plan: self._paid(plan, world, price))
        meshes = tuple((str(m), s) for (m, _), s in zip(given, bounds, strict=True))
        return dataclasses.replace(plan, meshes=meshes)

    def _paid(self, plan: Plan, world: World, price: Price | None) -> float:
        """Seconds of the whole program under a plan, with what the bytes that it keeps cost."""
        kept = price.seconds_per_byte * bytes_kept(price.kept, plan) if price else 0.0
        return summed(self.deep.under(plan), world) + kept

    def chosen(self, plan: Plan, world: World, budget: Budget | None) -> Deep:
        """The program with a plan for it, as the sum of its seconds and the budget say."""
        plan = dataclasses.replace(plan, unsplit=unsplit(self.program, plan.mesh, plan.choices))
        seconds = summed(self.deep.under(plan), world)
        plan = dataclasses.replace(plan, seconds=seconds, bound=0.0)
        chosen = choose.dropping(dataclasses.replace(self.program, plan=plan), budget)
        return Deep(chosen, self.deep)


def summed(deep: Deep, world: World) -> float:
    """Seconds of the step of a chosen program as the search adds them up."""

    def seconds(chosen: Program) -> tuple[float]:
        assert chosen.plan is not None
        return (sum(terms(chosen, chosen.plan, world).values()),)

    return float(deep.extrapolated(seconds)[0])
