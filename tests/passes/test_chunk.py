"""chunk: products and their collectives in pieces: on derived graphs by name, in their numbers, and
where one piece is the answer.
"""

from __future__ import annotations

import copy
import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

import autopar
import models
from autopar import _compat
from autopar.cost.simulator.graph_events import (
    Phase,
    collective_of,
    flops,
    graph_seconds,
    group_of,
    is_wait,
)
from autopar.ir.graph import copy_graph
from autopar.ir.mesh import group_ranks
from autopar.passes.overlap import DerivedGraph, chunk, facts_of
from autopar.passes.overlap.chunk import chunk_units_of
from autopar.passes.overlap.chunk_units import units
from autopar.runtime.backends import Scheduled
from derived import MATMULS, called, derived_from, graph_of, passed
from launch import launched
from training_facts import LIMIT

aten, functional = torch.ops.aten, torch.ops._c10d_functional
RANKS = 4
WORLD = autopar.World.of(RANKS)
CORE = autopar.Device("core", {"float32": 1e12}, 80e9, 1e11)
# Products and sums of the small GPT take about as long as one another.
SLOW = autopar.World(
    (autopar.Level(RANKS, 5e7, 1e-6),),
    autopar.Device("slow", {"float32": 1e9}, 8e9, 1e10),
    backend="nccl",
)
PHASES: tuple[Phase, ...] = ("forward", "backward")
LAYOUTS = {
    "megatron": "megatron",
    "megatron-sp": "megatron-sp",
    "atp": autopar.Grid2D(2, 2),
    "4d": autopar.Grid4D(x=2, z=2),
    "3d": autopar.Grid3D(2, 2, 1),
}


# Deriving the graphs of one takes seconds.
CASES = [
    pytest.param(name, marks=[pytest.mark.slow] if name in ("atp", "3d") else [])
    for name in LAYOUTS
]


@functools.cache
def derived(layout: str, gloo: bool = True) -> Scheduled:
    """The graphs of a GPT of one layer, as AOTAutograd leaves them. On gloo a reduce-scatter is an
    all-to-all.
    """
    model, args = models.GptWithLogits(layers=1), models.gpt()[1]
    return derived_from(
        autopar.plan(model, WORLD, args, LAYOUTS[layout], smaller=False, outputs="sharded"), gloo
    )


def chunked(
    graph: fx.Graph,
    phase: Phase,
    world: autopar.World = WORLD,
    pieces: int | None = None,
    stored: frozenset[str] = frozenset(),
) -> fx.Graph:
    """The graph with products in pieces; the pass's contract is checked."""
    before, derived = facts_of(graph), DerivedGraph(graph, phase, stored)
    rewritten = chunk.chunk(derived, world, pieces)
    chunk.check(before, rewritten)
    return rewritten.graph


# -- a wire for derived graphs: every rank of the group at once ------------------------------------
def ran(graph: fx.Graph, inputs: list[list[Any]]) -> list[Any]:
    """What the graph gives on every rank, node by node."""
    envs: list[dict[fx.Node, Any]] = [{} for _ in inputs]
    places = iter(range(len(inputs[0])))
    for node in graph.nodes:
        if node.op == "placeholder":
            place = next(places)
            for env, values in zip(envs, inputs, strict=True):
                env[node] = values[place]
        elif node.op == "output":
            return [fx.node.map_arg(node.args[0], env.__getitem__) for env in envs]
        elif collective_of(node) is not None:
            sent = [fx.node.map_arg(node.args, env.__getitem__) for env in envs]
            for rank, env in enumerate(envs):
                env[node] = received(node, sent, rank)
        else:
            for env in envs:
                args, more = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = args[0] if is_wait(node) else node.target(*args, **more)
    raise AssertionError("no output")


def received(node: fx.Node, sent: list[Any], rank: int) -> Any:
    """What one rank gets of what all sent."""
    name, ranks = str(collective_of(node)), group_ranks(group_of(node), rank)
    if isinstance(sent[0][0], list):
        single = [[(values, *args[1:]) for values in args[0]] for args in sent]
        pieces = zip(*single, strict=True)
        return [
            received_part(name.removesuffix("_coalesced"), list(p), ranks, rank) for p in pieces
        ]
    return received_part(name, sent, ranks, rank)


