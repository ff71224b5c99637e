"""The fastest plan that fits the memory limit.

The search minimises seconds plus a price per byte of saved activations and stored state; such a
plan is the fastest of all that hold no more bytes (Everett 1963). If the plan of least time fits
only with rematerialization, the price is what that costs per byte saved. If it does not fit at all,
the price rises until a plan fits, then falls towards the lowest such price. Where weights may be
gathered again in the backward, plans are searched as if all were: that costs two gathers and no
memory. The most promising plans are then rematerialized as little as fits (rematerialize.py), and
the fastest wins. "auto" also compares the named layouts' plans.

Programs with the plans of least time and a request enter, the program with the plan that fits
leaves. Called by planner.py.
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
    regather_weights,
)
from autopar.cost.memory import Budget
from autopar.ir.plan import Plan
from autopar.ir.plan_table import Memory
from autopar.ir.program import Program
from autopar.passes import emit_program
from autopar.planner import small_models
from autopar.planner.bounds.factor_graph import frame
from autopar.planner.deep_models import DeepModel, ShortenedModel
from autopar.planner.mesh_search import GAP, Candidate, bounds_of, meshes_by_bound, promising_meshes
from autopar.planner.named_layouts import rivals
from autopar.planner.objective import cost_terms
from autopar.planner.rematerialize import (
    Estimated,
    RematerializationSearch,
    RematerializationSteps,
    TriedRematerialization,
)
from autopar.planner.request import Layouts, PlanRequest

_STEP = 8.0  # factor between the first prices; its square root after a turn
_TRIES = 4
_ROUNDS = 2  # of _TRIES prices each; what else a plan holds is corrected between
_FIRST_MESHES, _NEAR = 48, 2.0  # meshes at the first price: by their bounds without one
_MESHES = 24  # meshes searched at the second and later prices: the best at the first price
_NAMED, _CLOSE = 2, 1.1  # named layouts searched at prices: those within a tenth of the best
_PROMISING = 2  # plans of a round that are rematerialized to fit
_LESS = 0.995  # of the limit, where an estimate of a peak was too low
_FRUGAL = 64.0  # price of a byte, in steps per peak: so high that memory decides nearly alone
_PRICES = (0.25, 0.5, 1.0, 2.0)  # of all bytes held, in step times of the plan of least time


class _Tried(NamedTuple):
    """A chosen program with its rematerialization, the seconds of its step with what runs twice,
    and its memory. `ladder`: the search over what else it could recompute.
    """

    program: Program
    seconds: float
    memory: Memory
    ladder: RematerializationSearch | None = None


class _Priced(NamedTuple):
    """A program chosen at a price per byte, and the bytes that it holds. Its plan's seconds include
    gathering weights again.
    """

    program: Program
    saved_bytes: float
    price: Price

    @property
    def paid(self) -> float:
        """Seconds of the step plus the price of the bytes held."""
        return _plan(self.program).seconds + self.price.seconds_per_byte * self.saved_bytes


def search_within_memory(
    model: ShortenedModel, several: list[Program], request: PlanRequest
) -> Program:
    """Return the first of several chosen programs that fits the request's budget as it is; else
    the fastest found that fits, or that of least memory where none does.
    """
    assert request.budget is not None
    return _search(several, LimitedSearch(model, request, request.budget))


def _search(several: list[Program], under: LimitedSearch) -> Program:
    """Return what `search_within_memory` does, for the aim of a search."""
    for chosen in several if len(several) > 1 else ():
        if (fitting := under.dropping_nothing(chosen)) is not None:
            return fitting
    chosen = min(several, key=lambda candidate: _plan(candidate).seconds)
    fastest = under.best(chosen)
    if under.layout == "auto" and not _fits_as_chosen(fastest, chosen, under.aim):
        fastest = _best([fastest, *_named_layout_plans(under, fastest)], under.aim)
    estimate, fastest = fastest, under.worked_out(fastest)
    if under.aim.fits(estimate.memory) and not under.budget.fits(fastest.memory):
        return _search(several, under.lower(estimate.memory.peak / fastest.memory.peak))
    return _with_limit_and_bound(fastest, chosen, under)


def _with_limit_and_bound(found: _Tried, chosen: Program, under: LimitedSearch) -> Program:
    """Return the program, its plan with the limit and a bound. `chosen`: the program of
    least time.
    """
    least, limit, bound = _plan(chosen), None, 0.0
    if not _fits_as_chosen(found, chosen, under.budget):
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


def _fits_as_chosen(found: _Tried, chosen: Program, budget: Budget) -> bool:
    """Whether the plan of least time fits without rematerialization."""
    return found.program is chosen and budget.fits(found.memory)


def _named_layout_plans(free: LimitedSearch, best: _Tried) -> Iterator[_Tried]:
    """Yield plans of named layouts that could beat the best that fits: those of least time, made to
    fit, then those at prices. No bound of "auto" excludes a mesh: named layouts may replicate what
    it must split.
    """
    contenders: list[tuple[LimitedSearch, Program]] = []
    for name in rivals(free.model.program) if free.world.ranks > 1 else ():
        if (plan := free.model.named(name)) is None:
            continue
        chosen = free.model.chosen(plan, free.request).program
        contenders.append((free.under(name), chosen))
    contenders.sort(key=lambda pair: _plan(pair[1]).seconds)

    def could_win(chosen: Program) -> bool:
        return not free.aim.fits(best.memory) or _plan(chosen).seconds < best.seconds

    fitted: list[tuple[float, LimitedSearch, Program]] = []
    for under, chosen in contenders:
        if could_win(chosen):
            tried = under.fitted(chosen)
            fitted.append((_promised(tried, free.aim), under, chosen))
            best = _best([best, tried], free.aim)
            yield best
    fitted.sort(key=lambda each: each[0])
    if free.model.deep.runs:  # of many equal blocks some do more again, so prices add little
        close = _CLOSE * _promised(best, free.aim) if free.aim.fits(best.memory) else 0.0
        fitted = [each for each in fitted[:_NAMED] if each[0] <= close]
    for _, under, chosen in fitted:
        if could_win(chosen):
            best = _best([best, under.best(chosen)], free.aim)
            yield best


def _promised(tried: _Tried, budget: Budget) -> float:
    """Return the seconds of a plan, in proportion more where its peak is above the limit."""
    assert budget.memory_bytes is not None
    return tried.seconds * max(1.0, tried.memory.peak / budget.memory_bytes)


def _best(tried: list[_Tried], budget: Budget) -> _Tried:
    """Return the fastest that fits; where none does, the one of least memory."""
    fitting = [candidate for candidate in tried if budget.fits(candidate.memory)]
    if fitting:
        return min(fitting, key=lambda candidate: candidate.seconds)
    return min(tried, key=lambda candidate: candidate.memory.peak)


class LimitedSearch:
    """The search under a memory limit for one layout. `budget` is the limit for exact peaks; `aim`
    is the limit for the search and its estimates, lower where estimates turned out too low.
    """

    def __init__(self, model: ShortenedModel, request: PlanRequest, aim: Budget) -> None:
        assert request.budget is not None and request.layout is not None
        self.model, self.program, self.world = model, model.program, model.world
        self.request, self.budget, self.aim = request, request.budget, aim
        self.layout: Layouts = request.layout
        may_regather = request.recompute == "auto"
        searched = regather_weights(self.program) if may_regather else self.program
        self.saved = ActivationMemory(searched, self.budget.optimizer)
        self.meshes: list[Candidate] = []
        self.regathering = model.annotated(searched) if may_regather else model
        self._fitted: dict[int, _Tried] = {}  # by id; _ladders keeps the programs alive
        self._ladders: dict[int, tuple[Program, RematerializationSearch]] = {}

    def under(self, layout: Layouts) -> LimitedSearch:
        """Return the search for another layout."""
        return LimitedSearch(self.model, self.request.under(layout), self.aim)

    def _candidates(self) -> list[Candidate]:
        return self.model.candidates(self.layout)

    def lower(self, off: float) -> LimitedSearch:
        """Return the search with an aim lower by `off`, by which an estimate was too low."""
        assert self.budget.memory_bytes is not None
        limit_bytes = self.budget.memory_bytes * off * _LESS
        aim = dataclasses.replace(self.budget, memory_bytes=limit_bytes)
        return LimitedSearch(self.model, self.request, aim)

    def best(self, chosen: Program) -> _Tried:
        """Return the best plan found; `chosen` is the program of least time."""
        least = self.fitted(chosen)
        if _fits_as_chosen(least, chosen, self.aim):
            return least
        bounds, meshes = bounds_of(_plan(chosen)), self._candidates()
        known = len(bounds) == len(meshes)
        self.meshes = promising_meshes(bounds, meshes, _FIRST_MESHES, _NEAR) if known else meshes
        if self.aim.fits(least.memory):
            return self._traded(chosen, least)
        frugal = self.frugal(least.seconds, least.memory.peak)
        if not self.aim.fits(frugal.memory):
            return _best([least, frugal], self.aim)
        price = least.seconds / max(1.0, least.memory.peak)
        tried = [least, frugal]
        for _ in range(_ROUNDS):
            besides = self._besides(tried[-1])
            priced = self._at_prices(price, besides)
            price = priced[-1].price.seconds_per_byte
            priced.sort(key=lambda candidate: self._promise(candidate, besides))
            for candidate in priced[:_PROMISING]:
                tried += self._better(candidate, tried)
            if self.aim.fits(_best(tried, self.aim).memory):
                break
        return self._settled(priced[0], tried)

    def frugal(self, seconds: float, peak_bytes: float) -> _Tried:
        """Return the plan at a price so high that memory decides nearly alone, made to fit: if it
        does not, hardly any does. `seconds`, `peak_bytes`: of any plan, to set the price by.
        """
        self.meshes = self.meshes or self._candidates()
        price = Price(self.saved, _FRUGAL * seconds / max(1.0, peak_bytes))
        plan = self.regathering.best(self.meshes, price, tries=1)
        return self.fitted(self._once(self._priced(plan, price)))

    def _traded(self, chosen: Program, least: _Tried) -> _Tried:
        """Return the best plan found where that of least time fits by rematerialization: at the
        price per byte that this pays.
        """
        assert least.ladder is not None
        saved_bytes = least.ladder.planned().memory.peak - least.memory.peak
        priced = self._at(Price(self.saved, (least.seconds - _plan(chosen).seconds) / saved_bytes))
        return self._settled(priced, [least, *self._better(priced, [least])])

    def _settled(self, one: _Priced, tried: list[_Tried]) -> _Tried:
        """Return the best of these plans and the most promising one searched again."""
        refined = self._refined(one)
        return _best(tried + (self._better(refined, tried) if refined else []), self.aim)

    def _better(self, one: _Priced, tried: list[_Tried]) -> list[_Tried]:
        """Return the program made to fit, if it could be faster than the best that fits."""
        chosen, best = self._once(one), _best(tried, self.aim)
        if self.aim.fits(best.memory) and _plan(chosen).seconds >= best.seconds:
            return []
        return [self.fitted(chosen)]

    def _besides(self, tried: _Tried) -> float:
        """Return the bytes of a program's peak beside its activations and stored state."""
        assert tried.ladder is not None
        return tried.ladder.counted().memory.peak - activation_bytes(
            self.saved, _plan(tried.program)
        )

    def fitted(self, chosen: Program) -> _Tried:
        """Return a chosen program with just enough rematerialization to fit, or what comes nearest.
        It is the program itself where it fits as it is.
        """
        if id(chosen) not in self._fitted:
            ladder = self._ladder(chosen)
            self._fitted[id(chosen)] = self._fit(chosen, ladder, ladder.best())
        return self._fitted[id(chosen)]

    def _ladder(self, chosen: Program) -> RematerializationSearch:
        """Return the rematerialization search of a chosen program."""
        if id(chosen) not in self._ladders:
            deep = DeepModel(chosen, self.model.deep)
            if deep.runs:
                ladder: RematerializationSearch = Estimated(deep, self.world, self.aim)
            else:
                ladder = RematerializationSteps(
                    emit_program(chosen, self.world), self.world, self.aim
                )
            self._ladders[id(chosen)] = chosen, ladder
        return self._ladders[id(chosen)][1]

    def dropping_nothing(self, chosen: Program) -> Program | None:
        """Return a chosen program with its exact memory if it fits as it is, else None."""
        if not self.aim.fits(self._ladder(chosen).planned().memory):
            return None
        exact = self.worked_out(self.fitted(chosen))
        if not _fits_as_chosen(exact, chosen, self.budget):
            return None
        plan = dataclasses.replace(_plan(chosen), memory=exact.memory)
        return dataclasses.replace(chosen, plan=plan)

    def worked_out(self, tried: _Tried) -> _Tried:
        """Return the plan with its exact memory in place of an estimate, and made to fit that."""
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
        """Return a chosen program with the rematerialization that was found for it."""
        plan = dataclasses.replace(_plan(chosen), **found.rung._asdict())
        chosen = dataclasses.replace(chosen, plan=plan)
        return _Tried(chosen, plan.seconds + found.seconds, found.memory)

    def proven(self, best: _Tried, least: Plan) -> tuple[_Tried, float]:
        """Return the fastest of all plans that fit, if it can be proven, and a bound in seconds.
        `least`: the plan of least time.
        """
        meshes = self._candidates()
        if not small_models.is_small(self.program, meshes):
            return best, self._priced_bound(least)
        below = best.seconds if self.budget.fits(best.memory) else math.inf
        chosen, tried, bound = small_models.fastest(
            self.program, meshes, self.world, self.request, below
        )
        if chosen is None or tried is None:
            return best, bound if bound < math.inf else 0.0
        return self._dropped(chosen, tried), bound

    def _priced_bound(self, least: Plan) -> float:
        """Return seconds that no plan within the limit is below: at any price of the bytes that
        every plan holds, the bound less what the limit may cost (Everett, 1963). `least`: the plan
        of least time.
        """
        floor = Middle if self.budget.recompute == "none" else Stored
        held, limit = floor(self.program, self.budget.optimizer), self.budget.memory_bytes
        needs = activation_bytes(held, least)
        assert limit is not None
        if self.layout != "auto" or needs <= limit:  # a price cannot raise the bound there
            return 0.0
        meshes = self._candidates()
        near = promising_meshes(bounds_of(least), meshes, _MESHES)
        free = dict(zip((mesh for mesh, _ in meshes), (s for _, s in least.meshes), strict=True))
        other_meshes = min(
            (s for mesh, s in free.items() if mesh not in {m for m, _ in near}), default=math.inf
        )
        bound = 0.0
        for factor in _PRICES:
            price = factor * least.seconds / needs
            paid = meshes_by_bound(frame(self.program), near, self.world, Price(held, price))
            bounds = [
                max(free[mesh], s - price * limit) for (mesh, _), s in zip(near, paid, strict=True)
            ]
            bound = max(bound, min(other_meshes, *bounds))
        return bound

    def _at_prices(self, price: float, besides: float) -> list[_Priced]:
        """Return the plans at a few prices, found by bisection. What a plan holds beside the bytes
        counted is taken from the last plan whose peak was computed.
        """
        assert self.aim.memory_bytes is not None
        plans: list[_Priced] = []
        step, was_enough = _STEP, False
        for _ in range(_TRIES):
            plans.append(self._at(Price(self.saved, price)))
            enough = besides + plans[-1].saved_bytes <= self.aim.memory_bytes
            step = step**0.5 if enough != was_enough else step
            price, was_enough = (price / step if enough else price * step), enough
        return plans

    def _at(self, price: Price) -> _Priced:
        plan = self.regathering.best(self.meshes, price, tries=1)  # as there are other prices
        self.meshes = promising_meshes(bounds_of(plan), self.meshes, _MESHES)
        return self._priced(plan, price)

    def _priced(self, plan: Plan, price: Price) -> _Priced:
        chosen = self.regathering.chosen(plan, self.request).program
        return _Priced(chosen, activation_bytes(self.saved, _plan(chosen)), price)

    def _once(self, one: _Priced) -> Program:
        """Return the program with the seconds of a step in which nothing runs twice."""
        terms = cost_terms(self.program, _plan(one.program), self.world)
        plan = dataclasses.replace(_plan(one.program), seconds=sum(terms.values()))
        return dataclasses.replace(self.program, plan=plan)

    def _promise(self, one: _Priced, besides: float) -> float:
        """Estimate the seconds of its step once it fits: the share of its blocks that holds the
        missing bytes is recomputed, at a third of their computation.
        """
        assert self.aim.memory_bytes is not None
        missing = max(0.0, besides + one.saved_bytes - self.aim.memory_bytes) / one.saved_bytes
        return _plan(one.program).seconds * (1 + missing / 3)

    def _refined(self, one: _Priced) -> _Priced | None:
        """Search again among more options at the same price; None without a better plan."""
        plan = _plan(one.program)
        if dict(plan.meshes)[str(plan.mesh)] >= one.paid * (1 - GAP):
            return None
        plan = self.regathering.refined(plan, self._candidates(), one.price)
        refined = self._priced(plan, one.price)
        return refined if refined.paid < one.paid * (1 - 1e-9) else None


def _plan(program: Program) -> Plan:
    assert program.plan is not None
    return program.plan
