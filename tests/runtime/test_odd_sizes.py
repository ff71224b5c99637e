"""Sizes and losses that shards make uneven: ignored tokens, padding, heads that do not divide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import World
from odd_models import ids, sequences
from plans import assert_equal_to_eager, named_or_refused, random_plan, subject

# -- cross entropy ---------------------------------------------------------------------------------


class Classes(nn.Module):
    """Logits of 36 classes for sequences of 6, with everything that cross entropy knows."""

    def __init__(self, weighted: bool, flat: bool, **options: Any) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(24, 24), nn.Linear(24, 36)
        self.register_buffer("weight", torch.rand(36) + 0.2 if weighted else None)
        self.flat, self.options = flat, options

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.inner(x).relu())
        if self.flat:
            logits, labels = logits.flatten(0, 1), labels.flatten()
        else:
            logits = logits.transpose(1, 2)
        return F.cross_entropy(logits, labels, weight=self.weight, **self.options)


@pytest.mark.slow_cells("weighted-0.2-mean")
@pytest.mark.slow_cells(
    "plain*", "weighted-0.0-mean", "weighted-0.0-none", "weighted-0.0-sum", "weighted-0.2-none",
    "weighted-0.2-sum",
)  # fmt: skip
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_cross_entropy_of_unequal_shards(reduction: str, smoothing: float, weighted: bool) -> None:
    """Tokens on the data axis, 0, 1, 2, ... of them ignored a row; classes on the others."""
    torch.manual_seed(0)
    ignored = 5 if weighted else -100
    labels = ids()
    for row in range(len(labels)):
        labels[row, : row % 7] = ignored
    options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored}
    flat = weighted != (smoothing > 0)
    case = subject(Classes(weighted, flat, **options), (sequences(), labels))
    assert_equal_to_eager(case)
    for ranks, layout in ((4, "ddp"), (3, "megatron"), (6, "fsdp")):
        assert case.named(ranks, layout).loss_error < 1e-12
    for seed in range(3):
        case.at_random("x2.y2.z2", seed)


def test_random_plans_split_the_classes_and_the_tokens() -> None:
    """The plans above are worth their time: logits lie on both, on several axes."""
    program = subject(Classes(False, True), (sequences(), ids())).program
    splits = set()
    for seed in range(40):
        plan = random_plan(program, "x2.y2", World.of(4), seed)
        logits = plan.choices["cross_entropy_loss"].operands[0]
        splits.add(tuple(sorted(state.dim for state in logits.states if state.kind == "S")))
    assert {(0,), (1,), (0, 1), (1, 1)} <= splits


# -- sizes that do not divide ----------------------------------------------------------------------


class OddSizes(nn.Module):
    def __init__(self, heads: int, vocabulary: int) -> None:
        super().__init__()
        hidden = 4 * heads
        self.heads, self.tokens = heads, nn.Embedding(vocabulary, hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens)
        q, k, v = (
            t.unflatten(-1, (self.heads, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(x + self.out(y.transpose(1, 2).flatten(2)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _odd_sizes(heads: int, vocabulary: int, batch: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    tokens = torch.randint(0, vocabulary, (batch, 7))
    return OddSizes(heads, vocabulary), (tokens, tokens.roll(-1, 1))


@pytest.mark.slow_cells("6-36-3")
@pytest.mark.slow_cells("5-36-12", "5-37-3", "6-37-12")
@pytest.mark.parametrize(
    ("heads", "vocabulary", "batch"), [(5, 36, 12), (6, 37, 12), (6, 36, 3), (5, 37, 3)]
)
def test_sizes_that_do_not_divide_split_something_else(
    heads: int, vocabulary: int, batch: int
) -> None:
    case = subject(*_odd_sizes(heads, vocabulary, batch))
    for ranks in (2, 3, 4, 6, 7):
        case.named(ranks, "auto")
        named_or_refused(case, ranks, ("ddp", "fsdp", "megatron")[ranks % 3])
    case.at_random("x2.y3", 0)


@pytest.mark.slow
def test_the_plan_says_what_was_not_split_and_why() -> None:
    plan = autopar.plan(*_with_ranks(_odd_sizes(5, 37, 3), 7))
    (sentence, *_) = [line for line in plan.unsplit if "scaled_dot_product_attention" in line]
    assert "of 7" in sentence and "= 3" in sentence and "= 5" in sentence  # axis, batch, heads
    assert sentence in str(plan.table().caption)
    products = [line for line in plan.unsplit if "linear" in line or "scaled_dot" in line]
    assert plan.mesh.size == 7 and all("7" in line for line in products)
    assert not autopar.plan(*_with_ranks(_odd_sizes(6, 36, 12), 4)).unsplit


def _with_ranks(example: tuple[nn.Module, Any], ranks: int) -> tuple[nn.Module, int, Any]:
    return example[0], ranks, example[1]


# -- transformers with masks of padding ------------------------------------------------------------


def _bert(mask: Tensor) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers.models.bert.configuration_bert import BertConfig
    from transformers.models.bert.modeling_bert import BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=24, hidden_size=24, num_hidden_layers=1, num_attention_heads=6,
        intermediate_size=48, max_position_embeddings=6, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    inputs = {"input_ids": ids(6, 6) % 24, "attention_mask": mask, "labels": ids(6) % 2}
    return BertForSequenceClassification(config), inputs


def _t5(mask: Tensor) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers.models.t5.configuration_t5 import T5Config
    from transformers.models.t5.modeling_t5 import T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=24, d_model=24, d_kv=4, d_ff=48, num_layers=1, num_heads=6, dropout_rate=0.0,
        use_cache=False, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    labels = ids(6, 6) % 24
    inputs = {"input_ids": ids(6, 6) % 24, "attention_mask": mask, "labels": labels}
    return T5ForConditionalGeneration(config), {**inputs, "decoder_attention_mask": mask.flip(0)}


def _padding() -> Tensor:
    mask = torch.ones(6, 6, dtype=torch.int64)
    mask[1::2, -2:] = 0
    return mask


MASKS = {
    "bert int": lambda: _bert(_padding()),
    "bert bool": lambda: _bert(_padding()[:, None, None].expand(6, 1, 6, 6).bool()),
    "bert float": lambda: _bert((1.0 - _padding()[:, None, None].expand(6, 1, 6, 6)) * -1e4),
    "t5 int": lambda: _t5(_padding()),
}


@pytest.mark.slow_cells("bert float")
@pytest.mark.slow_cells("bert bool", "bert int", "t5 int")
@pytest.mark.parametrize("name", MASKS)
def test_padding_is_masked_the_same_on_all_ranks(name: str) -> None:
    case = subject(*MASKS[name]())
    for layout in ("auto", "megatron", "ddp"):
        case.named(3, layout)
    case.at_random("x2.y3", 1)
