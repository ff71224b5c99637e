"""A scheduled graph that holds no more than it may."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import fx

import autopar
import models
from autopar import _compat
from autopar.cost.simulator.graph_events import bytes_of, collective_of, is_wait
from autopar.cost.simulator.liveness import StepMemory, graph_peak_bytes, saved_by
from autopar.passes.overlap import DerivedGraph
from autopar.runtime.backends import Scheduled
from autopar.tools.decoders import Gpt, Sizes
from derived import called, passed, placed, value_of

STORED: frozenset[str] = frozenset({"x0", "x1", "x2", "x3"})


def scheduled(plan: autopar.Plan) -> Scheduled:
    program = plan.context.program
    run = Scheduled(program, plan.world, ("bucket", "schedule"))
    with _compat.fake_mode():
        run.derived([value_of(entry, program) for entry in program.signature.inputs])
    return run


def peak_bytes(run: Scheduled) -> dict[str, float]:
    assert run.forward is not None and run.backward is not None
    placeholders = run.forward.graph.find_nodes(op="placeholder")
    step = StepMemory(float(sum(map(bytes_of, placeholders))), saved_by(run.forward.graph), True)
    graphs = {"forward": run.forward.graph, "backward": run.backward.graph}
    return {name: graph_peak_bytes(graph, step) for name, graph in graphs.items()}


@pytest.mark.slow_cells("gathers")
@pytest.mark.parametrize("recompute", ["none", "gathers"])
def test_a_step_holds_what_its_plan_says(recompute: str) -> None:
    """Where weights outweigh activations, a schedule without a bound would hold all gathers."""
    torch.manual_seed(0)
    model = Gpt(Sizes("gpt", layers=2, width=256, heads=4, vocabulary=256, context=16))
    tokens = torch.zeros(8, 16, dtype=torch.int64)
    plan = autopar.plan(model, 4, (tokens, tokens), "fsdp", recompute=recompute, smaller=False)
    assert plan.memory is not None
    bound = plan.memory.peak - plan.memory.optimizer
    peaks = peak_bytes(scheduled(plan))
    assert max(peaks.values()) <= 1.01 * bound
    if recompute == "none":  # they are held anyway
        return
    program = plan.context.program
    free = dataclasses.replace(plan, memory=None)
    unlimited = dataclasses.replace(plan.context, program=dataclasses.replace(program, plan=free))
    unbound = peak_bytes(scheduled(dataclasses.replace(free, context=unlimited)))
    assert unbound["backward"] > 1.1 * bound


@pytest.mark.slow
def test_where_there_is_no_room_every_collective_is_waited_for() -> None:
    """At every call, and the gradients of results beside the loss are autograd's own."""
    model, args, _ = models.gpt()
    plan = autopar.plan(model, 2, args, "ddp", smaller=False)
    assert plan.device_limit is None and plan.memory is not None
    program = plan.context.program

    def ran(limit: float) -> tuple[Scheduled, list[str]]:
        low = dataclasses.replace(plan, device_limit=limit)
        run = Scheduled(dataclasses.replace(program, plan=low), plan.world)
        with _compat.fake_mode():
            values = [value_of(entry, program) for entry in program.signature.inputs]
            results = [x for _ in range(2) for x in run(*values)]
        return run, [type(x.grad_fn).__name__ for x in results]

    with pytest.warns(UserWarning, match=r"would hold [\d.]+ MiB more than memory= allows"):
        run, backwards = ran(0.5 * plan.peak_bytes)
    assert run._run is run.module and "LateBackward" not in backwards
    run, backwards = ran(plan.peak_bytes)
    assert run._run is not run.module and "LateBackward" in backwards


