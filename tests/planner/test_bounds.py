"""The search over all meshes: held against trying everything, an integer program and the exact
prices.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autopar
import brute
import integer
import models
from autopar.cost.communication import path_seconds
from autopar.cost.many_meshes import Meshes
from autopar.errors import LayoutError
from autopar.ir.layout import I, Layout, P, R, S
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.reshard import reshard_steps
from autopar.passes import annotate
from autopar.planner import solve
from autopar.planner.bound import bound_on
from autopar.planner.bounds.factor_graph import (
    FIRST_SLOT,
    INVARIANT,
    REPLICATED,
    Edge,
    Frame,
    Kind,
    Variable,
    frame,
)
from autopar.planner.bounds.option_costs import HALF, OptionCosts
from autopar.planner.bounds.reshard_costs import ReshardBounds
from autopar.planner.constraint import Constraint
from autopar.planner.exact_search import search
from autopar.planner.request import PlanRequest
from autopar.planner.solve import best, bounds_of
from autopar.world import World
from random_nets import random_problem
from traced import annotated

slow = pytest.mark.slow
AUTO = Constraint("auto")


# -- against trying everything ---------------------------------------------------------------------
def equals_trying_everything(seed: int) -> None:
    program, mesh, world = random_problem(seed)
    exact = search(program, mesh, world, AUTO).seconds
    assert brute.least(program, mesh, world) == pytest.approx(exact, rel=1e-9), seed
    best_plan = best(program, [(mesh, AUTO)], world)
    assert best_plan.seconds == pytest.approx(exact, rel=1e-6), seed
    assert max(best_plan.bound, *bounds_of(best_plan)) <= exact * (1 + 1e-5), seed


@pytest.mark.slow_cells("0")
@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=slow) for n in range(10, 200, 10))])
def test_search_and_bound_against_trying_everything(first: int) -> None:
    for seed in range(first, first + 10):
        equals_trying_everything(seed)


@pytest.mark.slow_cells("gpt-x2.y2", "llama-x8")
@pytest.mark.parametrize(("name", "mesh"), [("gpt", "x2.y2"), ("llama", "x8"), ("llama", "x16")])
def test_the_bound_is_not_above_the_exact_search(name: str, mesh: str) -> None:
    """On x8 and x16 it pays to take queries in another layout than keys and values."""
    program, on = traced(name), Mesh.parse(mesh)
    world = World.preset("dgx-h100", on.size)
    exact = search(program, on, world, AUTO).seconds
    bound = float(bound_on(program, on, AUTO, world).run()[0])
    assert exact * (1 - 5e-3) < bound <= exact * (1 + 1e-6)


@pytest.mark.slow_cells("gpt-x2.y2")
@pytest.mark.parametrize(("name", "mesh"), [("gpt", "x2.y2"), ("gpt", "x16"), ("llama", "x8")])
def test_the_bound_holds_where_every_rank_gets_every_output(name: str, mesh: str) -> None:
    """Logits that the loss takes and the user gets: one gather serves both."""
    program, on = annotate.replicate(traced(name), False, True), Mesh.parse(mesh)
    world = World.preset("dgx-h100", on.size)
    exact = search(program, on, world, AUTO).seconds
    bound = float(bound_on(program, on, AUTO, world).run()[0])
    assert exact * (1 - 6e-3) < bound <= exact * (1 + 1e-6)


# -- against an integer program --------------------------------------------------------------------
@pytest.mark.slow_cells("gpt-x2.y2-dgx-h100")
@pytest.mark.parametrize(
    ("name", "mesh", "preset"),
    [
        ("gpt", "x2.y2", "dgx-h100"),
        pytest.param("gpt", "x2.y4", "ethernet-25g", marks=slow),
        pytest.param("llama", "x2.y2", "dgx-h100", marks=slow),
        pytest.param("t5_encoder", "x2.y2", "dgx-h100", marks=slow),
    ],
)
def test_search_equals_an_integer_program(
    name: str, mesh: str, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block, with embedding, head and loss, written down from the prices alone."""
    monkeypatch.setattr(models, "LAYERS", 1)
    model = models.GptWithLogits(layers=1)
    ids = models.token_ids()
    program = annotated(*((model, (ids, ids), {}) if name == "gpt" else getattr(models, name)()))
    parsed = Mesh.parse(mesh)
    world = World.preset(preset, parsed.size)
    least = search(program, parsed, world, AUTO).seconds
    assert integer.least(program, parsed, world) == pytest.approx(least, rel=1e-6)


# -- against the exact prices ----------------------------------------------------------------------
MESHES = ("x2.y4", "x2.y2.z4", "w2.x2.y2.z2")


