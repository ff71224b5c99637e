"""Context parallelism: queries of attention split over the sequence, with gathered keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
import models
import moe_models
from autopar.errors import LayoutError
from autopar.ir.band import Band, Place, position
from autopar.ir.graph import every_node
from autopar.ir.layout import Layout
from autopar.ir.plan import Plan
from autopar.ops.sharded.masked_attention import MASKED_ATTENTION
from autopar.planner.request import GridContext, Layouts
from autopar.runtime.apply import renew_plan

LIMIT = 1e-9
MODELS = {
    "llama": models.llama,
    "gpt2": models.gpt2,
    "gemma2": models.gemma2,  # caps its scores, so it has no fused attention
    "gemma3": models.gemma3,
    "mistral": models.mistral,
    "bert": models.bert,
    "t5": models.t5,
}
LAYOUTS: dict[str, tuple[int, Layouts]] = {
    "cp": (4, "cp"),
    "cp on 8": (8, "cp"),
    "cp x fsdp": (4, GridContext(2)),
    "cp x fsdp on 8": (8, GridContext(4)),
    "cp x megatron": (4, GridContext(2, "megatron")),
    "cp x 4d": (8, GridContext(2, autopar.Grid4D(x=2, z=2))),
    "contiguous cp": (4, GridContext(4, attention="contiguous")),
    "contiguous cp x megatron": (4, GridContext(2, "megatron", "contiguous")),
}
HEADS: dict[str, tuple[int, Layouts]] = {
    "heads": (4, GridContext(4, attention="heads")),
    "heads x fsdp": (4, GridContext(2, attention="heads")),
    "heads x megatron": (4, GridContext(2, "megatron", "heads")),
    "heads x 4d": (8, GridContext(2, autopar.Grid4D(x=2, z=2), "heads")),
}


def holds(name: str, ranks: int, layout: Layouts, **overrides: Any) -> None:
    model, args, kwargs = MODELS[name](**overrides)
    check = autopar.verify(model, ranks, args or kwargs, layout=layout)
    assert check.ranks == ranks
    assert max(check.loss_error, check.grad_error, check.step_error) < LIMIT


@pytest.mark.slow_cells("llama-cp")
@pytest.mark.slow_cells(
    "*-contiguous cp x megatron", "*-cp on 8", "*-cp x 4d", "*-cp x fsdp on 8", "bert-*",
    "gemma2-*", "gemma3-*", "gpt2-*", "llama-contiguous cp", "llama-cp x fsdp",
    "llama-cp x megatron", "mistral-*", "t5-*",
)  # fmt: skip
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_parity_of_context_parallelism(name: str, layout: str) -> None:
    holds(name, *LAYOUTS[layout])


@pytest.mark.slow_cells("llama-heads x megatron")
@pytest.mark.slow_cells(
    "*-heads x 4d", "*-heads x fsdp", "*-heads", "bert-*", "gemma3-*", "gpt2-*", "mistral-*",
    "t5-*",
)  # fmt: skip
@pytest.mark.parametrize("layout", HEADS)
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"gemma2"}))
def test_parity_where_ranks_exchange_the_sequence_for_heads(name: str, layout: str) -> None:
    holds(name, *HEADS[layout])


@pytest.mark.slow_cells("gpt2")
@pytest.mark.slow_cells("bert", "t5")
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_dropout_where_queries_are_split(name: str) -> None:
    holds(name, 4, "cp", dropout=0.2)


# -- where queries lie -----------------------------------------------------------------------------
def attentions(plan: Plan, operand: int = 0) -> list[Layout]:
    """The layouts of the queries of every attention, or of another operand."""
    assert plan.context is not None
    notes = plan.context.source.annotations
    assert notes is not None
    layouts = [
        plan.choices[name].operands[operand] for name, rule in notes.specs.items() if rule.attends
    ]
    return [layout for layout in layouts if layout is not None]


@pytest.mark.slow_cells("False")
@pytest.mark.slow_cells("True")
@pytest.mark.parametrize("strided", [True, False])
def test_ranks_take_runs_of_tokens_in_turns(strided: bool) -> None:
    """16 tokens on 4 ranks: 2 runs of 2 tokens each, or one of 4. A file of the plan says so."""
    model, _, kwargs = models.llama()
    plan = autopar.plan(
        model, 4, kwargs, layout=GridContext(4, attention="strided" if strided else "contiguous")
    )
    renewed = renew_plan(model, Plan.from_json(plan.to_json()), kwargs)
    for layout in (*attentions(plan), *attentions(renewed)):
        (digit,) = layout.digits(2)
        assert (digit.axis, digit.stride, digit.size) == ("context", 2 if strided else 4, 4)
    assert not renewed.changed_figures


def test_every_query_lies_on_one_rank() -> None:
    places = (Place(2, 2), Place(8, 2))
    queries = [
        position(local, places, (first, second))
        for local in range(4)
        for first in range(2)
        for second in range(2)
    ]
    assert sorted(queries) == list(range(16))


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_contiguous_part_costs_what_the_last_rank_computes(ranks: int) -> None:
    tokens = 1 << 16
    band, part = Band(after=0), tokens // ranks
    whole = band.share(tokens, tokens)
    assert band.share(part, tokens, (Place(1, ranks),)) == pytest.approx(whole, rel=0.07)
    contiguous = band.share(part, tokens, (Place(part, ranks),))
    assert contiguous == pytest.approx(0.5 * (2 - 1 / ranks), rel=0.07)


@pytest.mark.parametrize(
    "places", [(), (Place(1, 4),), (Place(16, 4),), (Place(4, 2), Place(1, 2))]
)
@pytest.mark.parametrize("band", [Band(after=0), Band(5, 0), Band(3, 4), Band(None, -2), Band()])
def test_blocks_hold_every_key_that_is_seen(band: Band, places: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("autopar.ir.band._FEWEST", 3)
    ranks = 1
    for _, size in places:
        ranks *= size
    queries, keys = 64 // ranks, 64
    blocks = band.blocks(queries, keys, places)
    assert [row for rows, _ in blocks for row in rows] == list(range(queries))
    for rows, columns in blocks:
        for number in range(ranks):
            own, left = [], number
            for _, size in places:
                left, digit = divmod(left, size)
                own.append(digit)
            for row in rows:
                query = position(row, places, own)
                seen = {key for key in range(keys) if band.sees(query, key)}
                assert seen <= set(columns)
                assert band.hides(rows, columns, places) or seen == set(columns)


@pytest.mark.slow_cells("2-4", "4-4")
@pytest.mark.parametrize(("ranks", "heads_of_keys"), [(2, 4), (4, 4), (4, 2)])
def test_a_rank_has_the_full_sequence_of_its_heads(ranks: int, heads_of_keys: int) -> None:
    """8 heads, 4 of keys or 2, which are repeated before attention."""
    model, _, kwargs = models.llama(num_key_value_heads=heads_of_keys)
    plan = autopar.plan(model, ranks, kwargs, layout=GridContext(ranks, attention="heads"))
    for layout in (*attentions(plan), *attentions(plan, 1)):
        assert str(layout).startswith("context:S(1")


# -- long sequences --------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_long_sequence_fits_on_8_ranks() -> None:
    """One of 131,072 tokens: planned on meta tensors within 16 GiB, and no rank makes a tensor of
    tokens by tokens.
    """
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    tokens, ranks = 131_072, 8
    config = LlamaConfig(**{**models.decoder_config(), "max_position_embeddings": tokens})
    with torch.device("meta"):
        model = LlamaForCausalLM(config).train()
        ids = torch.zeros(1, tokens, dtype=torch.int64)
    world = autopar.World.preset("dgx-h100", ranks)
    inputs = {"input_ids": ids, "labels": ids}
    plan = autopar.plan(model, world, inputs, layout="cp", memory=16 * 2**30)
    assert plan.peak_bytes < 16 * 2**30
    assert plan.context is not None
    largest = tokens // ranks * tokens
    nodes = [node for node, _ in every_node(plan.context.program.module)]
    shapes = [n.meta["layout"].local_size for n in nodes if "layout" in n.meta]
    assert max(shapes) < largest // 8
    assert sum(node.target is MASKED_ATTENTION for node in nodes) == models.LAYERS
    whole = autopar.plan(model, world, inputs, layout="megatron", memory=1 << 50)
    assert plan.peak_bytes < whole.peak_bytes / 2


# -- what does not fit -----------------------------------------------------------------------------
def test_a_sequence_that_no_axis_divides_is_refused_where_tokens_see_later_ones() -> None:
    model, args, kwargs = models.bert()
    with pytest.raises(LayoutError, match=r"axis context of 3 ranks .* sequences of \d+ tokens"):
        autopar.plan(model, 3, args or kwargs, layout="cp")


def test_a_model_without_a_sequence_is_refused() -> None:
    with pytest.raises(LayoutError, match="no sequence of token ids"):
        autopar.plan(nn.Linear(8, 8), 4, (torch.ones(4, 8),), layout="cp")


@pytest.mark.slow
def test_heads_that_no_axis_divides_are_refused() -> None:
    model, _, kwargs = models.llama()
    says = r"axis context of 16 ranks on the heads of attention, and \w+ has 4 × 2, of which"
    with pytest.raises(LayoutError, match=says):
        autopar.plan(model, 16, kwargs, layout=GridContext(16, attention="heads"))
    with pytest.raises(LayoutError, match="has 4 × 2, of which an axis splits one number"):
        autopar.plan(model, 8, kwargs, layout=GridContext(8, attention="heads"))
    says = r"axis context of 4 ranks beside 4 of tensor parallelism on the heads .* has 4 × 2,"
    with pytest.raises(LayoutError, match=says):
        autopar.plan(model, 16, kwargs, layout=GridContext(4, "megatron", "heads"))


@pytest.mark.slow
def test_attention_that_is_no_op_has_no_heads_to_split() -> None:
    """Gemma 2 caps its scores between two products."""
    model, _, kwargs = models.gemma2()
    with pytest.raises(LayoutError, match="no attention that is one op: call torch's"):
        autopar.plan(model, 4, kwargs, layout=GridContext(4, attention="heads"))


def test_an_unknown_scheme_of_attention_is_refused() -> None:
    model, _, kwargs = models.llama()
    with pytest.raises(LayoutError, match="`attention` is strided or contiguous or heads"):
        autopar.plan(model, 4, kwargs, layout=GridContext(4, attention="ring"))  # type: ignore[arg-type]


def test_ranks_that_context_does_not_divide_are_refused() -> None:
    model, _, kwargs = models.llama()
    with pytest.raises(LayoutError, match="a multiple of 3 ranks, the world has 4"):
        autopar.plan(model, 4, kwargs, layout=GridContext(3))


# -- beside experts --------------------------------------------------------------------------------
@pytest.mark.slow_cells(
    "4-GridContext(context=2, within=GridEP*",
)  # fmt: skip
@pytest.mark.slow_cells("8-*")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (4, GridContext(2, autopar.GridEP(expert=2))),
        (8, GridContext(2, autopar.GridEP(2, 2))),
        (8, GridContext(2, autopar.GridEP(expert=2, tensor=2), "heads")),
    ],
    ids=str,
)
def test_parity_of_contexts_with_experts(ranks: int, layout: Layouts) -> None:
    model, _, kwargs = moe_models.mixtral()
    check = autopar.verify(model, ranks, kwargs, layout=layout)
    assert max(check.loss_error, check.grad_error, check.step_error) < LIMIT
    assert check.ranks == ranks
