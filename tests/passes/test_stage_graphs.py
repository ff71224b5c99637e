"""The cut of a graph into stages, and its contract."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import autopar
import models
from autopar.ir.program import Program
from autopar.passes import stages
from priced import slow_between
from stage_models import ROWS, TOKENS, WIDTH, apart_towers, gpt


@pytest.fixture(scope="module")
def program() -> Program:
    model, inputs = gpt()
    plan = autopar.plan(model, 4, inputs, autopar.Stages(2, "fsdp"), microbatches=4)
    assert plan.context is not None
    return plan.context.program


def test_two_stages_have_one_border_and_each_its_parameters(program: Program) -> None:
    first, last = stages.cut(program, ("blocks.2",))
    assert first.receives == last.sends == () and first.sends == last.receives
    assert len(first.sends) == 1 and last.results == (0, 1) and not first.results
    names = {"blocks.0", "blocks.1", "position"}, {"blocks.2", "blocks.3", "norm"}
    for stage, (own, other) in zip((first, last), (names, names[::-1]), strict=True):
        own_names = stage.parameters
        assert all(any(n.replace(".", "_") in p for p in own_names) for n in own), own_names
        assert "p_token_weight" in own_names  # tied: in both
        del other


def test_what_has_no_parameters_is_made_where_it_is_used() -> None:
    model, inputs = apart_towers()
    plan = autopar.plan(model, 2, inputs, autopar.Stages(2, "ddp"), microbatches=2)
    assert plan.context is not None
    first, last = stages.cut(plan.context.program, ("encoder.2",))
    users = [e.position for e in last.program.signature.inputs if e.position is not None]
    assert users == [1], "y is the user's, and is not sent"
    assert any("start" in name for name in last.parameters), "it is computed where it is read"
    assert not any("start" in name for name in first.parameters)


def test_a_value_that_later_stages_read_passes_through() -> None:
    model, inputs = apart_towers()
    plan = autopar.plan(model, 2, inputs, autopar.Stages(2, "ddp"), microbatches=2)
    assert plan.context is not None
    cut = stages.cut(plan.context.program, ("decoder.0", "decoder.1", "decoder.2"))
    stages.check(plan.context.program, cut)
    end = cut[0].sends[0]
    assert all(end in stage.receives for stage in cut[1:]), "the end of the encoder"
    assert [len(stage.receives) for stage in cut] == [0, 1, 2, 2]


def test_the_contract_sees_a_value_in_two_stages(program: Program) -> None:
    cut = stages.cut(program, ("blocks.2",))
    twice = dataclasses.replace(cut[1], program=cut[0].program)
    with pytest.raises(AssertionError, match="computed in two stages"):
        stages.check(program, (cut[0], twice))


def test_the_contract_sees_a_border_that_is_not_sent(program: Program) -> None:
    cut = stages.cut(program, ("blocks.2",))
    with pytest.raises(AssertionError, match="is sent something else"):
        stages.check(program, (dataclasses.replace(cut[0], sends=()), cut[1]))


def test_the_contract_sees_a_lost_result(program: Program) -> None:
    cut = stages.cut(program, ("blocks.2",))
    with pytest.raises(AssertionError, match="a result is lost"):
        stages.check(program, (cut[0], dataclasses.replace(cut[1], results=(0,))))


# -- slices of border tensors ----------------------------------------------------------------------
def words_sent(world: Any, layout: Any, example: models.Example, microbatches: int = 2) -> int:
    """Numbers that a rank of the first of two stages sends on for each micro-batch."""
    model, args, kwargs = example
    layout = autopar.Stages(2, layout)
    plan = autopar.plan(model, world, args or kwargs, layout, microbatches=microbatches)
    assert plan.context is not None
    first, last = stages.cut(plan.context.program, plan.stage_starts)
    assert first.sends == last.receives and len(first.sends) == 1
    return first.program.layouts[first.sends[0]].local_size


def test_ranks_that_hold_the_same_send_a_slice_each_where_links_are_slow() -> None:
    stream = models.BATCH // 2 * models.SEQUENCE * models.HIDDEN
    assert words_sent(8, "megatron", models.gpt()) == stream
    assert words_sent(slow_between(4, 2), "megatron", models.gpt()) == stream // 4
    assert words_sent(slow_between(4, 2), autopar.Grid4D(x=2, y=2), models.gpt()) == stream // 4
    assert words_sent(slow_between(2, 2), "fsdp", models.gpt()) == stream // 2


class WithoutNorms(nn.Module):
    """Four blocks that read the stream without a norm: what they add is parts of a sum there."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def test_parts_of_sums_are_scattered_as_that_costs_no_more() -> None:
    stream, inputs = ROWS // 4 * TOKENS * WIDTH, (torch.randn(ROWS, TOKENS, WIDTH),)
    assert words_sent(8, "megatron", (WithoutNorms(), inputs, {}), microbatches=4) == stream // 4
    assert words_sent(8, "megatron", (*gpt(), {}), microbatches=4) == stream  # no parts of a sum


