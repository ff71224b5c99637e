"""Scheduled graphs: what runs under what, by name; orders that keep what the graph says."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx

import autopar
from autopar.cost.simulator.graph_events import (
    carries_on,
    collective_cost,
    collective_of,
    graph_events,
    group_of,
    group_pattern,
    is_wait,
    op_seconds,
)
from autopar.passes.overlap import DerivedGraph, collectives_in_order, facts_of, schedule
from autopar.runtime.backends import Scheduled
from derived import MATMULS, passed, scheduled

aten = torch.ops.aten


def order(module: fx.GraphModule) -> dict[fx.Node, int]:
    return {node: place for place, node in enumerate(module.graph.nodes)}


def sent(module: fx.GraphModule, name: str) -> list[tuple[fx.Node, fx.Node]]:
    """(issue, wait) of every collective of this name."""
    pairs = []
    for node in module.graph.nodes:
        if collective_of(node) == name:
            (wait,) = [user for user in node.users if is_wait(user)]
            pairs.append((node, wait))
    return pairs


def makes_gradient(matmul: fx.Node) -> bool:
    """Whether this is a product for dW: one side is the sum over all tokens, not a row of them."""
    return matmul.meta["val"].shape[0] <= 4096


def products(module: fx.GraphModule) -> Iterator[fx.Node]:
    return (node for node in module.graph.nodes if node.target in MATMULS)


def between(module: fx.GraphModule, pair: tuple[fx.Node, fx.Node]) -> list[fx.Node]:
    """What is computed between the issue of a collective and the wait for it."""
    place = order(module)
    issue, wait = (place[node] for node in pair)
    nodes = list(module.graph.nodes)[issue + 1 : wait]
    return [n for n in nodes if not carries_on(n) and collective_of(n) is None]


def covered(run: Scheduled, module: fx.GraphModule, pair: tuple[fx.Node, fx.Node]) -> bool:
    """Whether what is computed meanwhile takes as long as the collective."""
    meanwhile = sum(op_seconds(node, run.world) for node in between(module, pair))
    return meanwhile >= collective_cost(pair[0], run.world)[1]


# -- by name ---------------------------------------------------------------------------------------
@pytest.mark.slow
def test_oar_dx_is_summed_under_the_matmul_for_dw() -> None:
    run = scheduled(autopar.Grid4D(x=2, y=4))
    assert run.backward is not None
    sums = [pair for pair in sent(run.backward, "all_reduce") if pair[0].meta["val"].shape[0] == 64]
    assert len(sums) > 4 * 2
    under = [
        [n for n in between(run.backward, pair) if n.target in MATMULS and makes_gradient(n)]
        for pair in sums
    ]
    assert sum(bool(matmuls) for matmuls in under) > len(sums) / 2, under
    assert sum(covered(run, run.backward, pair) for pair in sums) > 0.8 * len(sums)


@pytest.mark.slow
def test_ors_reduce_scatters_of_dw_are_waited_for_at_the_end() -> None:
    run = scheduled("fsdp")
    assert run.backward is not None
    place = order(run.backward)
    last = max(place[node] for node in products(run.backward))
    scatters = sent(run.backward, "reduce_scatter_tensor")
    assert len(scatters) > 2 * 12
    assert all(place[wait] > last for _, wait in scatters)
    assert sum(place[issue] < last for issue, _ in scatters) > 2 / 3 * len(scatters)


@pytest.mark.slow
def test_oag_gathers_of_the_next_layers_are_issued_ahead() -> None:
    run = scheduled("fsdp")
    assert run.forward is not None
    place = order(run.forward)
    matrices = [
        pair
        for pair in sent(run.forward, "all_gather_into_tensor")
        if pair[0].meta["val"].numel() >= 1024 * 1024
    ]
    assert len(matrices) == 1 + 4 * 2
    assert (
        sum(covered(run, run.forward, pair) for pair in matrices) >= len(matrices) - 2
    )  # the first are needed at once
    for _, wait in matrices:  # and waited for right before what uses them
        user = next(iter(wait.users))
        assert not [n for n in products(run.forward) if place[wait] < place[n] < place[user]]


@pytest.mark.slow
def test_oag_is_as_far_ahead_as_the_link_needs() -> None:
    """Issued one product ahead where that hides a gather, several where links are slower."""
    run = scheduled("fsdp", layers=4)
    assert run.forward is not None
    distances = []
    for speed in (1.0, 0.1):
        levels = tuple(
            dataclasses.replace(level, bytes_per_s=level.bytes_per_s * speed)
            for level in run.world.levels
        )
        graph = copy.deepcopy(run.forward.graph)
        slower = dataclasses.replace(run.world, levels=levels)
        passed("schedule", DerivedGraph(graph, "forward", run.stored), slower)
        module = fx.GraphModule(run.forward, graph)
        place = order(module)
        at = [place[node] for node in products(module)]
        large = [
            (place[issue], place[wait])
            for issue, wait in sent(module, "all_gather_into_tensor")
            if issue.meta["val"].numel() >= 1024 * 1024
        ]
        distances.append([sum(issue < p < wait for p in at) for issue, wait in large[2:]])
    near, far = distances
    assert sum(near) / len(near) < 2.5, near
    assert sum(far) > 1.5 * sum(near), (near, far)
    assert max(far) > 1


@pytest.mark.slow
def test_gathers_are_not_all_issued_at_once() -> None:
    run = scheduled("fsdp", layers=4)
    assert run.forward is not None
    place = order(run.forward)
    first = min(place[node] for node in products(run.forward))
    issued = [place[issue] for issue, _ in sent(run.forward, "all_gather_into_tensor")]
    assert sum(at < first for at in issued) < len(issued) / 3


@pytest.mark.slow
def test_gradient_sums_run_under_the_rest_of_the_backward() -> None:
    run = scheduled("ddp")
    assert run.backward is not None
    place = order(run.backward)
    last = max(place[node] for node in products(run.backward))
    sums = sent(run.backward, "all_reduce")
    assert all(place[wait] > last for _, wait in sums)
    assert sum(place[issue] < last for issue, _ in sums) > 2 / 3 * len(sums)


SLOW = pytest.param("2.5d", marks=pytest.mark.slow)
LAYOUTS = ["ddp", "fsdp", "megatron", "megatron-sp", autopar.Grid4D(2, 2, 2, 1), SLOW, "auto"]


@pytest.mark.slow_cells("Grid4D*", "auto", "megatron-sp", "megatron")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_scheduling_pays_and_repeats_itself(layout: Any) -> None:
    run = scheduled(layout)
    assert run.forward is not None and run.backward is not None
    for phase, module in (("forward", run.forward), ("backward", run.backward)):
        listed = graph_events(module.graph, run.world, run.stored, phase)  # type: ignore[arg-type]
        alone = sum(event.seconds for event in listed.events)
        assert run.modelled[phase].seconds <= alone * (1 + 1e-9)
        before = [node.name for node in module.graph.nodes]
        derived = DerivedGraph(module.graph, phase, run.stored)  # type: ignore[arg-type]
        passed("schedule", derived, run.world)
        again = [node.name for node in module.graph.nodes]
        assert sorted(again) == sorted(before)
        module.graph.lint()


def test_groups_of_parts_have_the_pattern_of_their_ranks() -> None:
    assert group_pattern("autopar/data4.x2/data") == ((4, 2),)
    assert group_pattern("autopar/data4.x2/data/2@1") == ((2, 2),)
    assert group_pattern("autopar/data4.x2/data/2@2") == ((2, 4),)
    assert group_pattern("autopar/data2.x2.y2/data.x") == ((4, 2),)
    assert group_pattern("autopar/data2.x2.y2/data.y") == ((2, 4), (2, 1))


# -- contracts -------------------------------------------------------------------------------------
def test_a_lost_node_and_a_missing_wait_are_reported() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    done = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "g"))
    used = graph.call_function(aten.neg.default, (done,))
    graph.output(used)
    x.meta["val"] = torch.empty(2)
    before, after = facts_of(graph), DerivedGraph(graph, "forward")
    with pytest.raises(AssertionError, match="nothing waits for all_reduce"):
        schedule.check(before, after)
    used.args = (x,)  # nothing needs it
    schedule.check(before, after)
    with pytest.raises(AssertionError, match="nodes were lost"):
        schedule.check(before._replace(nodes=before.nodes - {done}), after)


def test_the_order_names_group_kind_and_shape() -> None:
    run = scheduled("ddp")
    assert run.backward is not None
    lines = collectives_in_order(run.backward.graph)
    assert len(lines) == len(sent(run.backward, "all_reduce"))
    assert lines[0].startswith("autopar/data8/data all_reduce (")


def test_every_collective_is_priced() -> None:
    run = scheduled("fsdp")
    assert run.forward is not None
    for node in run.forward.graph.nodes:
        if collective_of(node) is not None:
            assert group_of(node) == "autopar/data8/data"
    listed = graph_events(run.forward.graph, run.world, run.stored, "forward")
    sums = [event for event in listed.events if event.lane]
    assert all(event.seconds > 0 for event in sums)
    assert sum(event.ahead for event in sums) > 2 * 12
    assert all(op_seconds(node, run.world) > 0 for node in products(run.forward))
