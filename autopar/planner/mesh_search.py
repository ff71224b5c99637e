"""The mesh search: the best plan over many meshes, and a lower bound on every plan.

All candidate meshes are bounded at once (bounds/); then the most promising mesh is searched exactly
(exact_search.py) among the options that its bound leaves, then the next one, until no mesh promises
more than the best plan found. Plans that only compete with others are found quickly: fewer meshes
and options, no proof, and several shares of what collectives count are bounded together, as if they
were further meshes. `near` translates the options that a bound leaves into the joint
choices that the exact search takes.

An annotated program, candidates (mesh, constraint) and a world enter; `Best` leaves: a plan, its
bound and every candidate's bound. `search_meshes` is the first search of every plan, for
planner.py; memory_search.py, overlap_search.py, deep_models.py, world_size.py and why.py call
the others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

from autopar.cost.activations import Price
from autopar.errors import PlanError
from autopar.ir.garbage import without_collection
from autopar.ir.layout import I, R
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.progress import tell
from autopar.ir.sharding_rule import results_of, shape_of
from autopar.ir.strategy import Choice, Slot
from autopar.planner.bounds.factor_graph import (
    FIRST_SLOT,
    WHOLE,
    Frame,
    Variable,
    frame,
    shorten_frame,
)
from autopar.planner.bounds.meshes import meshes_of
from autopar.planner.bounds.messages import Bound, Joint
from autopar.planner.bounds.option_costs import OptionCosts
from autopar.planner.constraint import Constraint
from autopar.planner.exact_search import search, search_nearly
from autopar.planner.named_layouts import candidates
from autopar.planner.request import PlanRequest, with_asked_recomputation
from autopar.world import World

Choices = tuple[tuple[Choice, ...], ...]


def near(bound: Bound, margin: float, most: int, place: int = 0) -> Mapping[str, Choices]:
    """Return for every node and stored tensor the joint choices whose bound on the mesh at this
    place is at most `margin` seconds above the least, at most `most` per region.
    """
    joint_options = bound.near(margin, most, place)
    choices: dict[str, Choices] = {}
    choices_by_look: dict[Hashable, Choices] = {}
    for variable in bound.frame.variables:
        if variable.name not in joint_options:
            continue
        names = [variable.name] if variable.region is None else variable.region.nodes
        for position, name in enumerate(names):
            look = (variable.look, joint_options[variable.name], position)
            if look not in choices_by_look:
                choices_by_look[look] = _joint_choices(
                    variable, joint_options[variable.name], position
                )
            choices[name] = choices_by_look[look]
    return choices


def _joint_choices(variable: Variable, left: Joint, position: int) -> Choices:
    """Return the joint choices of the node at `position` in a region, or of a stored tensor, for
    the options left.
    """
    if variable.region is not None:
        axis_choices = [option[position].choice for option in variable.options]
    else:
        axis_choices = [_stored_choice(variable, state) for state in variable.options]
    return tuple(dict.fromkeys(tuple(axis_choices[i] for i in each) for each in sorted(left)))


def _stored_choice(variable: Variable, state: int) -> Choice:
    """Return the choice that gives a stored tensor this state on one axis."""
    if state < FIRST_SLOT:
        return I if state == WHOLE else R
    dim, place = variable.slots[state - FIRST_SLOT]
    return Slot(str(dim), place)


Candidate = tuple[Mesh, Constraint]

_TOGETHER = 96  # meshes bounded in one array: numpy works on rows of meshes
_ROUNDS = 1  # on the shorter frame: a second round changes bounds by 1e-5 and costs as much
_MARGIN = 2e-2  # of the bound: options within it of the least are searched exactly
_LEFT = (8, 4, 2, 1)  # options per region searched exactly; fewer where tables outgrow memory
_QUICKLY_LEFT = _LEFT[1:]  # the same where plans only compete with others
_AGAIN = {1: 512, 2: 128, 3: 16, 4: 8}  # the same for the last search, by number of axes
_SETTLED = 2e-4  # of its seconds: a plan this near its bound is not searched again
GAP = 1e-3  # of the seconds: a mesh that promises a smaller gain is not searched
_TRIES, _QUICK_TRIES = 4, 2  # meshes searched exactly; quickly
_FEW = 16  # up to this many meshes under a layout's rules are all searched exactly


class Best(NamedTuple):
    """The best plan found, the least bound of all candidates in seconds, and every candidate's."""

    plan: Plan
    bound: float
    bounds: tuple[float, ...]


