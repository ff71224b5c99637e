"""Scheduled graphs: what runs under what, by name; orders that keep what the graph says."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import autopar
import models
from autopar import _compat
from autopar.backends import Scheduled
from autopar.cost import buckets
from autopar.cost.derived import (
    carries_on,
    collective_cost,
    collective_of,
    graph_events,
    group_of,
    group_pattern,
    is_wait,
    op_seconds,
)
from autopar.graphs import ordered
from autopar.passes import bucket, schedule

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)


@functools.cache
def scheduled(layout: Any, layers: int = 2, ranks: int = 8) -> Scheduled:
    """The graphs of a GPT wide enough for its products to matter; no tensor has storage."""
    with torch.device("meta"):
        model = models.Gpt(vocabulary=4096, sequence=512, hidden=1024, heads=8, layers=layers)
        ids = torch.zeros(64, 512, dtype=torch.long)
    world = autopar.World.preset("dgx-h100", ranks)
    plan = autopar.plan(model, world, (ids, ids), layout=layout)
    program = plan.ready.program
    run = Scheduled(program, world, ("schedule",))
    with _compat.fake_mode():
        run.derived([value_of(entry, program) for entry in program.signature.inputs])
    return run


def value_of(entry: Any, program: Any) -> torch.Tensor:
    if entry.kind in ("coordinate", "seed"):
        return torch.empty((1,) if entry.kind == "coordinate" else (), dtype=torch.int64)
    shape, dtype = program.layouts[entry.node].local_shape, program.dtypes[entry.node]
    return torch.empty(shape, dtype=dtype, requires_grad=entry.trainable)


def order(module: fx.GraphModule) -> dict[fx.Node, int]:
    return {node: place for place, node in enumerate(module.graph.nodes)}


def sent(module: fx.GraphModule, name: str) -> list[tuple[fx.Node, fx.Node]]:
    """(issue, wait) of every collective of this name."""
    found = []
    for node in module.graph.nodes:
        if collective_of(node) == name:
            (wait,) = [user for user in node.users if is_wait(user)]
            found.append((node, wait))
    return found


def makes_gradient(product: fx.Node) -> bool:
    """Whether this is a product for dW: one side is the sum over all tokens, not a row of them."""
    return product.meta["val"].shape[0] <= 4096


def products(module: fx.GraphModule) -> Iterator[fx.Node]:
    return (node for node in module.graph.nodes if node.target in PRODUCTS)


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
def test_oar_dx_is_summed_under_the_product_for_dw() -> None:
    run = scheduled(autopar.Grid4D(x=2, y=4))
    assert run.backward is not None
    sums = [pair for pair in sent(run.backward, "all_reduce") if pair[0].meta["val"].shape[0] == 64]
    assert len(sums) > 4 * 2
    under = [
        [n for n in between(run.backward, pair) if n.target in PRODUCTS and makes_gradient(n)]
        for pair in sums
    ]
    assert sum(bool(found) for found in under) > len(sums) / 2, under
    assert sum(covered(run, run.backward, pair) for pair in sums) > 0.8 * len(sums)


def test_ors_reduce_scatters_of_dw_are_waited_for_at_the_end() -> None:
    run = scheduled("fsdp")
    assert run.backward is not None
    place = order(run.backward)
    last = max(place[node] for node in products(run.backward))
    scatters = sent(run.backward, "reduce_scatter_tensor")
    assert len(scatters) > 2 * 12
    assert all(place[wait] > last for _, wait in scatters)
    assert sum(place[issue] < last for issue, _ in scatters) > 2 / 3 * len(scatters)


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
        schedule.schedule(graph, slower, run.stored, "forward")
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


def test_gathers_are_not_all_issued_at_once() -> None:
    run = scheduled("fsdp", layers=4)
    assert run.forward is not None
    place = order(run.forward)
    first = min(place[node] for node in products(run.forward))
    issued = [place[issue] for issue, _ in sent(run.forward, "all_gather_into_tensor")]
    assert sum(at < first for at in issued) < len(issued) / 3


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


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_scheduling_pays_and_repeats_itself(layout: Any) -> None:
    run = scheduled(layout)
    assert run.forward is not None and run.backward is not None
    for phase, module in (("forward", run.forward), ("backward", run.backward)):
        listed = graph_events(module.graph, run.world, run.stored, phase)  # type: ignore[arg-type]
        alone = sum(event.seconds for event in listed.events)
        assert run.modelled[phase].seconds <= alone * (1 + 1e-9)
        before = [node.name for node in module.graph.nodes]
        schedule.schedule(module.graph, run.world, run.stored, phase)  # type: ignore[arg-type]
        again = [node.name for node in module.graph.nodes]
        assert sorted(again) == sorted(before)
        module.graph.lint()


def test_groups_of_parts_and_lanes_have_the_pattern_of_their_ranks() -> None:
    assert group_pattern("autopar/data4.x2/data") == ((4, 2),)
    assert group_pattern("autopar/data4.x2/data/2@1") == ((2, 2),)
    assert group_pattern("autopar/data4.x2/data/2@2/lane1") == ((2, 4),)
    assert group_pattern("autopar/data2.x2.y2/data.x") == ((4, 2),)
    assert group_pattern("autopar/data2.x2.y2/data.y") == ((2, 4), (2, 1))


# -- contracts -------------------------------------------------------------------------------------
def test_a_lost_node_and_a_missing_wait_are_reported() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    done = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "g"))
    used = graph.call_function(aten.neg.default, (done,))
    graph.output(used)
    with pytest.raises(AssertionError, match="nothing waits for all_reduce"):
        schedule.check(graph, list(graph.nodes))
    with pytest.raises(AssertionError, match="nodes were lost"):
        schedule.check(graph, list(graph.nodes)[:-1])


def test_the_order_names_group_kind_and_shape() -> None:
    run = scheduled("ddp")
    assert run.backward is not None
    lines = schedule.collectives_in_order(run.backward.graph)
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


# -- buckets ---------------------------------------------------------------------------------------
def derived(layout: Any, world: autopar.World, passes: tuple[str, ...]) -> Scheduled:
    """The graphs of the small GPT: on slow links the start of every collective counts."""
    model, args, _ = models.gpt()
    program = autopar.plan(model, world, args, layout=layout).ready.program
    run = Scheduled(program, world, passes)
    with _compat.fake_mode():
        run.derived([value_of(entry, program) for entry in program.signature.inputs])
    return run


@pytest.mark.parametrize(("layout", "phase"), [("ddp", "backward"), ("fsdp", "forward")])
def test_small_collectives_are_joined(layout: str, phase: str) -> None:
    world = autopar.World.of(4)
    apart = derived(layout, world, ("schedule",))
    joined = derived(layout, world, ("bucket", "schedule"))
    one, other = getattr(apart, phase), getattr(joined, phase)
    counts = [sum(collective_of(n) is not None for n in m.graph.nodes) for m in (one, other)]
    assert counts[1] < counts[0] / 3
    names = {collective_of(n) for n in other.graph.nodes} - {None}
    assert not any("coalesced" in name for name in names)  # on a CPU they go as one tensor
    moved = [
        sum(e.bytes for e in graph_events(m.graph, world, apart.stored, "forward").events)
        for m in (one, other)
    ]
    assert moved[0] == pytest.approx(moved[1])
    assert joined.modelled[phase].seconds < apart.modelled[phase].seconds


def test_large_ones_are_not_joined_where_that_costs_overlap() -> None:
    run = scheduled("ddp")
    assert run.backward is not None
    found = bucket.bucket(run.backward.graph, run.world, run.stored, "backward")
    sums = [n for n in found.nodes if collective_of(n)]
    large = [
        n for n in sums if collective_of(n) == "all_reduce" and n.meta["val"].numel() >= 1 << 20
    ]
    assert len(large) >= 7


def test_all_to_alls_are_joined_as_one_tensor() -> None:
    """Gloo's reduce-scatters: two all-to-alls that are summed, and one whose parts are used."""
    graph, mode = fx.Graph(), _compat.fake_mode()
    with mode:
        values = [torch.empty(2, n) for n in (3, 5, 7)]
    results = []
    for place, value in enumerate(values):
        x = graph.placeholder(f"x{place}")
        x.meta["val"] = value
        arguments = (x, [1, 1], [1, 1], "autopar/x2/x")
        sent = called(graph, torch.ops._c10d_functional.all_to_all_single.default, arguments)
        done = called(graph, torch.ops._c10d_functional.wait_tensor.default, (sent,))
        last = aten.sum.dim_IntList if place < 2 else aten.neg.default
        results.append(called(graph, last, (done, [0]) if place < 2 else (done,)))
    graph.output(tuple(results))
    world = autopar.World.of(2)
    listed = graph_events(graph, world, frozenset(), "backward")
    (several,) = bucket.choices(listed, buckets.SIZES)
    found = bucket.joined(graph, several)
    assert found is not None
    found.lint()
    sent_now = [n for n in found.nodes if collective_of(n)]
    assert sorted(tuple(n.meta["val"].shape) for n in sent_now) == [(2, 7), (2, 8)]
    identity = {"all_to_all_single": lambda x, *_: x.clone(), "wait_tensor": lambda x: x}
    for node in found.nodes:
        name = str(node.target).split(".")[1] if "c10d" in str(node.target) else ""
        node.target = identity.get(name, node.target)
    given = [torch.randn(2, n) for n in (3, 5, 7)]
    ran = fx.GraphModule(torch.nn.Module(), found)(*given)
    assert torch.equal(ran[0], given[0].sum(0)) and torch.equal(ran[1], given[1].sum(0))
    assert torch.equal(ran[2], -given[2])


