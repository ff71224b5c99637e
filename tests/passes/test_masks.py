"""Masks of attention become descriptions that say the same, or stay as they are."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, fx, nn
from torch.nn import functional as F

import autopar
import models
from autopar.errors import TraceError
from autopar.ir.band import Band
from autopar.ir.program import Program
from autopar.ir.sharding_rule import bound
from autopar.ops.sharded.masked_attention import BLOCK_MASK, MASKED_ATTENTION
from autopar.passes import draws, masks, trace
from autopar.passes.trace.signature import without_cache

SDPA = torch.ops.aten.scaled_dot_product_attention.default
SIZE = 16


def described(model: nn.Module, args: Any, kwargs: Any) -> tuple[Program, Program]:
    """A model's program before and after the pass."""
    with without_cache(model, kwargs):
        before = draws.draws(trace.trace(model, args, kwargs))
    after = masks.masks(before)
    masks.check(after)
    return before, after


def said(program: Program) -> list[str]:
    """What each attention of a program sees, in words; in blocks with "blocks" before."""
    labels = []
    for node in program.module.graph.nodes:
        if node.target not in (MASKED_ATTENTION, SDPA):
            continue
        in_blocks = node.target is MASKED_ATTENTION
        description = node if in_blocks else bound(node)["attn_mask"]
        if not isinstance(description, fx.Node):
            labels.append("causal" if bound(node)["is_causal"] else "all")
        elif description.target not in (MASKED_ATTENTION, BLOCK_MASK):
            labels.append("mask")
        else:
            values = bound(description)
            words = f"{values['before']} {values['after']} {values['compare']}".strip()
            labels.append(f"blocks {words}" if in_blocks else words)
    return labels


@pytest.fixture
def in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention to sequences of any length is computed in blocks."""
    monkeypatch.setattr("autopar.passes.masks._pays_in_blocks", lambda *_: True)


# -- models of transformers ------------------------------------------------------------------------
def padded(example: models.Example) -> models.Example:
    model, args, kwargs = example
    mask = torch.ones_like(kwargs["input_ids"])
    mask[::2, -3:] = 0
    return model, args, {**kwargs, "attention_mask": mask}


def packed(example: models.Example) -> models.Example:
    model, args, kwargs = example
    documents = torch.cat([torch.arange(6), torch.arange(models.SEQUENCE - 6)])
    positions = documents.expand(models.BATCH, -1).contiguous()
    return model, args, {**kwargs, "position_ids": positions}


MODELS = {
    "llama": (lambda: models.llama(), ["causal", "causal"]),
    "gpt2": (lambda: models.gpt2(), ["causal", "causal"]),
    "gemma3": (lambda: models.gemma3(), ["7 0", "causal"]),
    "mistral": (lambda: models.mistral(), ["7 0", "7 0"]),
    "short mistral": (lambda: models.mistral(sliding_window=4096), ["causal", "causal"]),
    "packed llama": (lambda: packed(models.llama()), ["None 0 eq"] * 2),
    "packed gemma3": (lambda: packed(models.gemma3()), ["7 0 eq", "None 0 eq"]),
    "padded llama": (lambda: padded(models.llama()), ["None 0 eq"] * 2),
    "padded bert": (lambda: padded(models.bert()), ["None None eq"] * 2),
    "dropping bert": (lambda: padded(models.bert(0.1)), ["None None eq"] * 2),
    "qwen3": (
        lambda: models.qwen3(use_sliding_window=True, sliding_window=8, max_window_layers=1),
        ["causal", "7 0"],
    ),
}


@pytest.mark.slow_cells("short mistral")
@pytest.mark.slow_cells(
    "dropping bert", "gemma3", "gpt2", "llama", "mistral", "packed gemma3", "packed llama",
    "padded bert", "padded llama", "qwen3",
)  # fmt: skip
@pytest.mark.parametrize("name", MODELS)
def test_what_masks_of_transformers_say(name: str) -> None:
    make, expected = MODELS[name]
    _, after = described(*make())
    assert said(after) == expected


@pytest.mark.slow
def test_a_model_that_does_not_take_the_mask_of_a_trace_is_refused_with_the_mask_to_give() -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.NystromformerConfig(
        vocab_size=32, num_hidden_layers=1, num_landmarks=4, segment_means_seq_len=16, **sizes
    )
    model = transformers.NystromformerForMaskedLM(config)
    ids = torch.randint(3, 32, (4, 16))
    inputs = {"input_ids": ids, "labels": ids}
    with pytest.raises(TraceError, match=r"attention_mask=torch\.zeros\(batch, 1, 1, length\)"):
        autopar.plan(model, 4, inputs, "fsdp")
    inputs["attention_mask"] = torch.zeros(4, 1, 1, 16)
    check = autopar.verify(model, 4, inputs, "fsdp")
    assert max(check.loss_error, check.grad_error, check.step_error) < 1e-9


PLANS: dict[str, Any] = {"4d": autopar.Grid4D(z=2, y=2), "cp": "cp"}


@pytest.mark.slow_cells("padded bert-cp")
@pytest.mark.slow_cells("packed gemma3-4d", "packed gemma3-cp", "padded bert-4d", "qwen3-*")
@pytest.mark.parametrize("layout", PLANS)
@pytest.mark.parametrize("name", ["packed gemma3", "padded bert", "qwen3"])
def test_described_masks_in_every_rank(name: str, layout: str) -> None:
    same_on_ranks(name, layout)


@pytest.mark.slow_cells("mistral-*", "packed gemma3-4d", "packed llama-*", "padded bert-*")
@pytest.mark.parametrize("layout", PLANS)
@pytest.mark.parametrize("name", ["packed gemma3", "padded bert", "mistral", "packed llama"])
@pytest.mark.usefixtures("in_blocks")
def test_masks_in_blocks_in_every_rank(name: str, layout: str) -> None:
    same_on_ranks(name, layout)


def same_on_ranks(name: str, layout: str) -> None:
    model, _, kwargs = MODELS[name][0]()
    check = autopar.verify(model, 4, kwargs, layout=PLANS[layout])
    assert max(check.loss_error, check.grad_error, check.step_error) < 1e-9


LENGTHS = {
    "short": (1024, Band(511, 0), False),
    "window": (2048, Band(511, 0), True),
    "causal": (2048, Band(None, 0), True),
    "padding": (2048, Band(), False),
    "padding of a long one": (1 << 15, Band(), True),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_blocks_where_they_pay(case: str) -> None:
    """Attention is computed in blocks where it is long and they skip much, or its mask is large."""
    tokens, band, expected = LENGTHS[case]

    def make(segment: Tensor, valid: Tensor) -> Tensor:
        i, j = torch.arange(tokens)[:, None], torch.arange(tokens)
        mask = valid[:, None, None, :].expand(-1, 1, tokens, -1)
        if band.after is not None:
            mask = mask & (j <= i + band.after)
        return mask if band.before is None else mask & (j >= i - band.before)

    x = torch.empty(1, 1, tokens, 8, device="meta")
    vector = torch.empty(1, tokens, device="meta")
    inputs = (x, x, x, vector.long(), vector.bool())
    _, after = described(Masked(make), inputs, {})
    words = f"{band.before} {band.after} eq"
    assert said(after) == [f"blocks {words}" if expected else words]


# -- random trees ----------------------------------------------------------------------------------
class Tree(nn.Module):
    """Attention under an "and" of random conditions on positions, inputs and constants."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segment: Tensor, valid: Tensor) -> Tensor:
        dice = random.Random(self.seed)
        mask = _condition(dice, segment, valid)
        for _ in range(dice.randrange(3)):
            other = _condition(dice, segment, valid)
            mask = dice.choice([torch.logical_and, torch.bitwise_and])(mask, other)
        return F.scaled_dot_product_attention(q, k, v, mask)


