"""Attention's time: shares of its own, forward and backward, wherever computing is priced."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import autopar
import models
from autopar.cost.calibration import fit as timing
from autopar.cost.calibration import time_computing
from autopar.cost.calibration.measure import Matmul
from autopar.cost.compute import (
    attention_seconds,
    attention_share,
    matmul_seconds,
    node_seconds,
    rule_seconds,
)
from autopar.cost.simulator.graph_events import flops, graph_events, op_seconds
from autopar.errors import WorldError
from autopar.ir.mesh import Mesh
from autopar.ir.sharding_rule import ATTENTION_BACKWARD, Attends, OpShardingRule
from autopar.ir.strategy import Strategy
from autopar.planner.bound import bound_on
from autopar.planner.constraint import Constraint
from autopar.planner.exact_search import search
from autopar.planner.objective import COMPUTE, cost_terms
from autopar.planner.solve import best, bounds_of
from autopar.runtime import calibrate_on_ranks
from autopar.world import Attention, Device, World
from derived import FOUR, derived_from, graph_of
from traced import annotated

FLOAT = torch.float32
PLAIN = Device("plain", {"float32": 1e12}, 8e9, 1e15)
CAUSAL = Attends(1024, 64, True)
AUTO = Constraint("auto")


def shares(
    keys: tuple[int, ...], sizes: tuple[int, ...], forward: float, backward: float
) -> tuple[Attention, ...]:
    """The same everywhere."""
    return tuple(
        Attention("float32", causal, many, size, forward, backward)
        for causal, many, size in itertools.product((True, False), keys, sizes)
    )


def slow_attention(world: World) -> World:
    """It takes so long that little else of the computing counts."""
    grid = shares((8, 64), (4, 32), 1e-5, 2e-5)
    return replace(world, device=replace(world.device, attention=grid))


# -- one op ----------------------------------------------------------------------------------------
def test_without_calibration_it_is_a_matmul_and_its_backward_five_for_two() -> None:
    rule = OpShardingRule((), (), {}, flops=1e12, attends=CAUSAL)
    forward = rule_seconds(rule, 1e12, 0.0, FLOAT, False, PLAIN)
    both = rule_seconds(rule, 1e12, 0.0, FLOAT, True, PLAIN)
    assert forward == matmul_seconds(1e12, 0.0, FLOAT, PLAIN) == 1.0
    assert both - forward == pytest.approx(2.5) and ATTENTION_BACKWARD == 2.5
    plain = replace(rule, attends=None)
    assert rule_seconds(plain, 1e12, 0.0, FLOAT, True, PLAIN) == pytest.approx(3.0)


def test_forward_and_backward_have_their_own_shares() -> None:
    device = replace(PLAIN, attention=shares((8,), (4,), 0.5, 0.25), launch_s=1e-3)
    rule = OpShardingRule((), (), {}, flops=1e12, attends=CAUSAL)
    phases = [rule_seconds(rule, 1e12, 0.0, FLOAT, gradient, device) for gradient in (False, True)]
    assert phases == pytest.approx([2.0 + 1e-3, 2.0 + 10.0 + 2e-3])
    arrays = rule_seconds(rule, np.array([1e12, 2e12]), np.array([0.0, 0.0]), FLOAT, True, device)
    assert arrays == pytest.approx([phases[1], 24.0 + 2e-3])


def test_a_share_lies_on_lines_between_what_was_measured() -> None:
    """Seconds per FLOP of 1 + 64 / keys + 16 / head size: the lines are exact."""

    def cost(keys: float, size: float) -> float:
        return 1 + 64 / keys + 16 / size

    known = tuple(
        Attention("float32", False, keys, size, 1 / cost(keys, size), 0.5 / cost(keys, size))
        for keys, size in itertools.product((2048, 128, 512), (128, 32))
    )
    device = replace(PLAIN, attention=known)
    for keys, size in ((128, 32), (200, 64), (1024, 100.5), (2048, 48)):
        forward = attention_share(Attends(keys, size, False), False, FLOAT, device)
        backward = attention_share(Attends(keys, size, False), True, FLOAT, device)
        assert forward == pytest.approx(1 / cost(keys, size)) and backward == forward / 2
    beyond = attention_share(Attends(10**5, 8, False), False, FLOAT, device)
    assert beyond == pytest.approx(1 / cost(2048, 32))
    assert attention_share(CAUSAL, False, FLOAT, device) is None


# -- in every price --------------------------------------------------------------------------------
@pytest.mark.slow
def test_search_bound_and_plan_agree_on_it() -> None:
    model, args, _ = models.gpt()
    program, mesh = annotated(models.GptWithLogits(layers=1), args, {}), Mesh.parse("x2.y2")
    plain = World.preset("dgx-h100", 4)
    world = slow_attention(plain)
    exact = search(program, mesh, world, AUTO).seconds
    assert exact > 2 * search(program, mesh, plain, AUTO).seconds
    assert exact * (1 - 5e-3) < float(bound_on(program, mesh, AUTO, world).run()[0])
    best_plan = best(program, [(mesh, AUTO)], world)
    assert best_plan.seconds == pytest.approx(exact, rel=1e-6)
    assert max(best_plan.bound, *bounds_of(best_plan)) <= exact * (1 + 1e-5)
    plan = autopar.plan(model, world, args, smaller=False, overlap=False)
    spent = cost_terms(plan.context.source, plan, world)
    assert sum(spent.values()) == pytest.approx(plan.seconds, rel=1e-9)


def test_derived_graphs_take_what_the_plan_says() -> None:
    """Attention that computes for long: what is read and written does not count. Its backward is
    one op, with 2.5 times the FLOPs at another share.
    """
    model, args = models.GptWithLogits(layers=1), models.gpt()[1]
    world = slow_attention(FOUR)
    plan = autopar.plan(model, world, args, "megatron", smaller=False)
    run, notes = derived_from(plan), plan.context.program.annotations
    assert notes is not None
    ((name, rule),) = [(n, s) for n, s in notes.specs.items() if s.attends is not None]
    choice = plan.choices[name]
    parts = math.prod(split_sizes(choice.results[0]))
    assert parts == world.ranks
    strategy = Strategy((), choice.operands, choice.results, parts)
    forward = node_seconds(rule, strategy, FLOAT, False, world)
    backward = node_seconds(rule, strategy, FLOAT, True, world) - forward
    by_phase: dict[str, tuple[float, float]] = {}
    for phase in ("forward", "backward"):
        (node,) = [n for n in graph_of(run, phase).nodes if "dot_product" in str(n.target)]
        by_phase[phase] = op_seconds(node, world), flops(node)
        listed = graph_events(graph_of(run, phase), world, frozenset(), phase)
        assert listed.events[listed.nodes.index(node)].seconds == by_phase[phase][0]
    assert by_phase["forward"][0] == pytest.approx(forward, rel=1e-9)
    assert by_phase["backward"][0] == pytest.approx(backward, rel=1e-9)
    assert by_phase["forward"][1] == pytest.approx(rule.flops / parts)
    assert by_phase["backward"][1] == pytest.approx(2.5 * rule.flops / parts)
    assert backward == pytest.approx(1.25 * forward, rel=1e-3)


def split_sizes(layout: Any) -> list[int]:
    """By dim, over how many ranks it is split."""
    return [a // b for a, b in zip(layout.shape, layout.local_shape, strict=True)]


def test_compute_is_what_grows() -> None:
    model, args, _ = models.gpt()
    plan = autopar.plan(model, 2, args, "megatron", smaller=False)
    before = cost_terms(plan.context.source, plan, plan.world)
    after = cost_terms(plan.context.source, plan, slow_attention(plan.world))
    assert after[COMPUTE] > 2 * before[COMPUTE]
    assert {k: v for k, v in after.items() if k != COMPUTE} == {
        k: v for k, v in before.items() if k != COMPUTE
    }


# -- what is measured ------------------------------------------------------------------------------
@pytest.mark.slow
def test_attention_is_timed_over_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's own keys and head size are lines of it, where they are not too slow."""
    monkeypatch.setattr(timing, "CPU_KEYS", (16, 64))
    monkeypatch.setattr(timing, "HEAD_SIZES", (8, 16))
    own = [(FLOAT, Attends(24, 4, True)), (FLOAT, Attends(10**7, 16, False))]
    device = torch.device("cpu")
    known = replace(PLAIN, flop_per_s={"float32": 1e9})
    wanted = timing.attention_cases(own, [FLOAT], known, False)
    assert {case.shape.keys for case in wanted if not case.shape.causal} == {16, 64}
    products = [Matmul(FLOAT, 8, 8, 8)]
    times, each, others = time_computing(products, wanted, device, 0.01, lambda *_: None)
    assert list(times.seconds) == products and list(each) == wanted and others > 0
    points = timing.shares(each, known)
    causal = {(point.keys, point.head_size) for point in points if point.causal}
    assert causal == set(itertools.product((16, 24, 64), (4, 8, 16)))
    assert len(points) - len(causal) == 4
    assert replace(known, attention=points).attention == points  # a whole grid
    assert all(0 < share < math.inf for point in points for share in (
        point.forward_share, point.backward_share
    ))  # fmt: skip


