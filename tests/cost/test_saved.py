"""What nodes are said to keep for the backward is what autograd keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import models
from autopar import PlanError
from autopar.cost.activations import SavedActivationsByNode, Share, bytes_of
from autopar.cost.memory import optimizer_bytes
from autopar.ir.graph import producer
from autopar.ir.layout import I, Layout, S
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program, Value
from autopar.ir.sharding_rule import operands_of, results_of
from autopar.ir.strategy import Strategy
from autopar.passes.pass_manager import PassManager
from autopar.planner.planner import analyse
from autopar.planner.tracing import trace_model
from traced import run


def modelled(program: Program) -> float:
    """Bytes that the whole graph keeps on one device: every memory once, parameters apart."""
    assert program.annotations is not None
    of = SavedActivationsByNode(program.annotations.gradient)
    base: dict[Value, Value] = {}  # the value whose memory a view shares
    saved: set[Value] = set()
    size: dict[Value, int] = {}
    inside = 0.0
    for node in program.module.graph.nodes:
        values = results_of(node) if node.op != "output" else []
        for index, value in enumerate(values):
            if isinstance(value, Tensor):
                size[node.name, index] = value.numel() * value.element_size()
        if node.op != "call_function" or node.name not in program.annotations.specs:
            continue
        uses, operands = of(node), operands_of(node)
        sources = [None if n is None else producer(n) for n in operands]
        own = {i: base.get(s, s) for i, s in enumerate(sources) if s is not None}
        for index, viewed in enumerate(uses.views):
            if viewed is not None:
                base[node.name, index] = own[viewed]
        saved |= {own[i] for i in uses.operands}
        saved |= {base.get((node.name, i), (node.name, i)) for i in uses.results}
        inside += uses.inside_bytes
    placed = {e.node for e in program.signature.inputs}
    return inside + sum(size[value] for value in saved if value[0] not in placed)


def measured(program: Program, args: Any, kwargs: Any) -> float:
    tensors = {name: tensor.clone() for name, tensor in program.tensors.items()}
    for entry in program.signature.inputs:
        if entry.kind == "parameter":
            tensors[entry.target].requires_grad_(entry.trainable)
    packed: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        packed.append(t)
        return t

    with saved_tensors_hooks(keep, keep):
        run(program, args, kwargs, tensors)
    stored = [*tensors.values(), *args, *kwargs.values()]
    outside = {t.untyped_storage().data_ptr() for t in stored}
    inside = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in packed}
    return float(sum(size for key, size in inside.items() if key not in outside))


@pytest.mark.slow_cells("bert", "gpt2", "gpt", "llama", "t5")
@pytest.mark.parametrize("name", ["mlp", "gpt", "gpt2", "llama", "bert", "t5"])
def test_the_parts_add_up_to_what_autograd_keeps(name: str) -> None:
    model, args, kwargs = getattr(models, name)()
    program = analyse(PassManager(), trace_model(model, kwargs or args))
    assert modelled(program) == pytest.approx(measured(program, args, kwargs), rel=0.02)


def test_strategies_divide_what_is_saved() -> None:
    mesh = Mesh.parse("x2.y2")
    x, weight = Layout(mesh, (8, 6), (S(0, 4), I)), Layout(mesh, (4, 6), (I, S(0, 2)))
    result = Layout(mesh, (8, 4), (S(0, 4), S(1, 2)))
    strategy = Strategy((), (x, weight, None), (result,), 4)
    share = Share(((0, 4.0), (1, 4.0)), ((0, 2.0),), 64.0)
    assert bytes_of(share, strategy) == (4 * 24 + 4 * 12) + 2 * 8 + 64 / 4


def test_states_of_stored_parameters() -> None:
    layout = Layout(Mesh.parse("x2"), (8, 6), (S(0, 4),))
    assert optimizer_bytes(layout, 2, "adamw") == 24 * 2 * 2
    assert optimizer_bytes(layout, 2, "sgd") == 0
    assert optimizer_bytes(layout, 2, 12) == 24 * 12
    with pytest.raises(PlanError, match="unknown optimizer 'adan'"):
        optimizer_bytes(layout, 2, "adan")


def test_a_frozen_weight_lets_go_of_its_input() -> None:
    model, args, _ = models.mlp()
    model.up.weight.requires_grad_(False)  # type: ignore[union-attr]
    model.down.weight.requires_grad_(False)  # type: ignore[union-attr]
    program = analyse(PassManager(), trace_model(model, args))
    assert program.annotations is not None
    products = [n for n in program.module.graph.nodes if n.target == torch.ops.aten.linear.default]
    first, second = (SavedActivationsByNode(program.annotations.gradient)(n) for n in products)
    assert not first.operands and second.operands == {1}