def _condition(dice: random.Random, segment: Tensor, valid: Tensor) -> Tensor:
    i, j = torch.arange(SIZE)[:, None], torch.arange(SIZE)
    step = dice.randrange(-3, 4)
    compare = dice.choice([torch.le, torch.lt, torch.ge, torch.gt, torch.eq, torch.ne])
    own, other = segment[:, None, :, None], segment[:, None, None, :]
    match dice.randrange(9):
        case 0:
            return compare(j + step, i)
        case 1:
            return compare(i, j - step)[None, None]
        case 2:
            return (i - j).abs() <= abs(step)
        case 3:
            return ~compare(i - j, step)
        case 4:
            return compare(own, other + step)
        case 5:
            return valid[:, None, None, :]
        case 6:
            return valid[:, None, :, None].expand(-1, 1, -1, SIZE)
        case 7:
            return compare(i // 4, j // 4)
    return torch.ones(SIZE, SIZE, dtype=torch.bool).tril(step)


def tree_inputs(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    operands = [
        torch.randn(2, 4, SIZE, 8, generator=generator, dtype=torch.float64) for _ in range(3)
    ]
    segment = torch.randint(0, 4, (2, SIZE), generator=generator).sort(-1).values
    return [*operands, segment, torch.rand(2, SIZE, generator=generator) < 0.7]


def gradients(program: Program, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    (result,) = program.module(*leaves, *inputs[3:])
    weight = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view_as(result)
    return [result.detach(), *torch.autograd.grad((result * weight).sum(), leaves)]


@pytest.mark.parametrize("seed", range(24))
def test_a_random_mask_and_its_description_agree(seed: int) -> None:
    same_as_traced(seed)


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.usefixtures("in_blocks")
def test_a_random_mask_and_attention_in_blocks_agree(seed: int) -> None:
    same_as_traced(seed)


def same_as_traced(seed: int) -> None:
    inputs = tree_inputs(seed)
    before, after = described(Tree(seed), tuple(inputs), {})
    assert said(after) != ["mask"]
    for own, expected in zip(gradients(after, inputs), gradients(before, inputs), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)


class Masked(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segment: Tensor, valid: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, self.make(segment, valid))


def _i() -> Tensor:
    return torch.arange(SIZE)[:, None]


UNKNOWN = {
    "or": lambda s, k: (torch.arange(SIZE) <= _i()) | k[:, None, None, :],
    "product": lambda s, k: (torch.arange(SIZE) * _i()) < 20,
    "both": lambda s, k: (s[:, None, :, None] + s[:, None, None, :]) < 4,
    "float": lambda s, k: torch.zeros(SIZE, SIZE, dtype=torch.float64).masked_fill(
        torch.arange(SIZE) > _i(), float("-inf")
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_no_description_stays(name: str) -> None:
    inputs = tree_inputs(0)
    before, after = described(Masked(UNKNOWN[name]), tuple(inputs), {})
    assert after is before and said(after) == ["mask"]


def test_positions_that_are_no_packing_are_compared() -> None:
    """The segments of other positions than those compared say nothing of them."""

    def make(segment: Tensor, valid: Tensor) -> Tensor:
        first = segment[:, :1] - 1
        number = (torch.diff(segment, prepend=first, dim=-1) != 1).cumsum(-1)
        places = segment.flip(-1)
        same = number[:, None, :, None] == number[:, None, None, :]
        return same & (places[:, None, None, :] <= places[:, None, :, None])

    inputs = tree_inputs(1)
    before, after = described(Masked(make), tuple(inputs), {})
    assert said(after) == ["None None eq ge"]
    for own, expected in zip(gradients(after, inputs), gradients(before, inputs), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)
