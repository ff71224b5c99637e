"""Two lanes: what can wait goes over a group of its own where the simulation says that it pays."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import fx

from autopar import _compat
from autopar.cost.simulator.engine import simulate_overlap
from autopar.cost.simulator.graph_events import collective_of, graph_events, group_of
from autopar.passes.overlap import lanes, schedule
from autopar.world import Device, Level, World
from derived import called
from launch import launched

functional, aten = torch.ops._c10d_functional, torch.ops.aten
WORLD = World((Level(2, 1e8, 1e-4),), Device("core", {"float32": 4e10}, 8e9, 1e10))
GROUP = "autopar/x2/x"


def a_sum(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """An all-reduce, waited for."""
    sent = called(graph, functional.all_reduce.default, (x, "sum", GROUP))
    return called(graph, functional.wait_tensor.default, (sent,))


def backward(gradients: int) -> fx.Graph:
    """Large sums of gradients, then a product, a small sum, and a product that takes it."""
    graph = fx.Graph()
    with _compat.fake_mode():
        large, side, one = torch.empty(1000, 1000), torch.empty(700, 700), torch.empty(700, 700)
    given = []
    for place, value in enumerate((side, one, *([large] * gradients))):
        given.append(graph.placeholder(f"x{place}"))
        given[-1].meta["val"] = value
    x, w, *held = given
    done = [a_sum(graph, value) for value in held]
    for _ in range(2):
        x = called(graph, aten.mm.default, (x, w))
        x = a_sum(graph, x)
    x = called(graph, aten.mm.default, (x, w))
    graph.output((x, *done))
    return graph


def seconds(graph: fx.Graph) -> float:
    return simulate_overlap(graph_events(graph, WORLD, frozenset(), "backward").events).seconds


def test_gradients_go_aside_where_they_hold_up_the_next_product() -> None:
    graph = backward(gradients=3)
    before, taken = seconds(graph), list(graph.nodes)
    lanes.lanes(graph, WORLD, frozenset(), "backward")
    assert seconds(graph) < before
    assert lanes.opened(graph) == {GROUP + lanes.LANE}
    groups = [group_of(node) for node in graph.nodes if collective_of(node)]
    assert groups == [GROUP + lanes.LANE] * 3 + [GROUP] * 2
    lines = schedule.collectives_in_order(graph)
    assert sum("/lane1 " in line for line in lines) == 3  # the ranks compare lanes, too
    lanes.lanes(graph, WORLD, frozenset(), "backward")
    assert [group_of(node) for node in graph.nodes if collective_of(node)] == groups
    schedule.check(graph, taken)


def test_nothing_moves_where_nothing_is_gained() -> None:
    graph = backward(gradients=0)
    lanes.lanes(graph, WORLD, frozenset(), "backward")
    assert lanes.opened(graph) == set()


def test_the_same_bits_on_real_ranks(tmp_path: Path) -> None:
    """Every candidate moved, whether it pays or not."""
    (facts,) = launched(tmp_path, 4, "lanes", script="lane_ranks.py").values()
    assert facts["groups"] == sorted(facts["groups"]) and facts["groups"]
    assert all(name.endswith("/lane1") for name in facts["groups"])
    assert all(facts["same"]), facts
