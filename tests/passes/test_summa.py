"""The panels of SUMMA in derived graphs: sent once, and together; the same numbers, the same words,
no more memory than the plan says.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch import fx

import autopar
import models
from autopar import _compat
from autopar.cost.simulator.graph_events import collective_of, graph_events, is_wait
from autopar.ir.graph import sort
from autopar.passes import OPTIONS
from autopar.passes.overlap import DerivedGraph, Freedom, bucket, summa_fusion
from autopar.runtime.backends import Scheduled
from derived import called, placed, ran, value_of

aten, functional = torch.ops.aten, torch.ops._c10d_functional
GROUP, WORLD = "autopar/x2/x", autopar.World.of(4)


def scheduled(passes: tuple[str, ...] = OPTIONS) -> Scheduled:
    """The graphs of two layers on 2 × 2, held to the memory that the plan says."""
    model, args, _ = models.gpt()
    world = autopar.World.of(4)
    plan = autopar.plan(model, world, args, layout="2.5d")
    program = plan.context.program
    assert plan.memory is not None
    run = Scheduled(dataclasses.replace(program, plan=plan), world, passes)
    with _compat.fake_mode():
        run.derived([value_of(entry, program) for entry in program.signature.inputs])
    return run


def counts(run: Scheduled) -> tuple[Counter[str], float]:
    """Collectives and waits of both graphs by name, and the bytes that a rank sends."""
    counter: Counter[str] = Counter()
    sent = 0.0
    for module, phase in ((run.forward, "forward"), (run.backward, "backward")):
        assert module is not None
        for node in module.graph.nodes:
            counter[collective_of(node) or ("wait" if is_wait(node) else "")] += 1
        events = graph_events(module.graph, run.world, run.stored, phase).events  # type: ignore[arg-type]
        sent += sum(event.bytes for event in events)
    return counter, sent


@pytest.mark.slow
def test_panels_of_two_layers_go_together() -> None:
    """Two panels of a block from two roots are one gather, the two parts of a gradient one scatter:
    each of the 96 broadcasts and reduces pays a start and a wait, and on 2 × 2 it is held as long.
    """
    together, sent = counts(scheduled())
    apart, sent_apart = counts(scheduled(("schedule",)))
    assert apart["broadcast"] == 64 and apart["reduce"] == 32
    assert together["broadcast"] == together["reduce"] == 0
    assert together["wait"] <= apart["wait"] / 2
    starts = [sum(n for k, n in c.items() if k not in ("", "wait")) for c in (together, apart)]
    assert starts[0] <= starts[1] / 2
    assert sent <= sent_apart * (1 + 1e-9)


# -- by hand ---------------------------------------------------------------------------------------
def waited(graph: fx.Graph, target: Any, arguments: tuple[Any, ...]) -> fx.Node:
    return called(graph, functional.wait_tensor.default, (called(graph, target, arguments),))


def broadcasts() -> fx.Graph:
    """Two products of one x, each with panels of its own: x as two rows, by two views."""
    graph = fx.Graph()
    (x,) = placed(graph, [(6,)])
    results = []
    for _ in range(2):
        for root in range(2):
            rows = called(graph, aten.view.default, (x, [2, 3]))
            panel = waited(graph, functional.broadcast.default, (rows, root, GROUP))
            results.append(called(graph, aten.neg.default, (panel,)))
    graph.output(tuple(results))
    return graph


def reduces(ranks: int = 2) -> fx.Graph:
    """The gradient of a weight: a rank keeps the sum of the parts that is for its own place."""
    graph = fx.Graph()
    place, *parts = placed(graph, [(1,), *[(2, 3)] * ranks])
    group = f"autopar/x{ranks}/x"
    own = None
    for root, part in enumerate(parts):
        with _compat.fake_mode():
            total = waited(graph, torch.ops.autopar.reduce.default, (part, root, group))
        mine = called(graph, aten.eq.Scalar, (place, root)) if root else None
        own = total if mine is None else called(graph, aten.where.self, (mine, total, own))
    graph.output((called(graph, aten.neg.default, (own,)),))
    return graph


def forms(graph: fx.Graph, most: float = float("inf")) -> list[fx.Graph]:
    freedom = Freedom(bucket_bytes=most)
    derived = DerivedGraph(graph, "backward", frozenset({"x0"}), freedom=freedom)
    choices = list(summa_fusion.panel_choices(derived, WORLD))
    for form in choices:
        form.lint()
    return choices


def sent(graph: fx.Graph) -> list[str]:
    return [str(collective_of(n)) for n in graph.nodes if collective_of(n) is not None]


def test_the_same_panel_goes_once() -> None:
    once, whole = forms(broadcasts())
    assert sent(once) == ["broadcast"] * 2
    assert sent(whole) == ["all_gather_into_tensor"]
    x = torch.randn(6)
    stand_ins = {
        "broadcast": lambda x, root, _: x + 10 * root,
        "all_gather_into_tensor": lambda x, *_: torch.cat([x, x + 10]),
        "wait_tensor": lambda x: x,
    }
    wanted = [-(x.view(2, 3) + 10 * root) for root in range(2)] * 2
    for form in (once, whole):
        for value, expected in zip(ran(form, stand_ins, [x]), wanted, strict=True):
            assert torch.equal(value, expected)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_parts_of_a_gradient_go_as_one(monkeypatch: pytest.MonkeyPatch, on_cpu: bool) -> None:
    monkeypatch.setattr(summa_fusion, "on_cpu", lambda node: on_cpu)
    (graph,) = forms(reduces())
    assert sent(graph) == ["all_to_all_single" if on_cpu else "reduce_scatter_tensor"]
    assert not any(node.target in (aten.where.self, aten.eq.Scalar) for node in graph.nodes)
    mine, theirs = torch.randn(2, 2, 3), torch.randn(2, 2, 3)  # of two roots
    stand_ins = {
        "all_to_all_single": lambda x, *_: torch.stack([x[1], theirs[1]]),
        "reduce_scatter_tensor": lambda x, *_: x[2:] + theirs[1],
        "wait_tensor": lambda x: x,
    }
    (own,) = ran(graph, stand_ins, [torch.tensor([1]), *mine])
    assert torch.equal(own, -(mine[1] + theirs[1]))


def test_more_than_two_panels_go_together_only_where_there_is_room() -> None:
    most = 3 * 6 * 4
    assert not forms(reduces(3), most - 1)
    assert len(forms(reduces(3), most)) == 1


def test_panels_from_one_root_are_joined() -> None:
    graph, shapes, results = fx.Graph(), ((2, 3), (4,)), []
    for x in placed(graph, shapes):
        results.append(waited(graph, functional.broadcast.default, (x, 1, GROUP)))
    graph.output(tuple(results))
    members = [node for node in graph.nodes if collective_of(node) == "broadcast"]
    assert all(bucket.can_fuse(node) for node in members)
    with _compat.fake_mode():
        bucket.fuse(graph, members)
    assert sort(graph)
    (node,) = [n for n in graph.nodes if collective_of(n)]
    assert node.meta["val"].shape == (10,) and node.args[1:] == (1, GROUP)
    values = [torch.randn(shape) for shape in shapes]
    stand_ins = {"broadcast": lambda x, *_: x + 1, "wait_tensor": lambda x: x}
    for value, x in zip(ran(graph, stand_ins, values), values, strict=True):
        assert torch.equal(value, x + 1)
