"""The best plan over many meshes, and how far from the best it can be.

All meshes are bounded at once (bound.py); then the most promising one is searched exactly among
the options that its bound leaves, then the next, until none promises more than what was found.

From the options that a bound leaves on one mesh to the joint choices that search.py takes.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from autopar.cost.activations import Price
from autopar.errors import PlanError
from autopar.ir.layout import I, R
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.strategy import Choice, Slot
from autopar.planner.bounds.arrays import Meshes
from autopar.planner.bounds.factor_graph import (
    FIRST_SLOT,
    WHOLE,
    Frame,
    Variable,
    frame,
    shorten_frame,
)
from autopar.planner.bounds.message_passing import Bound, Joint
from autopar.planner.bounds.option_costs import OptionCosts
from autopar.planner.constraint import Constraint
from autopar.planner.exact_search import search
from autopar.world import World

Choices = tuple[tuple[Choice, ...], ...]


def near(bound: Bound, margin: float, most: int) -> Mapping[str, Choices]:
    """Of every node and stored tensor: the joint choices whose bound is at most `margin` seconds
    above the least, of every region at most so many.
    """
    left = bound.near(margin, most)
    found: dict[str, Choices] = {}
    known: dict[Hashable, Choices] = {}
    for variable in bound.frame.variables:
        if variable.name not in left:
            continue
        names = [variable.name] if variable.region is None else variable.region.nodes
        for position, name in enumerate(names):
            key = (variable.look, left[variable.name], position)
            if key not in known:
                known[key] = _choices(variable, left[variable.name], position)
            found[name] = known[key]
    return found


def _choices(variable: Variable, left: Joint, position: int) -> Choices:
    if variable.region is not None:
        single = [option[position].choice for option in variable.options]
    else:
        single = [_stored(variable, state) for state in variable.options]
    return tuple(dict.fromkeys(tuple(single[i] for i in each) for each in sorted(left)))


def _stored(variable: Variable, state: int) -> Choice:
    if state < FIRST_SLOT:
        return I if state == WHOLE else R
    dim, place = variable.slots[state - FIRST_SLOT]
    return Slot(str(dim), place)


Candidate = tuple[Mesh, Constraint]

_TOGETHER = 96  # meshes whose messages are arrays together: rows of meshes are what numpy works on
_ROUNDS = 1  # on the shorter frame: a second changes the bounds by 1e-5 and costs as much again
_MARGIN = 2e-2  # of the bound: what an option may lie above the least to be searched exactly
_LEFT = (8, 4, 2, 1)  # options of a region that are searched exactly; fewer where tables outgrow
_AGAIN = {1: 512, 2: 128, 3: 16, 4: 8}  # the same on the best mesh in the end, by its axes
_SETTLED = 2e-4  # of its seconds: a plan so near the bound is not searched again
GAP = 1e-3  # a mesh that promises less than this more is not searched
_TRIES = 4  # meshes searched exactly
_QUICK = 2  # the same where plans are only to compete with others
_FEW = 16  # meshes under a layout's rules: all are searched exactly


class Best(NamedTuple):
    """The best plan found, the least bound of all candidates in seconds, and every candidate's."""

    plan: Plan
    bound: float
    bounds: tuple[float, ...]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Looking for cycles among the nodes of a traced graph takes as long as a search on one mesh
    does, which makes hardly any.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@_uncollected()
def best(
    program: Program,
    given: Sequence[Candidate],
    world: World,
    redundant: bool = False,
    price: Price | None = None,
    thorough: bool = True,
) -> Best:
    """The best plan over these candidates; ties go to fewer axes, then to the first. With a
    `price`, the plan's seconds and all bounds contain what the bytes that it keeps cost.
    """
    whole = frame(program)
    if not given[0][0].axes:  # one rank: nothing to choose
        mesh, rules = given[0]
        plan = search(program, mesh, world, rules, redundant, None, price)
        return Best(plan, plan.seconds, (plan.seconds,) * len(given))
    if all(not constraint.free for _, constraint in given) and len(given) <= _FEW:
        plans = [
            search(program, mesh, world, rules, redundant, None, price) for mesh, rules in given
        ]
        best_one = min(plans, key=lambda plan: plan.seconds)
        return Best(best_one, best_one.seconds, tuple(plan.seconds for plan in plans))
    bounds = meshes_by_bound(whole, given, world, redundant, price) if len(given) > 1 else [0.0]
    order = sorted(range(len(given)), key=lambda i: (_rounded(bounds[i]), len(given[i][0].axes), i))
    found: Plan | None = None
    for place in order[: _TRIES if thorough else _QUICK]:
        if found is not None and bounds[place] >= found.seconds * (1 - GAP):
            break
        plan, bound = exact(whole, *given[place], world, redundant, price, thorough)
        bounds[place] = max(bounds[place], bound)
        if found is None or plan.seconds < found.seconds * (1 - 1e-9):
            found = plan
    assert found is not None
    settled = min(bounds) >= found.seconds * (1 - _SETTLED)
    if thorough and not settled and price is None:  # prices are tried one after the other
        found = again(whole, found, given, world, redundant)
    return Best(found, min(*bounds, found.seconds), tuple(bounds))


