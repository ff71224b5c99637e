"""Cheap ops that run again (`recompute="selective"`): the same numbers, no product and no
collective twice, less held.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import autopar
import models
from autopar import PlanError
from autopar.cost.peak import LifetimeRecorder
from autopar.ir.graph import every_node
from autopar.ops.recomputation import rerun_in_backward
from autopar.planner.request import Grid4D
from counted_calls import calls


class Products(TorchDispatchMode):
    """Counts matmuls and attention, and all ops."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        self.products += func.overloadpacket in flop_registry
        return func(*args, **(kwargs or {}))


def plans(
    name: str, ranks: int, layout: Any, **overrides: Any
) -> tuple[autopar.Plan, autopar.Plan]:
    model, inputs = models.example(name, **overrides)
    plain, again = (
        autopar.plan(model, ranks, inputs, layout, recompute=how, smaller=False)
        for how in ("none", "selective")
    )
    return plain, again


@pytest.mark.slow_cells("gpt-4-fsdp-overrides0")
@pytest.mark.slow_cells(
    "gpt-4-megatron-overrides1", "gpt2-2-auto-overrides5", "llama-4-megatron-sp-overrides3",
    "llama-8-layout2-overrides2",
)  # fmt: skip
@pytest.mark.parametrize(
    ("name", "ranks", "layout", "overrides"),
    [
        ("gpt", 4, "fsdp", {}),
        ("gpt", 4, "megatron", {"dropout": 0.2}),
        ("llama", 8, Grid4D(2, 1, 2, 2), {}),
        ("llama", 4, "megatron-sp", {}),
        pytest.param("t5", 4, "2.5d", {}, marks=pytest.mark.slow),
        ("gpt2", 2, "auto", {}),
    ],
)
def test_numbers_are_those_of_one_device(
    name: str, ranks: int, layout: Any, overrides: Any
) -> None:
    model, inputs = models.example(name, **overrides)
    plain = autopar.verify(model, ranks, inputs, layout)
    again = autopar.verify(model, ranks, inputs, layout, recompute="selective")
    assert again.nodes == plain.nodes


@pytest.mark.parametrize("layout", ["2.5d", pytest.param("megatron-sp", marks=pytest.mark.slow)])
def test_attention_of_several_ops_is_right(layout: str) -> None:
    """gemma2 caps its scores: cheap ops stand before two products, one after the other."""
    model, inputs = models.example("gemma2")
    autopar.verify(model, 4, inputs, layout, recompute="selective")


@pytest.mark.slow_cells("gpt-2-megatron-0.75-cr")
@pytest.mark.slow_cells(
    "gpt-4-fsdp-0.7-cg", "gpt-4-fsdp-0.8-cg", "gpt-4-fsdp-0.95-c", "llama-4-fsdp-0.75-cg",
    "llama-4-megatron-sp-0.9-c",
)  # fmt: skip
@pytest.mark.parametrize(
    ("name", "ranks", "layout", "part", "kinds"),
    [
        ("gpt", 4, "fsdp", 0.95, "c"),
        ("gpt", 4, "fsdp", 0.8, "cg"),
        ("gpt", 4, "fsdp", 0.7, "cg"),
        ("llama", 4, "fsdp", 0.75, "cg"),
        ("llama", 4, "megatron-sp", 0.9, "c"),
        ("gpt", 2, "megatron", 0.75, "cr"),
        pytest.param("t5", 4, "fsdp", 0.8, "r", marks=pytest.mark.slow),
    ],
)
def test_what_the_search_chooses_within_a_limit_is_right(
    name: str, ranks: int, layout: Any, part: float, kinds: str
) -> None:
    """Every rank in lockstep, forward and backward: cheap ops (c), gathers (g), blocks (r)."""
    model, inputs = models.example(name)
    plain = autopar.plan(model, ranks, inputs, layout, recompute="none", smaller=False)
    limit = part * plain.peak_bytes
    plan = autopar.plan(model, ranks, inputs, layout, memory=limit, smaller=False)
    chosen = {"c": plan.rerun, "g": plan.regather, "r": plan.recompute}
    assert "".join(kind for kind, names in chosen.items() if names) == kinds
    assert plan.peak_bytes <= limit < plain.peak_bytes and plan.seconds > plain.seconds
    assert autopar.verify(model, None, inputs, plan).grad_error < 1e-9
    again = sum(collective.backward for collective in plan.collectives)
    assert calls(plan, inputs) - calls(plain, inputs) == len(plan.collectives) - len(
        plain.collectives
    )
    assert ("g" in kinds or "r" in kinds) == (
        again > sum(collective.backward for collective in plain.collectives)
    )


