"""What collectives cost: rings, the emulated cluster, two levels, paths; held against what was
measured. (Who shares a link: test_load.py.)
"""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch
from torch import fx

from autopar.cost.algorithms import algorithms
from autopar.cost.communication import (
    collective_cost,
    costs,
    hierarchies,
    inner_costs,
    path_seconds,
    seconds,
)
from autopar.cost.network import Pattern, load, pattern, size
from autopar.ir.layout import Element, I, Layout, P, R, S, Traffic
from autopar.ir.mesh import Mesh
from autopar.ir.reshard import reshard_steps
from autopar.ops.sharded import Part, inner_collectives, moving
from autopar.world import KINDS, Level, World
from priced import CORE, EMULATED, FAR, GPU, NEAR, START, price

MIB = 1 << 20


def flat(world: World, digits: Pattern, count: float) -> float:
    """Seconds of an all-reduce in one ring, without latency."""
    return 2 * (1 - 1 / size(digits)) * load(world, digits).ring * count


# -- rings -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_ring_takes_bytes_over_bandwidth_and_hops(ranks: int) -> None:
    """One level of 1 GB/s: bytes over bandwidth and hops of latency."""
    world = World((Level(ranks, 1e9, 1e-5),), GPU, "nccl", launch_s=5e-5)
    part, whole = (ranks - 1) / ranks, 10**9
    expected = {
        "all_gather": (part, part * whole / 1e9),
        "reduce_scatter": (part, part * whole / 1e9),
        "all_reduce": (2 * part, 2 * part * whole / 1e9),
        "all_to_all": (part / ranks, part / ranks * whole / 1e9),
    }
    for kind, (sent, took) in expected.items():
        cost = price(world, f"x{ranks}", "x", kind, whole)
        hops = (2 if kind == "all_reduce" else 1) * (ranks - 1)
        assert cost.bytes == pytest.approx(sent * whole)
        assert cost.seconds == pytest.approx(took + 5e-5 + hops * 1e-5, rel=1e-9)
        assert cost.algorithm.name == ("exchange" if kind == "all_to_all" else "ring")


def test_a_panel_is_a_broadcast_from_each_rank_in_turn() -> None:
    world = World((Level(4, 1e9, 1e-5),), GPU, "nccl", launch_s=2e-5)
    cost = price(world, "x4", "x", "broadcast", 4e9)
    assert cost.bytes == pytest.approx(3e9)
    assert cost.seconds == pytest.approx(3.0 + 4 * 2e-5 + 4 * 2 * 1e-5)


def test_one_rank_pays_nothing() -> None:
    for kind in KINDS:
        cost = price(EMULATED, "x4.y1", "y", kind, 1e9)
        assert (cost.bytes, cost.seconds) == (0, 0)
        assert price(EMULATED, "x4", "", kind, 1e9).seconds == 0


def test_small_sums_go_up_a_tree_and_large_ones_around_a_ring() -> None:
    world = World((Level(8, 4.5e11, 1e-6),), GPU, "nccl", launch_s=5e-6)
    cost = price(world, "x8", "x", "all_reduce", 8)
    assert cost.algorithm.name == "tree"
    assert cost.seconds == pytest.approx(5e-6 + 2 * 3 * 1e-6, rel=1e-3)
    assert price(world, "x8", "x", "all_reduce", 1e9).algorithm.name == "ring"


# -- the emulated cluster --------------------------------------------------------------------------
def test_the_emulated_cluster_sends_what_was_modelled() -> None:
    """Design, section 6: modelled, measured in brackets."""
    between, four, node = ((2, 2),), ((4, 1),), ((2, 1),)
    assert flat(EMULATED, between, 4e6) == pytest.approx(0.160, abs=5e-4)  # (0.177)
    assert flat(EMULATED, between, 8 * MIB) == pytest.approx(0.336, abs=1e-3)  # (0.352)
    assert flat(EMULATED, four, 4 * MIB) == pytest.approx(0.126, abs=5e-4)  # (0.133)
    assert flat(EMULATED, four, 8 * MIB) == pytest.approx(0.252, abs=5e-4)  # (0.263)
    assert flat(EMULATED, node, 4e6) == pytest.approx(0.007, abs=5e-4)