def received_part(name: str, sent: list[Any], ranks: Any, rank: int) -> Any:
    values = [sent[other][0] for other in ranks]
    place = list(ranks).index(rank)
    if name == "all_reduce":
        stacked = torch.stack(values)
        return stacked.amax(0) if sent[0][1] == "max" else stacked.sum(0)
    if name == "all_gather_into_tensor":
        return torch.cat(values)
    if name == "reduce_scatter_tensor":
        return torch.stack(values).sum(0).chunk(len(values))[place]
    assert name == "all_to_all_single", name
    return torch.stack([value[place] for value in values])


def inputs(graph: fx.Graph) -> list[list[Any]]:
    """Some numbers for every rank's placeholders; the coordinates are their own."""
    arguments = []
    for rank in range(RANKS):
        torch.manual_seed(rank)
        values: list[Any] = []
        for node in graph.find_nodes(op="placeholder"):
            like = node.meta["val"]
            if like.is_floating_point():
                value = torch.randn(like.shape, dtype=torch.float64)
                values.append(torch.empty_strided(like.shape, like.stride(), dtype=torch.float64))
                values[-1].copy_(value)
            else:
                values.append(torch.zeros(like.shape, dtype=like.dtype))
        arguments.append(values)
    return arguments


def widened(graph: fx.Graph) -> fx.Graph:
    """The graph for numbers in float64."""
    wide = copy_graph(graph)
    for node in wide.nodes:
        if node.kwargs.get("dtype") is torch.float32:
            node.kwargs = {**node.kwargs, "dtype": torch.float64}
        node.args = tuple(torch.float64 if a is torch.float32 else a for a in node.args)
    return wide


def same(actual: fx.Graph, graph: fx.Graph) -> bool:
    """Whether two graphs give the same numbers, but for rounding."""
    arguments = inputs(graph)
    pairs = zip(
        ran(widened(actual), arguments), ran(widened(graph), copy.deepcopy(arguments)), strict=True
    )
    return all(
        torch.allclose(value, other, rtol=1e-10, atol=1e-10, equal_nan=True)
        for values in pairs
        for value, other in zip(*values, strict=True)
        if isinstance(value, torch.Tensor)
    )


# -- numbers ---------------------------------------------------------------------------------------
@pytest.mark.slow_cells("megatron-sp")
@pytest.mark.slow_cells("4d", "megatron")
@pytest.mark.parametrize("layout", CASES)
def test_pieces_give_the_same_numbers(layout: str) -> None:
    """Also in buckets, in the order of the schedule, and written in place."""
    run = derived(layout)
    for phase in PHASES:
        graph = graph_of(run, phase)
        rewritten = chunked(graph, phase, pieces=4, stored=run.stored)
        assert rewritten is not graph
        rewritten = ordered(rewritten, run, phase, WORLD)
        assert same(rewritten, graph)
        rewritten = copy_graph(rewritten)
        before = [node.target for node in rewritten.nodes]
        passed("reinplace", DerivedGraph(rewritten, phase))
        assert [node.target for node in rewritten.nodes] != before
        assert same(rewritten, graph)


def ordered(graph: fx.Graph, run: Scheduled, phase: Phase, world: autopar.World) -> fx.Graph:
    """In buckets, in the order of the schedule."""
    derived = DerivedGraph(graph, phase, run.stored)
    return passed("schedule", passed("bucket", derived, world), world).graph


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["megatron-sp", "3d"])
def test_reduce_scatters_are_cut_along_what_they_scatter(layout: str) -> None:
    run = derived(layout, gloo=False)
    for phase in PHASES:
        graph = graph_of(run, phase)
        rewritten = chunked(graph, phase, pieces=2, stored=run.stored)
        counts = [names(g).count("reduce_scatter_tensor") for g in (graph, rewritten)]
        assert counts[1] >= counts[0] + 2
        assert same(rewritten, graph)


def names(graph: fx.Graph) -> list[str | None]:
    return [collective_of(node) for node in graph.nodes]


