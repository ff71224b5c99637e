"""Buckets: collectives that go as one, each part as if it had gone alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

import autopar
from autopar.cost.simulator import buckets
from autopar.cost.simulator.graph_events import Phase, collective_of, graph_events
from autopar.ir.graph import sort
from autopar.passes.overlap import DerivedGraph, bucket, facts_of
from derived import arrived, called, derived, passed, placed, ran, scheduled

aten = torch.ops.aten


@pytest.mark.slow_cells("ddp-backward")
@pytest.mark.slow_cells("fsdp-forward")
@pytest.mark.parametrize(("layout", "phase"), [("ddp", "backward"), ("fsdp", "forward")])
def test_small_collectives_are_joined(layout: str, phase: str) -> None:
    world = autopar.World.of(4)
    apart = derived(layout, world, ("schedule",))
    joined = derived(layout, world, ("bucket", "schedule"))
    separate, other = getattr(apart, phase), getattr(joined, phase)
    counts = [sum(collective_of(n) is not None for n in m.graph.nodes) for m in (separate, other)]
    assert counts[1] < counts[0] / 3
    names = {collective_of(n) for n in other.graph.nodes} - {None}
    assert not any("coalesced" in name for name in names)  # on a CPU they go as one tensor
    moved = [
        sum(e.bytes for e in graph_events(m.graph, world, apart.stored, "forward").events)
        for m in (separate, other)
    ]
    assert moved[0] == pytest.approx(moved[1])
    assert joined.modelled[phase].seconds < apart.modelled[phase].seconds


@pytest.mark.slow
def test_large_ones_are_not_joined_where_that_costs_overlap() -> None:
    run = scheduled("ddp")
    assert run.backward is not None
    derived = DerivedGraph(run.backward.graph, "backward", run.stored)
    fused = passed("bucket", derived, run.world).graph
    sums = [n for n in fused.nodes if collective_of(n)]
    large = [
        n for n in sums if collective_of(n) == "all_reduce" and n.meta["val"].numel() >= 1 << 20
    ]
    assert len(large) >= 7


def test_all_to_alls_are_joined_as_one_tensor() -> None:
    """Gloo's reduce-scatters: two all-to-alls that are summed, and one whose parts are used."""
    graph, shapes, results = fx.Graph(), ((2, 3), (2, 5), (2, 7)), []
    for place, x in enumerate(placed(graph, shapes)):
        done = arrived(graph, "all_to_all_single", (x, [1, 1], [1, 1], "autopar/x2/x"))
        last = aten.sum.dim_IntList if place < 2 else aten.neg.default
        results.append(called(graph, last, (done, [0]) if place < 2 else (done,)))
    graph.output(tuple(results))
    fused = joined(graph, autopar.World.of(2), "backward")
    sent = [n for n in fused.nodes if collective_of(n)]
    assert sorted(tuple(n.meta["val"].shape) for n in sent) == [(2, 7), (2, 8)]
    values = [torch.randn(shape) for shape in shapes]
    outputs = ran(
        fused, {"all_to_all_single": lambda x, *_: x.clone(), "wait_tensor": lambda x: x}, values
    )
    for y, wanted in zip(outputs, (values[0].sum(0), values[1].sum(0), -values[2]), strict=True):
        assert torch.equal(y, wanted)


def test_gathers_are_joined_as_one_tensor() -> None:
    """On a CPU, where gloo's coalesced form corrupts memory: each part as if it went alone."""
    graph, shapes, results = fx.Graph(), ((3, 2), (1, 4), (2,)), []
    for x in placed(graph, shapes):
        done = arrived(graph, "all_gather_into_tensor", (x, 2, "autopar/x2/x"))
        results.append(called(graph, aten.neg.default, (done,)))
    graph.output(tuple(results))
    fused = joined(graph, autopar.World.of(2), "forward")
    (sent,) = [n for n in fused.nodes if collective_of(n)]
    assert tuple(sent.meta["val"].shape) == (2 * 12,)
    values = [torch.randn(shape) for shape in shapes]
    from_both = {
        "all_gather_into_tensor": lambda x, *_: torch.cat([x, x + 10]),
        "wait_tensor": lambda x: x,
    }
    for y, x in zip(ran(fused, from_both, values), values, strict=True):
        assert torch.equal(y, -torch.cat([x, x + 10])) and y.is_contiguous()


