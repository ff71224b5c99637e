"""Batches of rows that no axis divides: split where a loss counts the rows, else as they are."""

from __future__ import annotations

import pytest
import torch

import autopar
import uneven_batches
from autopar.errors import LayoutError
from autopar.planner.request import Grid4D, GridHSDP
from plans import verified_plan
from uneven_batches import CASES, COUNTED, REFUSED

SIZES = [(7, 4), (5, 4), (7, 8)]


def layouts(ranks: int) -> dict[str, object]:
    half = ranks // 2
    return {
        "ddp": "ddp",
        "fsdp": "fsdp",
        "megatron": GridHSDP(shard=half, tensor=2),
        "4d": Grid4D(x=2, y=1, z=2, data=half // 2),
        "auto": "auto",
    }


@pytest.mark.slow_cells(
    "*-bert", "*-gpt2", "5-4-*", "7-4-4d-mlp", "7-4-auto-mlp", "7-4-ddp-mlp", "7-4-megatron-mlp",
    "7-8-*",
)  # fmt: skip
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "megatron", "4d", "auto"])
@pytest.mark.parametrize(("rows", "ranks"), SIZES)
def test_ranks_compute_what_one_does(rows: int, ranks: int, layout: str, name: str) -> None:
    plan = verified_plan(CASES[name](rows), ranks, layouts(ranks)[layout])
    sizes = {(each.size, each.padded) for each in plan.padding}
    if layout in ("ddp", "fsdp"):
        assert sizes == {(rows, 8)}
    assert layout == "auto" or any(size == rows for size, _ in sizes)
    if sizes:
        assert any(f"from {rows} to" in note for note in plan.notes)


@pytest.mark.slow_cells(
    "a *", "absolute", "binary", "cosine", "covariance", "divergence", "entropies", "likelihood",
    "mean of rows", "mean", "squares of rows", "sum*", "two outputs", "weighted", "zeros",
)  # fmt: skip
@pytest.mark.parametrize("name", COUNTED)
def test_losses_that_count_rows(name: str) -> None:
    plan = verified_plan(uneven_batches.mlp(7, COUNTED[name]), 4, "ddp")
    assert [(each.size, each.padded) for each in plan.padding] == [(7, 8)]


@pytest.mark.parametrize("name", REFUSED)
def test_ops_that_mix_rows_leave_the_batch_as_it_is(name: str) -> None:
    model, inputs = uneven_batches.mlp(7, REFUSED[name])
    with pytest.raises(LayoutError, match="a batch of 7"):
        autopar.plan(model, 4, inputs, layout="ddp")


@pytest.mark.slow_cells("4")
@pytest.mark.slow_cells("8")
@pytest.mark.parametrize("ranks", [4, 8])
def test_batch_norms_keep_the_batch_as_it_is(ranks: int) -> None:
    case = uneven_batches.convolutions(7)
    assert not verified_plan(case, ranks, "auto").padding
    with pytest.raises(LayoutError, match="a batch of 7"):
        verified_plan(case, ranks, "fsdp")


@pytest.mark.slow
def test_dropout_drops_the_same_in_rows_that_are_no_copies() -> None:
    """`verify` compares it with one device, whose numbers hang on the places in all rows."""
    plan = verified_plan(uneven_batches.gpt2(7, dropout=0.1), 4, "fsdp")
    assert [(each.size, each.padded) for each in plan.padding] == [(7, 8)]


@pytest.mark.slow
def test_rows_that_are_not_the_first_dim_are_padded_without_draws_alone() -> None:
    def loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.dropout(x.T, model.rate) * y.T).mean()

    for rate, padded in ((0.0, True), (0.2, False)):
        model, inputs = uneven_batches.mlp(7, loss)
        model.rate = rate
        assert bool(autopar.plan(model, 4, inputs, smaller=False).padding) == padded


def test_gradients_of_inputs_have_no_padding() -> None:
    model, (x, y) = uneven_batches.mlp(5)
    plan = verified_plan((model, (x.requires_grad_(), y)), 4, "fsdp")
    assert [(each.size, each.padded) for each in plan.padding] == [(5, 8)]


def test_a_batch_that_divides_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.planner import padding

    monkeypatch.setattr(padding, "_searched_padded", lambda *_: pytest.fail("a second search"))
    model, inputs = uneven_batches.mlp(8)
    assert not autopar.plan(model, 4, inputs, layout="fsdp").padding


def test_a_batch_that_would_double_is_not_padded() -> None:
    model, inputs = uneven_batches.mlp(3)
    with pytest.raises(LayoutError, match="a batch of 3"):
        autopar.plan(model, 8, inputs, layout="fsdp")