def test_gathers_are_joined_as_one_tensor() -> None:
    """On a CPU, where gloo's coalesced form corrupts memory: each part as if it went alone."""
    graph, mode, shapes = fx.Graph(), _compat.fake_mode(), ((3, 2), (1, 4), (2,))
    with mode:
        values = [torch.empty(shape) for shape in shapes]
    results = []
    for place, value in enumerate(values):
        x = graph.placeholder(f"x{place}")
        x.meta["val"] = value
        arguments = (x, 2, "autopar/x2/x")
        sent = called(graph, torch.ops._c10d_functional.all_gather_into_tensor.default, arguments)
        done = called(graph, torch.ops._c10d_functional.wait_tensor.default, (sent,))
        results.append(called(graph, aten.neg.default, (done,)))
    graph.output(tuple(results))
    stored = frozenset(f"x{place}" for place in range(3))
    listed = graph_events(graph, autopar.World.of(2), stored, "forward")
    (several,) = bucket.choices(listed, buckets.SIZES)
    found = bucket.joined(graph, several)
    assert found is not None
    found.lint()
    (sent,) = [n for n in found.nodes if collective_of(n)]
    assert tuple(sent.meta["val"].shape) == (2 * 12,)
    from_both = {
        "all_gather_into_tensor": lambda x, *_: torch.cat([x, x + 10]),
        "wait_tensor": lambda x: x,
    }
    for node in found.nodes:
        name = str(node.target).split(".")[1] if "c10d" in str(node.target) else ""
        node.target = from_both.get(name, node.target)
    given = [torch.randn(shape) for shape in shapes]
    ran = fx.GraphModule(torch.nn.Module(), found)(*given)
    for y, x in zip(ran, given, strict=True):
        assert torch.equal(y, -torch.cat([x, x + 10])) and y.is_contiguous()