# -- by hand ---------------------------------------------------------------------------------------
def gathers() -> tuple[fx.Graph, list[fx.Node]]:
    """Four gathers of 4 KB, all issued at once, each then used alone."""
    graph = fx.Graph()
    *weights, y = placed(graph, [(256,)] * 4 + [(1024,)])
    gather = torch.ops._c10d_functional.all_gather_into_tensor.default
    wait = torch.ops._c10d_functional.wait_tensor.default
    with _compat.fake_mode():
        sent = [called(graph, gather, (x, 4, "autopar/data4/data")) for x in weights]
        total = None
        for collective in sent:
            part = called(
                graph, torch.ops.aten.dot.default, (called(graph, wait, (collective,)), y)
            )
            total = (
                part if total is None else called(graph, torch.ops.aten.add.Tensor, (total, part))
            )
    graph.output(total)
    return graph, sent


@pytest.mark.parametrize(("room", "ahead"), [(4, 4), (3, 3), (2, 2), (1, 1)])
def test_as_many_gathers_ahead_as_there_is_room_for(room: int, ahead: int) -> None:
    graph, sent = gathers()
    step, size = StepMemory(0.0, {}), 4096.0
    bound = room * size + 4 * 1024 + size + 100
    limited = passed("limit_memory", DerivedGraph(graph, "forward", STORED, step, bound))
    assert limited.graph is graph and limited.room >= 0
    in_flight = most = 0
    for node in graph.nodes:
        in_flight += node in sent
        most = max(most, in_flight)
        in_flight -= is_wait(node)
    assert most == ahead
    assert [n for n in graph.nodes if collective_of(n)] == sent


@pytest.mark.parametrize("kib", range(12, 26))
def test_a_view_that_several_gathers_send_stays_before_the_first(kib: int) -> None:
    """Also where the first gather stays at its place and a later one moves ahead."""
    graph = fx.Graph()
    x, total = placed(graph, [(256,), (1024,)])
    gather = torch.ops._c10d_functional.all_gather_into_tensor.default
    wait = torch.ops._c10d_functional.wait_tensor.default
    with _compat.fake_mode():
        rows = called(graph, torch.ops.aten.view.default, (x, [16, 16]))
        sent = [called(graph, gather, (rows, 4, "autopar/data4/data")) for _ in range(4)]
        for collective in sent:
            done = called(graph, wait, (collective,))
            flat = called(graph, torch.ops.aten.view.default, (done, [1024]))
            total = called(graph, torch.ops.aten.add.Tensor, (total, flat))
    graph.output(total)
    step, bound = StepMemory(0.0, {}), 1024.0 * kib
    limited = passed("limit_memory", DerivedGraph(graph, "forward", frozenset({"x0"}), step, bound))
    assert (limited.room >= 0) == (kib >= 13)


def test_sums_are_waited_for_where_there_is_no_room() -> None:
    """Four products whose sums are scattered: an operand is free once that is waited for."""
    graph = fx.Graph()
    x, y = placed(graph, [(64, 16), (16, 64)])
    scatter = torch.ops._c10d_functional.reduce_scatter_tensor.default
    wait = torch.ops._c10d_functional.wait_tensor.default
    with _compat.fake_mode():
        products = [called(graph, torch.ops.aten.mm.default, (x, y)) for _ in range(4)]
        sent = [called(graph, scatter, (p, "sum", 4, "autopar/data4/data")) for p in products]
        waits = [called(graph, wait, (collective,)) for collective in sent]
    graph.output(tuple(waits))
    for product, collective in zip(products, sent, strict=True):  # as a schedule would have it
        product.append(collective)
    step, size = StepMemory(0.0, {}), 64 * 64 * 4.0
    assert graph_peak_bytes(graph, step) > 4 * size

    def room(bound: float) -> float:
        derived = DerivedGraph(graph, "backward", step=step, bound=bound)
        return passed("limit_memory", derived).room

    assert room(2 * size + 6 * size / 4 + 1e4) >= 0
    place = {node: number for number, node in enumerate(graph.nodes)}
    assert place[waits[0]] < place[products[3]]
    assert room(size) < 0  # less than one product with its result
    assert room(math.inf) == math.inf