def search_meshes(program: Program, world: World, request: PlanRequest) -> Program:
    """Return the annotated program with the plan of least summed seconds over every mesh that the
    request's layout allows on the ranks of `world`, and a proven bound; ties go to fewer axes, then
    to the first mesh.
    """
    assert request.layout is not None
    meshes = list(candidates(request.layout, world.ranks, program))
    found = best(program, meshes, world)
    bounds = with_bounds(meshes, found.bounds)
    plan = dataclasses.replace(found.plan, bound=found.bound, meshes=bounds)
    return with_asked_recomputation(dataclasses.replace(program, plan=plan), request)


@without_collection()
def best(
    program: Program,
    given: Sequence[Candidate],
    world: World,
    price: Price | None = None,
) -> Best:
    """Return the best plan over these candidates; ties go to fewer axes, then to the first
    candidate. With a `price`, the plan's seconds and all bounds include the price of the bytes that
    it holds.
    """
    if _need_no_bound(given):
        return _best_of_all(program, given, world, price)
    full_frame = frame(program)
    bounds = meshes_by_bound(full_frame, given, world, price) if len(given) > 1 else [0.0]

    def searched(index: int) -> Plan:
        plan, bound = exact(full_frame, *given[index], world, price)
        bounds[index] = max(bounds[index], bound)
        return plan

    plan_found = _best_in_order(given, bounds, _TRIES, searched)
    near_bound = min(bounds) >= plan_found.seconds * (1 - _SETTLED)
    if not near_bound and price is None:  # prices are tried one after the other
        plan_found = again(full_frame, plan_found, given, world)
    return Best(plan_found, min(*bounds, plan_found.seconds), tuple(bounds))


def _best_in_order(
    given: Sequence[Candidate],
    bounds: Sequence[float],
    tries: int,
    searched: Callable[[int], Plan],
) -> Plan:
    """Return the best plan of the `tries` most promising candidates, until none promises more than
    the best one found. `searched`: searches the candidate at a place.
    """
    found: Plan | None = None
    for index in _in_order(given, bounds)[:tries]:
        if found is not None and bounds[index] >= found.seconds * (1 - GAP):
            break
        plan = searched(index)
        if found is None or plan.seconds < found.seconds * (1 - 1e-9):
            found = plan
    assert found is not None
    return found


def _need_no_bound(given: Sequence[Candidate]) -> bool:
    """Whether the candidates are so few, and their rules leave so little, that each is searched."""
    one_rank = not given[0][0].axes
    return one_rank or (len(given) <= _FEW and not any(rules.free for _, rules in given))


def _best_of_all(
    program: Program, given: Sequence[Candidate], world: World, price: Price | None
) -> Best:
    """Return the best plan of these candidates, each searched among all that its rules leave."""
    if not given[0][0].axes:  # one rank: nothing to choose
        given = given[:1]
    plans = [search_nearly(program, mesh, world, rules, None, price) for mesh, rules in given]
    fastest = min(plans, key=lambda plan: plan.seconds)
    bounds = tuple(plan.bound for plan in plans)
    return Best(fastest, min(bounds), bounds)


def _in_order(given: Sequence[Candidate], bounds: Sequence[float]) -> list[int]:
    """Return the places of the candidates, the lowest bound first."""
    places = range(len(given))
    return sorted(places, key=lambda i: (_round_seconds(bounds[i]), len(given[i][0].axes), i))


def with_bounds(
    given: Sequence[Candidate], bounds: Sequence[float]
) -> tuple[tuple[str, float], ...]:
    """Return (mesh, bound in seconds) of every candidate, as a plan stores them."""
    return tuple((str(mesh), s) for (mesh, _), s in zip(given, bounds, strict=True))


def bounds_of(plan: Plan) -> list[float]:
    """Return the bound in seconds of every candidate that a plan was chosen from."""
    return [bound for _, bound in plan.meshes]


