"""Two micro-batches in one graph: what depends on stored tensors is there once, all else twice."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import autopar
import models
from autopar.cost.simulator import interleave, simulate, timeline
from autopar.cost.simulator.engine import Event
from autopar.passes.interleave import interleave_microbatches
from autopar.tools.decoders import Gpt
from autopar.tools.targets import NAMED


@pytest.mark.slow_cells("fsdp")
@pytest.mark.slow_cells("megatron")
@pytest.mark.parametrize("layout", ["megatron", "fsdp"])
def test_each_microbatch_has_its_own_nodes_and_weights_are_gathered_once(layout: str) -> None:
    model, args, _ = models.gpt()
    plan = autopar.plan(model, 4, args, layout, microbatches=2, smaller=False, outputs="sharded")
    single = plan.context.program
    both = interleave_microbatches(single)
    both.module.graph.lint()
    names = [node.name for node in both.module.graph.find_nodes(op="placeholder")]
    assert names == [entry.node for entry in both.signature.inputs]
    calls = [
        [str(n.target) for n in p.module.graph.nodes if n.op == "call_function"]
        for p in (single, both)
    ]
    assert len(both.module.graph.output_node().args[0]) == 2 * len(single.signature.outputs)
    for target in set(calls[0]):
        times = calls[1].count(target) / calls[0].count(target)
        assert 1 <= times <= 2
    assert calls[1].count("aten.linear.default") == 2 * calls[0].count("aten.linear.default")
    if layout == "fsdp":
        gathers = [sum("all_gather" in target for target in each) for each in calls]
        assert gathers[0] and gathers[1] == gathers[0]


def test_one_microbatch_computes_while_the_other_communicates() -> None:
    compute = Event("mm", "compute", 1.0, (), "forward", "")
    events = [compute]
    for number in range(4):
        sent = Event("sum", "all_reduce", 1.0, (2 * number,), "forward", "", lane="x", link=0)
        events += [sent, compute._replace(after=(2 * number + 1,))]
    alone = simulate(events).seconds
    assert alone == pytest.approx(9.0)
    assert interleave(events).seconds == pytest.approx(10.0)


@pytest.mark.slow
def test_a_plan_takes_turns_where_that_is_faster() -> None:
    sizes = dataclasses.replace(NAMED["gpt2"], width=4096, heads=32, layers=2, context=2048)
    with torch.device("meta"):
        model = Gpt(sizes).to(torch.bfloat16)
        ids = torch.zeros(16, 2048, dtype=torch.long)
    world = autopar.World.preset("dgx-h100", 8)
    turns, alone = (
        autopar.plan(
            model, world, (ids, ids), layout, microbatches=2, smaller=False, outputs="sharded"
        )
        for layout in ("megatron", "ddp")
    )
    assert turns.interleaved and not alone.interleaved
    assert turns.timeline().seconds == turns.overlapped
    assert "two in turns" in repr(turns)
    without = dataclasses.replace(turns.context.program.plan, interleaved=False)
    program = dataclasses.replace(turns.context.program, plan=without)
    assert (turns.overlapped or 0.0) <= 0.95 * timeline(program, world).seconds