CUT: dict[tuple[str, Phase], dict[str, int]] = {
    ("megatron", "forward"): {"all_reduce": 2},
    ("megatron", "backward"): {"all_reduce": 2},
    ("megatron-sp", "forward"): {"all_gather": 3, "all_to_all": 2},
    ("megatron-sp", "backward"): {"all_gather": 2, "all_to_all": 2},
    ("4d", "forward"): {"all_reduce": 3},
    ("4d", "backward"): {"all_reduce": 2},
    ("atp", "forward"): {"all_reduce": 4},
    ("atp", "backward"): {"all_reduce": 4},
    ("3d", "forward"): {"all_gather": 3, "all_to_all": 2},
    ("3d", "backward"): {"all_gather": 2, "all_to_all": 2},
}


@pytest.mark.slow_cells("4d", "megatron")
@pytest.mark.parametrize("layout", CASES)
def test_collectives_between_products_are_cut_and_no_others(layout: str) -> None:
    """Collectives between products; neither those of norms nor gradients, nor what no product of
    the backward waits for.
    """
    run = derived(layout)
    for phase in PHASES:
        graph = graph_of(run, phase)
        before = names(graph)
        after = names(chunked(graph, phase, pieces=2, stored=run.stored))
        more = {str(n): after.count(n) - before.count(n) for n in set(before) - {None}}
        assert {n[:10]: count for n, count in more.items() if count} == CUT[layout, phase]


# -- the order -------------------------------------------------------------------------------------
def behind(node: Any, targets: frozenset[Any]) -> fx.Node | None:
    """The nearest node above this one, along first operands, that is one of these."""
    while isinstance(node, fx.Node) and node.target not in targets:
        node = node.args[0] if node.args else None
    return node if isinstance(node, fx.Node) else None


def side_by_side(graph: fx.Graph, *targets: frozenset[Any]) -> list[list[tuple[fx.Node, ...]]]:
    """For every value that is put together from pieces, of every piece the nodes of these targets
    above it, the last one first.
    """
    groups = []
    for node in graph.nodes:
        if node.target is aten.cat.default:
            pieces = []
            for above in node.args[0]:
                chain = []
                for wanted in targets:
                    above = behind(above, wanted)
                    chain.append(above)
                    if above is not None:
                        left = 1 if above.target is aten.addmm.default else 0
                        above = above.args[left]
                pieces.append(tuple(chain))
            if len(set(pieces)) == len(pieces) and all(None not in piece for piece in pieces):
                groups.append(pieces)
    return groups


SUM = frozenset({functional.all_reduce.default})
GATHER = frozenset({functional.all_gather_into_tensor.default})
MATMUL = frozenset(MATMULS)


def scheduled(layout: str, phase: Phase, pieces: int | None) -> fx.Graph:
    run = derived(layout)
    rewritten = chunked(graph_of(run, phase), phase, SLOW, pieces, run.stored)
    return ordered(rewritten, run, phase, SLOW)


@pytest.mark.slow_cells("forward")
@pytest.mark.parametrize("phase", PHASES)
def test_a_piece_is_summed_under_the_matmul_of_the_next(phase: Phase) -> None:
    graph = scheduled("megatron", phase, pieces=4)
    place = {node: number for number, node in enumerate(graph.nodes)}
    cut = side_by_side(graph, SUM, MATMUL)
    assert len(cut) == 2, cut
    for pairs in cut:
        assert len(pairs) == 4
        for (issued, _), (_, product) in itertools.pairwise(pairs):
            (wait,) = issued.users
            assert is_wait(wait)
            assert place[issued] < place[product] < place[wait]


def test_a_gathered_piece_is_multiplied_while_the_next_arrives() -> None:
    graph = scheduled("megatron-sp", "forward", pieces=4)
    place = {node: number for number, node in enumerate(graph.nodes)}
    cut = side_by_side(graph, MATMUL, GATHER)
    assert len(cut) == 3, cut
    for pairs in cut:
        assert all(place[gather] < place[pairs[0][0]] for _, gather in pairs)
        for (product, _), (_, gather) in itertools.pairwise(pairs):
            (wait,) = gather.users
            assert is_wait(wait)
            assert place[product] < place[wait]