@pytest.mark.slow_cells("llama-4-megatron-sp", "llama-8-layout2")
@pytest.mark.parametrize(
    ("name", "ranks", "layout"),
    [("gpt", 4, "fsdp"), ("llama", 4, "megatron-sp"), ("llama", 8, Grid4D(2, 2, 2, 1))],
)
def test_less_is_saved_and_no_collective_runs_twice(name: str, ranks: int, layout: Any) -> None:
    plain, again = plans(name, ranks, layout)
    _, inputs = models.example(name)
    assert again.rerun and not again.recompute and not again.regather
    assert calls(again, inputs) == calls(plain, inputs)
    assert len(again.collectives) == len(plain.collectives)
    assert again.comm_bytes == plain.comm_bytes
    assert plain.memory is not None and again.memory is not None
    assert again.memory.activations < 0.95 * plain.memory.activations
    assert again.context is not None
    twice = [node for node, runs in every_node(again.context.program.module) if runs]
    assert twice and again.seconds > plain.seconds
    assert "cheap ops again in the backward: 2 blocks" in str(again.table().caption)


@pytest.mark.slow
def test_what_runs_again_are_norms_and_activations() -> None:
    _, again = plans("llama", 4, "megatron")
    assert again.context is not None
    nodes = list(every_node(again.context.program.module))
    names = {str(node.target).removeprefix("aten.").split(".")[0] for node, runs in nodes if runs}
    assert {"silu", "mul", "cat", "rsqrt"} <= names or {"silu", "mul", "cat", "rms_norm"} <= names
    assert not {"linear", "scaled_dot_product_attention", "embedding"} & names


@pytest.mark.slow_cells("gpt")
@pytest.mark.slow_cells("llama")
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_real_step_holds_less_and_multiplies_as_often(name: str) -> None:
    """One rank, on real memory: gradients equal, products once, cheap ops twice, less saved."""
    model, args, kwargs = getattr(models, name)()
    inputs = kwargs or args
    saved_bytes, counted, gradients = [], [], []
    for how in ("none", "selective"):
        par = autopar.parallelize(
            copy.deepcopy(model),
            1,
            inputs,
            recompute=how,
            overlap=False,  # type: ignore[arg-type]
        )
        lives, counter = LifetimeRecorder(), Products()
        with lives:
            outputs = par(**inputs) if isinstance(inputs, dict) else par(*inputs)
        leaves = torch.utils._pytree.tree_leaves(outputs)
        loss = next(x for x in leaves if isinstance(x, torch.Tensor) and not x.dim())
        moment = lives.moment + 1
        saved_bytes.append(sum(life.size for life in lives.lifetimes if life.died > moment))
        with counter:
            loss.backward(retain_graph=True)
        counted.append(counter)
        gradients.append([p.grad.clone() for p in par.parameters() if p.grad is not None])
        loss.backward()  # what was made again may be made once more
        for parameter, once in zip(par.parameters(), gradients[-1], strict=True):
            torch.testing.assert_close(parameter.grad, 2 * once)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)
    assert saved_bytes[1] < 0.95 * saved_bytes[0]
    assert counted[1].products == counted[0].products and counted[1].ops > counted[0].ops


def left_after_a_step(recompute: Any) -> int:
    """The bytes that a step made and that are still there, where Python collects no cycles."""
    model, inputs = models.example("llama")
    par = autopar.parallelize(model, 1, inputs, recompute=recompute, overlap=False)
    gc.collect()
    gc.disable()
    try:
        lives = LifetimeRecorder()
        with lives:
            outputs = par(**inputs) if isinstance(inputs, dict) else par(*inputs)
            leaves = torch.utils._pytree.tree_leaves(outputs)
            next(x for x in leaves if isinstance(x, torch.Tensor) and not x.dim()).backward()
            par.zero_grad()
            del outputs, leaves
        return sum(life.size for life in lives.lifetimes if life.died > lives.moment + 1)
    finally:
        gc.enable()


@pytest.mark.slow
def test_what_a_step_saved_is_freed_with_its_graph() -> None:
    assert left_after_a_step("selective") <= 1.05 * left_after_a_step("none")


def test_what_is_dropped_is_made_once() -> None:
    """Two products of one norm: it runs once more, not twice."""
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    norm = graph.call_function(torch.sin, (x,))
    more = graph.call_function(torch.exp, (norm,))
    graph.output(tuple(graph.call_function(torch.matmul, (y, w)) for y in (norm, more)))
    block = torch.fx.GraphModule(torch.nn.Module(), graph)
    rows, weight = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    first, second = rerun_in_backward(block, 2, rows, weight)

    class Sines(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += func.overloadpacket is torch.ops.aten.sin
            return func(*args, **(kwargs or {}))

    with Sines() as sines:
        (first + second).sum().backward()
    assert sines.count == 1
    gradients = rows.grad, weight.grad
    rows.grad = weight.grad = None
    (rows.sin() @ weight + rows.sin().exp() @ weight).sum().backward()
    torch.testing.assert_close(gradients, (rows.grad, weight.grad))


def test_a_plan_keeps_them_in_a_file(tmp_path: Any) -> None:
    model, inputs = models.example("gpt")
    plan = autopar.plan(model, 1, inputs, recompute="selective")
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded.rerun == plan.rerun == ("blocks.0", "blocks.1")
    par = autopar.apply(model, loaded, inputs)
    assert par.graph.graph.find_nodes(op="call_function", target=rerun_in_backward)
    wrong = dataclasses.replace(plan, rerun=("blocks.8",), context=None)
    with pytest.raises(PlanError, match=r"blocks\.8 cannot be rerun|reruns 'blocks\.8'"):
        autopar.apply(model, wrong, inputs)
