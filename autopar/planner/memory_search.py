"""The fastest plan that fits the memory: time is searched for at several prices of a byte.

A price of bytes gives the fastest plan among those that keep no more than it does (Everett 1963).
Where the plan of least time fits only by what it drops, the price is what dropping a byte costs it:
a plan that fits and is faster is better at that price, too, and the best one at it, which drops
what is too much, is as fast. Where it does not fit at all, the price goes up until its plan does,
and down again towards the lowest such price. Where weights may be gathered again in the backward,
these plans are searched as if all of blocks were: they cost two gathers and no memory. The most
promising plans then make as little as it takes again (fitting.py), and the fastest one wins. "auto"
holds them against the named layouts, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from autopar.cost.activations import (
    ActivationMemory,
    Middle,
    Price,
    Stored,
    activation_bytes,
    regathering,
)
from autopar.cost.memory import Budget
from autopar.ir.plan import Plan
from autopar.ir.plan_table import Memory
from autopar.ir.program import Program
from autopar.passes import emit_program
from autopar.planner import choose, proven
from autopar.planner.bounds.factor_graph import frame
from autopar.planner.deep_models import DeepModel, ShortenedModel
from autopar.planner.mesh_search import GAP, Candidate, bounds_of, meshes_by_bound, promising_meshes
from autopar.planner.named_layouts import NAMES, Layouts, candidates
from autopar.planner.objective import cost_terms
from autopar.planner.overlap_search import plans_by_step
from autopar.planner.rematerialize import (
    Estimated,
    RematerializationSearch,
    RematerializationSteps,
    TriedRematerialization,
)
from autopar.world import World

_STEP = 8.0  # between the first prices; its square root at every turn
_TRIES = 4
_ROUNDS = 2  # of so many tries each: what a plan holds besides is corrected in between
_MESHES = 24  # that are tried at the second price and later ones: the best at the first
_PROMISING = 2  # plans of a round that are made to fit
_LESS = 0.995  # of the memory, besides, where an estimate of a peak was too low
_PRICES = (0.25, 0.5, 1.0, 2.0)  # of all that is held, in steps of the plan of least time


class _Tried(NamedTuple):
    """A chosen program with what it drops, the seconds of its step with what runs twice, and its
    memory. `ladder`: what else it could drop.
    """

    program: Program
    seconds: float
    memory: Memory
    ladder: RematerializationSearch | None = None


class _Priced(NamedTuple):
    """A program chosen at a price, its plan's seconds those in which weights are gathered again,
    and the bytes that it keeps.
    """

    program: Program
    kept: float
    price: Price

    @property
    def paid(self) -> float:
        """Seconds with what the bytes cost."""
        return _plan(self.program).seconds + self.price.seconds_per_byte * self.kept


def search_within_memory(
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
    shallow = ShortenedModel(program, world, redundant)
    if overlap and (budget is None or budget.recompute not in ("full", "gathers")):
        several = plans_by_step(shallow, layout, budget)
    else:
        several = [choose.choose(program, world, layout, redundant, budget)]
    if budget is None or budget.memory_bytes is None:
        return several[0]
    return _within(several, _Under(shallow, layout, budget, budget))


def _within(several: list[Program], under: _Under) -> Program:
    """The first of the chosen programs that fits as it is, where they are several; else the fastest
    plan found that fits.
    """
    for chosen in several if len(several) > 1 else ():
        if (whole := under.dropping_nothing(chosen)) is not None:
            return whole
    chosen = min(several, key=lambda one: _plan(one).seconds)
    found = under.best(chosen)
    if under.layout == "auto" and not _as_chosen(found, chosen, under.aim):
        found = _best([found, *_named(under, found)], under.aim)
    estimate, found = found, under.worked_out(found)
    if under.aim.fits(estimate.memory) and not under.budget.fits(found.memory):
        return _within(several, under.lower(estimate.memory.peak / found.memory.peak))
    return _told(found, chosen, under)


def _told(found: _Tried, chosen: Program, under: _Under) -> Program:
    """The program found, its plan with the limit and a bound, if `chosen` is that of least time."""
    least, limit, bound = _plan(chosen), None, 0.0
    if not _as_chosen(found, chosen, under.budget):
        limit = under.budget.memory_bytes
        found, bound = under.proven(found, least)
    bound = min(max(least.bound, bound), found.seconds)  # a named layout's may be below it
    plan = dataclasses.replace(
        _plan(found.program),
        bound=bound,
        meshes=least.meshes,
        limit=limit,
        memory=found.memory if least.mesh.axes else None,  # one rank runs the graph as traced
        peak_bytes=found.memory.peak,
    )
    return dataclasses.replace(found.program, plan=plan)


def _as_chosen(found: _Tried, chosen: Program, budget: Budget) -> bool:
    """Whether the plan of least time fits as it is."""
    return found.program is chosen and budget.fits(found.memory)


def _named(free: _Under, best: _Tried) -> Iterator[_Tried]:
    """The plans of named layouts that could be faster than the best one that fits: that of least
    time with what it must drop. While nothing fits, those at prices, too. No bound of "auto" rules
    a mesh out: a named layout may compute on several ranks what "auto" must split.
    """
    budget = free.aim
    given: list[tuple[_Under, Program]] = []
    for name in NAMES[1:] if free.world.ranks > 1 else ():
        if (plan := free.whole.named(name)) is None:
            continue
        chosen = free.whole.chosen(plan, budget).program
        if not budget.fits(best.memory) or _plan(chosen).seconds < best.seconds:
            given.append((free.under(name), chosen))
    for under, chosen in sorted(given, key=lambda pair: _plan(pair[1]).seconds):
        if not budget.fits(best.memory) or _plan(chosen).seconds < best.seconds:
            found = under.made(chosen)
            best = _best([best, found], budget)
            yield found
    for under, chosen in given:
        if not budget.fits(best.memory):
            best = under.best(chosen)
            yield best


def _best(tried: list[_Tried], budget: Budget) -> _Tried:
    """The fastest that fits; where none does, that of least memory."""
    fitting = [one for one in tried if budget.fits(one.memory)]
    if fitting:
        return min(fitting, key=lambda one: one.seconds)
    return min(tried, key=lambda one: one.memory.peak)


class _Under:
    """Plans of a layout under a limit of memory: that of `budget` for exact peaks, that of `aim`
    for the search and its estimates, which is lower where estimates turned out too low.
    """

    def __init__(self, whole: ShortenedModel, layout: Layouts, budget: Budget, aim: Budget) -> None:
        self.whole, self.program, self.world = whole, whole.program, whole.world
        self.layout, self.budget, self.aim = layout, budget, aim
        again = budget.recompute == "auto"
        searched = regathering(self.program) if again else self.program
        self.kept = ActivationMemory(searched, budget.optimizer)
        self.given: list[Candidate] = []
        self.shallow = whole.annotated(searched) if again else whole
        self._made: dict[int, _Tried] = {}  # by identity, which the program beside a ladder keeps
        self._ladders: dict[int, tuple[Program, RematerializationSearch]] = {}

    def under(self, layout: Layouts, aim: Budget | None = None) -> _Under:
        """Plans of another layout under the same limit, or with another aim."""
        return _Under(self.whole, layout, self.budget, aim or self.aim)

    def lower(self, off: float) -> _Under:
        """With a lower aim, as an estimate that was within it was too low by a factor `off`."""
        assert self.budget.memory_bytes is not None
        less = self.budget.memory_bytes * off * _LESS
        return self.under(self.layout, dataclasses.replace(self.budget, memory_bytes=less))

    def best(self, chosen: Program) -> _Tried:
        """The best plan found, if `chosen` is the one of least time."""
        least = self.made(chosen)
        if _as_chosen(least, chosen, self.aim):
            return least
        self.given = list(candidates(self.layout, self.world.ranks, self.program))
        if self.aim.fits(least.memory):
            return self._traded(chosen, least)
        price = least.seconds / max(1.0, least.memory.peak)
        tried = [least]
        for _ in range(_ROUNDS):
            besides = self._besides(tried[-1])
            priced = self._at_prices(price, besides)
            price = priced[-1].price.seconds_per_byte
            priced.sort(key=lambda one: self._promise(one, besides))
            for one in priced[:_PROMISING]:
                tried += self._better(one, tried)
            if self.aim.fits(_best(tried, self.aim).memory):
                break
        return self._settled(priced[0], tried)

    def _traded(self, chosen: Program, least: _Tried) -> _Tried:
        """The best plan found where that of least time fits by what it drops: at the price that it
        pays for a byte.
        """
        assert least.ladder is not None
        saved = least.ladder.planned().memory.peak - least.memory.peak
        one = self._at(Price(self.kept, (least.seconds - _plan(chosen).seconds) / saved))
        return self._settled(one, [least, *self._better(one, [least])])

    def _settled(self, one: _Priced, tried: list[_Tried]) -> _Tried:
        """The best of these, or of the most promising one searched again."""
        refined = self._refined(one)
        return _best(tried + (self._better(refined, tried) if refined else []), self.aim)

    def _better(self, one: _Priced, tried: list[_Tried]) -> list[_Tried]:
        """The program made to fit, if it could be faster than the best that fits."""
        chosen, best = self._once(one), _best(tried, self.aim)
        if self.aim.fits(best.memory) and _plan(chosen).seconds >= best.seconds:
            return []
        return [self.made(chosen)]

    def _besides(self, tried: _Tried) -> float:
        """What the peak of a program has that is not counted as kept."""
        assert tried.ladder is not None
        return tried.ladder.counted().memory.peak - activation_bytes(
            self.kept, _plan(tried.program)
        )

    def made(self, chosen: Program) -> _Tried:
        """A chosen program with as little dropped as makes it fit; what comes nearest where nothing
        does. It is the program itself where it fits as it is.
        """
        if id(chosen) not in self._made:
            ladder = self._ladder(chosen)
            self._made[id(chosen)] = self._fit(chosen, ladder, ladder.best())
        return self._made[id(chosen)]

    def _ladder(self, chosen: Program) -> RematerializationSearch:
        """What a chosen program may drop."""
        if id(chosen) not in self._ladders:
            deep = DeepModel(chosen, self.whole.deep)
            if deep.runs:
                ladder: RematerializationSearch = Estimated(deep, self.world, self.aim)
            else:
                ladder = RematerializationSteps(
                    emit_program(chosen, self.world), self.world, self.aim
                )
            self._ladders[id(chosen)] = chosen, ladder
        return self._ladders[id(chosen)][1]

    def dropping_nothing(self, chosen: Program) -> Program | None:
        """A chosen program with its memory, if it fits as it is: by more than an estimate."""
        if not self.aim.fits(self._ladder(chosen).planned().memory):
            return None
        found = self.worked_out(self.made(chosen))
        if not _as_chosen(found, chosen, self.budget):
            return None
        plan = dataclasses.replace(_plan(chosen), memory=found.memory)
        return dataclasses.replace(chosen, plan=plan)

    def worked_out(self, tried: _Tried) -> _Tried:
        """With the memory that it needs where that was an estimate, and as little dropped as makes
        it fit.
        """
        if not isinstance(tried.ladder, Estimated):
            return tried
        ladder = RematerializationSteps(
            emit_program(tried.program, self.world), self.world, self.budget
        )
        return self._fit(tried.program, ladder, ladder.settled(tried.ladder))

    def _fit(
        self, chosen: Program, ladder: RematerializationSearch, found: TriedRematerialization
    ) -> _Tried:
        if found is ladder.planned():
            return _Tried(chosen, _plan(chosen).seconds + found.seconds, found.memory, ladder)
        return self._dropped(chosen, found)._replace(ladder=ladder)

    def _dropped(self, chosen: Program, found: TriedRematerialization) -> _Tried:
        """A chosen program that drops what it was found to fit with."""
        plan = dataclasses.replace(_plan(chosen), **found.rung._asdict())
        chosen = dataclasses.replace(chosen, plan=plan)
        return _Tried(chosen, plan.seconds + found.seconds, found.memory)

    def proven(self, best: _Tried, least: Plan) -> tuple[_Tried, float]:
        """The best of all plans that fit, if that can be told, and seconds that none is below.
        `least`: the plan of least time.
        """
        given = list(candidates(self.layout, self.world.ranks, self.program))
        if not proven.is_small(self.program, given):
            return best, self._priced_bound(least, given)
        below = best.seconds if self.budget.fits(best.memory) else math.inf
        search = self.program, given, self.world, self.whole.redundant, self.budget
        chosen, found, bound = proven.fastest(*search, below)
        if chosen is None or found is None:
            return best, bound if bound < math.inf else 0.0
        return self._dropped(chosen, found), bound

    def _priced_bound(self, least: Plan, given: list[Candidate]) -> float:
        """Seconds that no plan within the limit is below: at any price of bytes that every plan
        holds, the bound less what the limit may cost (Everett, 1963).
        """
        floor = Middle if self.budget.recompute == "none" else Stored
        kept, limit = floor(self.program, self.budget.optimizer), self.budget.memory_bytes
        needs = activation_bytes(kept, least)
        assert limit is not None
        if self.layout != "auto" or needs <= limit:  # a price gains nothing there
            return 0.0
        near = promising_meshes(bounds_of(least), given, _MESHES)
        free = dict(zip((mesh for mesh, _ in given), (s for _, s in least.meshes), strict=True))
        rest = min(
            (s for mesh, s in free.items() if mesh not in {m for m, _ in near}), default=math.inf
        )
        found = 0.0
        for more in _PRICES:
            price = more * least.seconds / needs
            paid = meshes_by_bound(
                frame(self.program), near, self.world, self.whole.redundant, Price(kept, price)
            )
            several = [
                max(free[mesh], s - price * limit) for (mesh, _), s in zip(near, paid, strict=True)
            ]
            found = max(found, min(rest, *several))
        return found

    def _at_prices(self, price: float, besides: float) -> list[_Priced]:
        """The plans at a few prices, found by bisection. What a plan keeps is known at once; what
        it holds besides is taken to be as much as in the last plan whose peak was worked out.
        """
        assert self.aim.memory_bytes is not None
        found: list[_Priced] = []
        step, was_enough = _STEP, False
        for _ in range(_TRIES):
            found.append(self._at(Price(self.kept, price)))
            enough = besides + found[-1].kept <= self.aim.memory_bytes
            step = step**0.5 if enough != was_enough else step
            price, was_enough = (price / step if enough else price * step), enough
        return found

    def _at(self, price: Price) -> _Priced:
        plan = self.shallow.best(self.given, price, tries=1)  # as there are other prices
        self.given = promising_meshes(bounds_of(plan), self.given, _MESHES)
        return self._priced(plan, price)

    def _priced(self, plan: Plan, price: Price) -> _Priced:
        chosen = self.shallow.chosen(plan, self.aim).program
        return _Priced(chosen, activation_bytes(self.kept, _plan(chosen)), price)

    def _once(self, one: _Priced) -> Program:
        """With the seconds of a step in which nothing runs twice."""
        spent = cost_terms(self.program, _plan(one.program), self.world)
        plan = dataclasses.replace(_plan(one.program), seconds=sum(spent.values()))
        return dataclasses.replace(self.program, plan=plan)

    def _promise(self, one: _Priced, besides: float) -> float:
        """About the seconds of its step if it is made to fit: of what it needs too much as many
        blocks are recomputed as keep that, at a third of their computation.
        """
        assert self.aim.memory_bytes is not None
        missing = max(0.0, besides + one.kept - self.aim.memory_bytes) / one.kept
        return _plan(one.program).seconds * (1 + missing / 3)

    def _refined(self, one: _Priced) -> _Priced | None:
        """Searched again among more options, at the same price; None where that finds nothing."""
        plan = _plan(one.program)
        if dict(plan.meshes)[str(plan.mesh)] >= one.paid * (1 - GAP):
            return None
        given = list(candidates(self.layout, self.world.ranks, self.program))
        found = self._priced(self.shallow.refined(plan, given, one.price), one.price)
        return found if found.paid < one.paid * (1 - 1e-9) else None


def _plan(program: Program) -> Plan:
    assert program.plan is not None
    return program.plan
