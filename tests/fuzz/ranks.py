"""A case on real gloo ranks: every rank is in this process's place, four of them at once."""

from __future__ import annotations

import copy
import datetime
import operator
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import autopar
from autopar.runtime.training.call_graphs import CallGraphs
from autopar.runtime.training.step_graph import Bound, StepGraph
from on_ranks import unsharded

from .case import Case
from .habits import Session
from .reference import Trained, agrees, differences, train
from .simulated import LOOSE, TOLERANCE, Result, described, read_layout, refused
from .source import Built, Unfit, again, build

_TIMEOUT_S = 60


def join(rank: int, ranks: int, store: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=_TIMEOUT_S),
    )


def run(case: Case, seed: int = 0) -> Result:
    """One case, on this rank of all."""
    try:
        built = build(case, seed)
    except Unfit as unfit:
        return Result("unfit", str(unfit))
    return run_built(built, case.layout, case.ranks)


def run_built(built: Built, layout: str, ranks: int) -> Result:
    torch.set_default_dtype(torch.float64)  # of this process, which does nothing else
    world = dist.get_world_size() if dist.is_initialized() else 1
    assert ranks == world, f"{ranks} ranks asked for, {world} run"
    try:
        differs = _compared(built, layout, ranks)
        kind, said = ("wrong", f"on gloo, {differs}") if differs else ("ok", "")
    except Unfit as unfit:
        kind, said = "unfit", str(unfit)
    except Exception as error:
        kind, said = "error", described(error)
        if refused(error):
            notes = "".join(getattr(error, "__notes__", ()))
            kind, said = "refused", f"{type(error).__name__}: {notes}{error}"
    return Result(kind, said, built.kinds)


def _compared(built: Built, layout: str, ranks: int) -> str:
    parsed, world = read_layout(layout, built, ranks)
    inputs = copy.deepcopy(built.inputs)
    if world is None:
        par = autopar.apply(built.model, parsed, inputs)
    else:
        par = autopar.parallelize(built.model, world, inputs, layout=parsed)
    try:
        record, masks = _trained(par, inputs, [line for _, line in built.habits])
    except Exception as error:
        error.add_note("of a call: ")  # one device took the call
        raise
    tolerance = LOOSE if built.loose else TOLERANCE

    def differ(expected: Trained) -> str:
        return differences(record, expected, tolerance, lambda name, unsharded: unsharded)

    return agrees(differ, lambda: again(built), masks, tolerance)


def _trained(
    par: Any, inputs: tuple[Any, ...], habits: list[str]
) -> tuple[Trained, list[list[int]]]:
    """As `reference.trained`, with DTensors."""
    masks: list[list[int]] = []
    called: list[StepGraph] = []
    graph_for = CallGraphs.graph_for

    def spy(graphs: CallGraphs, args: Any, kwargs: Any) -> tuple[StepGraph, Bound]:
        graph, bound = graph_for(graphs, args, kwargs)
        called.append(graph)
        return graph, bound

    def call(act: Callable[[], list[Any]]) -> list[Any]:
        called.clear()
        with mock.patch.object(CallGraphs, "graph_for", spy):
            leaves = act()
        masks.append(_seeds(par, called[-1]) if called else [])
        return leaves

    rank = dist.get_rank() if dist.is_initialized() else 0
    record = train(Session(par, inputs, rank), habits, call, unsharded)
    own = _constants(par)
    record.buffers = {
        n: b for n, b in record.buffers.items() if not n.startswith("coordinate_") and n not in own
    }
    return record, masks


def _constants(par: Any) -> set[str]:
    return {e.node for e in par._autopar.first.program.signature.inputs if e.kind == "constant"}


def _seeds(par: Any, graph: StepGraph) -> list[int]:
    """The seeds of the call that was run, in the order of its graph."""
    placeholders = graph.program.module.graph.find_nodes(op="placeholder", target="seed")
    if not placeholders:
        return []
    added = [n.args[1] for n in placeholders[0].users if len(n.args) > 1]
    return [operator.add(par._autopar.seed.value, number) for number in dict.fromkeys(added)]