@pytest.mark.parametrize("shape", [Attends(64, 16, True), Attends(2048, 128, False)])
def test_what_is_timed_is_the_attention_that_is_said(
    shape: Attends, monkeypatch: pytest.MonkeyPatch
) -> None:
    attended: list[tuple[torch.Size, bool]] = []
    real = F.scaled_dot_product_attention

    def watched(query: torch.Tensor, *others: torch.Tensor, is_causal: bool) -> torch.Tensor:
        attended.append((query.shape, is_causal))
        return real(query, *others, is_causal=is_causal)

    monkeypatch.setattr(timing.F, "scaled_dot_product_attention", watched)
    case = timing.Attending(FLOAT, shape, False)
    work, forward = timing.attention(case, torch.device("cpu"))
    forward()
    (samples, heads, keys, size), causal = attended[-1]
    assert Attends(keys, size, causal) == shape
    assert work == 4 * samples * heads * keys * keys * size / (2 if causal else 1) >= 2.0**26
    more, backward = timing.attention(case._replace(backward=True), torch.device("cpu"))
    assert more == 2.5 * work and len(attended) == 2
    assert [g.shape for g in backward()] == [attended[-1][0]] * 3 and len(attended) == 2


def test_shares_are_what_was_measured_of_the_rate() -> None:
    """PLAIN has 1e12 FLOP/s: 2e-12 s for one are half of it."""
    case = timing.Attending(FLOAT, CAUSAL, False)
    points = timing.shares({case: 2e-12, case._replace(backward=True): 4e-12}, PLAIN)
    assert points == (Attention("float32", True, 1024, 64, 0.5, 0.25),)


