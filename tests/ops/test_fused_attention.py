"""Attention with dropout by torch's own kernel, as GPUs run it: here by the one that a CPU has."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
import autopar.ops.sharded.attention
import models
from autopar.ir.program import Program
from autopar.ops import sharded
from autopar.ops.sharded.attention import seed_at
from autopar.runtime import lockstep
from autopar.runtime.verify import _Rank
from derived import derived

kernels = sys.modules["autopar.ops.sharded.attention"]


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_has_kernel", lambda device: True)


def attend(*operands: Tensor | None, place: int = 0, draw: int = 1, causal: bool = False) -> Tensor:
    query, key, value, mask = operands
    seed = seed_at(7, {"x": place}, "@x")
    return sharded.attention(
        query, key, value, mask, 0.3, causal, None, torch.tensor(0), [], [], [], seed, draw
    )


def operands(heads: int = 2, dims: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, count, 5, 3)[-dims:] for count in (2, heads, heads)]
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.usefixtures("on_kernels")
@pytest.mark.parametrize(("heads", "dims"), [(2, 4), (1, 4), (2, 3), (2, 2)])
@pytest.mark.parametrize("mask", ["", "causal", "learned"])
def test_its_gradient_is_that_of_what_it_dropped(heads: int, dims: int, mask: str) -> None:
    arguments: list[Any] = [*operands(heads, dims), None]
    if mask == "learned":
        arguments[3] = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *x: attend(*x, causal=mask == "causal"), tuple(arguments)
    )


@pytest.mark.usefixtures("on_kernels")
def test_a_seed_is_a_mask_and_leaves_the_generator_alone() -> None:
    arguments = *operands(), None
    before = torch.get_rng_state()
    first = attend(*arguments)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert torch.equal(attend(*arguments), first)
    assert not torch.equal(attend(*arguments, place=1), first)
    assert not torch.equal(attend(*arguments, draw=2), first)


def test_it_is_an_op_that_torch_knows_all_about() -> None:
    arguments = (*operands(1), None, 0.3, True, None, torch.tensor(5), 3)
    torch.library.opcheck(torch.ops.autopar.attention.default, arguments)


def losses(program: Program, inputs: tuple[Tensor, ...]) -> list[float]:
    """Of every rank, with seeds as a step feeds them."""
    assert program.plan is not None
    mesh = program.plan.mesh

    def step(rank: int) -> float:
        place = mesh.coordinate(rank)
        own = _Rank(program, place, list(inputs))
        entries = program.signature.inputs
        outputs = program.module(
            *(seed_at(5, place, e.target) if e.target[0] == "@" else own.feed(e) for e in entries)
        )
        return float(next(x for x in outputs if not x.dim()).detach())

    return lockstep.run(mesh, step)


@pytest.mark.slow_cells("2.5d", "4d", "ddp", "megatron-sp", "megatron")
@pytest.mark.usefixtures("on_kernels")
@pytest.mark.parametrize("layout", ["ddp", "megatron", "megatron-sp", "atp", "4d", "2.5d"])
def test_ranks_that_hold_the_same_heads_drop_the_same(layout: str) -> None:
    """Else their activations would differ, and so their losses, which all layouts make equal."""
    model, inputs, _ = models.gpt(dropout=0.2)
    program = autopar.plan(model, 4, inputs, layout=layout, smaller=False).context.program
    own = [e for e in program.signature.inputs if e.target.startswith("@")]
    assert own, "no attention is seeded by the rank's place"
    by_rank = losses(program, inputs)
    assert max(by_rank) - min(by_rank) < 1e-6
    # Masks are others than the formula's.
    assert abs(by_rank[0] - losses_by_hash(program, inputs)) > 1e-4


def losses_by_hash(program: Program, inputs: tuple[Tensor, ...]) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_has_kernel", lambda device: False)
        return losses(program, inputs)[0]


@pytest.mark.usefixtures("on_kernels")
def test_ranks_that_hold_other_heads_drop_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeded by all of its place, a rank that holds the same as another drops otherwise."""
    model, inputs, _ = models.gpt(dropout=0.2)
    program = autopar.plan(model, 4, inputs, layout="megatron", smaller=False).context.program
    (axis,) = program.plan.mesh.names
    seeds = {seed_at(5, {axis: k}, f"@{axis}").item() for k in range(4)}
    assert [e.target for e in program.signature.inputs if "@" in e.target] == [f"@{axis}"]
    assert len(seeds) == 4


def test_a_plan_for_gpus_holds_no_scores() -> None:
    """Where a kernel drops, nothing of the size of the scores is held in a step."""
    model, inputs, _ = models.gpt(dropout=0.2)
    world = autopar.World.preset("dgx-h100", 4)
    gpus = autopar.plan(model, world, inputs, layout="ddp", smaller=False)
    cpus = autopar.plan(model, 4, inputs, layout="ddp", smaller=False)
    assert gpus.memory is not None and cpus.memory is not None
    assert gpus.memory.activations < cpus.memory.activations


@pytest.mark.slow
def test_a_graph_has_one_op_for_a_dropout_and_one_for_its_gradient() -> None:
    """Its mask took some hundred ops of int64 arithmetic each, forward and backward."""
    run = derived("ddp", autopar.World.of(4), ("schedule",), dropout=0.2)
    for module in (run.forward, run.backward):
        named = [str(node.target) for node in module.graph.nodes]
        drops = [name for name in named if name == "autopar.dropout.default"]
        assert len(drops) == 6  # three a block
        assert not any("bitwise_xor" in name for name in named)
