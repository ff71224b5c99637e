"""Graphs as AOTAutograd derives them: of a model, and made by hand, node by node."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import autopar
import models
from autopar import _compat
from autopar.cost.simulator.graph_events import Phase
from autopar.ops import comm
from autopar.passes import OVERLAP
from autopar.passes.overlap import DerivedGraph
from autopar.passes.pass_manager import PassManager
from autopar.runtime.backends import Scheduled

aten = torch.ops.aten
MATMULS = (aten.mm.default, aten.addmm.default)
FOUR = autopar.World.of(4)


@functools.cache
def scheduled(layout: Any, layers: int = 2, ranks: int = 8) -> Scheduled:
    """The graphs of a GPT wide enough for its products to matter; no tensor has storage."""
    with torch.device("meta"):
        model = models.GptWithLogits(
            vocabulary=4096, sequence=512, hidden=1024, heads=8, layers=layers
        )
        ids = torch.zeros(64, 512, dtype=torch.long)
    world = autopar.World.preset("dgx-h100", ranks)
    plan = autopar.plan(model, world, (ids, ids), layout, outputs="sharded")
    return _run(plan, world, ("schedule",))


def derived(
    layout: Any, world: autopar.World, passes: tuple[str, ...], dropout: float = 0.0
) -> Scheduled:
    """The graphs of the small GPT: on slow links the start of every collective counts."""
    model, args, _ = models.gpt(dropout)
    plan = autopar.plan(model, world, args, layout, outputs="sharded")
    return _run(plan, world, passes)


def _run(plan: autopar.Plan, world: autopar.World, passes: tuple[str, ...]) -> Scheduled:
    """What the passes make where nothing bounds the memory; test_limit_memory.py bounds it."""
    program = plan.context.program
    free = dataclasses.replace(program.plan, memory=None)
    program = dataclasses.replace(program, plan=free)
    run = Scheduled(program, world, passes)
    with _compat.fake_mode():
        run.derived([value_of(entry, program) for entry in program.signature.inputs])
    return run


def value_of(entry: Any, program: Any) -> torch.Tensor:
    if entry.kind in ("coordinate", "seed"):
        return torch.empty((1,) if entry.kind == "coordinate" else (), dtype=torch.int64)
    shape, dtype = program.layouts[entry.node].local_shape, program.dtypes[entry.node]
    return torch.empty(shape, dtype=dtype, requires_grad=entry.trainable)


def passed(name: str, derived: DerivedGraph, world: autopar.World = FOUR) -> DerivedGraph:
    """What the pass of this name makes of a graph; its contract is checked."""
    return PassManager().run_overlap([p for p in OVERLAP if p.name == name], derived, world)


def called(graph: fx.Graph, target: Any, arguments: tuple[Any, ...]) -> fx.Node:
    node = graph.call_function(target, arguments)
    node.meta["val"] = target(*fx.node.map_arg(arguments, lambda n: n.meta["val"]))
    return node


def arrived(graph: fx.Graph, kind: str, arguments: tuple[Any, ...]) -> fx.Node:
    target = getattr(torch.ops._c10d_functional, kind).default
    sent = called(graph, target, arguments)
    return called(graph, torch.ops._c10d_functional.wait_tensor.default, (sent,))


def placed(graph: fx.Graph, shapes: Sequence[tuple[int, ...]]) -> list[fx.Node]:
    """A placeholder for a tensor of each of the shapes."""
    nodes = [graph.placeholder(f"x{place}") for place in range(len(shapes))]
    with _compat.fake_mode():
        for node, shape in zip(nodes, shapes, strict=True):
            node.meta["val"] = torch.empty(shape)
    return nodes


def ran(
    graph: fx.Graph, stand_ins: Mapping[str, Callable[..., Tensor]], inputs: Sequence[Tensor]
) -> Any:
    """What the graph gives where functions stand in for collectives; it calls them ever after."""
    for node in graph.nodes:
        name = str(node.target).split(".")[1] if "c10d" in str(node.target) else ""
        node.target = stand_ins.get(name, node.target)
    return fx.GraphModule(torch.nn.Module(), graph)(*inputs)


def derived_from(plan: autopar.Plan, gloo: bool = True) -> Scheduled:
    """The graphs of a plan."""
    run = Scheduled(plan.context.program, FOUR, (), "aot_eager")  # nothing in place
    program = plan.context.program
    with pytest.MonkeyPatch.context() as patch, _compat.fake_mode():
        patch.setattr(comm, "_reduce_scatter_is_slow", lambda *_: gloo)
        run.derived([value_of(entry, program) for entry in program.signature.inputs])
    return run


def graph_of(run: Scheduled, phase: Phase) -> fx.Graph:
    module = run.forward if phase == "forward" else run.backward
    assert module is not None
    return module.graph
