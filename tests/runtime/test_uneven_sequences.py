"""Sequences that no axis divides: split where no token sees a later one, else as they are."""

from __future__ import annotations

import pytest

import autopar
import uneven_sequences
from autopar.errors import LayoutError
from autopar.planner.request import GridContext, GridEP, Layouts
from plans import verified_plan
from uneven_sequences import COUNTED, REFUSED, Case

MODELS = {"llama": uneven_sequences.llama, "gpt2": uneven_sequences.gpt2}
LAYOUTS: dict[str, tuple[int, Layouts]] = {
    "cp": (4, "cp"),
    "cp x fsdp": (4, GridContext(2)),
    "cp x megatron": (4, GridContext(2, "megatron")),
    "cp x 4d": (8, GridContext(2, autopar.Grid4D(x=2, z=2))),
    "contiguous cp": (4, GridContext(4, attention="contiguous")),
    "heads": (4, GridContext(2, attention="heads")),
}


def padding(plan: autopar.Plan) -> set[tuple[int, int]]:
    return {(each.size, each.padded) for each in plan.padding}


@pytest.mark.slow_cells(
    "5-*", "6-*", "7-gpt2-*", "7-llama-contiguous cp", "7-llama-cp x *", "7-llama-heads"
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tokens", [5, 6, 7])
def test_ranks_compute_what_one_does(tokens: int, name: str, layout: str) -> None:
    """Of 6 tokens, 2 ranks take some as they are."""
    ranks, wanted = LAYOUTS[layout]
    plan = verified_plan(MODELS[name](tokens), ranks, wanted)
    contexts = plan.mesh.sizes["context"]
    padded = -(-tokens // contexts) * contexts
    assert padding(plan) == ({(tokens, padded)} if padded > tokens else set())
    if padded > tokens:
        assert any(f"the sequence is padded inside the graph, from {tokens} to {padded}" in note
                   for note in plan.notes)  # fmt: skip


@pytest.mark.slow
def test_runs_of_tokens_in_turns() -> None:
    """Fifteen tokens become sixteen, of which each of eight ranks takes one of either half."""
    assert padding(verified_plan(uneven_sequences.llama(15), 8, "cp")) == {(15, 16)}


@pytest.mark.slow_cells("before attention", "mean of tokens", "mean")
@pytest.mark.parametrize("name", COUNTED)
def test_losses_that_count_tokens(name: str) -> None:
    assert padding(verified_plan(uneven_sequences.layer(7, COUNTED[name]), 4, "cp")) == {(7, 8)}


@pytest.mark.parametrize("name", REFUSED)
def test_ops_that_mix_tokens_leave_the_sequence_as_it_is(name: str) -> None:
    refused(uneven_sequences.layer(7, REFUSED[name]))


def refused(case: Case, layout: Layouts = "cp") -> None:
    with pytest.raises(LayoutError, match="sequences of 7 tokens"):
        autopar.plan(case[0], 4, case[1], layout=layout)


@pytest.mark.slow
def test_attention_to_later_tokens_leaves_the_sequence_as_it_is() -> None:
    refused(uneven_sequences.layer(7, COUNTED["mean"], causal=False))
    refused(uneven_sequences.bert(7))
    refused(uneven_sequences.t5(7))


def test_weights_of_attention_that_are_dropped_leave_the_sequence_as_it_is() -> None:
    refused(uneven_sequences.layer(7, COUNTED["mean"], dropout=0.1))


@pytest.mark.slow_cells("*-cp x *", "qwen3_moe-*")
@pytest.mark.parametrize(
    "layout",
    ["cp", GridContext(2), GridContext(2, GridEP(expert=2))],
    ids=["cp", "cp x fsdp", "cp x ep"],
)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_routers_take_tokens_that_are_no_copies(name: str, layout: Layouts) -> None:
    assert padding(verified_plan(uneven_sequences.moe(name, 7), 4, layout)) == {(7, 8)}


def test_rows_and_tokens_are_not_both_padded() -> None:
    model, (ids,) = uneven_sequences.layer(7, COUNTED["mean"])
    with pytest.raises(LayoutError, match="a batch of 7"):
        autopar.plan(model, 4, (ids[:7],), layout=GridContext(2))


@pytest.mark.slow
def test_a_plan_of_a_file_pads_the_same_tokens() -> None:
    model, inputs = uneven_sequences.llama(6)
    plan = autopar.plan(model, 4, inputs, layout="cp")
    again = autopar.Plan.from_json(plan.to_json())
    assert padding(again) == padding(plan) == {(6, 8)}
    autopar.verify(model, None, inputs, layout=again)


@pytest.mark.slow
def test_layouts_without_contexts_pad_no_sequence() -> None:
    model, inputs = uneven_sequences.llama(7)
    for layout in ("megatron-sp", "auto"):
        assert not padding(autopar.plan(model, 4, inputs, layout=layout, smaller=False))
