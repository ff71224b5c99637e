"""Models on sequences of any number of tokens, as (model, inputs), and losses of tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
import moe_models
import padded_models
from padded_models import Case

Loss = Callable[[Tensor, Tensor], Tensor]
WORDS, HEADS, WIDTH = 64, 4, 32


def cut(case: Case, tokens: int) -> Case:
    """Return a model with sequences of so many tokens, of which some count for no loss."""
    model, inputs = case
    ids = torch.randint(0, WORDS, (padded_models.ROWS, tokens))
    inputs_cut = {"input_ids": ids, "labels": models.ignore_some(ids)}
    if "attention_mask" in inputs:
        inputs_cut["attention_mask"] = inputs["attention_mask"][:, :tokens].contiguous()
    return model, inputs_cut


def llama(tokens: int) -> Case:
    return cut(padded_models.llama(WORDS, groups=2, heads=HEADS), tokens)


def gpt2(tokens: int) -> Case:
    return cut(padded_models.gpt2(WORDS, heads=HEADS), tokens)


def bert(tokens: int) -> Case:
    return cut(padded_models.bert(WORDS, heads=HEADS), tokens)


def t5(tokens: int) -> Case:
    return cut(padded_models.t5(WORDS, heads=HEADS), tokens)


def moe(name: str, tokens: int) -> Case:
    """A mixture of experts, whose router divides by the sum of the scores that it takes."""
    model, _, inputs = getattr(moe_models, name)()
    return cut((padded_models.Losses(model), inputs), tokens)


class Layer(nn.Module):
    """One layer of attention whose loss is a function of (its result, the embedded tokens)."""

    def __init__(self, loss: Loss, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.loss, self.causal, self.dropout = loss, causal, dropout

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        heads = (h.unflatten(-1, (HEADS, -1)).transpose(1, 2) for h in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(
            *heads, is_causal=self.causal, dropout_p=self.dropout
        )
        return self.loss(self.out(mixed.transpose(1, 2).flatten(2)), x)


def layer(tokens: int, loss: Loss, causal: bool = True, dropout: float = 0.0) -> Case:
    torch.manual_seed(0)
    ids = torch.randint(0, WORDS, (8, tokens))
    return Layer(loss, causal, dropout), (ids,)


COUNTED: dict[str, Loss] = {
    "sum": lambda y, x: (y * x).sum(),
    "mean": lambda y, x: (y + x).mean(),
    "mean of squares": lambda y, x: (y.square() + x).mean(),
    "mean of tokens": lambda y, x: y.mean(1).square().sum(),
    "before attention": lambda y, x: y.mean() + (x * x).exp().sum(1).log().mean(),
}
# Ops that mix tokens otherwise than by a sum, and such as may give no number for a token's mixture.
REFUSED: dict[str, Loss] = {
    "cumulative": lambda y, x: y.cumsum(1).square().mean(),
    "largest": lambda y, x: y.amax(1).sum(),
    "next token": lambda y, x: (y[:, :-1] * x[:, 1:]).mean(),
    "logarithm": lambda y, x: (y * y).log().mean(),
    "a division": lambda y, x: (y / (y * y).sum(-1, keepdim=True)).mean(),
    "last token": lambda y, x: y[:, -1].square().mean(),
}
