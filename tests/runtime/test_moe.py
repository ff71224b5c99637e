"""Mixtures of experts from transformers: right in every node, and trained on real ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar._compat import pytree
from autopar.ops.experts import experts_op
from autopar.planner.request import GridEP
from launch import launched
from moe_models import EXPERTS, MOE, gshard, looped, mixtral, with_auxiliary_loss
from training_facts import LIMIT, check_training

LAYOUTS = ("auto", "ep", "fsdp", "megatron")
FAST = {("mixtral", "ep"), ("gshard", "ep")}


@pytest.mark.slow_cells("mixtral-ep")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(n, layout, marks=() if (n, layout) in FAST else pytest.mark.slow)
        for n in MOE
        for layout in LAYOUTS
    ],
)
def test_a_mixture_of_experts_is_right_on_four_ranks(name: str, layout: str) -> None:
    model, args, inputs = MOE[name]()
    assert autopar.verify(model, 4, inputs or args, layout=layout).grad_error < 1e-11


@pytest.mark.slow
def test_memory_of_checkpointed_blocks_is_filled_too() -> None:
    model, _, inputs = MOE["mixtral"]()
    autopar.verify(model, 2, inputs, layout="fsdp", recompute="full")


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["ep", "auto", GridEP(2, 2, 2)], ids=str)
@pytest.mark.parametrize("name", MOE)
def test_a_mixture_of_experts_is_right_on_eight_ranks(name: str, grid: Any) -> None:
    model, args, inputs = MOE[name]()
    assert autopar.verify(model, 8, inputs or args, layout=grid).grad_error < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["ep", "auto", GridEP(4, 2, 2), GridEP(2, 4, 2)], ids=str)
@pytest.mark.parametrize("name", MOE)
def test_a_mixture_of_experts_is_right_on_sixteen_ranks(name: str, grid: Any) -> None:
    model, args, inputs = pytree.tree_map_only(Tensor, lambda x: torch.cat((x, x)), MOE[name]())
    assert autopar.verify(model, 16, inputs or args, layout=grid).grad_error < 1e-9


# -- experts as one op -----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def planned() -> autopar.Plan:
    model, _, inputs = mixtral()
    return autopar.plan(model, 4, inputs, layout=GridEP(data=2, expert=2))


def layers(plan: autopar.Plan) -> list[torch.fx.Node]:
    assert plan.context is not None
    graph = plan.context.source.module.graph
    return graph.find_nodes(op="call_function", target=experts_op)


def test_experts_are_one_op_whose_weights_no_rank_gathers(planned: autopar.Plan) -> None:
    (layer,) = layers(planned)
    choice = planned.choices[layer.name]
    assert choice.splits == ("t", "e")
    states = {str(layout) for layout in choice.operands[3:] if layout is not None}
    assert states == {"data:R expert:S(0)"}
    stored = planned.stored["p_model_layers_0_mlp_experts_down_proj"]
    assert str(stored).endswith("expert:S(0)")


def test_the_config_asks_for_what_it_did_before() -> None:
    model, _, inputs = mixtral()
    before = model.config._experts_implementation
    plan = autopar.plan(model, 2, inputs, layout="fsdp")
    assert layers(plan) and model.config._experts_implementation == before


def test_a_plan_says_what_it_takes_of_the_router(planned: autopar.Plan) -> None:
    (note,) = (note for note in planned.notes if "tokens an expert" in note)
    assert "4 experts are split over expert of 2 ranks" in note
    assert "32 tokens an expert" in note and "1.2 times as many on the busiest rank" in note


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ep", "auto", GridEP(expert=2, tensor=2)], ids=str)
@pytest.mark.parametrize("name", [name for name in MOE if name != "olmoe"])
def test_two_microbatches_give_the_same(name: str, layout: Any) -> None:
    model, args, inputs = MOE[name]()
    check = autopar.verify(model, 4, inputs or args, layout=layout, microbatches=2)
    assert max(check.loss_error, check.grad_error, check.step_error) < 1e-9


# -- refusals --------------------------------------------------------------------------------------
def refused(error: type[Exception], *words: str, **options: Any) -> None:
    model, args, inputs = options.pop("model", mixtral)()
    with pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, words))):
        autopar.plan(model, options.pop("ranks", 8), inputs or args, **options)


def test_an_expert_axis_larger_than_the_experts_is_refused() -> None:
    words = (
        f"axis expert of 8 ranks on a layer of {EXPERTS} experts",
        "use expert=4 and more data",
    )
    refused(autopar.LayoutError, *words, layout=GridEP(expert=8))
    words = ("of 2 ranks on the factor batch", "a batch of 8: use a batch that 16 divides")
    refused(autopar.LayoutError, *words, ranks=16, layout="ep")
    words = ("axis expert of 3 ranks", "hold 1.33: use another layout, or layout 'auto'")
    refused(autopar.LayoutError, *words, ranks=3, layout="ep")


def test_a_model_without_experts_is_refused() -> None:
    def dense() -> Any:
        return nn.Linear(8, 8), (torch.randn(8, 8),), {}

    refused(autopar.LayoutError, "the model has none", "or 'auto'", model=dense, layout="ep")


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        (lambda index, scores: (index, None), "its scores are none"),
        (lambda index, scores: (index,), "its scores are none"),
        (lambda index, scores: (None, scores), "its numbers of experts are none"),
        (lambda index, scores: (scores, scores), "its numbers of experts are torch.float32"),
        (lambda index, scores: (index, index), "its scores are torch.int64"),
        (lambda index, scores: (index, scores.sum(1)), "torch.float32 of shape (64,)"),
        (lambda index, scores: (index, scores[:, :1]), "numbers (64, 2) and scores (64, 1)"),
        (lambda index, scores: (index[:8], scores), "its numbers of experts are torch.int64"),
    ],
    ids=[
        "no scores", "one result", "no numbers", "scores alone", "numbers alone", "one", "fewer",
        "few tokens",
    ],
)  # fmt: skip
def test_a_router_that_does_not_say_which_experts_and_how_much_is_refused(
    choices: Any, says: str
) -> None:
    def model() -> Any:
        net, args, kwargs = mixtral()
        experts = net.model.layers[0].mlp.experts

        class Misled(type(experts)):  # type: ignore[misc]
            def forward(self, tokens: Any, index: Any, scores: Any) -> Any:
                return super().forward(tokens, *choices(index, scores))

        experts.__class__ = Misled
        return net, args, kwargs

    refused(
        autopar.TraceError,
        "Misled model.layers.0.mlp.experts of 4 experts takes from",
        says,
        model=model,
    )


def test_a_loop_over_experts_is_refused_with_the_remedy() -> None:
    words = ("A loop over experts", "einsum", "use_experts_implementation")
    refused(autopar.TraceError, *words, model=looped)


def test_an_auxiliary_loss_in_microbatches_is_refused_with_the_reason() -> None:
    words = ("product of two sums over the batch", "auxiliary loss")
    refused(autopar.PlanError, *words, model=with_auxiliary_loss, layout="fsdp", microbatches=2)


def test_einsum_experts_lie_where_they_compute() -> None:
    model, args, _ = gshard()
    plan = autopar.plan(model, 4, args, layout=GridEP(expert=4))
    assert {str(plan.stored[f"p_{name}"]) for name in ("up", "down")} == {"expert:S(0)"}


@pytest.mark.slow
@pytest.mark.parametrize("name", MOE)
def test_a_mixture_of_experts_trains_as_on_one_device(tmp_path: Path, name: str) -> None:
    facts = launched(tmp_path, 4, name, script="moe_ranks.py", seconds=900)[name]
    assert len(facts) == 6 - (name == "olmoe"), "no auxiliary loss in micro-batches"
    for of_layout in facts.values():
        check_training(of_layout)
        assert of_layout["losses agree"]
        assert of_layout["all parameters"] < LIMIT
