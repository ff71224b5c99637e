"""Blocks that are recomputed: the same numbers, less memory, and what it costs is counted."""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
import models
from autopar import PlanError, listing
from autopar.ir.graph import every_node
from autopar.ops import collectives
from autopar.ops.recomputation import recompute_in_backward, regather_in_backward
from autopar.planner.request import Grid4D
from counted_calls import calls


@pytest.mark.slow_cells("gpt-2-fsdp")
@pytest.mark.slow_cells("gpt-4-2.5d", "t5-2-megatron")
@pytest.mark.parametrize(
    ("name", "ranks", "layout"),
    [("gpt", 2, "fsdp"), ("gpt", 4, "2.5d"), ("t5", 2, "megatron")],
)
def test_every_node_and_gradient_is_right(name: str, ranks: int, layout: str) -> None:
    model, inputs = models.example(name)
    plain = autopar.verify(model, ranks, inputs, layout)
    again = autopar.verify(model, ranks, inputs, layout, recompute="full")
    assert again.nodes == plain.nodes


@pytest.mark.slow_cells("gpt-4-fsdp")
@pytest.mark.slow_cells("gpt2-2-fsdp", "llama-8-layout1")
@pytest.mark.parametrize(
    ("name", "ranks", "layout"),
    [("gpt", 4, "fsdp"), ("llama", 8, Grid4D(2, 1, 2, 2)), ("gpt2", 2, "fsdp")],
)
def test_weights_gathered_again_are_right(name: str, ranks: int, layout: Any) -> None:
    model, inputs = models.example(name)
    plain = autopar.verify(model, ranks, inputs, layout)
    again = autopar.verify(model, ranks, inputs, layout, recompute="gathers")
    assert again.nodes == plain.nodes


@pytest.mark.slow_cells("llama-8-layout1")
@pytest.mark.parametrize(
    ("name", "ranks", "layout"), [("gpt", 2, "fsdp"), ("llama", 8, Grid4D(2, 1, 2, 2))]
)
def test_only_weights_of_products_are_gathered_again(name: str, ranks: int, layout: Any) -> None:
    """As many collectives more as run more; nothing is computed twice."""
    model, inputs = models.example(name)
    plain = autopar.plan(model, ranks, inputs, layout, recompute="none", smaller=False)
    again = autopar.plan(model, ranks, inputs, layout, recompute="gathers", smaller=False)
    assert plain.regather == () and len(again.regather) == 2
    assert again.peak_bytes < plain.peak_bytes and again.recompute == ()
    more = len(again.collectives) - len(plain.collectives)
    assert more == calls(again, inputs) - calls(plain, inputs) > 0
    gathers = [c for c in again.collectives if c.backward and c.kind == "all_gather"]
    assert more <= len(gathers)
    module = again.context.program.module
    twice = [n for n, again in every_node(module) if again and n.op == "call_function"]
    assert all("step" in node.meta for node in twice)
    assert sum(node.target is collectives.all_gather for node in twice) == more
    seconds = [plan.context.timeline(overlap=False).seconds for plan in (plain, again)]
    assert seconds[1] - seconds[0] == pytest.approx(again.seconds - plain.seconds, rel=0.02)


def test_what_gathers_nothing_regathers_nothing() -> None:
    model, inputs = models.example("gpt")
    for ranks, layout in ((4, "ddp"), (1, "auto")):
        plan = autopar.plan(model, ranks, inputs, layout, recompute="gathers")
        assert (
            plan.regather == ()
            and plan.context.program.module.graph.find_nodes(
                op="call_function", target=regather_in_backward
            )
            == []
        )


def test_a_frozen_weight_keeps_no_activation_alive() -> None:
    """What a product needs is kept, what is to be gathered again is not held by how."""
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    whole = graph.call_function(torch.cat, ([w, w],))
    graph.output((graph.call_function(torch.matmul, (x, whole)),))
    block = torch.fx.GraphModule(torch.nn.Module(), graph)
    frozen_input, weight = torch.randn(3, 4, requires_grad=True), torch.randn(2, 5)
    activation = frozen_input * 1.0
    (y,) = regather_in_backward(block, 1, activation, weight)
    gone = weakref.ref(activation)
    del activation
    assert gone() is None
    y.sum().backward()
    torch.testing.assert_close(frozen_input.grad, torch.ones(3, 5) @ torch.cat([weight, weight]).T)


