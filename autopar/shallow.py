"""Plans for a deep model, searched on a shorter one.

Of many equal blocks in a row all but the outer ones are left out, the rest is searched, and those
that were left out get the layouts of the one that stands for them. That takes as long for 80 blocks
as for 8. A plan found so is a real one at its full price, but not proven to be the best: such plans
compete with the one that was searched for on the whole graph.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property

from autopar.cost.activations import Price, bytes_kept
from autopar.cost.memory import Budget
from autopar.depth import Deep
from autopar.errors import LayoutError
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.layouts import candidates
from autopar.passes import choose
from autopar.price import terms
from autopar.rating.frame import Frame, frame
from autopar.rating.rate import Best, Candidate, again, best, bounded, promising, with_bounds
from autopar.unsplit import unsplit
from autopar.world import World

_TRIES = 2  # meshes that are searched of many


class Shallow:
    """An annotated program without a plan, and a shorter one to search for a world. `known`: the
    same program, its annotations and its plan aside.
    """

    def __init__(
        self, program: Program, world: World, redundant: bool = False, known: Deep | None = None
    ) -> None:
        self.program = dataclasses.replace(program, plan=None)
        self.world, self.redundant, self._same = world, redundant, known
        self._named: dict[str, Plan | None] = {}

    def annotated(self, program: Program) -> Shallow:
        """The same program with other annotations."""
        return Shallow(program, self.world, self.redundant, self.deep)

    def bounds(self, given: Sequence[Candidate], price: Price | None = None) -> list[float]:
        """A lower bound of the step of the whole program in seconds, of every candidate; 0 of a
        single one, which needs none.
        """
        if len(given) == 1:
            return [0.0]
        return bounded(self._frame, given, self.world, self.redundant, price)

    @cached_property
    def deep(self) -> Deep:
        """The program, with its runs of equal blocks."""
        return Deep(self.program, self._same)

    @cached_property
    def _frame(self) -> Frame:
        return frame(self.program)

    def plan(self, given: Sequence[Candidate], price: Price | None = None) -> Plan:
        """The plan found on these meshes; its seconds are not worked out: `chosen` does that."""
        return self.deep.whole(self._found(given, price).plan)

    def best(
        self, given: Sequence[Candidate], price: Price | None = None, tries: int = _TRIES
    ) -> Plan:
        """The plan found on so many of these meshes, the most promising, with the bounds of all."""
        if not self.deep.runs:
            found = self._found(given, price)
            return dataclasses.replace(found.plan, meshes=with_bounds(given, found.bounds))
        bounds = self.bounds(given, price)
        plans = [self.plan([one], price) for one in promising(bounds, given, tries)]
        plan = min(plans, key=lambda plan: self._paid(plan, price))
        return dataclasses.replace(plan, meshes=with_bounds(given, bounds))

    def named(self, name: str) -> Plan | None:
        """`best` of a named layout; None where it has no mesh for so many ranks."""
        if name not in self._named:
            try:
                given = list(candidates(name, self.world.ranks, self.program))
            except LayoutError:
                given = []
            self._named[name] = self.best(given) if given else None
        return self._named[name]

    def refined(self, plan: Plan, given: Sequence[Candidate], price: Price) -> Plan:
        """The plan found on the mesh of another among more options of every region."""
        start = dataclasses.replace(plan, seconds=math.inf)  # whatever is found is taken
        short = frame(self.deep.longer)
        return self.deep.whole(again(short, start, given, self.world, self.redundant, price))

    def _found(self, given: Sequence[Candidate], price: Price | None) -> Best:
        longer = self.deep.longer
        return best(longer, given, self.world, self.redundant, price, thorough=False)

    def _paid(self, plan: Plan, price: Price | None) -> float:
        """Seconds of the whole program under a plan, with what the bytes that it keeps cost."""
        kept = price.seconds_per_byte * bytes_kept(price.kept, plan) if price else 0.0
        return summed(self.deep.under(plan), self.world) + kept

    def chosen(self, plan: Plan, budget: Budget | None) -> Deep:
        """The program with a plan for it, as the sum of its seconds and the budget say."""
        plan = dataclasses.replace(plan, unsplit=unsplit(self.program, plan.mesh, plan.choices))
        seconds = summed(self.deep.under(plan), self.world)
        plan = dataclasses.replace(plan, seconds=seconds, bound=0.0)
        chosen = choose.dropping(dataclasses.replace(self.program, plan=plan), budget)
        return Deep(chosen, self.deep)


def summed(deep: Deep, world: World) -> float:
    """Seconds of the step of a chosen program as the search adds them up."""

    def seconds(chosen: Program) -> tuple[float]:
        assert chosen.plan is not None
        return (sum(terms(chosen, chosen.plan, world).values()),)

    return float(deep.extrapolated(seconds)[0])
