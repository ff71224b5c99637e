"""The stage `fit`: the fastest plan within the memory limit.

Example: "ddp" is the fastest on 8 ranks and holds 90 GB where 80 are allowed. It is tried with
blocks that run again in the backward, beside plans that store parts of the weights.

The first contender that fits as it is wins. Where none does, plans are searched that minimise
seconds plus a price per byte of saved activations and stored state; such a plan is the fastest of
all that hold no more bytes (Everett 1963). If the plan of least time fits only with
rematerialization, the price is what that costs per byte saved. If it does not fit at all, the price
rises until a plan fits, then falls towards the lowest such price. Where weights may be gathered
again in the backward, plans are searched as if all were: that costs two gathers and no memory. The
most promising plans are then rematerialized as little as fits (rematerialize.py), and the fastest
wins. "auto" also compares the named layouts' plans.

A limit that is below what every plan holds (cost/least_bytes.py) has no contenders: `most_frugal`
then gives the plan that the refusal names.

A program, contenders and a request enter, the program with the plan that fits leaves. It is the
only stage that goes back to an earlier one: which price of a byte is worth a search, the peak of
the plan at the last one says. confirm.py is the next stage.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from autopar.cost.activations import (
    ActivationMemory,
    MidstepMemory,
    ParameterMemory,
    Price,
    activation_bytes,
    regather_weights,
)
from autopar.cost.memory import Budget
from autopar.ir.deep_models import DeepModel
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes import emit_program
from autopar.planner import small_models
from autopar.planner.bound import bound_rivals, lower_bounds
from autopar.planner.objective import cost_terms
from autopar.planner.rematerialize import (
    Estimated,
    RematerializationSearch,
    RematerializationSteps,
    TriedRematerialization,
)
from autopar.planner.request import Layouts, PlanRequest
from autopar.planner.solve import GAP, Contender, ShortenedModel, bounds_of, promising
from autopar.planner.space import Candidate, candidates, rival_candidates, searched_candidates
from autopar.world import World

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


def fit(
    program: Program, world: World, contenders: Sequence[Contender], request: PlanRequest
) -> Program:
    """Return the first of several contenders that fits the request's budget as it is; else the
    fastest plan found that fits, or that of least memory where none does. Without a limit, return
    the first.
    """
    budget = request.budget
    if budget is None or budget.memory_bytes is None:
        return contenders[0].program
    search = LimitedSearch(ShortenedModel.of(program, world), request, budget)
    return _fit_to_aim(contenders, search)


def most_frugal(program: Program, world: World, request: PlanRequest) -> Program:
    """Return the program with the plan of least memory that a few searches find, its peak exact,
    for a request whose limit no plan fits: for "auto" the best of the named layouts, else the plan
    of least time or one at a price so high that memory decides nearly alone.
    """
    assert request.budget is not None and request.layout is not None
    search = LimitedSearch(ShortenedModel.of(program, world), request, request.budget)
    if request.layout == "auto" and world.ranks > 1:
        tried = [under.fitted(plan) for under, plan in _rivals(search)]
    else:
        least = search.model.best(search._candidates())
        tried = [search.fitted(Contender(search.model.chosen(least, request)))]
        tried.append(search.frugal(tried[0].plan.seconds, tried[0].peak))
    best = search.worked_out(_best(tried, search.budget))
    plan = dataclasses.replace(
        best.plan, limit=search.budget.memory_bytes, memory=best.memory, peak_bytes=best.peak
    )
    return dataclasses.replace(best.program, plan=plan)


def _fit_to_aim(contenders: Sequence[Contender], under: LimitedSearch) -> Program:
    """Return what `fit` does, for the aim of a search."""
    for contender in contenders if len(contenders) > 1 else ():
        if (fitted := under.without_rematerialization(contender)) is not None:
            return fitted
    least = min(contenders, key=lambda each: each.plan.seconds)
    fastest = under.best(least)
    if under.layout == "auto" and not _fits_as_chosen(fastest, least, under.aim):
        fastest = _best([fastest, *_named_layout_plans(under, fastest)], under.aim)
    estimate, fastest = fastest, under.worked_out(fastest)
    if estimate.fits(under.aim) and not fastest.fits(under.budget):
        return _fit_to_aim(contenders, under.lower(estimate.peak / fastest.peak))
    return _with_limit_and_bound(fastest, least, under)


def _with_limit_and_bound(contender: Contender, least: Contender, under: LimitedSearch) -> Program:
    """Return the program, its plan with the limit and a bound. `least`: of least time."""
    limit, bound = None, 0.0
    if not _fits_as_chosen(contender, least, under.budget):
        limit = under.budget.memory_bytes
        contender, bound = under.proven(contender, least.plan)
    bound = min(max(least.plan.bound, bound), contender.seconds)  # a named layout's may be below it
    plan = dataclasses.replace(
        contender.plan,
        bound=bound,
        meshes=least.plan.meshes,
        limit=limit,
        memory=contender.memory
        if least.plan.mesh.axes
        else None,  # one rank runs the graph as traced
        peak_bytes=contender.peak,
    )
    return dataclasses.replace(contender.program, plan=plan)


def _fits_as_chosen(contender: Contender, least: Contender, budget: Budget) -> bool:
    """Whether the plan of least time fits without rematerialization."""
    return contender.program is least.program and contender.fits(budget)


def _named_layout_plans(free: LimitedSearch, best: Contender) -> Iterator[Contender]:
    """Yield plans of named layouts that could beat the best that fits: those of least time, made to
    fit, then those at prices. No bound of "auto" excludes a mesh: named layouts may replicate what
    it must split.
    """
    named = sorted(_rivals(free), key=lambda pair: pair[1].plan.seconds)

    def could_win(contender: Contender) -> bool:
        return not best.fits(free.aim) or contender.plan.seconds < best.seconds

    fitted: list[tuple[float, LimitedSearch, Contender]] = []
    for under, contender in named:
        if could_win(contender):
            tried = under.fitted(contender)
            fitted.append((_promised(tried, free.aim), under, contender))
            best = _best([best, tried], free.aim)
            yield best
    fitted.sort(key=lambda each: each[0])
    if free.model.deep.runs:  # of many equal blocks some do more again, so prices add little
        close = _CLOSE * _promised(best, free.aim) if best.fits(free.aim) else 0.0
        fitted = [each for each in fitted[:_NAMED] if each[0] <= close]
    for _, under, contender in fitted:
        if could_win(contender):
            best = _best([best, under.best(contender)], free.aim)
            yield best


def _rivals(free: LimitedSearch) -> Iterator[tuple[LimitedSearch, Contender]]:
    """Yield the plan of least time of every named layout, with the search under that layout."""
    rivals = rival_candidates(free.world.ranks, free.program)
    bounds = bound_rivals(free.program, rivals, free.world)
    for name, meshes in rivals.items():
        plan = free.model.named(name, meshes, bounds[name])
        yield free.under(name), Contender(free.model.chosen(plan, free.request))


def _promised(tried: Contender, budget: Budget) -> float:
    """Return the seconds of a plan, in proportion more where its peak is above the limit."""
    assert budget.memory_bytes is not None
    return tried.seconds * max(1.0, tried.peak / budget.memory_bytes)


def _best(tried: Sequence[Contender], budget: Budget) -> Contender:
    """Return the fastest that fits; where none does, the one of least memory."""
    that_fit = [contender for contender in tried if contender.fits(budget)]
    if that_fit:
        return min(that_fit, key=lambda contender: contender.seconds)
    return min(tried, key=lambda contender: contender.peak)


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
        self._fitted: dict[Contender, Contender] = {}
        self._known_rungs: dict[Contender, RematerializationSearch] = {}

    def under(self, layout: Layouts) -> LimitedSearch:
        """Return the search for another layout."""
        return LimitedSearch(self.model, self.request.under(layout), self.aim)

    def _candidates(self) -> list[Candidate]:
        return searched_candidates(self.layout, self.world, self.program)

    def lower(self, off: float) -> LimitedSearch:
        """Return the search with an aim lower by `off`, by which an estimate was too low."""
        assert self.budget.memory_bytes is not None
        limit_bytes = self.budget.memory_bytes * off * _LESS
        aim = dataclasses.replace(self.budget, memory_bytes=limit_bytes)
        return LimitedSearch(self.model, self.request, aim)

    def best(self, chosen: Contender) -> Contender:
        """Return the best plan found; `chosen` is the one of least time."""
        least = self.fitted(chosen)
        if _fits_as_chosen(least, chosen, self.aim):
            return least
        bounds, meshes = bounds_of(chosen.plan), self._candidates()
        known = len(bounds) == len(meshes)
        self.meshes = promising(bounds, meshes, _FIRST_MESHES, _NEAR) if known else meshes
        if least.fits(self.aim):
            return self._traded(chosen, least)
        frugal = self.frugal(least.seconds, least.peak)
        if not frugal.fits(self.aim):
            return _best([least, frugal], self.aim)
        price = least.seconds / max(1.0, least.peak)
        tried = [least, frugal]
        for _ in range(_ROUNDS):
            besides = self._besides(tried[-1])
            priced = self._at_prices(price, besides)
            price = _price_of(priced[-1])
            priced.sort(key=lambda candidate: self._promise(candidate, besides))
            for candidate in priced[:_PROMISING]:
                tried += self._better(candidate, tried)
            if _best(tried, self.aim).fits(self.aim):
                break
        return self._settled(priced[0], tried)

    def frugal(self, seconds: float, peak_bytes: float) -> Contender:
        """Return the plan at a price so high that memory decides nearly alone, made to fit: if it
        does not, hardly any does. `seconds`, `peak_bytes`: of any plan, to set the price by.
        """
        self.meshes = self.meshes or self._candidates()
        price = Price(self.saved, _FRUGAL * seconds / max(1.0, peak_bytes))
        plan = self.regathering.best(self.meshes, price, tries=1)
        return self.fitted(self._once(self._priced(plan, price)))

    def _traded(self, chosen: Contender, least: Contender) -> Contender:
        """Return the best plan found where that of least time fits by rematerialization: at the
        price per byte that this pays.
        """
        assert least.rungs is not None
        saved_bytes = least.rungs.planned().memory.peak - least.peak
        priced = self._at(Price(self.saved, (least.seconds - chosen.plan.seconds) / saved_bytes))
        return self._settled(priced, [least, *self._better(priced, [least])])

    def _settled(self, priced: Contender, tried: list[Contender]) -> Contender:
        """Return the best of these plans and the most promising one searched again."""
        refined = self._refined(priced)
        return _best(tried + (self._better(refined, tried) if refined else []), self.aim)

    def _better(self, priced: Contender, tried: list[Contender]) -> list[Contender]:
        """Return the contender made to fit, if it could be faster than the best that fits."""
        chosen, best = self._once(priced), _best(tried, self.aim)
        if best.fits(self.aim) and chosen.plan.seconds >= best.seconds:
            return []
        return [self.fitted(chosen)]

    def _besides(self, tried: Contender) -> float:
        """Return the bytes of a program's peak beside its activations and stored state."""
        assert tried.rungs is not None
        return tried.rungs.counted().memory.peak - activation_bytes(self.saved, tried.plan)

    # -- rematerialization -------------------------------------------------------------------------
    def fitted(self, chosen: Contender) -> Contender:
        """Return a contender with just enough rematerialization to fit, or what comes nearest. Its
        program is the same where it fits as it is.
        """
        if chosen not in self._fitted:
            rungs = self._rungs(chosen)
            self._fitted[chosen] = self._filled(chosen, rungs, rungs.best())
        return self._fitted[chosen]

    def _rungs(self, chosen: Contender) -> RematerializationSearch:
        """Return the rematerialization search of a contender."""
        if chosen not in self._known_rungs:
            if chosen.deep.runs:
                self._known_rungs[chosen] = Estimated(chosen.deep, self.world, self.aim)
            else:
                emitted = emit_program(chosen.program, self.world)
                self._known_rungs[chosen] = RematerializationSteps(emitted, self.world, self.aim)
        return self._known_rungs[chosen]

    def without_rematerialization(self, chosen: Contender) -> Program | None:
        """Return the program of a contender with its exact memory if it fits as it is, else
        None.
        """
        if not self.aim.fits(self._rungs(chosen).planned().memory):
            return None
        exact = self.worked_out(self.fitted(chosen))
        if not _fits_as_chosen(exact, chosen, self.budget):
            return None
        return dataclasses.replace(
            chosen.program, plan=dataclasses.replace(chosen.plan, memory=exact.memory)
        )

    def worked_out(self, tried: Contender) -> Contender:
        """Return the contender with its exact memory in place of an estimate, and made to fit
        that.
        """
        if not isinstance(tried.rungs, Estimated):
            return tried
        emitted = emit_program(tried.program, self.world)
        rungs = RematerializationSteps(emitted, self.world, self.budget)
        return self._filled(tried, rungs, rungs.settled(tried.rungs))

    def _filled(
        self, chosen: Contender, rungs: RematerializationSearch, tried: TriedRematerialization
    ) -> Contender:
        """Return a contender with the rematerialization that was found for it."""
        deep = chosen.deep if tried is rungs.planned() else _on_rung(chosen.deep, tried)
        return dataclasses.replace(
            chosen, deep=deep, memory=tried.memory, repeated=tried.seconds, rungs=rungs
        )

    # -- a proof -----------------------------------------------------------------------------------
    def proven(self, best: Contender, least: Plan) -> tuple[Contender, float]:
        """Return the fastest of all plans that fit, if it can be proven, and a bound in seconds.
        `least`: the plan of least time. Of small models all meshes are tried, in every order of
        their axes: plans within a limit differ in which axis is the outer one.
        """
        meshes = candidates(self.layout, self.world.ranks, self.program)
        if not small_models.is_small(self.program, meshes):
            return best, self._priced_bound(least) if best.fits(self.budget) else 0.0
        below = best.seconds if best.fits(self.budget) else math.inf
        chosen, tried, bound = small_models.fastest(
            self.program, meshes, self.world, self.request, below
        )
        if chosen is None or tried is None:
            return best, bound if bound < math.inf else 0.0
        deep = _on_rung(DeepModel(chosen, self.model.deep), tried)
        return Contender(deep, memory=tried.memory, repeated=tried.seconds), bound

    def _priced_bound(self, least: Plan) -> float:
        """Return seconds that no plan within the limit is below: at any price of the bytes that
        every plan holds, the bound less what the limit may cost (Everett, 1963). `least`: the plan
        of least time.
        """
        floor = MidstepMemory if self.budget.recompute == "none" else ParameterMemory
        memory, limit = floor(self.program, self.budget.optimizer), self.budget.memory_bytes
        needs = activation_bytes(memory, least)
        assert limit is not None
        if self.layout != "auto" or needs <= limit:  # a price cannot raise the bound there
            return 0.0
        meshes = self._candidates()
        near = promising(bounds_of(least), meshes, _MESHES)
        free = dict(zip((mesh for mesh, _ in meshes), (s for _, s in least.meshes), strict=True))
        other_meshes = min(
            (s for mesh, s in free.items() if mesh not in {m for m, _ in near}), default=math.inf
        )

        def at(factor: float) -> float:
            price = factor * least.seconds / needs
            paid = lower_bounds(self.program, near, self.world, Price(memory, price))
            bounds = [
                max(free[mesh], s - price * limit) for (mesh, _), s in zip(near, paid, strict=True)
            ]
            return min(other_meshes, *bounds)

        # The bound is concave in the price: it can be higher beyond the higher of two alone.
        first, second, third, last = _PRICES
        bounds = [at(second), at(third)]
        if bounds[0] >= bounds[1]:
            bounds.append(at(first))
        if bounds[1] >= bounds[0]:
            bounds.append(at(last))
        return max(bounds)

    # -- prices of bytes ---------------------------------------------------------------------------
    def _at_prices(self, price: float, besides: float) -> list[Contender]:
        """Return the plans at a few prices, found by bisection. What a plan holds beside the bytes
        counted is taken from the last plan whose peak was computed.
        """
        assert self.aim.memory_bytes is not None
        plans: list[Contender] = []
        step, was_enough = _STEP, False
        for _ in range(_TRIES):
            plans.append(self._at(Price(self.saved, price)))
            enough = besides + plans[-1].priced_bytes <= self.aim.memory_bytes
            step = step**0.5 if enough != was_enough else step
            price, was_enough = (price / step if enough else price * step), enough
        return plans

    def _at(self, price: Price) -> Contender:
        plan = self.regathering.best(self.meshes, price, tries=1)  # as there are other prices
        self.meshes = promising(bounds_of(plan), self.meshes, _MESHES)
        return self._priced(plan, price)

    def _priced(self, plan: Plan, price: Price) -> Contender:
        """Return the contender of a plan found at a price. Its seconds include gathering weights
        again.
        """
        deep = self.regathering.chosen(plan, self.request)
        assert deep.program.plan is not None
        priced_bytes = activation_bytes(self.saved, deep.program.plan)
        return Contender(deep, price=price, priced_bytes=priced_bytes)

    def _once(self, priced: Contender) -> Contender:
        """Return the contender with the seconds of a step in which nothing runs twice."""
        terms = cost_terms(self.program, priced.plan, self.world)
        plan = dataclasses.replace(priced.plan, seconds=sum(terms.values()))
        return Contender(self.model.deep.under(plan))

    def _promise(self, priced: Contender, besides: float) -> float:
        """Estimate the seconds of its step once it fits: the share of its blocks that holds the
        missing bytes is recomputed, at a third of their computation.
        """
        assert self.aim.memory_bytes is not None
        missing = (
            max(0.0, besides + priced.priced_bytes - self.aim.memory_bytes) / priced.priced_bytes
        )
        return priced.plan.seconds * (1 + missing / 3)

    def _refined(self, priced: Contender) -> Contender | None:
        """Search again among more options at the same price; None without a better plan."""
        plan, price = priced.plan, priced.price
        assert price is not None
        if dict(plan.meshes)[str(plan.mesh)] >= _paid(priced) * (1 - GAP):
            return None
        plan = self.regathering.refined(plan, self._candidates(), price)
        refined = self._priced(plan, price)
        return refined if _paid(refined) < _paid(priced) * (1 - 1e-9) else None


def _price_of(priced: Contender) -> float:
    assert priced.price is not None
    return priced.price.seconds_per_byte


def _paid(priced: Contender) -> float:
    """Return the seconds of a step plus the price of the bytes held."""
    return priced.plan.seconds + _price_of(priced) * priced.priced_bytes


def _on_rung(deep: DeepModel, tried: TriedRematerialization) -> DeepModel:
    """Return a program with the rematerialization that was found for it."""
    assert deep.program.plan is not None
    return deep.under(dataclasses.replace(deep.program.plan, **tried.rung._asdict()))
