"""Quick searches over many meshes: for plans that only compete with others, with no proof.

Fewer meshes and options are searched than in mesh_search.py, and what bounded all meshes at once
says which options those are. Several shares of what collectives count are bounded together, too, as
if they were further meshes: numpy takes as long for ten columns as for one.

Programs, candidates (mesh, constraint) and a world enter; `Best` leaves for each program. Called by
deep_models.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autopar.cost.activations import Price
from autopar.ir.garbage import without_collection
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.planner.bounds import Bound
from autopar.planner.bounds.factor_graph import Frame, frame
from autopar.planner.exact_search import search_nearly
from autopar.planner.mesh_search import (
    GAP,
    MARGIN,
    QUICKLY_LEFT,
    Best,
    Candidate,
    best_of_all,
    chunks,
    in_order,
    near_limits,
    need_no_bound,
    pass_messages,
    search_among,
)
from autopar.world import World

_TRIES = 2  # meshes searched exactly


class _Bounded(NamedTuple):
    """A candidate's bound in seconds, and its place among the meshes of `bound`."""

    seconds: float
    bound: Bound
    place: int


@without_collection()
def quick_best(
    program: Program, given: Sequence[Candidate], world: World, price: Price | None = None
) -> Best:
    """Return the best plan found over these candidates; ties go to fewer axes, then to the first
    candidate. With a `price`, seconds and bounds include the price of the bytes that a plan holds.
    """
    if need_no_bound(given):
        return best_of_all(program, given, world, price)
    return _best(program, given, _bounded(frame(program), given, world, price), world, price)


def best_at_shares(
    programs: Sequence[Program], given: Sequence[Candidate], world: World
) -> Iterator[Plan]:
    """Yield the best plan found for each of these programs, which differ in the share of what
    collectives take that counts, and in nothing else.
    """
    if len(programs) == 1 or need_no_bound(given):
        for program in programs:
            yield quick_best(program, given, world).plan
        return
    shares = [_share(program) for program in programs for _ in given]
    every = [candidate for _ in programs for candidate in given]
    bounded = _bounded(frame(programs[0]), every, world, None, shares)
    for number, program in enumerate(programs):
        own = bounded[number * len(given) : (number + 1) * len(given)]
        yield _best(program, given, own, world, None).plan


def _share(program: Program) -> float:
    assert program.annotations is not None
    return program.annotations.share


@without_collection()
def _bounded(
    whole: Frame,
    given: Sequence[Candidate],
    world: World,
    price: Price | None,
    shares: Sequence[float] = (),
) -> list[_Bounded]:
    """Return the bound of every candidate, at its own of `shares`."""
    found: dict[int, _Bounded] = {}
    for chunk in chunks(given):
        own_shares = [shares[i] for i in chunk] if shares else ()
        bound = pass_messages(whole, [given[i] for i in chunk], world, price, own_shares)
        for place, (index, seconds) in enumerate(zip(chunk, bound.run(), strict=True)):
            found[index] = _Bounded(max(0.0, float(seconds)), bound, place)  # messages round
    return [found[index] for index in range(len(given))]


@without_collection()
def _best(
    program: Program,
    given: Sequence[Candidate],
    bounded: Sequence[_Bounded],
    world: World,
    price: Price | None,
) -> Best:
    """Return the best plan of the most promising candidates."""
    bounds = [each.seconds for each in bounded]
    best_plan: Plan | None = None
    for index in in_order(given, bounds)[:_TRIES]:
        if best_plan is not None and bounds[index] >= best_plan.seconds * (1 - GAP):
            break
        plan = _searched(program, given[index], bounded[index], world, price)
        if best_plan is None or plan.seconds < best_plan.seconds * (1 - 1e-9):
            best_plan = plan
    assert best_plan is not None
    return Best(best_plan, min(*bounds, best_plan.seconds), tuple(bounds))


def _searched(
    program: Program,
    candidate: Candidate,
    bounded: _Bounded,
    world: World,
    price: Price | None,
) -> Plan:
    """Return the best plan on one mesh among the options that its bound leaves."""
    mesh, rules = candidate
    if not rules.free:  # they leave little to search
        return search_nearly(program, mesh, world, rules, None, price)
    margin = MARGIN * bounded.seconds
    limits = near_limits(bounded.bound, margin, QUICKLY_LEFT, bounded.place)
    return search_among(program, limits, candidate, world, price)