def test_a_bucket_stays_one_from_the_first_level_of_a_sum_to_the_last() -> None:
    """Scatter, sum, gather of two gradients, run for the two ranks of a node at once: one copy, and
    views of what arrives.
    """
    graph, mode, shapes = fx.Graph(), _compat.fake_mode(), ((4, 3), (6,))
    with mode:
        values = [torch.empty(shape) for shape in shapes]
    results = []
    for place, value in enumerate(values):
        x = graph.placeholder(f"x{place}")
        x.meta["val"] = value
        rows = called(graph, aten.view.default, (x, [2, -1]))
        arguments = (rows, [1, 1], [1, 1], "autopar/x4/x/2@1")
        own = called(
            graph, aten.sum.dim_IntList, (arrived(graph, "all_to_all_single", arguments), [0])
        )
        whole = arrived(graph, "all_reduce", (own, "sum", "autopar/x4/x/2@2"))
        all_ = arrived(graph, "all_gather_into_tensor", (whole, 2, "autopar/x4/x/2@1"))
        results.append(called(graph, aten.view.default, (all_, list(value.shape))))
    graph.output(tuple(results))
    listed = graph_events(graph, autopar.World.of(4), frozenset(), "backward")
    (several,) = bucket.choices(listed, buckets.SIZES)
    found = bucket.joined(graph, several)
    assert found is not None
    found.lint()
    made = [str(node.target) for node in found.nodes if node.op == "call_function"]
    assert sum("c10d" in name and "wait" not in name for name in made) == 3
    assert sum("cat" in name or "clone" in name for name in made) == 1
    given = [[torch.randn(shape) for shape in shapes] for _ in range(2)]
    for ran in both(found, given):
        for part, ours, theirs in zip(ran, *given, strict=True):
            assert torch.equal(part, 2 * (ours + theirs)) and part.is_contiguous()