def prices(name: str, mesh: str) -> tuple[Frame, Meshes, World, brute.Objective]:
    parsed, program = Mesh.parse(mesh), traced(name)
    world = World.preset("dgx-h100", parsed.size)
    objective = brute.Objective(program, parsed, world)
    return frame(program), Meshes([parsed], world), world, objective


_TRACED: dict[str, Program] = {}


def traced(name: str) -> Program:
    if name not in _TRACED:
        make: Callable[[], models.Example] = getattr(models, name)
        _TRACED[name] = annotated(*make())
    return _TRACED[name]


@pytest.mark.slow_cells("w2.x2.y2.z2-t5", "x2.y2.z4-t5", "x2.y4-t5")
@pytest.mark.parametrize("name", ["gpt", "llama", "t5"])
@pytest.mark.parametrize("mesh", MESHES)
def test_rated_options_cost_what_the_search_says(name: str, mesh: str) -> None:
    """Also: what is allowed here is what has strategies there."""
    parsed, meshes, _, objective = prices(name, mesh)
    costs, draw = OptionCosts(parsed, meshes, [AUTO]), random.Random(0)
    allowed = 0
    for variable in parsed.variables:
        if variable.region is None:
            continue
        options, seconds = costs.rated(variable)[1:]
        places = np.arange(seconds.size)
        legal = seconds.reshape(-1) < HALF
        for place in (*_some(places[legal], 4, draw), *_some(places[~legal], 2, draw)):
            joint = [options[i] for i in np.unravel_index(place, seconds.shape[1:])]
            exact = _exact(objective, variable, joint)
            if not legal[place]:
                assert exact is None, (variable.name, joint)
                continue
            rated = float(seconds.reshape(-1)[place])
            assert rated == pytest.approx(exact, rel=1e-5), (variable.name, joint)
            allowed += 1
    assert allowed > 100


def _some(places: Any, count: int, draw: random.Random) -> list[int]:
    return draw.sample(places.tolist(), min(count, len(places)))


def _exact(objective: brute.Objective, variable: Variable, joint: list[int]) -> float | None:
    """Seconds of the strategies of these choices; None where a node has none."""
    assert variable.region is not None
    total = 0.0
    for position, name in enumerate(variable.region.nodes):
        node = objective.named[name]
        choices = tuple(variable.options[option][position].choice for option in joint)
        strategies = objective.strategies(node, [choices])
        if not strategies:
            return None
        total += objective.node_seconds(node, strategies[0])
    return total


def laid_out(
    kind: Kind, mesh: Mesh, joint: list[int], draw: random.Random | None = None
) -> Layout | None:
    """The layout of a joint state whose digits are in mesh order, or in one that is drawn; None
    where they do not fit.
    """
    places = list(range(len(joint)))
    if draw is not None:
        draw.shuffle(places)
    states, left = [I] * len(joint), {}
    for place in places:
        state, size_of_axis = joint[place], mesh.axes[place].size
        if state < FIRST_SLOT:
            states[place] = (I, R, P)[state]
            continue
        dim, unit, size = kind.slots[state - FIRST_SLOT]
        left[state], rest = divmod(left.get(state, size), size_of_axis)
        if rest:
            return None
        states[place] = S(dim, unit * left[state])
    return Layout(mesh, kind.shape, tuple(states))


def edges_of(frame: Frame) -> list[Edge]:
    """One of each look that converts."""
    every = [e for v in frame.variables for e in v.edges if e.user is v]
    return list({(e.kind, frozenset(e.produced), frozenset(e.wanted)): e for e in every}.values())


def states_of(kind: Kind, states: tuple[int, ...]) -> list[int]:
    return sorted({s if kind.element.gradient or s != INVARIANT else REPLICATED for s in states})


@pytest.mark.slow_cells("x2.y4")
@pytest.mark.slow_cells("w2.x2.y2.z2", "x2.y2.z4")
@pytest.mark.parametrize("mesh", MESHES)
def test_reshards_of_the_bound_cost_no_more_than_paths(mesh: str) -> None:
    """For pairs drawn at random, however odd, and digits in any order. One step costs just the
    same, but where cutting on one axis after the other is cheaper than jointly.
    """
    draw = random.Random(0)
    above: list[bool] = []
    single: list[bool] = []
    for name in ("gpt", "llama", "t5"):
        parsed, meshes, world, _ = prices(name, mesh)
        for edge in edges_of(parsed):
            drawn = moved_at_random(edge.kind, edge, meshes, world, draw)
            for moved, exact, count, slicing in drawn:
                above.append(moved > exact * (1 + 1e-5) + 1e-12)
                if count == 1 and not slicing:
                    single.append(moved == pytest.approx(exact, rel=1e-5, abs=1e-12))
    assert not any(above) and len(above) > 200
    assert sum(single) >= 0.95 * len(single) and len(single) > 20