def test_the_pass_chunks_by_itself_where_that_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk, "_LEAST_FLOPS", 0)
    monkeypatch.setattr(chunk, "_LEAST_SIDE", 0)
    graph = graph_of(derived("megatron"), "forward")
    assert side_by_side(scheduled("megatron", "forward", pieces=None), SUM, MATMUL)
    seconds = [
        graph_seconds(g, SLOW, frozenset(), "forward")
        for g in (chunked(graph, "forward", SLOW), graph)
    ]
    assert seconds[0] < 0.95 * seconds[1]


# -- how many --------------------------------------------------------------------------------------
def matmul_and_sum(rows: int) -> fx.Graph:
    """A product, its sum over the ranks, and another that waits for it."""
    graph = fx.Graph()
    with _compat.fake_mode():
        values = [torch.empty(rows, 1024), torch.empty(1024, 1024), torch.empty(1024, 1024)]
    x, weight, other = (graph.placeholder(name) for name in ("x", "one", "other"))
    for node, value in zip((x, weight, other), values, strict=True):
        node.meta["val"] = value
    product = called(graph, aten.mm.default, (x, weight))
    issued = called(graph, functional.all_reduce.default, (product, "sum", "autopar/x4/x"))
    done = called(graph, functional.wait_tensor.default, (issued,))
    graph.output((called(graph, aten.mm.default, (done, other)),))
    return graph


def pieces_on(rate: float, rows: int = 8192, latency: float = 1e-6, **more: Any) -> int:
    """Into how many pieces a product of 1024 x 1024 is cut over links of so many bytes/s."""
    world = autopar.World((autopar.Level(RANKS, rate, latency),), CORE, backend="nccl", **more)
    graph = matmul_and_sum(rows)
    rewritten = chunked(graph, "forward", world)
    if rewritten is graph:
        return 1
    seconds = [graph_seconds(g, world, frozenset(), "forward") for g in (rewritten, graph)]
    assert seconds[0] < seconds[1] * (1 - chunk.WORTH)
    return names(rewritten).count("all_reduce")


def test_one_piece_is_an_answer() -> None:
    assert pieces_on(3e9) > 1  # as long as the product
    assert pieces_on(1e13) == 1  # a negligible sum
    assert pieces_on(1e6) == 1  # nothing that could hide it
    assert pieces_on(3e9, rows=8) == 1  # pieces too small to be worth it
    assert pieces_on(3e9, latency=5e-3) == 1  # each collective has a price
    assert pieces_on(3e9, contention=1.0) == 1  # what hides costs as much
    assert pieces_on(3e9, latency=1e-9) >= pieces_on(3e9, latency=2e-4) > 1


def test_a_lost_collective_is_reported() -> None:
    graph = matmul_and_sum(64)
    (unit,) = units(graph, 2, set())
    rewritten = DerivedGraph(chunk_units_of(graph, [unit]), "forward")
    chunk.check(facts_of(graph), rewritten)
    (first, _) = [node for node in rewritten.graph.nodes if collective_of(node) is not None]
    (wait,) = first.users
    wait.replace_all_uses_with(first.all_input_nodes[0])
    rewritten.graph.erase_node(wait)
    rewritten.graph.erase_node(first)
    with pytest.raises(AssertionError, match="are sent, not"):
        chunk.check(facts_of(graph), rewritten)


def test_products_have_the_flops_that_torch_counts() -> None:
    graph, seen = graph_of(derived("megatron"), "backward"), 0
    for node in graph.nodes:
        if node.target in MATMULS:
            args = fx.node.map_arg(node.args, lambda node: node.meta["val"])
            count = flop_registry[node.target.overloadpacket]
            assert flops(node) == count(*args, out_val=node.meta["val"]) > 0
            seen += 1
    assert seen > 8


# -- on ranks --------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("task", ["pieces", "pieces by aot_eager", "pieces by inductor"])
def test_ranks_give_the_numbers_of_one_device(tmp_path: Path, task: str) -> None:
    facts = launched(tmp_path, RANKS, task, script="backend_ranks.py", seconds=900)[task]
    assert len(facts) == 4
    for layout, figures in facts.items():
        assert figures["loss"] < LIMIT and figures["gradients"][0] < LIMIT, (layout, figures)
        assert figures["runs"] == "Scheduled" and figures["cut"] == [True, True], (layout, figures)