@pytest.mark.slow
def test_dropout_drops_the_same_again() -> None:
    model, inputs = models.example("gpt", dropout=0.2)
    autopar.verify(model, 4, inputs, "megatron", recompute="full")


def test_on_one_rank_the_generators_are_set_back() -> None:
    """There dropout is torch's own."""
    model, args, _ = models.gpt(dropout=0.2)
    gradients = []
    for recompute in ("none", "full"):
        par = autopar.parallelize(model, 1, args, recompute=recompute)  # type: ignore[arg-type]
        torch.manual_seed(1)
        par(*args)[1].backward()
        gradients.append([p.grad.clone() for p in par.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


@pytest.mark.slow_cells("4-megatron-sp")
@pytest.mark.parametrize(("ranks", "layout"), [(2, "fsdp"), (4, "megatron-sp")])
def test_less_is_saved_and_more_is_sent(ranks: int, layout: str) -> None:
    model, inputs = models.example("gpt")
    plain = autopar.plan(model, ranks, inputs, layout, recompute="none")
    again = autopar.plan(model, ranks, inputs, layout, recompute="full")
    assert plain.recompute == () and again.recompute == ("blocks.0", "blocks.1")
    assert again.peak_bytes < 0.9 * plain.peak_bytes
    assert again.seconds > plain.seconds and again.comm_bytes > plain.comm_bytes
    more = len(again.collectives) - len(plain.collectives)
    assert more == calls(again, inputs) - calls(plain, inputs) > 0


def test_the_timeline_runs_them_twice() -> None:
    model, inputs = models.example("gpt")
    plain = autopar.plan(model, 4, inputs, "megatron-sp", recompute="none")
    again = autopar.plan(model, 4, inputs, "megatron-sp", recompute="full")
    first, second = (plan.context.timeline(overlap=False) for plan in (plain, again))
    more = [e for e in second.events if e.kind not in ("compute",)]
    less = [e for e in first.events if e.kind not in ("compute",)]
    assert len(more) - len(less) == len(again.collectives) - len(plain.collectives)
    assert sum(e.seconds for e in second.events) == pytest.approx(
        sum(e.seconds for e in first.events) + again.seconds - plain.seconds, rel=0.02
    )


def test_a_plan_keeps_its_blocks_in_a_file(tmp_path: Path) -> None:
    model, inputs = models.example("gpt")
    plan = autopar.plan(model, 1, inputs, recompute="full")
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded.recompute == plan.recompute and loaded.memory == plan.memory
    par = autopar.apply(model, loaded, inputs)
    assert len(par.graph.graph.find_nodes(op="call_function", target=recompute_in_backward)) == 2
    torch.testing.assert_close(par(*inputs)[1], model(*inputs)[1])


def test_a_block_that_is_not_there() -> None:
    model, inputs = models.example("gpt")
    unedited = autopar.plan(model, 1, inputs)
    plan = dataclasses.replace(unedited, regather=("blocks.8",), context=None)
    with pytest.raises(PlanError, match=r"blocks\.8 cannot be regathered|regathers 'blocks\.8'"):
        autopar.apply(model, plan, inputs)
    plan = dataclasses.replace(unedited, recompute=("blocks.7",), context=None)
    with pytest.raises(PlanError, match=r"recomputes 'blocks\.7'.* are blocks\.0, blocks\.1"):
        autopar.apply(model, plan, inputs)


@pytest.mark.slow
def test_the_listing_shows_what_runs_twice() -> None:
    model, inputs = models.example("gpt")
    plan = autopar.plan(model, 2, inputs, "megatron", recompute="full")
    text = listing(plan.context.program.module)
    assert "= recompute_in_backward(" in text and "\n    >> all_reduce" in text
    plain = autopar.plan(model, 2, inputs, "megatron", recompute="none").context.program.module
    names = [n.target for n, _ in every_node(plan.context.program.module) if "source" in n.meta]
    assert names == [n.target for n in plain.graph.nodes if "source" in n.meta]


@pytest.mark.slow
def test_a_compiler_takes_it() -> None:
    model, args, _ = models.gpt()
    par = autopar.parallelize(model, 1, args, backend="aot_eager", recompute="full")
    par(*args)[1].backward()
    model(*args)[1].backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(par.get_parameter(name).grad, parameter.grad)
