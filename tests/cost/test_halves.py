"""What a backward in two halves holds between them: modelled against the derived graphs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import autopar
from autopar import Stages, _compat
from autopar.cost.peak import peak_and_saved, peak_of_halves
from autopar.ir.program import Input, Program
from autopar.passes.overlap.split_backward import split
from autopar.passes.stages import Stage, cut
from autopar.runtime.backends import Scheduled
from benchmarks import models


def last_stage(model: torch.nn.Module, words: int, within: str, recompute: Any) -> Stage:
    tokens = torch.zeros(16, 64, dtype=torch.long)
    layout = Stages(2, within)
    options: Any = {"microbatches": 4, "recompute": recompute, "smaller": False}
    plan = autopar.plan(model, 4, (tokens, tokens), layout, **options)
    assert plan.context is not None
    program = dataclasses.replace(plan.context.program, plan=plan)
    return cut(program, plan.stage_starts)[1]


def value(program: Program, entry: Input) -> torch.Tensor:
    if entry.kind == "coordinate":
        return torch.empty(1, dtype=torch.int64)
    shape, dtype = program.layouts[entry.node].local_shape, program.dtypes[entry.node]
    return torch.empty(shape, dtype=dtype, requires_grad=entry.trainable)


def carried_bytes(stage: Stage) -> float:
    """The bytes of the storages that the derived backward carries from one half to the other."""
    program = stage.program
    assert program.plan is not None
    run = Scheduled(program, program.plan.world)
    entries = program.signature.inputs
    with _compat.fake_mode():
        run.derived([value(program, entry) for entry in entries])
    assert run._deferred is not None
    graph, saved = run._deferred._graph, run._step.saved
    places = {i for i, e in enumerate(entries) if e.node in stage.receives}
    by_name: dict[str, float] = {}
    for node in graph.nodes:
        if node.name not in split(graph, places).carried:
            continue
        root = node
        while root.op == "call_function" and root.target in _VIEWS:
            root = root.all_input_nodes[0]
        known = saved.get(root.name)
        name = root.name if known is None else known.producer
        by_name[name] = float(root.meta["val"].nbytes) if known is None else known.bytes
    return sum(by_name.values())


aten = torch.ops.aten
_VIEWS = {aten.view.default, aten.t.default, aten.permute.default, aten.transpose.int}


@pytest.mark.parametrize(
    ("name", "within", "recompute"),
    [
        pytest.param("gpt", "megatron", "none", marks=pytest.mark.slow),
        pytest.param("gpt", "fsdp", "full", marks=pytest.mark.slow),
        pytest.param("llama", "megatron", "full", marks=pytest.mark.slow),
        pytest.param("llama", "fsdp", "selective", marks=pytest.mark.slow),
    ],
)
def test_what_is_carried_over_is_what_derived_graphs_carry(
    name: str, within: str, recompute: str
) -> None:
    with torch.device("meta"):
        gpt, llama = models.gpt(512, 64, 64, 4, 2), models.llama(512, 64, 64, 4, 2, 176, 2)
    stage = last_stage(gpt if name == "gpt" else llama, 512, within, recompute)
    program = stage.program
    assert program.plan is not None
    halves = peak_of_halves(program, stage.receives, "adamw", program.plan.world)
    assert halves.carried == pytest.approx(carried_bytes(stage), rel=0.02)
    assert halves.carried < min(halves.first, halves.rest)
    assert halves.forward >= peak_and_saved(program, "adamw", program.plan.world).saved


def test_a_stage_that_receives_nothing_runs_its_backward_as_its_second_half() -> None:
    with torch.device("meta"):
        model = models.gpt(512, 64, 64, 4, 2)
    stage = last_stage(model, 512, "ddp", "none")
    program = stage.program
    assert program.plan is not None
    halves = peak_of_halves(program, (), "adamw", program.plan.world)
    saved = peak_and_saved(program, "adamw", program.plan.world).saved
    assert halves.first == halves.carried == saved < halves.rest
