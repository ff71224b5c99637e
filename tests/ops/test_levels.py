"""Collectives in two and more levels give what those in one give, forward and backward; which
groups they go over; graphs that run the way that was priced.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
import models
from autopar.cost.algorithms import algorithms, stages
from autopar.cost.communication import collective_cost, flat_price, sent, sent_collectives
from autopar.cost.communication import hierarchies as levels_of
from autopar.ir.graph import stored_nodes
from autopar.ir.layout import Element, I, Layout, P, R, S, State
from autopar.ir.mesh import Mesh
from autopar.ir.reshard import reshard_steps
from autopar.ops import collectives as c
from autopar.ops import comm
from autopar.ops.collectives import emit_step, groups_of
from autopar.planner.request import Grid4D
from autopar.runtime import lockstep
from autopar.world import Device, Level, World
from reshards import RESHARDS, deal, own, random, same

# Links so unequal that it pays to send little across them.
DEVICE = Device("test", {"float32": 1e12}, 80e9, 1e12)
UNEQUAL = World((Level(2, 5e9, 1e-5), Level(2, 5e7, 2e-3)), DEVICE)
EIGHT = World((Level(2, 5e9, 1e-5), Level(2, 5e8, 1e-4), Level(2, 5e7, 2e-3)), DEVICE)

ROUTES: list[tuple[str, Any, Any]] = [
    ("x4", "x", 2),
    ("x12", "x", 3),
    ("x12", "x", (2, 3)),
    ("x8", "x", (2, 2)),
    ("data2.x6", "x", 2),
    ("data4.x2", "data", 2),
    ("data2.x2", ("data", "x"), 2),
    ("data2.x3.z2", ("data", "z"), 2),
    ("data2.x2.z3", ("data", "z"), 3),
    ("data2.x3.z2", ("data", "x", "z"), (2, 3)),
]


# -- routes ----------------------------------------------------------------------------------------
def test_a_route_leads_through_neighbours_first() -> None:
    assert comm.route("x", "x8.y2") == ((8, "autopar/x8.y2/x"),)
    assert comm.route("x", "x8.y2", 2) == (
        (2, "autopar/x8.y2/x/2@1"),
        (4, "autopar/x8.y2/x/4@2"),
    )
    assert [ranks for ranks, _ in comm.route(["y", "x"], "x8.y2", (2, 4))] == [2, 4, 2]
    with pytest.raises(AssertionError, match="inside of 8 ranks"):
        comm.route("x", "x8.y2", 3)


# -- numbers ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(("text", "axis", "inside"), ROUTES, ids=str)
@pytest.mark.parametrize("numbers", [1, 5, 24])
def test_sums_and_gathers_are_those_of_one_level(
    text: str, axis: Any, inside: Any, numbers: int
) -> None:
    """Numbers that the ranks inside do not divide are padded."""
    mesh = Mesh.parse(text)
    flat, deep = comm.route(axis, text), comm.route(axis, text, inside)
    ranks = comm.route_size(flat)
    assert comm.route_size(deep) == ranks and len(deep) > 1

    def on_rank(rank: int) -> list[Tensor]:
        small, large = random((numbers, 2), rank), random((ranks * numbers, 3), rank)
        return [
            result
            for sizes in (flat, deep)
            for result in (
                comm.hierarchical_all_reduce(small, sizes),
                comm.hierarchical_all_gather(small, sizes),
                comm.hierarchical_reduce_scatter(large, sizes),
            )
        ]

    for results in lockstep.run(mesh, on_rank):
        torch.testing.assert_close(results[:3], results[3:], rtol=1e-12, atol=1e-12)
        assert torch.equal(results[1], results[4])


@pytest.mark.parametrize(("text", "axis", "inside"), ROUTES, ids=str)
@pytest.mark.parametrize("name", RESHARDS)
def test_every_change_of_state_in_levels(name: str, text: str, axis: Any, inside: Any) -> None:
    """Value and gradient, forward in one number of levels and backward in another."""
    before, after, grows, _ = RESHARDS[name]
    mesh = Mesh.parse(text)
    size = len(mesh.group(mesh.ordered(axis), 0))
    shape = (2, 3 * 2 * (size if grows == -1 else 1), 3)
    x, grown = deal(mesh, axis, shape, same(before), "x"), list(shape)
    grown[1] = int(grown[1] * float(size) ** grows)
    dy = deal(mesh, axis, grown, same(after, gradient=True), "dy")

    def run(inside: Any, backward_inside: Any) -> list[Any]:
        def on_rank(rank: int) -> tuple[Tensor, Tensor]:
            leaf = x[rank].clone().requires_grad_()
            y = called(name, leaf, own(mesh, rank, axis), axis, text, inside, backward_inside)
            y.backward(dy[rank])
            assert leaf.grad is not None
            return y.detach(), leaf.grad

        return lockstep.run(mesh, on_rank)

    expected = run((), ())
    for sizes in ((inside, inside), (inside, ()), ((), inside)):
        torch.testing.assert_close(run(*sizes), expected, rtol=1e-12, atol=1e-12)


FUNCTIONS = {
    "replicate": (c.replicate, {}),
    "slice of I": (c.take_slice, {"of": "I"}),
    "slice of R": (c.take_slice, {"of": "R"}),
    "gather to R": (c.all_gather, {}),
    "gather to I": (c.all_gather, {"to": "I"}),
    "reduce to I": (c.all_reduce, {"to": "I"}),
    "reduce to R": (c.all_reduce, {}),
    "scatter": (c.reduce_scatter, {}),
    "invariant": (c.invariant, {}),
    "part of I": (c.partial, {"of": "I"}),
    "part of R": (c.partial, {"of": "R"}),
    "place": (c.place, {}),
}


def called(
    name: str, x: Tensor, place: Tensor, axis: Any, mesh: str, inside: Any, backward_inside: Any
) -> Tensor:
    """The change with those of these arguments that it takes."""
    function, kwargs = FUNCTIONS[name]
    every = {"coordinate": place, "axis": axis, "dim": 1, "mesh": mesh, "inner": 2}
    every |= {"inside": inside, "backward_inside": backward_inside}
    taken = inspect.signature(function).parameters
    return function(x, **kwargs, **{key: value for key, value in every.items() if key in taken})


# -- what is priced is what runs -------------------------------------------------------------------
@pytest.mark.parametrize(
    ("before", "after"), [(P, R), (P, I), (I, R), (S(0, 1 << 17), R), (P, S(0, 1 << 17))]
)
def test_a_step_is_emitted_as_it_is_priced(before: State, after: State) -> None:
    mesh = Mesh.parse("x4")
    source, target = (Layout(mesh, (1 << 19,), (state,)) for state in (before, after))
    (step,) = reshard_steps(source, target)
    levels = levels_of(step, Element(4, 4), UNEQUAL)
    graph = torch.fx.Graph()
    node = emit_step(graph, graph.placeholder("x"), step, graph.placeholder, levels)
    for traffic, key in zip(step.traffic(True), ("inside", "backward_inside"), strict=True):
        if traffic is None:
            assert key not in node.kwargs
            continue
        algorithm = collective_cost(traffic, ("x",), mesh, 4, UNEQUAL).algorithm
        assert (algorithm.name, algorithm.inside) == ("two-level", (2,))
        assert node.kwargs[key] == 2
    graph.output(node)
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    assert groups_of(module) >= {"autopar/x4/x/2@1", "autopar/x4/x/2@2"}


def test_three_levels_of_links_are_three_levels_of_sums() -> None:
    (step,) = reshard_steps(*(Layout(Mesh.parse("x8"), (1 << 22,), (state,)) for state in (P, R)))
    assert levels_of(step, Element(4, 4), EIGHT) == ((2, 2), (2, 2))


LAYOUTS: list[tuple[World, Any]] = [
    (UNEQUAL, "ddp"),
    (UNEQUAL, "fsdp"),
    (UNEQUAL, "megatron-sp"),
    (EIGHT, "ddp"),
    (EIGHT, "fsdp"),
    (EIGHT, Grid4D(1, 2, 2, 2)),
]


@pytest.mark.slow_cells("4-megatron-sp")
@pytest.mark.slow_cells("*-ddp", "4-fsdp", "8-Grid4D(x=1, y=2, z=2, data=2)", "8-fsdp")
@pytest.mark.parametrize(
    ("world", "layout"), LAYOUTS, ids=[f"{w.ranks}-{layout}" for w, layout in LAYOUTS]
)
def test_models_in_two_levels_are_those_of_one_device(world: World, layout: Any) -> None:
    model, args, _ = models.gpt()
    check = autopar.verify(model, world, args, layout=layout)
    assert max(check.loss_error, check.grad_error, check.step_error) < 1e-9


def test_what_is_looked_up_for_positions_is_stored() -> None:
    """Positions hang on nothing, so what an embedding gives for them hangs on its weight alone, and
    its gradient may go with those of the weights.
    """
    model, args, _ = models.gpt()
    program = autopar.plan(model, UNEQUAL, args, layout="ddp").context.program
    late = [move for move in sent_collectives(program) if move.backward]
    looked_up = [m for m in late if m.node.all_input_nodes[0].name.startswith("embedding")]
    assert looked_up and all(move.node in stored_nodes(program) for move in looked_up)


def test_what_may_be_joined_goes_in_the_same_levels() -> None:
    """A bias alone is summed the fastest in one level, the weights in three: in one bucket they go
    as the weights do, in the graph and in the modelled step.
    """
    world = World.preset("pcie-4090", 16)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 256))
    plan = autopar.plan(model, world, (torch.randn(32, 512),), layout="ddp")
    sums = [move for move in sent_collectives(plan.context.program) if move.backward]
    alone = {
        collective_cost(m.traffic, m.axes, plan.mesh, m.element_bytes, world).algorithm.inside
        for m in sums
    }
    assert alone == {(), (2, 4)}
    assert [move.hierarchy for move in sums] == 4 * [(2, 4)]
    events = [event for event in plan.timeline().events if event.lane]
    assert len({event.lane for event in events}) == 3  # a queue a stage
    scattered = [event for event in events if event.kind == "reduce_scatter"]
    assert sum(max(1, len(event.members)) for event in scattered) == 2 * 4  # two stages of four
    assert [len(event.members) for event in scattered] == [0, 0, 2, 2, 0, 0]  # joined, as on gloo
    assert [len(event.members) for event in events if event.kind == "all_reduce"] == [0, 2, 0]
    assert sum(event.bytes for event in events) == pytest.approx(plan.comm_bytes)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_the_stages_of_an_algorithm_take_and_send_what_it_takes_and_sends(kind: str) -> None:
    digits, whole = ((8, 1),), 1e7
    for inside in {algorithm.inside for algorithm in algorithms(EIGHT, kind, digits)} | {
        (2,),
        (4,),
        (2, 2),
    }:
        candidates = [
            algorithm for algorithm in algorithms(EIGHT, kind, digits) if algorithm.inside == inside
        ]
        each = [
            flat_price(stage.kind, stage.digits, whole / stage.parts, EIGHT)
            for stage in stages(kind, digits, inside)
        ]
        assert sum(price.bytes for price in each) == pytest.approx(sent(kind, 8) * whole)
        for algorithm in candidates:
            assert sum(price.seconds for price in each) <= algorithm.seconds(whole) * (1 + 1e-9)
    assert [(stage.digits, stage.parts) for stage in stages("all_gather", digits, (2, 2))] == [
        (((2, 4),), 4),
        (((2, 2),), 2),
        (((2, 1),), 1),
    ]


class Calls:
    """Bytes that rank 0 sends in a step on all ranks in lockstep, by group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[tuple[str, str, int]] = []
        exchange = lockstep._Run.exchange

        def recorded(run: Any, kind: str, x: Tensor, group: str) -> Tensor:
            if run._own.rank == 0:
                self.sent.append((kind, group, x.numel()))
            return exchange(run, kind, x, group)

        monkeypatch.setattr(lockstep._Run, "exchange", recorded)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_what_is_sent_is_what_was_priced(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each collective that is priced in two levels is that many calls over the inner group and one
    over the outer one, and none of its bytes go over all ranks at once.
    """
    from autopar._compat import pytree
    from autopar.runtime.verify import _Rank

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 256))
    plan = autopar.plan(model, UNEQUAL, (torch.randn(8, 512),), layout=layout)
    program = plan.context.program
    inputs = pytree.tree_leaves((torch.randn(8, 512),))
    expected: dict[str, int] = {}
    for move in sent_collectives(program):
        (axis,), kind = move.axes, move.traffic.collective
        inner = {"all_reduce": ["reduce-scatter", "all-gather"]}.get(kind, [kind.replace("_", "-")])
        across = "all-reduce sum" if kind == "all_reduce" else kind.replace("_", "-")
        assert move.hierarchy in ((), (2,))
        calls = [f"{across} {axis}"]
        if move.hierarchy:
            calls = [f"{across} {axis}/2@2", *(f"{kind} {axis}/2@1" for kind in inner)]
        for call in calls:
            expected[call] = expected.get(call, 0) + 1

    calls = Calls(monkeypatch)

    def step(rank: int) -> None:
        own = _Rank(program, plan.mesh.coordinate(rank), inputs)
        outputs = program.module(*(own.feed(entry) for entry in program.signature.inputs))
        own._backward(list(outputs))

    lockstep.run(plan.mesh, step)
    counts: dict[str, int] = {}
    for kind, group, _ in calls.sent:
        call = f"{kind} {group.partition(f'{plan.mesh}/')[2]}"
        counts[call] = counts.get(call, 0) + 1
    assert counts == expected
    assert any("2@2" in call for call in counts)
