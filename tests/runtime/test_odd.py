"""Odd models through the whole pipeline: each is right on all ranks, or refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
import odd_shapes  # noqa: F401  (enters its models)
from autopar import PlanError, TraceError
from launch import TESTS
from odd_models import ODD, Simple, rows, sequences
from plans import assert_equal_to_eager, named_or_refused, subject

# Their casts and complex parameters are widened: eager differs in the last digits.
NARROW = {"casts", "complex_numbers", "complex_slices_written"}
NAMED = ("ddp", "fsdp", "megatron")


@pytest.mark.slow_cells(
    "a_bias_on_scores_that_is_trained", "a_branch_that_is_detached", "a_branch_without_parameters",
    "a_gated_pair_from_one_weight", "a_moving_average", "a_tied_embedding",
    "a_weight_and_its_transpose", "adapters_on_a_frozen_base", "along_a_dim", "an_image_network",
    "attention_by_bmm", "attention_by_einsum", "attention_with_dropout", "batch_norm", "casts",
    "complex_numbers", "complex_slices_written", "dropout_in_training", "encoder_layer",
    "encoder_layer_with_dropout", "grouped_queries_of_uneven_widths", "indices",
    "log_softmax_and_nll_by_hand", "multihead_attention", "multihead_attention_with_weights",
    "norms", "other_losses", "patches", "pieces", "products", "recurrent", "recurrent_layers",
    "statistics_over_the_batch", "two_losses_and_a_mean_by_hand", "writes_into_a_tensor",
)  # fmt: skip
@pytest.mark.parametrize("name", ODD)
def test_an_odd_model_is_right_on_all_ranks(name: str) -> None:
    model, args, kwargs = ODD[name]()
    model_subject = subject(model, args or kwargs)
    if "dropout" not in name and name not in NARROW:
        assert_equal_to_eager(model_subject)
    assert model_subject.named(2, "auto").ranks == 2
    number = list(ODD).index(name)
    named_or_refused(model_subject, (3, 4, 6)[number % 3], NAMED[number // 3 % 3])
    assert model_subject.at_random(("x2.y3", "x3", "x2.y2.z2")[number % 3], number).ranks > 2


# -- ops without a rule ----------------------------------------------------------------------------


@pytest.mark.slow
def test_an_op_that_no_rule_and_no_trial_can_split_is_listed_once() -> None:
    def body(model: Any, x: Tensor) -> Tensor:
        y = model.up(x)
        for _ in range(3):
            vectors = y.flatten(0, -2)
            y = y @ torch.matrix_exp(vectors.mT @ vectors / vectors.shape[0])
        return model.down(y).square().mean()

    inputs = (sequences(),)
    model = Simple(body)
    plan = autopar.plan(model, 4, inputs)
    assert [line.split()[0] for line in plan.unsplit].count("aten.matrix_exp.default") == 1
    autopar.verify(model, 4, inputs)


RANDOM = {
    "poisson": lambda model, x: model.up(x) + torch.poisson(model.up(x).relu()),
    "binomial": lambda model, x: model.up(x) * torch.binomial(torch.ones(48), torch.rand(48)),
    "cauchy": lambda model, x: model.up(x) + torch.empty(48).cauchy_(),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_that_ranks_would_draw_apart_are_refused(name: str) -> None:
    model = Simple(RANDOM[name])
    with pytest.raises(PlanError, match="draws random numbers") as caught:
        autopar.plan(model, 2, (rows(),))
    message = str(caught.value)
    assert f'File "{TESTS}/' in message and "pass them as inputs" in message


IDLE = {
    "alpha_dropout": lambda model, x: F.alpha_dropout(model.up(x), 0.5, training=False),
    "rrelu": lambda model, x: F.rrelu(model.up(x), training=False),
    "unused": lambda model, x: (torch.rand(3), model.up(x))[1],
}


@pytest.mark.parametrize("name", IDLE)
def test_random_ops_that_draw_nothing_are_not(name: str) -> None:
    autopar.verify(Simple(IDLE[name]), 2, (rows(),))


# -- memory that is read by its strides ------------------------------------------------------------


class Strided(nn.Module):
    def __init__(self, copy: bool) -> None:
        super().__init__()
        self.linear, self.copy = nn.Linear(8, 8), copy

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).transpose(1, 2)
        y = y.contiguous() if self.copy else y
        return y.as_strided((12, 3, 8), (24, 4, 1)).square().mean()


def test_strides_of_a_contiguous_tensor_mean_the_same_on_all_ranks() -> None:
    torch.manual_seed(0)
    case = subject(Strided(copy=True), (torch.randn(12, 6, 8),))
    assert_equal_to_eager(case)
    for seed in range(4):
        case.at_random("x2.y3", seed)


def test_strides_of_another_tensor_are_refused() -> None:
    with pytest.raises(TraceError, match="as_strided reads a tensor that is not contiguous"):
        autopar.plan(Strided(copy=False), 2, (torch.randn(12, 6, 8),))