def moved_at_random(
    kind: Kind, edge: Edge, meshes: Meshes, world: World, draw: random.Random
) -> Iterator[tuple[float, float, int, bool]]:
    """Seconds by Moves and by changes.steps, how many steps, whether one scatters jointly."""
    sources, targets = states_of(kind, edge.produced), states_of(kind, edge.wanted)
    reshards = ReshardBounds(kind, frozenset(sources), frozenset(targets), meshes)
    axes = range(meshes.axis_count)
    pairs = [
        ([draw.choice(sources) for _ in axes], [draw.choice(targets) for _ in axes])
        for _ in range(6)
    ]
    pairs += [([s] * meshes.axis_count, [t] * meshes.axis_count) for s in sources for t in targets]
    for pair in pairs:
        source, target = (laid_out(kind, meshes.meshes[0], joint, draw) for joint in pair)
        if source is not None and target is not None:
            path = reshard_steps(source, target)
            exact = path_seconds(path, kind.element, world)
            scatters = any(s.kind[-1] == "S" and len(s.axes) > 1 for s in path)
            yield pushed(reshards, *pair), exact, len(path), scatters


def pushed(reshards: ReshardBounds, source: list[int], target: list[int]) -> float:
    costs = np.full((len(reshards.states),) * len(source) + (1,), 1e6, dtype=np.float32)
    costs[(*(reshards.states.index(s) for s in source), 0)] = 0
    return float(reshards.push(costs)[(*(reshards.states.index(s) for s in target), 0)])


# -- odd worlds ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "ranks"),
    [(n, r) for n in ("mlp", "gpt") for r in (1, 3, 6, 7)] + [("mlp", r) for r in (96, 1000, 1024)],
)
def test_odd_worlds_have_a_plan_or_a_clear_error(name: str, ranks: int) -> None:
    program = traced(name)
    plan = solve.search_meshes(program, World.of(ranks), PlanRequest("auto")).plan
    assert plan is not None and plan.mesh.size == ranks and plan.seconds > 0
    assert plan.bound <= plan.seconds


def test_one_axis_of_1024() -> None:
    model = nn.Sequential(nn.Linear(8, 1024), nn.ReLU(), nn.Linear(1024, 8))
    program = annotated(model, (torch.randn(1024, 8),), {})
    mesh, world = Mesh.parse("x1024"), World.preset("dgx-h100", 1024)
    best_plan = best(program, [(mesh, AUTO)], world)
    assert best_plan.seconds == pytest.approx(search(program, mesh, world, AUTO).seconds, rel=1e-6)


def test_a_batch_of_64_on_256_ranks() -> None:
    program = annotated(models.Mlp(2048, 8192), (torch.randn(64, 2048),) * 2, {})
    world = World.preset("dgx-h100", 256)
    with pytest.raises(LayoutError, match="batch of 64"):
        solve.search_meshes(program, world, PlanRequest("ddp"))
    plan = solve.search_meshes(program, world, PlanRequest("auto")).plan
    assert plan is not None and plan.mesh.size == 256


@pytest.mark.slow
def test_fewer_heads_than_ranks_are_planned() -> None:
    """4 heads of keys and values on 16 ranks."""
    world = World.preset("dgx-h100", 16)
    for layout in ("auto", "megatron", "4d"):
        plan = solve.search_meshes(traced("llama"), world, PlanRequest(layout)).plan
        assert plan is not None and plan.mesh.size == 16


def planned(name: str) -> str:
    """The plan's JSON, less what planning took."""
    model, args, kwargs = getattr(models, name)()
    data = autopar.plan(model, World.preset("dgx-h100", 8), args or kwargs).to_json()
    data.pop("seconds_by_pass", None)
    return json.dumps(data, sort_keys=True)


def digest(name: str) -> str:
    return hashlib.sha256(planned(name).encode()).hexdigest()


@pytest.mark.slow_cells("mlp")
@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt", marks=slow)])
def test_ties_go_alike_in_every_process(name: str) -> None:
    script = f"import sys; sys.path[:0] = {sys.path!r}; import test_bounds as t; "
    script += f"print(t.digest({name!r}))"
    command = [sys.executable, "-W", "ignore", "-c", script]
    digests = {digest(name), digest(name)}
    for seed in ("1", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        digests.add(done.stdout.split()[-1])
    assert len(digests) == 1
