"""Values that are zero but for rounding raise no alarm, and nothing else gets more room by that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
import mutations
from autopar import VerificationError, World
from autopar._compat import pytree
from autopar.passes.pass_manager import PassManager
from autopar.planner import confirm, planner, tracing
from autopar.planner.request import PlanRequest
from autopar.runtime import reference
from autopar.runtime.reference import (
    Reference,
    double_by_default,
    reference_step,
    tensor_to_float64,
)
from autopar.runtime.verify import _Rank, compare
from odd_models import Simple, rows
from plans import Subject, subject


def normed(m: Any, x: Tensor) -> Tensor:
    """The loss and every gradient."""
    return m.norm(m.down(m.up(x))).sum()


def biased(m: Any, x: Tensor) -> Tensor:
    """A bias before a batch norm, alone to be trained."""
    return m.batch(m.down.bias + m.up(x)[:, :24].detach()).pow(3).sum()


def centred(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """A node in the middle, and what hangs on it."""
    y = m.down(m.up(x))
    rest = (y - y.mean(-1, keepdim=True)).sum(-1)
    return (y.square().sum(-1) + rest * 5).sum(), rest


def summed(m: Any, x: Tensor) -> Tensor:
    """Probabilities sum to one, whatever they are."""
    return m.up(x).softmax(-1).sum()


BODIES = [normed, biased, centred, summed]


def simple(body: Any) -> nn.Module:
    torch.manual_seed(0)
    return Simple(body, norm=nn.LayerNorm(24), batch=nn.BatchNorm1d(24, affine=False))


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "megatron", "auto"])
@pytest.mark.parametrize("body", BODIES)
def test_what_is_zero_but_for_rounding_raises_no_alarm(body: Any, layout: str) -> None:
    autopar.verify(simple(body), 4, (rows(),), layout=layout)


# -- nothing else gets more room by that -----------------------------------------------------------
def known_of(subject: Subject) -> Reference:
    leaves = [
        tensor_to_float64(leaf)
        for leaf in pytree.tree_leaves(tracing.call_arguments(subject.inputs))
    ]
    with double_by_default():
        return reference_step(
            subject.single, lambda rank, visit: _Rank(rank, {}, leaves).observe(visit)
        )


def test_a_value_of_its_own_size_is_compared_with_itself() -> None:
    known = known_of(
        subject(simple(lambda m, x: m.down(m.up(x).relu()).square().mean()), (rows(),))
    )
    floors = {n: known.floor(n) / v.abs().max() for n, v in known.values.items() if v.any()}
    assert len(floors) > 15 and max(floors.values()) < 0.1, floors


def test_the_floor_is_a_thousandth_of_what_cancels() -> None:
    known = known_of(subject(simple(centred), (rows(),)))
    terms = known.values["linear_1", 0].abs().mean()
    assert known.values["output 1"].abs().max() < 1e-14 * terms
    assert 0.3e-3 * terms < known.floor("output 1") < 30e-3 * terms


def test_a_choice_that_was_made_stays_made() -> None:
    """Equal numbers: any of them is the largest, and a little off another one would be."""

    def body(m: Any, x: Tensor) -> Tensor:
        same = (m.up(x) * 0 + 1).topk(2, -1)[1]
        return (m.up(x).gather(-1, same) * (m.up(x) * 0 + 2 > 1)[:, :2]).sum()

    known = known_of(subject(Simple(body), (rows(),)))
    assert known.floor("output 0") < 0.1 * known.values["output 0"].abs()


def test_a_jump_hides_nothing_larger_than_a_millionth() -> None:
    plain = {"jumps": torch.tensor([0.0, 1.0])}
    floor = reference.rounding_floors(plain, [{"jumps": torch.tensor([1.0, 1.0])}])["jumps"]
    assert 1e-9 * floor < 2e-6


def test_a_mistake_next_to_what_cancels_is_found() -> None:
    """A hundred-thousandth of the terms, wrong by half."""

    def body(m: Any, x: Tensor) -> Tensor:
        y = m.down(m.up(x))
        return ((y - y.mean(-1, keepdim=True)).sum(-1) + 1e-5 * y.sum(-1)).square().sum() * 1e10

    case = subject(simple(body), (rows(),))
    world = World.of(2)
    chosen = planner.choose_plan(PassManager(), case.program, world, PlanRequest("ddp"))
    program = confirm.rewrite_for_ranks(PassManager(), chosen, world)
    leaves = pytree.tree_leaves(tracing.call_arguments(case.inputs))
    compare(program, case.single, leaves, 1e-9)
    small = next(n.name for n in program.module.graph.nodes if 1e-5 in n.args)
    wrong = mutations.broken(program, small, mutations.another_divisor)
    assert wrong is not None
    with pytest.raises(VerificationError, match="the first wrong node is mul"):
        compare(wrong, case.single, leaves, 1e-9)
