"""Small models that the tests share, each as (model, args, kwargs); sizes divide by 16 ranks."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torch.nn.functional as F
from torch import nn

from autopar.tools.decoders import Gpt, Sizes

BATCH, SEQUENCE, HIDDEN, HEADS, VOCABULARY, LAYERS = 16, 16, 64, 8, 128, 2

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def example(name: str, **overrides: Any) -> tuple[nn.Module, Any]:
    """(model, inputs) of one of the functions below."""
    model, args, kwargs = globals()[name](**overrides)
    return model, args or kwargs


class Mlp(nn.Module):
    """Two linears with a gelu between them, and a mean square loss."""

    def __init__(self, hidden: int = HIDDEN, inner: int = 4 * HIDDEN) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.down(F.gelu(self.up(x))), target)


class GptWithLogits(Gpt):
    """The GPT with its output's weight tied to its embedding, which returns (logits, loss)."""

    def __init__(
        self,
        vocabulary: int = VOCABULARY,
        sequence: int = SEQUENCE,
        hidden: int = HIDDEN,
        heads: int = HEADS,
        layers: int = LAYERS,
        dropout: float = 0.0,
        tied: bool = True,
    ) -> None:
        sizes = Sizes("gpt", layers, hidden, heads, vocabulary, sequence, tied=tied)
        super().__init__(sizes, dropout)

    def forward(  # type: ignore[override]
        self, tokens: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.logits(tokens)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def token_ids(vocabulary: int = VOCABULARY, sequence: int = SEQUENCE) -> torch.Tensor:
    return torch.randint(0, vocabulary, (BATCH, sequence))


def ignore_some(labels: torch.Tensor) -> torch.Tensor:
    """Labels of which unequal numbers a row are ignored: 0, 1, 2, ... (mod 7) in rows 0, 1, 2."""
    labels = labels.clone()
    for row in range(labels.shape[0]):
        labels[row, : row % 7] = -100
    return labels


def mlp() -> Example:
    torch.manual_seed(0)
    return Mlp(), (torch.randn(BATCH, HIDDEN), torch.randn(BATCH, HIDDEN)), {}


def gpt(dropout: float = 0.0) -> Example:
    torch.manual_seed(0)
    model = GptWithLogits(dropout=dropout).train()
    ids = token_ids()
    return model, (ids, ignore_some(ids.roll(-1, 1))), {}


def gpt2(dropout: float = 0.0) -> Example:
    from transformers.models.gpt2.configuration_gpt2 import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        use_cache=False,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    ids = token_ids()
    return GPT2LMHeadModel(config).train(), (), {"input_ids": ids, "labels": ignore_some(ids)}


def decoder_config() -> dict[str, Any]:
    """What Llama, Qwen3 and Gemma2 have in common: 8 heads, 4 of keys and values."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": 4 * SEQUENCE,
        "use_cache": False,
        "tie_word_embeddings": False,
    }


def decoder_inputs() -> dict[str, Any]:
    ids = token_ids()
    return {"input_ids": ids, "labels": ignore_some(ids)}


def llama(**overrides: Any) -> Example:
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**{**decoder_config(), **overrides})
    return LlamaForCausalLM(config).train(), (), decoder_inputs()


def qwen3(**overrides: Any) -> Example:
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**{**decoder_config(), **overrides})
    return Qwen3ForCausalLM(config).train(), (), decoder_inputs()


def gemma2(**overrides: Any) -> Example:
    from transformers.models.gemma2.configuration_gemma2 import Gemma2Config
    from transformers.models.gemma2.modeling_gemma2 import Gemma2ForCausalLM

    torch.manual_seed(0)
    window = {"sliding_window": SEQUENCE // 2, "query_pre_attn_scalar": HIDDEN // HEADS}
    config = Gemma2Config(**{**decoder_config(), **window, **overrides})
    return Gemma2ForCausalLM(config).train(), (), decoder_inputs()


def gemma3(**overrides: Any) -> Example:
    from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3ForCausalLM

    torch.manual_seed(0)
    layers = ["sliding_attention", "full_attention"]
    window = {"sliding_window": SEQUENCE // 2, "layer_types": layers, "head_dim": HIDDEN // HEADS}
    config = Gemma3TextConfig(**{**decoder_config(), **window, **overrides})
    return Gemma3ForCausalLM(config).train(), (), decoder_inputs()


def mistral(**overrides: Any) -> Example:
    from transformers.models.mistral.configuration_mistral import MistralConfig
    from transformers.models.mistral.modeling_mistral import MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(**{**decoder_config(), "sliding_window": SEQUENCE // 2, **overrides})
    return MistralForCausalLM(config).train(), (), decoder_inputs()


def bert(dropout: float = 0.0) -> Example:
    from transformers.models.bert.configuration_bert import BertConfig
    from transformers.models.bert.modeling_bert import BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=2 * HIDDEN,
        max_position_embeddings=SEQUENCE,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    ids, mask = token_ids(), torch.ones(BATCH, SEQUENCE, dtype=torch.int64)
    mask[1::2, -3:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ignore_some(ids)}
    return BertForMaskedLM(config).train(), (), inputs


def t5(dropout: float = 0.0, num_layers: int = LAYERS) -> Example:
    from transformers.models.t5.configuration_t5 import T5Config
    from transformers.models.t5.modeling_t5 import T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        d_kv=HIDDEN // HEADS,
        d_ff=2 * HIDDEN,
        num_layers=num_layers,
        num_heads=HEADS,
        dropout_rate=dropout,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    inputs = {"input_ids": token_ids(), "labels": ignore_some(token_ids(sequence=SEQUENCE // 2))}
    return T5ForConditionalGeneration(config).train(), (), inputs


def t5_encoder() -> Example:
    """One block of a T5's encoder, with its embedding and a head."""
    from transformers.models.t5.configuration_t5 import T5Config
    from transformers.models.t5.modeling_t5 import T5EncoderModel

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = T5EncoderModel(
                T5Config(
                    vocab_size=VOCABULARY,
                    d_model=HIDDEN,
                    d_kv=HIDDEN // HEADS,
                    d_ff=2 * HIDDEN,
                    num_layers=1,
                    num_heads=HEADS,
                    dropout_rate=0.0,
                )
            )
            self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            hidden = self.encoder(input_ids=tokens).last_hidden_state
            return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    return Tagger().train(), (token_ids(), token_ids()), {}


def vit(dropout: float = 0.0) -> Example:
    from transformers.models.vit.configuration_vit import ViTConfig
    from transformers.models.vit.modeling_vit import ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=2 * HIDDEN,
        image_size=32,
        patch_size=8,
        num_labels=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    inputs = {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.arange(BATCH) % 32}
    return ViTForImageClassification(config).train(), (), inputs


class Fivefold(torch.autograd.Function):
    """Gives what it takes; its backward, unlike the derivative, is five times the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 5 * grads[0]