def promising_meshes(
    bounds: Sequence[float], given: Sequence[Candidate], most: int, near: float | None = None
) -> list[Candidate]:
    """Return at most `most` candidates of the lowest bounds, none above `near` times the least, in
    their given order.
    """
    assert given, "nothing to choose from"
    lowest = sorted(range(len(given)), key=bounds.__getitem__)[:most]
    return [
        given[i] for i in sorted(lowest) if near is None or bounds[i] <= near * bounds[lowest[0]]
    ]


def _round_seconds(seconds: float) -> float:
    """Return the seconds to four digits: meshes that differ by less are tried in their order."""
    return float(f"{seconds:.3e}")


def meshes_by_bound(
    whole: Frame,
    given: Sequence[Candidate],
    world: World,
    price: Price | None = None,
) -> list[float]:
    """Return a lower bound of the step in seconds for every candidate."""
    bounds, done = [0.0] * len(given), 0
    for chunk in _chunks(given):
        tell("meshes bounded", done, len(given))
        # not in threads: numpy's calls are short, and they would wait for Python
        bound = pass_messages(whole, [given[i] for i in chunk], world, price)
        for index, seconds in zip(chunk, bound.run(), strict=True):
            bounds[index] = max(0.0, float(seconds))  # messages round
        done += len(chunk)
    tell("meshes bounded", done, len(given))
    return bounds


def _chunks(given: Sequence[Candidate]) -> list[list[int]]:
    """Return the places of the candidates that are bounded in one array: as many axes, not too
    many meshes.
    """
    together: list[list[int]] = []
    for count in sorted({len(mesh.axes) for mesh, _ in given}):
        same_axes = [i for i, (mesh, _) in enumerate(given) if len(mesh.axes) == count]
        together.extend(same_axes[i : i + _TOGETHER] for i in range(0, len(same_axes), _TOGETHER))
    return together


def pass_messages(
    whole: Frame,
    given: Sequence[Candidate],
    world: World,
    price: Price | None = None,
    shares: Sequence[float] = (),
) -> Bound:
    """Return a bound whose messages have converged on a shorter frame first. `shares`: by
    candidate, of the collectives that can overlap; () for the program's own.
    """
    meshes = meshes_of(tuple(mesh for mesh, _ in given), world, tuple(shares))
    costs = OptionCosts(whole, meshes, [constraint for _, constraint in given], price)
    short, twins = shorten_frame(whole)
    start = Bound(short, costs)
    start.run(_ROUNDS)
    return start if short is whole else Bound(whole, costs, start, twins)


def bound_on(program: Program, mesh: Mesh, constraint: Constraint, world: World) -> Bound:
    """Return the bound of every option of every node on one mesh; read it with `near`."""
    bound = pass_messages(frame(program), [(mesh, constraint)], world, None)
    bound.run(2)
    return bound


def exact(
    whole: Frame,
    mesh: Mesh,
    constraint: Constraint,
    world: World,
    price: Price | None = None,
    thorough: bool = True,
) -> tuple[Plan, float]:
    """Return the plan of least modelled time on one mesh among the options that the bound leaves,
    and the bound in seconds. Not `thorough`: among fewer options, and the bound is not tightened.
    """
    if not mesh.axes or not constraint.free:  # rules leave little to search
        plan = search_nearly(whole.program, mesh, world, constraint, None, price)
        return plan, plan.bound
    bound = pass_messages(whole, [(mesh, constraint)], world, price)
    bound_seconds = float(bound.run()[0])
    counts = _LEFT if thorough else _QUICKLY_LEFT
    limits = _near_limits(bound, _MARGIN * bound_seconds, counts)
    plan = _search_among(whole.program, limits, (mesh, constraint), world, price)
    if thorough and plan.seconds * (1 - GAP) > bound_seconds:
        bound_seconds = max(bound_seconds, float(bound.run(2)[0]))
    return plan, min(bound_seconds, plan.seconds)