def test_a_models_own_attention() -> None:
    """Every block has the same."""
    model, args, _ = models.gpt()
    assert calibrate_on_ranks.unsharded_work(model, args).attentions == [
        (FLOAT, Attends(16, 8.0, True))
    ]


# -- files -----------------------------------------------------------------------------------------
def test_it_comes_back_from_its_file(tmp_path: Path) -> None:
    world = slow_attention(World.of(4))
    world.save(tmp_path / "world.json")
    again = World.load(tmp_path / "world.json")
    assert again == world and again.device.attention == world.device.attention != ()
    data = json.loads((tmp_path / "world.json").read_text())
    assert set(data["device"]["attention"][0]) == {
        "dtype", "causal", "keys", "head_size", "forward_share", "backward_share",
    }  # fmt: skip
    del data["device"]["attention"]  # as older files are
    (tmp_path / "world.json").write_text(json.dumps(data))
    assert World.load(tmp_path / "world.json").device.attention == ()


def test_a_plan_carries_it() -> None:
    model, args, _ = models.mlp()
    plan = autopar.plan(model, slow_attention(World.of(2)), args, "ddp", smaller=False)
    again = autopar.Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again.world == plan.world and again.world.device.attention


def test_shares_that_cannot_be() -> None:
    known = shares((8, 16), (4, 32), 0.5, 0.5)
    with pytest.raises(WorldError, match=r"causal, has \(keys, head size\) .* once"):
        replace(PLAIN, attention=known[1:])
    with pytest.raises(WorldError, match=r"not causal, has .* once"):
        replace(PLAIN, attention=(*known, known[-1]))
    with pytest.raises(WorldError, match=r"Attention.forward_share is 0"):
        replace(known[0], forward_share=0)
    with pytest.raises(WorldError, match="no dtype 'floot'"):
        replace(known[0], dtype="floot")


def test_numbers_are_what_arrays_are() -> None:
    device = replace(PLAIN, attention=shares((8,), (4,), 0.5, 0.25), memory_bytes_per_s=1e10)
    work, moved = np.array([1e3, 1e12]), np.array([1e9, 1.0])
    seconds = attention_seconds(work, moved, CAUSAL, True, FLOAT, device)
    each = [attention_seconds(float(f), float(b), CAUSAL, True, FLOAT, device)
            for f, b in zip(work, moved, strict=True)]  # fmt: skip
    assert seconds == pytest.approx(each) and each == pytest.approx([0.1, 4.0])