def with_bounds(
    given: Sequence[Candidate], bounds: Sequence[float]
) -> tuple[tuple[str, float], ...]:
    """Every mesh that was rated beside its bound, as a plan keeps them."""
    return tuple((str(mesh), s) for (mesh, _), s in zip(given, bounds, strict=True))


def bounds_of(plan: Plan) -> list[float]:
    """Of every candidate that a plan was chosen from."""
    return [bound for _, bound in plan.meshes]


def promising_meshes(
    bounds: Sequence[float], given: Sequence[Candidate], most: int, near: float | None = None
) -> list[Candidate]:
    """Of the candidates, so many of the lowest bounds, none above `near` times the least, in their
    order.
    """
    assert given, "nothing to choose from"
    low = sorted(range(len(given)), key=bounds.__getitem__)[:most]
    return [given[i] for i in sorted(low) if near is None or bounds[i] <= near * bounds[low[0]]]


def _rounded(seconds: float) -> float:
    """To four digits: meshes that differ in less are tried in their order."""
    return float(f"{seconds:.3e}")


def meshes_by_bound(
    whole: Frame,
    given: Sequence[Candidate],
    world: World,
    redundant: bool = False,
    price: Price | None = None,
) -> list[float]:
    """A lower bound of the step in seconds, of every candidate."""
    chunks: list[list[int]] = []
    for count in sorted({len(mesh.axes) for mesh, _ in given}):
        alike = [i for i, (mesh, _) in enumerate(given) if len(mesh.axes) == count]
        chunks.extend(alike[i : i + _TOGETHER] for i in range(0, len(alike), _TOGETHER))
    found = [0.0] * len(given)
    for chunk in chunks:  # not in threads: numpy's calls are short, and they would wait for Python
        bound = _messages(whole, [given[i] for i in chunk], world, redundant, price)
        for place, seconds in zip(chunk, bound.run(), strict=True):
            found[place] = max(0.0, float(seconds))  # messages round
    return found


def _messages(
    whole: Frame,
    given: Sequence[Candidate],
    world: World,
    redundant: bool,
    price: Price | None,
) -> Bound:
    """A bound whose messages have come to rest on a shorter frame."""
    meshes = Meshes([mesh for mesh, _ in given], world)
    costs = OptionCosts(whole, meshes, [constraint for _, constraint in given], redundant, price)
    short, twins = shorten_frame(whole)
    start = Bound(short, costs)
    start.run(_ROUNDS)
    return start if short is whole else Bound(whole, costs, start, twins)


def bound_on(
    program: Program, mesh: Mesh, constraint: Constraint, world: World, redundant: bool
) -> Bound:
    """What bounds every option of every node on one mesh, to read `near.near` off."""
    bound = _messages(frame(program), [(mesh, constraint)], world, redundant, None)
    bound.run(2)
    return bound


def exact(
    whole: Frame,
    mesh: Mesh,
    constraint: Constraint,
    world: World,
    redundant: bool = False,
    price: Price | None = None,
    thorough: bool = True,
) -> tuple[Plan, float]:
    """The plan of least modelled time on one mesh, among the options that the bound leaves, and the
    bound in seconds. Not `thorough`: among fewer options, and the bound is left as it is.
    """
    if not mesh.axes or not constraint.free:  # rules leave little to search
        plan = search(whole.program, mesh, world, constraint, redundant, None, price)
        return plan, plan.seconds
    bound = _messages(whole, [(mesh, constraint)], world, redundant, price)
    least = float(bound.run()[0])
    most = _LEFT if thorough else _LEFT[1:]
    plan = _among(bound, _MARGIN * least, most, (mesh, constraint), world, redundant, price)
    if thorough and plan.seconds * (1 - GAP) > least:
        least = max(least, float(bound.run(2)[0]))
    return plan, min(least, plan.seconds)


def again(
    whole: Frame,
    found: Plan,
    given: Sequence[Candidate],
    world: World,
    redundant: bool,
    price: Price | None = None,
) -> Plan:
    """The best plan, or a better one on its mesh, among more options of every region, the lowest in
    the bound. Where these are all that there are, it is the best there is.
    """
    one = next(pair for pair in given if pair[0] == found.mesh and pair[1].name == found.layout)
    if not found.mesh.axes or not one[1].free:
        return found
    bound = _messages(whole, [one], world, redundant, price)
    bound.run(2)
    most = _AGAIN[len(found.mesh.axes)]
    counts = [n for n in (most, most // 4, most // 16) if n]
    other = _among(bound, math.inf, counts, one, world, redundant, price)
    return other if other.seconds < found.seconds * (1 - 1e-9) else found


def _among(
    bound: Bound,
    margin: float,
    counts: Sequence[int],
    candidate: Candidate,
    world: World,
    redundant: bool,
    price: Price | None,
) -> Plan:
    """The best plan among so many options of every region, the next number where tables outgrow."""
    mesh, constraint = candidate
    program = bound.frame.program
    for most in counts:
        try:
            left = near(bound, margin, most)
            return search(program, mesh, world, constraint, redundant, left, price)
        except PlanError as error:
            refused = error
    raise refused
