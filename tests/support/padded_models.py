"""Models whose vocabulary and heads no axis of 4 or 8 ranks divides, as (model, inputs)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models

WORDS, ROWS, LENGTH, HEADS = 515, 8, 8, 6

Case = tuple[nn.Module, Any]


class Losses(nn.Module):
    """A language model of transformers that returns its loss alone: what it moves is not hidden by
    a gather of all logits.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs).loss


def tokens(words: int = WORDS) -> Tensor:
    return torch.randint(0, words, (ROWS, LENGTH))


def text(words: int = WORDS) -> dict[str, Tensor]:
    ids = tokens(words)
    return {"input_ids": ids, "labels": models.ignore_some(ids)}


def gpt2(words: int = WORDS, heads: int = HEADS, alone: bool = True) -> Case:
    """Its output weight is tied to its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=words, n_positions=LENGTH, n_embd=8 * heads, n_layer=2, n_head=heads,
        use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    return Losses(model) if alone else model, text(words)


def llama(words: int = WORDS, groups: int = 3, heads: int = HEADS) -> Case:
    """Groups of queries share keys, and neither divides."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=words, hidden_size=8 * heads, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=groups, max_position_embeddings=LENGTH,
        use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    return Losses(LlamaForCausalLM(config).train()), text(words)


def bert(words: int = WORDS, heads: int = HEADS) -> Case:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=words, hidden_size=8 * heads, num_hidden_layers=2, num_attention_heads=heads,
        intermediate_size=64, max_position_embeddings=LENGTH, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    mask[1::2, -3:] = 0
    return Losses(BertForMaskedLM(config).train()), {**text(words), "attention_mask": mask}


def t5(words: int = WORDS, heads: int = HEADS) -> Case:
    """A bias of its own for every head, and attention in single ops."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=words, d_model=48, d_kv=8, d_ff=64, num_layers=1, num_heads=heads,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return Losses(T5ForConditionalGeneration(config).train()), text(words)


class Smoothed(nn.Module):
    """A head of classes whose loss sums over all of them: smoothing, weights, log-softmax."""

    def __init__(self, words: int = WORDS, kind: str = "smoothing") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(words, 32), nn.Linear(32, words)
        self.register_buffer("weight", torch.rand(words) + 0.5 if "weights" in kind else None)
        self.kind = kind

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embed(ids)).flatten(0, 1)
        if self.kind == "log softmax":
            return F.nll_loss(F.log_softmax(logits, -1), labels.flatten())
        smoothing = 0.2 if "smoothing" in self.kind else 0.0
        return F.cross_entropy(
            logits, labels.flatten(), weight=self.weight, label_smoothing=smoothing
        )


CASES = {"gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5}
