"""The third stage of the funnel, `solve`: exact decisions on the most promising meshes.

Example: of 20 meshes x2.y4 has the least bound, 9 ms, and its best plan takes 10 ms. The mesh x8,
with a bound of 9.5 ms, is searched next; those with a bound above 10 ms are not.

The most promising candidate is searched exactly (exact_search.py) among the options that its bound
leaves, then the next one, until no candidate promises more than the best plan found: `best`. Plans
that only compete with it are found quickly, with fewer meshes and options and no proof, and for a
model of many equal blocks on a shorter one: `ShortenedModel`. `solve` adds those in which
collectives that can overlap (gathers of weights, reductions of their gradients) count only a share
of their seconds, so that more is sent but hidden, and for "auto" those of the named layouts.

A program, a space and its bounds enter; a `Contender` for every plan that competes leaves, among
them that of the least sum. fit.py asks for plans at prices of memory, why.py and world_size.py for
plans on one mesh. simulate.py is the next stage.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from autopar.cost.activations import Price, activation_bytes
from autopar.cost.memory import Budget
from autopar.errors import PlanError
from autopar.ir.deep_models import DeepModel
from autopar.ir.garbage import without_collection
from autopar.ir.graph import blocks, remember
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.plan_table import Memory
from autopar.ir.program import Program
from autopar.ir.progress import tell
from autopar.planner.bound import (
    Bound,
    Bounded,
    Choices,
    SpaceBounds,
    bound_candidates,
    estimated_bounds,
    lower_bounds,
    near,
    need_no_bound,
    pass_messages,
)
from autopar.planner.constraint import Constraint
from autopar.planner.exact_search import search, search_nearly
from autopar.planner.objective import sum_of_blocks
from autopar.planner.rematerialize import RematerializationSearch
from autopar.planner.request import Layouts, PlanRequest
from autopar.planner.space import MOST_AXES, Candidate, Space, searched_candidates
from autopar.world import World

_MARGIN = 2e-2  # of the bound: options within it of the least are searched exactly
_LEFT = (8, 4, 2, 1)  # options per region searched exactly; fewer where tables outgrow memory
_QUICKLY_LEFT = _LEFT[1:]  # the same where plans only compete with others
_AGAIN = {1: 512, 2: 128, 3: 16, 4: 8}  # the same for the last search, by number of axes
_SETTLED = 2e-4  # of its seconds: a plan this near its bound is not searched again
_MORE_ROUNDS = 2  # of messages, where a plan is far from its bound
GAP = 1e-3  # of the seconds: a mesh that promises a smaller gain is not searched
_LARGE, _LARGEST = 1 << 22, 1 << 24  # entries of a table of all orders of axes; of nesting ones
_TRIES, _QUICK_TRIES = 4, 2  # meshes searched exactly; quickly
_SHORTENED_TRIES = 2  # meshes of a deep model that are searched quickly
SHARES = (0.7, 0.4, 0.1)  # of the seconds of collectives that can overlap
_FREE, _RULED = 4, 2  # most promising meshes searched at every share
_BOUNDED = 48  # free meshes that are bounded at the least share
NEAR = 1.5  # times the least: plans above it are not tried
T = TypeVar("T")


# -- the least sum, with a proof -------------------------------------------------------------------
def search_meshes(program: Program, world: World, request: PlanRequest) -> Program:
    """Return the annotated program with the plan of least summed seconds over every mesh that the
    request's layout allows on the ranks of `world`, and a proven bound; ties go to fewer axes, then
    to the first mesh.
    """
    assert request.layout is not None
    plan = best(program, searched_candidates(request.layout, world, program), world)
    return with_requested_recomputation(dataclasses.replace(program, plan=plan), request)


def with_requested_recomputation(program: Program, request: PlanRequest) -> Program:
    """Return the program with a plan, its plan with the recomputation that the request sets: with
    "full" every repeated block is recomputed, with "gathers" every one gathers its weights again,
    with "selective" the cheap ops of every one run again; "auto" leaves them to the memory search.
    """
    assert program.plan is not None
    repeated = blocks(program.module.graph.nodes)
    recompute = repeated if request.recompute == "full" else ()
    regather = repeated if request.recompute == "gathers" else ()
    rerun = repeated if request.recompute == "selective" else ()
    plan = dataclasses.replace(program.plan, recompute=recompute, regather=regather, rerun=rerun)
    return dataclasses.replace(program, plan=plan)


def best(
    program: Program, candidates: Sequence[Candidate], world: World, price: Price | None = None
) -> Plan:
    """Return the best plan over these candidates, its `meshes` with every candidate's bound and its
    `bound` the least of these; ties go to fewer axes, then to the first candidate. With a `price`,
    the plan's seconds and all bounds include the price of the bytes that it holds.
    """
    if need_no_bound(candidates):
        return _best_of_all(program, candidates, world, price)
    bounds = lower_bounds(program, candidates, world, price) if len(candidates) > 1 else [0.0]
    return best_within(program, candidates, bounds, world, price)


@without_collection()
def best_within(
    program: Program,
    candidates: Sequence[Candidate],
    bounds: Sequence[float],
    world: World,
    price: Price | None = None,
) -> Plan:
    """Return what `best` does, of candidates with these bounds."""
    if need_no_bound(candidates):
        return _best_of_all(program, candidates, world, price)
    tightened = list(bounds)
    known: dict[int, Bound] = {}  # messages on the meshes searched, by their places
    loose: dict[int, Bound] = {}  # those of them that more rounds may tighten

    def searched(index: int, enough: float) -> Plan | None:
        messages = _messages_on(program, candidates[index], world, price)
        if messages is not None:
            known[index] = messages
            if messages.seconds < enough < math.inf:  # more rounds take less than a search
                messages.run(messages.more_rounds)
            else:
                loose[index] = messages
            tightened[index] = max(tightened[index], messages.seconds)
        if tightened[index] >= enough:
            return None
        return _search_near(program, candidates[index], world, price, messages, _LEFT)

    plan = _best_in_order(candidates, tightened, _TRIES, searched)
    _tighten(tightened, loose, plan.seconds * (1 - GAP))
    near_bound = min(tightened) >= plan.seconds * (1 - _SETTLED)
    if not near_bound and price is None:  # prices are tried one after the other
        plan = again(program, plan, candidates, world, known=known)
    return _with_bounds(plan, candidates, tightened)


def _tighten(bounds: list[float], loose: Mapping[int, Bound], enough: float) -> None:
    """Raise the least of the bounds by more rounds of its messages, once on each mesh, as long
    as it is below `enough` seconds and its messages are among the `loose`: no other one counts.
    """
    left = dict(loose)
    while (least := min(bounds)) < enough and (place := bounds.index(least)) in left:
        messages = left.pop(place)
        bounds[place] = max(least, float(messages.run(messages.more_rounds)[0]))


def _with_bounds(plan: Plan, candidates: Sequence[Candidate], bounds: Sequence[float]) -> Plan:
    """Return a plan with the bounds of the candidates that it was chosen from."""
    bound = min(*bounds, plan.seconds)
    return dataclasses.replace(plan, bound=bound, meshes=with_bounds(candidates, bounds))


def _best_in_order(
    candidates: Sequence[Candidate],
    bounds: Sequence[float],
    tries: int,
    searched: Callable[[int, float], Plan | None],
) -> Plan:
    """Return the best plan of the `tries` most promising candidates, until none promises more than
    the best one found. `searched`: searches the candidate at a place, or returns None where no plan
    on it takes less than so many seconds.
    """
    incumbent: Plan | None = None
    for index in by_promise(candidates, bounds)[:tries]:
        enough = math.inf if incumbent is None else incumbent.seconds * (1 - GAP)
        if bounds[index] >= enough:
            break
        plan = searched(index, enough)
        if plan is not None and (
            incumbent is None or plan.seconds < incumbent.seconds * (1 - 1e-9)
        ):
            incumbent = plan
    assert incumbent is not None
    return incumbent


def _best_of_all(
    program: Program, candidates: Sequence[Candidate], world: World, price: Price | None
) -> Plan:
    """Return the best plan of these candidates, each searched among all that its rules leave."""
    if not candidates[0][0].axes:  # one rank: nothing to choose
        candidates = candidates[:1]
    plans = [search_nearly(program, mesh, world, rules, None, price) for mesh, rules in candidates]
    fastest = min(plans, key=lambda plan: plan.seconds)
    bounds = [plan.bound for plan in plans]
    meshes = with_bounds(candidates, bounds)
    return dataclasses.replace(fastest, bound=min(bounds), meshes=meshes)


def by_promise(candidates: Sequence[Candidate], bounds: Sequence[float]) -> list[int]:
    """Return the places of the candidates, the lowest bound first. Of those within GAP of the least
    the one of fewest axes comes first: its search is the quickest, and often ends all others.
    """
    least = min(bounds)

    def promise(place: int) -> tuple[float, int, int]:
        seconds = bounds[place]
        close = seconds * (1 - GAP) <= least
        return least if close else _round_seconds(seconds), len(candidates[place][0].axes), place

    return sorted(range(len(candidates)), key=promise)


def _round_seconds(seconds: float) -> float:
    """Return the seconds to four digits: meshes that differ by less are tried in their order."""
    return float(f"{seconds:.3e}")


def exact(
    program: Program, mesh: Mesh, constraint: Constraint, world: World, thorough: bool = True
) -> tuple[Plan, float]:
    """Return the plan of least modelled time on one mesh among the options that the bound leaves,
    and the bound in seconds. Not `thorough`: among fewer options.
    """
    counts, candidate = _LEFT if thorough else _QUICKLY_LEFT, (mesh, constraint)
    messages = _messages_on(program, candidate, world, None)
    plan = _search_near(program, candidate, world, None, messages, counts)
    return plan, plan.bound if messages is None else min(messages.seconds, plan.seconds)


def _messages_on(
    program: Program, candidate: Candidate, world: World, price: Price | None
) -> Bound | None:
    """Return a round of messages on one mesh; None where its rules leave so little that all options
    are searched.
    """
    mesh, constraint = candidate
    if not mesh.axes or not constraint.free:
        return None
    messages = pass_messages(program, [candidate], world, price)
    messages.run()
    return messages


def _search_near(
    program: Program,
    candidate: Candidate,
    world: World,
    price: Price | None,
    messages: Bound | None,
    counts: Sequence[int],
) -> Plan:
    """Return the plan of least modelled time on one mesh among the options that its messages leave,
    at most the first of `counts` a region that tables allow; among all without messages.
    """
    if messages is None:
        mesh, constraint = candidate
        return search_nearly(program, mesh, world, constraint, None, price)
    limits = _near_limits(messages, _MARGIN * messages.seconds, counts)
    return _search_among(program, limits, candidate, world, price)


def again(
    program: Program,
    incumbent: Plan,
    candidates: Sequence[Candidate],
    world: World,
    price: Price | None = None,
    known: Mapping[int, Bound] | None = None,
) -> Plan:
    """Return the plan, or a better one on its mesh found among more options per region, those
    lowest in the bound. Where these are all options that there are, the result is optimal. `known`:
    messages on some candidates, by their places.
    """
    place = next(
        place
        for place, (mesh, rules) in enumerate(candidates)
        if mesh == incumbent.mesh and rules.name == incumbent.layout
    )
    candidate = candidates[place]
    if not incumbent.mesh.axes or not candidate[1].free:
        return incumbent
    messages = (known or {}).get(place) or pass_messages(program, [candidate], world, price)
    if messages.rounds < _MORE_ROUNDS:
        messages.run(_MORE_ROUNDS)
    largest_count = _AGAIN[len(incumbent.mesh.axes)]
    counts = [n for n in (largest_count, largest_count // 4, largest_count // 16) if n]
    limits = _near_limits(messages, math.inf, counts)
    improved = _search_among(program, limits, candidate, world, price, 2 * _LARGEST)
    return improved if improved.seconds < incumbent.seconds * (1 - 1e-9) else incumbent


def _near_limits(
    bound: Bound, margin: float, counts: Sequence[int], place: int = 0
) -> Iterator[Mapping[str, Choices]]:
    """Yield the lowest options of every region on the mesh at this place, by each of `counts`."""
    for most in counts:
        yield near(bound, margin, most, place)


def _search_among(
    program: Program,
    limits: Iterator[Mapping[str, Choices]],
    candidate: Candidate,
    world: World,
    price: Price | None = None,
    largest: int = _LARGEST,
) -> Plan:
    """Return the best plan among the first of these joint choices whose tables have at most
    `largest` entries, or one near the best among the first of all, if none do. Where the tables of
    all orders of axes are large, those that nest stand for them: see axis_orders.py.
    """
    mesh, constraint = candidate
    widest: Mapping[str, Choices] | None = None
    for joint_choices in limits:
        widest = joint_choices if widest is None else widest
        arguments = program, mesh, world, constraint, joint_choices, price
        for most, nesting in ((_LARGE, False), (largest, True)):
            try:
                return search(*arguments, most, nesting)
            except PlanError:
                continue
    return search_nearly(program, mesh, world, constraint, widest, price)


# -- which candidates are searched, and what a plan says of the others -----------------------------
def promising(
    bounds: Sequence[float], candidates: Sequence[Candidate], most: int, near: float | None = None
) -> list[Candidate]:
    """Return at most `most` candidates of the lowest bounds, none above `near` times the least, in
    their given order.
    """
    assert candidates, "nothing to choose from"
    lowest = sorted(range(len(candidates)), key=bounds.__getitem__)[:most]
    limit = None if near is None else near * bounds[lowest[0]]
    return [candidates[i] for i in sorted(lowest) if limit is None or bounds[i] <= limit]


def bounds_of(plan: Plan) -> list[float]:
    """Return the bound in seconds of every candidate that a plan was chosen from."""
    return [bound for _, bound in plan.meshes]


def with_bounds(
    candidates: Sequence[Candidate], bounds: Sequence[float]
) -> tuple[tuple[str, float], ...]:
    """Return (mesh, bound in seconds) of every candidate, as a plan stores them."""
    return tuple((str(mesh), s) for (mesh, _), s in zip(candidates, bounds, strict=True))


# -- quickly: for plans that only compete with others, with no proof -------------------------------
@without_collection()
def quick_best(
    program: Program, candidates: Sequence[Candidate], world: World, price: Price | None = None
) -> Plan:
    """Return the best plan found over these candidates; ties go to fewer axes, then to the first
    candidate. With a `price`, seconds and bounds include the price of the bytes that a plan holds.
    """
    if need_no_bound(candidates):
        return _best_of_all(program, candidates, world, price)
    return _quickly_best(
        program, candidates, bound_candidates(program, candidates, world, price), world, price
    )


def best_at_shares(
    programs: Sequence[Program], candidates: Sequence[Candidate], most: int, world: World
) -> Iterator[Plan]:
    """Yield the best plan found for each of these programs, which differ in the share of what
    collectives take that counts, and in nothing else. The first one is searched on the most
    promising candidates of all, the others on the `most` that promise the most for the first.
    """
    if len(programs) == 1 or need_no_bound(candidates):
        for program in programs:
            yield quick_best(program, candidates, world)
        return
    first, *others = programs
    bounds = bound_candidates(first, candidates, world, None)
    yield _quickly_best(first, candidates, bounds, world, None)
    near = promising([each.seconds for each in bounds], candidates, most)
    shares = [program.counting.share for program in others for _ in near]
    every_bound = bound_candidates(first, [*near] * len(others), world, None, shares)
    for number, program in enumerate(others):
        own = every_bound[number * len(near) : (number + 1) * len(near)]
        yield _quickly_best(program, near, own, world, None)


@without_collection()
def _quickly_best(
    program: Program,
    candidates: Sequence[Candidate],
    bounds_of_each: Sequence[Bounded],
    world: World,
    price: Price | None,
) -> Plan:
    """Return the best plan of the most promising candidates."""
    bounds = [each.seconds for each in bounds_of_each]

    def searched(index: int, enough: float) -> Plan:
        return _searched(program, candidates[index], bounds_of_each[index], world, price)

    plan = _best_in_order(candidates, bounds, _QUICK_TRIES, searched)
    return _with_bounds(plan, candidates, bounds)


def _searched(
    program: Program,
    candidate: Candidate,
    own: Bounded,
    world: World,
    price: Price | None,
) -> Plan:
    """Return the best plan on one mesh among the options that its bound leaves."""
    mesh, rules = candidate
    if not rules.free:  # they leave little to search
        return search_nearly(program, mesh, world, rules, None, price)
    margin = _MARGIN * own.seconds
    limits = _near_limits(own.messages, margin, _QUICKLY_LEFT, own.place)
    return _search_among(program, limits, candidate, world, price)


# -- on a shorter model ----------------------------------------------------------------------------
class ShortenedModel:
    """An annotated program without a plan, and a shorter one to search for a world. What it finds
    for a layout it finds once.
    """

    def __init__(self, program: Program, world: World) -> None:
        self.program = dataclasses.replace(program, plan=None)
        self.world = world
        self._named: dict[str, Plan] = {}
        self._known: dict[tuple[str, Layouts], Any] = {}

    @staticmethod
    def of(program: Program, world: World) -> ShortenedModel:
        """Return the model of an annotated program for a world, kept with the program's graph: what
        a plan found is there for the next one. It holds no tensors.
        """
        bare = dataclasses.replace(program, tensors={}, plan=None)
        reads = (program.annotations, program.signature, program.padding, program.chains, world)
        graph, counting = program.module.graph, program.counting
        return remember(graph, "search", reads, lambda: ShortenedModel(bare, world), counting)

    def once(self, what: str, layout: Layouts, find: Callable[[], T]) -> T:
        """Return what `find` finds for a layout, which depends on nothing else."""
        if isinstance(layout, Mapping):  # which no dict takes as a key
            return find()
        if (what, layout) not in self._known:
            self._known[what, layout] = find()
        result: T = self._known[what, layout]
        return result

    def annotated(self, program: Program) -> ShortenedModel:
        """Return the same program with other annotations."""
        return ShortenedModel(program, self.world)

    def bounds(self, candidates: Sequence[Candidate], price: Price | None = None) -> list[float]:
        """Return an estimate of the bound in seconds of the full program's step for every
        candidate; 0 for a single one, which needs none.
        """
        if len(candidates) == 1:
            return [0.0]
        return estimated_bounds(self.program, candidates, self.world, price)

    @cached_property
    def deep(self) -> DeepModel:
        """The program with its runs of equal blocks."""
        return DeepModel.of(self.program)

    def plan(self, candidates: Sequence[Candidate], price: Price | None = None) -> Plan:
        """Return the plan found on these meshes. Its seconds are those of the shorter program:
        `chosen` computes them in full.
        """
        return self.deep.full_plan(self._quick_plan(candidates, price))

    def at_shares(
        self, shares: Sequence[float], candidates: Sequence[Candidate], most: int
    ) -> Iterator[Plan]:
        """Yield `plan` at each of these shares of what can overlap, from the second one on of the
        `most` candidates that promise the most at the first.
        """
        longer = [with_share(self.deep.longer, share) for share in shares]
        for plan in best_at_shares(longer, candidates, most, self.world):
            yield self.deep.full_plan(plan)

    def best(
        self,
        candidates: Sequence[Candidate],
        price: Price | None = None,
        tries: int = _SHORTENED_TRIES,
        known: Sequence[float] = (),
    ) -> Plan:
        """Return the best plan found on the `tries` most promising of these meshes, with the bounds
        of all. `known`: these bounds.
        """
        if not self.deep.runs:
            return self._quick_plan(candidates, price)
        bounds = list(known) or self.bounds(candidates, price)
        plans = [
            self.plan([candidate], price) for candidate in promising(bounds, candidates, tries)
        ]
        plan = plans[0] if len(plans) == 1 else min(plans, key=lambda p: self._paid(p, price))
        return dataclasses.replace(plan, meshes=with_bounds(candidates, bounds))

    def named(self, name: str, candidates: Sequence[Candidate], bounds: Sequence[float]) -> Plan:
        """Return `best` for a named layout, whose candidates have these bounds."""
        if name not in self._named:
            self._named[name] = self.best(candidates, known=bounds)
        return self._named[name]

    def refined(self, plan: Plan, candidates: Sequence[Candidate], price: Price) -> Plan:
        """Return the plan found on the mesh of another plan among more options of every region."""
        start = dataclasses.replace(plan, seconds=math.inf)  # so any plan found is better
        return self.deep.full_plan(again(self.deep.longer, start, candidates, self.world, price))

    def _quick_plan(self, candidates: Sequence[Candidate], price: Price | None) -> Plan:
        return quick_best(self.deep.longer, candidates, self.world, price)

    def _seconds(self, plan: Plan) -> float:
        """Return the summed seconds of the full program under a plan."""
        return sum_of_blocks(self.deep.under(plan), self.world)

    def _paid(self, plan: Plan, price: Price | None) -> float:
        """Return the seconds of the full program under a plan, plus the price of the bytes that it
        holds.
        """
        memory_seconds = (
            price.seconds_per_byte * activation_bytes(price.memory, plan) if price else 0.0
        )
        return self._seconds(plan) + memory_seconds

    def chosen(self, plan: Plan, request: PlanRequest) -> DeepModel:
        """Return the program with this plan, the sum of its seconds, and its recomputation."""
        plan = dataclasses.replace(plan, seconds=self._seconds(plan), bound=0.0)
        program = with_requested_recomputation(
            dataclasses.replace(self.program, plan=plan), request
        )
        return DeepModel(program, self.deep)


def with_share(program: Program, share: float) -> Program:
    """Return the program in which collectives that can overlap count this share of their
    seconds.
    """
    counting = dataclasses.replace(program.counting, share=share)
    return dataclasses.replace(program, counting=counting)


# -- what competes with the least sum --------------------------------------------------------------
def solve(
    program: Program, world: World, space: Space, bounds: SpaceBounds, request: PlanRequest
) -> Contenders:
    """Return the plan of the least summed seconds over the candidates of a space, and those that
    compete with it where plans are compared by their steps.
    """
    layout, model = request.layout, ShortenedModel.of(program, world)
    assert layout is not None
    plan = model.once(
        "least sum",
        layout,
        lambda: best_within(model.program, space.candidates, bounds.candidates, world),
    )

    def compete() -> Contenders:
        least = dataclasses.replace(model.program, plan=plan)
        contenders = Contenders(with_requested_recomputation(least, request), model, request)
        if space.compared:
            contenders.take(space.candidates, bounds_of(plan))
        for done, (name, meshes) in enumerate(space.rivals.items()):
            tell("named layouts tried", done, len(space.rivals))
            contenders.take_named(name, meshes, bounds.rivals[name])
        return contenders

    return model.once(f"contenders, {request.recompute}{space.compared}", layout, compete)


@dataclasses.dataclass(frozen=True, eq=False)
class Contender:
    """A program with a plan that competes with others.

    `solve` makes it: `deep` is the program with its runs of equal blocks, `least_step` the seconds
    of its step if all that can overlap does. fit.py finds some at a `price` of the bytes that they
    hold, `priced_bytes`, and fills in `memory`, the `repeated` seconds of what the backward runs
    again, and `rungs`, what else it could run again.
    """

    deep: DeepModel
    least_step: float = math.nan
    price: Price | None = None
    priced_bytes: float = math.nan
    memory: Memory | None = None
    repeated: float = 0.0
    rungs: RematerializationSearch | None = None

    program: Program = dataclasses.field(init=False)
    plan: Plan = dataclasses.field(init=False)
    seconds: float = dataclasses.field(init=False)  # summed, of a step with what runs twice

    def __post_init__(self) -> None:
        plan = self.deep.program.plan
        assert plan is not None
        object.__setattr__(self, "program", self.deep.program)
        object.__setattr__(self, "plan", plan)
        object.__setattr__(self, "seconds", plan.seconds + self.repeated)

    @property
    def peak(self) -> float:
        """The bytes at the peak, once the contender is made to fit."""
        assert self.memory is not None
        return self.memory.peak

    def fits(self, budget: Budget) -> bool:
        """Whether the memory is within the budget, once the contender is made to fit."""
        assert self.memory is not None
        return budget.fits(self.memory)


class Contenders:
    """The plan of the least sum and those that compete with it, each once: `all` by what a plan
    looks like, `named` by the named layout that they are of. `request` says what they recompute;
    `steps` are those that simulate.py has worked out.
    """

    def __init__(self, least: Program, model: ShortenedModel, request: PlanRequest) -> None:
        self.world, self.request, self.model = model.world, request, model
        self.steps: dict[Contender, float] = {}
        self.least_share = shares(self.world)[-1]
        self.least_step = math.inf  # the fewest seconds of all if all that can overlap does
        self.all: dict[Hashable, Contender] = {}
        self.named: dict[str, dict[Hashable, Contender]] = defaultdict(dict)
        self.least_sum = self.enter(DeepModel(least, model.deep))

    def take_named(
        self, name: str, candidates: Sequence[Candidate], bounds: Sequence[float]
    ) -> None:
        """Enter a named layout's plan of the sum and its plans at the shares."""
        plan = self.model.named(name, candidates, bounds)
        self._enter_plan(plan, name)
        self.take(candidates, bounds_of(plan), name)

    def take(
        self, candidates: Sequence[Candidate], bounds: Sequence[float], name: str = ""
    ) -> None:
        """Enter the plans on the most promising of these meshes at the shares, the least share
        first; stop where that is not promising. Bounds of the whole sum say little of the least
        share, so many free meshes are bounded there.
        """
        free = all(rules.free for _, rules in candidates)
        if free:
            candidates, bounds = _with_useful_axes(candidates, bounds)
        meshes = promising(bounds, candidates, _BOUNDED if free else _RULED, NEAR)
        for plan in self.model.at_shares(shares(self.world)[::-1], meshes, _FREE):
            if self._enter_plan(plan, name).least_step > NEAR * self.least_step:
                return

    def _enter_plan(self, plan: Plan, name: str) -> Contender:
        """Add a plan at its full price, unless one like it is there."""
        known = self.all.get(_plan_key(plan))
        return self.enter(self._at_full_price(plan) if known is None else known.deep, name)

    def _at_full_price(self, plan: Plan) -> DeepModel:
        """Return another plan for the same program at its full price, with the bound proven for the
        sum.
        """
        deep, least = self.model.chosen(plan, self.request), self.least_sum.plan
        assert deep.program.plan is not None
        return deep.under(
            dataclasses.replace(deep.program.plan, bound=least.bound, meshes=least.meshes)
        )

    def enter(self, deep: DeepModel, name: str = "") -> Contender:
        """Add a plan, and return it with its seconds when what can overlap counts least."""
        assert deep.program.plan is not None
        key = _plan_key(deep.program.plan)
        if key not in self.all:
            lightest = DeepModel(with_share(deep.program, self.least_share), deep)
            self.all[key] = Contender(deep, sum_of_blocks(lightest, self.world))
            self.least_step = min(self.least_step, self.all[key].least_step)
        if name:
            self.named[name][key] = self.all[key]
        return self.all[key]


def _with_useful_axes(
    candidates: Sequence[Candidate], bounds: Sequence[float]
) -> tuple[Sequence[Candidate], Sequence[float]]:
    """Return the candidates and their bounds without the meshes of MOST_AXES axes where none of
    these promises a gain over meshes of fewer: their bounds take longer than those of all others.
    """
    pairs = list(zip(candidates, bounds, strict=True))
    fewer = [pair for pair in pairs if len(pair[0][0].axes) < MOST_AXES]
    if not fewer or min(bounds) < min(seconds for _, seconds in fewer) * (1 - GAP):
        return candidates, bounds
    return [candidate for candidate, _ in fewer], [seconds for _, seconds in fewer]


def shares(world: World) -> tuple[float, ...]:
    """Return SHARES, none below the share of computing that is lost to what overlaps with it."""
    return tuple(dict.fromkeys(max(share, world.contention) for share in SHARES))


def _plan_key(plan: Plan) -> Hashable:
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