def test_the_emulated_clusters_small_sums() -> None:
    """Measured: 0.7 ms in a node, 1.9 between nodes, 3.4 over all four ranks in one ring."""
    assert price(EMULATED, "n2.l2", "l", "all_reduce", 1).seconds == pytest.approx(0.7e-3, rel=1e-3)
    assert price(EMULATED, "n2.l2", "n", "all_reduce", 1).seconds == pytest.approx(1.9e-3, rel=1e-3)
    hops = 2 * 3 / 4 * load(EMULATED, ((4, 1),)).ring_hops
    assert hops + START == pytest.approx(3.4e-3, rel=1e-3)


def test_a_sum_in_two_levels_wins_on_the_emulated_cluster() -> None:
    """8 MB over four ranks: measured 203 ms in two levels, 266 in one ring."""
    cost = price(EMULATED, "x4", "x", "all_reduce", 8 * MIB)
    assert (cost.algorithm.name, cost.algorithm.inside) == ("two-level", (2,))
    assert 0.17 < cost.seconds < 0.21
    assert cost.bytes == 1.5 * 8 * MIB


def test_arrays_of_bytes_are_priced_as_each_is() -> None:
    """From one byte to 100 MB: through all ways, each where it is the fastest."""
    sizes = np.logspace(0, 8, 60)
    digits = pattern(Mesh.parse("n2.l2"), ("n", "l"))
    for kind in KINDS:
        each = [price(EMULATED, "n2.l2", "n l", kind, count) for count in sizes.astype(int)]
        prices = seconds(EMULATED, digits, kind, sizes.astype(int).astype(float))
        assert prices.tolist() == [cost.seconds for cost in each]
    assert seconds(EMULATED, (), "all_reduce", sizes).tolist() == [0.0] * 60


def test_a_change_says_how_its_collectives_go() -> None:
    """A weight's gather and its gradient's scatter over four ranks in two nodes, in two levels."""
    whole, split = (Layout(Mesh.parse("x4"), (1 << 21,), (state,)) for state in (R, S(0, 1 << 19)))
    (step,) = reshard_steps(split, whole)
    for grad, backward in ((True, (2,)), (False, ())):
        assert hierarchies(step, Element(4, 4 * grad), EMULATED) == ((2,), backward)
    assert hierarchies(*reshard_steps(whole, split), Element(4, 4), EMULATED) == ((), ())


def test_collectives_inside_an_op_go_in_one_level() -> None:
    x = Layout(Mesh.parse("x4"), (1 << 16, 64), (S(1, 16),))
    norm = fx.Graph().call_function(torch.ops.aten.rms_norm.default)
    prices = list(inner_costs(inner_collectives(norm, [x]), x.mesh, EMULATED))
    assert {cost.algorithm for cost in prices} == {"ring"}
    assert price(EMULATED, "x4", "x", "all_reduce", 1 << 18).algorithm.name == "two-level"


def test_gloo_scatters_sums_by_exchange() -> None:
    """Every rank sends every other its part, and adds; nccl passes partial sums around."""
    cost = price(EMULATED, "n2.l2", "l", "reduce_scatter", 1e8)
    assert cost.algorithm.name == "exchange"
    assert cost.seconds == pytest.approx(START + NEAR + 0.5e8 / 6e8 + 1.5e8 / 1e10)
    ringed = World(EMULATED.levels, CORE, "nccl")
    over_all = price(ringed, "x4", "x", "reduce_scatter", 1e8)
    assert over_all.seconds < price(EMULATED, "x4", "x", "reduce_scatter", 1e8).seconds


def test_an_exchange_loads_the_uplink_with_every_pair() -> None:
    cost = price(EMULATED, "x4", "x", "all_to_all", 16e6)
    crossing = 2 * 2 * 1e6  # 2 ranks of a node to 2 of the other, 16e6 / 4² bytes each
    assert cost.seconds == pytest.approx(START + NEAR + 2 * FAR + crossing / 5e7)