def test_every_stage_gathers_the_slices_that_it_reads() -> None:
    model, _, inputs = models.t5()
    plan = autopar.plan(model, 8, inputs, autopar.Stages(4, "megatron"), microbatches=2)
    assert plan.context is not None and not plan.slices_borders
    starts, whole = plan.stage_starts, plan.context.program
    program = stages.slice_borders(whole, starts)
    cut = stages.cut(program, starts)
    stages.check(program, cut)
    for stage, before in zip(cut[1:], stages.cut(whole, starts)[1:], strict=True):
        assert stage.receives
        sizes, whole_sizes = (
            [s.program.layouts[name].local_size for name in s.receives] for s in (stage, before)
        )
        assert sum(sizes) * 2 == sum(whole_sizes)


def test_a_program_whose_ranks_all_send_something_else_stays_as_it_is(program: Program) -> None:
    assert stages.slice_borders(program, ("blocks.2",)) is program


# -- where stages begin ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("seconds", "count", "begins"),
    [
        ([1, 1, 1, 1], 2, ["b.2"]),
        ([1, 1, 1, 3], 2, ["b.3"]),
        ([1, 1, 1, 1, 1, 1, 1, 3], 4, ["b.3", "b.5", "b.7"]),
        ([1, 1], 2, ["b.1"]),
    ],
)
def test_the_slowest_stage_is_as_fast_as_can_be(
    seconds: list[float], count: int, begins: list[str]
) -> None:
    starts = stages.balance({f"b.{i}": float(s) for i, s in enumerate(seconds)}, count)
    assert sorted(starts) == sorted(begins) or _slowest(seconds, starts) == _slowest(
        seconds, begins
    )


def _slowest(seconds: list[float], begins: list[str] | tuple[str, ...]) -> float:
    places = [0, *(int(name.split(".")[1]) for name in begins), len(seconds)]
    return max(sum(seconds[a:b]) for a, b in itertools.pairwise(places))


def refused(model: nn.Module, inputs: tuple[torch.Tensor, ...], words: str, count: int = 2) -> None:
    with pytest.raises(autopar.PlanError, match=words):
        autopar.plan(model, count, inputs, autopar.Stages(count, "ddp"), microbatches=2)


@pytest.mark.slow
def test_more_stages_than_blocks_are_refused() -> None:
    model, inputs = gpt()
    refused(model, inputs, "8 stages of a model with 4 repeated blocks.*fewer stages", 8)


@pytest.mark.slow
def test_a_stage_without_trained_parameters_is_refused() -> None:
    model, inputs = gpt()
    for module in (model.token, model.position, model.blocks[0]):
        module.requires_grad_(False)
    model.head.weight = nn.Parameter(model.token.weight.detach().clone())
    refused(model, inputs, "stage 0 of 4, from the first block on, has no parameter", 4)


def test_a_changed_buffer_is_refused() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    refused(Net(), (torch.randn(4, 8),), r"writes a buffer \(calls\)")