def test_a_bucket_stays_one_from_the_first_level_of_a_sum_to_the_last() -> None:
    """Scatter, sum, gather of two gradients, run for the two ranks of a node at once: one copy, and
    views of what arrives.
    """
    graph, shapes, results = fx.Graph(), ((4, 3), (6,)), []
    for x, shape in zip(placed(graph, shapes), shapes, strict=True):
        rows = called(graph, aten.view.default, (x, [2, -1]))
        arguments = (rows, [1, 1], [1, 1], "autopar/x4/x/2@1")
        rows = arrived(graph, "all_to_all_single", arguments)
        own = called(graph, aten.sum.dim_IntList, (rows, [0]))
        whole = arrived(graph, "all_reduce", (own, "sum", "autopar/x4/x/2@2"))
        gathered = arrived(graph, "all_gather_into_tensor", (whole, 2, "autopar/x4/x/2@1"))
        results.append(called(graph, aten.view.default, (gathered, list(shape))))
    graph.output(tuple(results))
    fused = joined(graph, autopar.World.of(4), "backward")
    targets = [str(node.target) for node in fused.nodes if node.op == "call_function"]
    assert sum("c10d" in name and "wait" not in name for name in targets) == 3
    assert sum("cat" in name or "clone" in name for name in targets) == 1
    gradients = [[torch.randn(shape) for shape in shapes] for _ in range(2)]
    for values in both(fused, gradients):
        for part, ours, theirs in zip(values, *gradients, strict=True):
            assert torch.equal(part, 2 * (ours + theirs)) and part.is_contiguous()


def joined(graph: fx.Graph, world: autopar.World, phase: Phase) -> fx.Graph:
    """The graph with its one choice of buckets; all that comes in is stored."""
    stored = frozenset(node.name for node in graph.find_nodes(op="placeholder"))
    listed = graph_events(graph, world, stored, phase)
    (several,) = bucket.choices(listed, buckets.SIZES)
    fused = bucket.fuse_buckets(graph, several)
    assert fused is not None
    bucket.check(facts_of(graph), DerivedGraph(fused, phase))
    return fused


def both(graph: fx.Graph, samples: list[list[Tensor]]) -> list[Any]:
    """What the graph gives on both ranks of a node, node by node; the other node has the same."""
    known: list[dict[fx.Node, Any]] = [{}, {}]
    inputs = [iter(tensors) for tensors in samples]
    for node in graph.nodes:
        if node.op == "placeholder":
            for values, left in zip(known, inputs, strict=True):
                values[node] = next(left)
            continue
        args = [fx.node.map_arg(node.args, values.__getitem__) for values in known]
        kind = collective_of(node)
        sent = [arguments[0] for arguments in args]
        if kind == "all_to_all_single":
            results = [torch.stack([x[rank] for x in sent]) for rank in range(2)]
        elif kind == "all_reduce":
            results = [2 * x for x in sent]
        elif kind == "all_gather_into_tensor":
            results = [torch.cat(sent)] * 2
        elif node.op == "output" or "wait" in str(node.target):
            results = sent
        else:
            results = [node.target(*arguments, **node.kwargs) for arguments in args]
        for values, result in zip(known, results, strict=True):
            values[node] = result
    return [values[graph.output_node()] for values in known]


def test_buckets_that_wait_for_one_another_are_refused() -> None:
    """a leads to b and c to d: {a, d} and {b, c} cannot both be one."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(aten.neg.default, (x,))
    second = graph.call_function(aten.neg.default, (first,))
    graph.output(second)
    assert sort(graph)
    first.args = (second,)
    assert not sort(graph)


class Decayed(torch.nn.Module):
    """The sum over its parameters hangs on gathers, whose buckets then wait for one another."""

    def __init__(self) -> None:
        super().__init__()
        self.m1 = torch.nn.Linear(4, 3)
        self.m2 = torch.nn.Linear(3, 8).requires_grad_(False)
        self.m3 = torch.nn.Linear(8, 12, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.m3(self.m2(self.m1(x)))
        loss = y.square().mean() + 0.1 * sum(p.square().sum() for p in self.parameters())
        return loss, loss.detach(), x.detach().mean(0)


def test_modelled_buckets_that_wait_for_one_another_are_no_step() -> None:
    plan = autopar.plan(Decayed(), 4, (torch.randn(2, 6, 4),), layout="atp", smaller=False)
    assert plan.overlapped == pytest.approx(plan.timeline().seconds)
