"""Quick searches: several shares bounded at once are each share by itself."""

from __future__ import annotations

import math

import pytest

import models
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.planner.bound import near, pass_messages
from autopar.planner.constraint import Constraint
from autopar.planner.exact_search import Search, search_nearly
from autopar.planner.request import Layouts
from autopar.planner.solve import best_at_shares, bounds_of, by_promise, quick_best, with_share
from autopar.planner.space import candidates
from autopar.world import World
from traced import annotated

SHARES = (0.1, 0.4, 0.7)


@pytest.fixture(scope="module")
def program() -> Program:
    model, args, kwargs = models.gpt()
    return annotated(model, args, kwargs)


@pytest.mark.slow
def test_shares_are_bounded_as_each_by_itself(program: Program) -> None:
    """What a share leaves of the seconds, and the options near the least, hang on no neighbour."""
    world = World.preset("ethernet-25g", 16)
    pairs = [(Mesh.parse(name), Constraint("auto")) for name in ("x2.y8", "x4.y4")]
    columns = [(pair, share) for share in SHARES for pair in pairs]
    together = pass_messages(
        with_share(program, SHARES[0]),
        [pair for pair, _ in columns],
        world,
        shares=[share for _, share in columns],
    )
    bounds = together.run(2)
    assert bounds[0] < bounds[2] < bounds[4]
    for place, (pair, share) in enumerate(columns):
        alone = pass_messages(with_share(program, share), [pair], world)
        assert bounds[place] == pytest.approx(alone.run(2)[0], rel=2e-3)
        least = near(alone, math.inf, 1)
        among = near(together, 0.02 * float(bounds[place]), 8, place)
        shared = [name for name, options in least.items() if set(options) <= set(among[name])]
        assert len(shared) > 0.9 * len(least)


@pytest.mark.slow
def test_plans_at_shares_are_those_found_one_by_one(program: Program) -> None:
    world = World.preset("ethernet-25g", 16)
    pairs = list(candidates("auto", 16, program))[:12]
    programs = [with_share(program, share) for share in SHARES]
    for share, plan in zip(
        programs, best_at_shares(programs, pairs, len(pairs), world), strict=True
    ):
        alone = quick_best(share, pairs, world)
        assert plan.seconds == pytest.approx(alone.seconds, rel=3e-3)
        assert alone.bound <= alone.seconds


def test_few_meshes_under_rules_are_all_searched(program: Program) -> None:
    world = World.preset("ethernet-25g", 16)
    pairs = list(candidates("4d", 16, program))[:5]
    best_plan = quick_best(program, pairs, world)
    bounds = bounds_of(best_plan)
    assert len(bounds) == 5 and best_plan.seconds == min(bounds)


def test_of_meshes_that_promise_the_same_the_one_of_fewest_axes_comes_first() -> None:
    """The bounds of the first and the third differ by less than the gain that is looked for."""
    meshes = [(Mesh.parse(m), Constraint("auto")) for m in ("w2.x2.y2.z8", "x8.y8", "x64")]
    assert by_promise(meshes, [0.84314, 0.8441, 0.84316]) == [2, 0, 1]
    assert by_promise(meshes, [0.84314, 0.8441, 0.8440]) == [0, 2, 1]


@pytest.mark.slow_cells("fsdp")
@pytest.mark.parametrize("layout", ["fsdp", "megatron"])
def test_a_search_of_a_layout_is_entered_once_for_all_shares(
    program: Program, layout: Layouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World.preset("ethernet-25g", 4)
    ((mesh, rules),) = candidates(layout, 4, program)
    entered = []
    enter = Search.enter
    monkeypatch.setattr(Search, "enter", lambda self: (entered.append(self), enter(self))[1])
    plans = [search_nearly(with_share(program, share), mesh, world, rules) for share in SHARES]
    assert len(entered) == 1
    alone = [Search(with_share(program, share), mesh, world, rules).enter() for share in SHARES]
    assert plans == [search.solve_nearly() for search in alone]
    assert len({plan.seconds for plan in plans}) == len(SHARES)