def test_calibration_scales_a_kind() -> None:
    slow = World(EMULATED.levels, CORE, launch_s=START, factors={"all_gather": 2.0})
    for kind, factor in (("all_gather", 2.0), ("all_to_all", 1.0)):
        usual, scaled = (price(w, "n2.l2", "n", kind, 1e6) for w in (EMULATED, slow))
        assert scaled.seconds == pytest.approx(factor * usual.seconds)
        assert scaled.bytes == usual.bytes


# -- ways ------------------------------------------------------------------------------------------
def test_two_levels_where_they_win() -> None:
    """16 nodes of 8, rings only: through two levels a small gather takes fewer steps, a large one
    is bound by the cards and goes round.
    """
    world = World.preset("dgx-h100", 128)
    small, large = (price(world, "x128", "x", "all_gather", count) for count in (1e4, 1e12))
    assert small.algorithm.name == "two-level" and large.algorithm.name == "ring"
    assert small.seconds < 1e-4 < world.launch_s + 127 * 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_the_algorithms_are_in_order_and_none_is_idle(kind: str) -> None:
    by_start = algorithms(World.preset("dgx-h100", 1024), kind, ((1024, 1),))
    for quicker, other in itertools.pairwise(by_start):
        assert quicker.start_s < other.start_s and quicker.s_per_byte > other.s_per_byte
    meets = [
        (b.start_s - a.start_s) / (a.s_per_byte - b.s_per_byte)
        for a, b in itertools.pairwise(by_start)
    ]
    assert meets == sorted(meets)


# -- paths -----------------------------------------------------------------------------------------
def test_costs_of_a_path_know_their_axes() -> None:
    mesh = Mesh.parse("n2.l2")
    source, target = (Layout(mesh, (64, 32), states) for states in ((P, S(0, 32)), (R, R)))
    path = reshard_steps(source, target)
    prices = list(costs(path, Element(4, 4), EMULATED))
    assert [(c.kind, c.axes, c.backward) for c in prices] == [
        ("all_reduce", ("n",), False),
        ("all_reduce", ("n",), True),
        ("all_gather", ("l",), False),
        ("reduce_scatter", ("l",), True),
    ]
    assert prices[0].seconds == price(EMULATED, "n2.l2", "n", "all_reduce", 32 * 32 * 4).seconds
    assert [c.algorithm for c in prices] == ["ring", "ring", "ring", "exchange"]
    assert path_seconds(path, Element(4, 4), EMULATED) > sum(c.seconds for c in prices)


def test_a_joint_sum_is_one_group() -> None:
    mesh = Mesh.parse("n2.l2")
    whole = Layout(mesh, (64,), (I, I))
    (price_of_sum,) = costs(
        reshard_steps(whole, Layout(mesh, (64,), (R, R))), Element(4, 4), EMULATED
    )
    assert price_of_sum.axes == ("n", "l") and price_of_sum.backward
    assert price_of_sum.seconds == price(EMULATED, "x4", "x", "all_reduce", 256).seconds


def test_collectives_inside_an_op() -> None:
    mesh = Mesh.parse("n2.l2")
    part = Part(0, Layout(mesh, (100, 8), (I, I)), (0,))
    (price_inside,) = inner_costs([moving("all_reduce", part, ("l",), True)], mesh, EMULATED)
    assert price_inside.seconds == price(EMULATED, "n2.l2", "l", "all_reduce", 400).seconds


def test_a_lookup_is_fast() -> None:
    world, mesh = World.preset("dgx-h100", 16384), Mesh.parse("data512.z4.x4.y2")
    traffic = Traffic("all_reduce", MIB)
    collective_cost(traffic, ("data", "z"), mesh, 2, world)
    started = time.process_time()
    for _ in range(20_000):
        collective_cost(traffic, ("data", "z"), mesh, 2, world)
    assert time.process_time() - started < 1