def again(
    whole: Frame,
    found: Plan,
    given: Sequence[Candidate],
    world: World,
    price: Price | None = None,
) -> Plan:
    """Return the plan, or a better one on its mesh found among more options per region, those
    lowest in the bound. Where these are all options that there are, the result is optimal.
    """
    candidate = next(
        pair for pair in given if pair[0] == found.mesh and pair[1].name == found.layout
    )
    if not found.mesh.axes or not candidate[1].free:
        return found
    bound = pass_messages(whole, [candidate], world, price)
    bound.run(2)
    largest_count = _AGAIN[len(found.mesh.axes)]
    counts = [n for n in (largest_count, largest_count // 4, largest_count // 16) if n]
    limits = _near_limits(bound, math.inf, counts)
    improved = _search_among(whole.program, limits, candidate, world, price)
    return improved if improved.seconds < found.seconds * (1 - 1e-9) else found


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
) -> Plan:
    """Return the best plan among the first of these joint choices whose tables fit in memory, or
    one near the best among the first of all, if none do.
    """
    mesh, constraint = candidate
    widest: Mapping[str, Choices] | None = None
    for joint_choices in limits:
        widest = joint_choices if widest is None else widest
        try:
            return search(program, mesh, world, constraint, joint_choices, price)
        except PlanError:
            continue
    return search_nearly(program, mesh, world, constraint, widest, price)


# -- quickly: for plans that only compete with others, with no proof -------------------------------
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
    if _need_no_bound(given):
        return _best_of_all(program, given, world, price)
    return _quickly_best(
        program, given, _bounded(frame(program), given, world, price), world, price
    )


def best_at_shares(
    programs: Sequence[Program], given: Sequence[Candidate], world: World
) -> Iterator[Plan]:
    """Yield the best plan found for each of these programs, which differ in the share of what
    collectives take that counts, and in nothing else.
    """
    if len(programs) == 1 or _need_no_bound(given):
        for program in programs:
            yield quick_best(program, given, world).plan
        return
    shares = [_share(program) for program in programs for _ in given]
    every = [candidate for _ in programs for candidate in given]
    bounded = _bounded(frame(programs[0]), every, world, None, shares)
    for number, program in enumerate(programs):
        own = bounded[number * len(given) : (number + 1) * len(given)]
        yield _quickly_best(program, given, own, world, None).plan


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
    for chunk in _chunks(given):
        own_shares = [shares[i] for i in chunk] if shares else ()
        bound = pass_messages(whole, [given[i] for i in chunk], world, price, own_shares)
        for place, (index, seconds) in enumerate(zip(chunk, bound.run(), strict=True)):
            found[index] = _Bounded(max(0.0, float(seconds)), bound, place)  # messages round
    return [found[index] for index in range(len(given))]


@without_collection()
def _quickly_best(
    program: Program,
    given: Sequence[Candidate],
    bounded: Sequence[_Bounded],
    world: World,
    price: Price | None,
) -> Best:
    """Return the best plan of the most promising candidates."""
    bounds = [each.seconds for each in bounded]

    def searched(index: int) -> Plan:
        return _searched(program, given[index], bounded[index], world, price)

    plan = _best_in_order(given, bounds, _QUICK_TRIES, searched)
    return Best(plan, min(*bounds, plan.seconds), tuple(bounds))


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
    margin = _MARGIN * bounded.seconds
    limits = _near_limits(bounded.bound, margin, _QUICKLY_LEFT, bounded.place)
    return _search_among(program, limits, candidate, world, price)


# -- the contract ----------------------------------------------------------------------------------
def check_choices(program: Program) -> None:
    """Check the contract: every searched node has a choice whose layouts have the shapes of its
    tensors and lie on the plan's mesh.
    """
    assert program.plan is not None and program.annotations is not None
    for name in program.annotations.searched & program.annotations.specs.keys():
        assert name in program.plan.choices, f"choose left {name} without a layout"
    for entry in program.signature.inputs:
        if entry.kind == "parameter":
            assert entry.node in program.plan.stored, (
                f"choose left parameter {entry.target} without a stored layout"
            )
    for name, choice in program.plan.choices.items():
        for layout, shape in zip(choice.results, _shapes(program, name), strict=True):
            assert layout.shape == shape and layout.mesh == program.plan.mesh, (
                f"{name} of shape {shape} is to lie as ({layout}) of {layout.shape} on mesh "
                f"{layout.mesh}, the plan's is {program.plan.mesh}"
            )


def _shapes(program: Program, name: str) -> list[tuple[int, ...]]:
    """Return the shapes of a node's tensor results."""
    node = next(n for n in program.module.graph.nodes if n.name == name)
    return [shape_of(v) for v in results_of(node) if hasattr(v, "shape")]
