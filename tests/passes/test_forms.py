"""Products in the form that calibration found fastest: the same numbers, only where it gains."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import autopar
import models
from autopar.cost.calibration import local_matmuls
from autopar.cost.calibration.measure import COPIES
from autopar.errors import WorldError
from autopar.ir.plan import Plan
from autopar.ops import sharded
from autopar.ops.sharded.matmul import other_order
from autopar.runtime.calibrate_on_ranks import unsharded_work
from autopar.world import Copied, KernelTimes, World


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("copied", list(itertools.product(COPIES, repeat=3)))
@pytest.mark.parametrize("biased", [True, False])
def test_copies_change_no_numbers(copied: tuple[Copied, Copied, Copied], biased: bool) -> None:
    actual, wanted = [], []
    for into in (actual, wanted):
        x, weight = drawn(2, 3, 5).requires_grad_(), drawn(7, 5).requires_grad_()
        bias = drawn(7).requires_grad_() if biased else None
        if into is actual:
            y = sharded.linear(x, weight, bias, copied)
        else:
            y = F.linear(x, weight, bias)
        y.backward(drawn(2, 3, 7))
        into += [y.detach(), x.grad, weight.grad] + ([bias.grad] if bias is not None else [])
    torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


def test_the_other_order_holds_the_same_numbers() -> None:
    x = drawn(3, 5)
    assert other_order(x).stride() == (1, 3) and torch.equal(other_order(x), x)
    assert other_order(x.t()).stride() == (3, 1) and torch.equal(other_order(x.t()), x.t())


def test_under_autocast_it_is_an_ordinary_linear() -> None:
    x, weight = drawn(4, 5).float(), drawn(7, 5).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = sharded.linear(x, weight, None, ("right", "", ""))
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and weight.grad is not None


def test_a_copy_has_to_gain_enough() -> None:
    times = KernelTimes("float32", 2, 3, 4, "NT", 1.0, 0.9, 0.8)
    assert times.fastest == "right"
    assert replace(times, right_copied_s=0.96, left_copied_s=0.96).fastest == ""
    assert replace(times, right_copied_s=0.94, left_copied_s=0.90).fastest == "left"
    with pytest.raises(
        WorldError, match=r"KernelTimes.as_it_is_s is 0: give a finite number above 0"
    ):
        replace(times, as_it_is_s=0)


def forged(ranks: int, right: float) -> World:
    """A world on which every product of the GPT was timed: 1 s as it comes, so many seconds with
    its right operand copied.
    """
    model, args, _ = models.gpt()
    shapes = local_matmuls(unsharded_work(model, args).matmuls, ranks)
    forms = {(str(p.dtype).removeprefix("torch."), p.m, p.n, p.k, p.form) for p in shapes}
    world = World.of(ranks)
    timed = tuple(KernelTimes(*form, 1.0, 2.0, right) for form in sorted(forms))
    return replace(world, device=replace(world.device, forms=timed))


def targets(plan: Plan) -> list[object]:
    return [node.target for node in plan.context.program.module.graph.nodes]  # type: ignore[union-attr]


@pytest.mark.slow_cells("ddp")
@pytest.mark.slow_cells("4d", "megatron")
@pytest.mark.parametrize("layout", ["ddp", "megatron", "4d"])
def test_products_take_the_form_that_gains(layout: str) -> None:
    model, args, _ = models.gpt()
    plain = autopar.plan(model, 4, args, layout, smaller=False)
    plan = autopar.plan(model, forged(4, 0.5), args, layout, smaller=False)
    linear = torch.ops.aten.linear.default
    assert targets(plain).count(linear) == targets(plan).count(sharded.linear) > 4
    assert linear not in targets(plan)
    nodes = plan.context.program.module.graph.nodes  # type: ignore[union-attr]
    copied = {node.args[3] for node in nodes if node.target is sharded.linear}
    assert copied == {("right", "right", "right")}


@pytest.mark.slow
def test_where_nothing_gains_nothing_is_rewritten() -> None:
    model, args, _ = models.gpt()
    plain = autopar.plan(model, 4, args, "megatron", smaller=False)
    plan = autopar.plan(model, forged(4, 0.97), args, "megatron", smaller=False)
    assert targets(plan) == targets(plain)


@pytest.mark.slow_cells("4d")
@pytest.mark.slow_cells("megatron")
@pytest.mark.parametrize("layout", ["megatron", "4d"])
def test_it_computes_what_one_device_does(layout: str) -> None:
    model, args, _ = models.gpt()
    check = autopar.verify(model, forged(4, 0.5), args, layout=layout)
    assert max(check.loss_error, check.grad_error, check.step_error) < 1e-9


def test_forms_come_back_from_their_file(tmp_path: Path) -> None:
    world = forged(4, 0.5)
    world.save(tmp_path / "world.json")
    again = World.load(tmp_path / "world.json")
    assert again == world and again.device.forms == world.device.forms


def test_a_linear_with_copies_compiles() -> None:
    x, weight = drawn(4, 6).requires_grad_(), drawn(8, 6).requires_grad_()

    def step(x: Tensor) -> Tensor:
        return sharded.linear(x, weight, None, ("right", "left", "left")).sum()

    torch.compile(step, backend="aot_eager", fullgraph=True)(x).backward()
    torch.testing.assert_close(x.grad, weight.detach().sum(0).expand(4, 6))