def arrived(graph: fx.Graph, kind: str, arguments: tuple[Any, ...]) -> fx.Node:
    target = getattr(torch.ops._c10d_functional, kind).default
    sent = called(graph, target, arguments)
    return called(graph, torch.ops._c10d_functional.wait_tensor.default, (sent,))


def both(graph: fx.Graph, given: list[list[Tensor]]) -> list[Any]:
    """What the graph gives on both ranks of a node, node by node; the other node has the same."""
    known: list[dict[fx.Node, Any]] = [{}, {}]
    inputs = [iter(tensors) for tensors in given]
    for node in graph.nodes:
        if node.op == "placeholder":
            for values, left in zip(known, inputs, strict=True):
                values[node] = next(left)
            continue
        args = [fx.node.map_arg(node.args, values.__getitem__) for values in known]
        kind = collective_of(node)
        sent = [one[0] for one in args]
        if kind == "all_to_all_single":
            results = [torch.stack([x[rank] for x in sent]) for rank in range(2)]
        elif kind == "all_reduce":
            results = [2 * x for x in sent]
        elif kind == "all_gather_into_tensor":
            results = [torch.cat(sent)] * 2
        elif node.op == "output" or "wait" in str(node.target):
            results = sent
        else:
            results = [node.target(*one, **node.kwargs) for one in args]
        for values, result in zip(known, results, strict=True):
            values[node] = result
    return [values[graph.output_node()] for values in known]


def called(graph: fx.Graph, target: Any, arguments: tuple[Any, ...]) -> fx.Node:
    node = graph.call_function(target, arguments)
    node.meta["val"] = target(*fx.node.map_arg(arguments, lambda n: n.meta["val"]))
    return node


def test_buckets_that_wait_for_one_another_are_refused() -> None:
    """a leads to b and c to d: {a, d} and {b, c} cannot both be one."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(aten.neg.default, (x,))
    second = graph.call_function(aten.neg.default, (first,))
    graph.output(second)
    assert ordered(graph)
    first.args = (second,)
    assert not ordered(graph)
