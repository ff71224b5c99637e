"""Tiny text models of transformers, made from a configuration as a user makes them."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

from benchmarks.zoo.sizes import (
    BATCH,
    HEADS,
    HIDDEN,
    LAYERS,
    SEQUENCE,
    VOCABULARY,
    Example,
    Factory,
    labeled_tokens,
    padded_tokens,
    token_ids,
)

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 4 * SEQUENCE,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": HEADS // 2, "head_dim": HIDDEN // HEADS}


def build(auto_class: str, kind: str, options: dict[str, Any], **settings: Any) -> Any:
    """Return a model in training mode: `auto_class.from_config(AutoConfig.for_model(kind, …))`."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **options)
    return getattr(transformers, auto_class).from_config(config, **settings).train()


def causal(kind: str, **options: Any) -> Factory:
    """Return the factory of a decoder with the loss of the next token."""

    def make() -> Example:
        return build("AutoModelForCausalLM", kind, {**COMMON, **options}), labeled_tokens()

    return make


def masked(kind: str, **options: Any) -> Factory:
    """Return the factory of an encoder with the loss of masked tokens, on padded rows."""

    def make() -> Example:
        return build("AutoModelForMaskedLM", kind, {**COMMON, **options}), padded_tokens()

    return make


def sequence_to_sequence(kind: str, **options: Any) -> Factory:
    """Return the factory of an encoder-decoder with the loss of the target's tokens."""

    def make() -> Example:
        inputs = {**padded_tokens(), "labels": token_ids()}
        return build("AutoModelForSeq2SeqLM", kind, {**COMMON, **options}), inputs

    return make


BART = {
    "d_model": HIDDEN,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 2 * HIDDEN,
    "decoder_ffn_dim": 2 * HIDDEN,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
NO_LAYERDROP = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
T5 = {
    "d_model": HIDDEN,
    "d_kv": HIDDEN // HEADS,
    "d_ff": 2 * HIDDEN,
    "num_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "num_heads": HEADS,
    "decoder_start_token_id": 0,
}
GPT2 = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 4 * SEQUENCE}


# -- calls of another kind -------------------------------------------------------------------------
def packed_llama(**options: Any) -> Factory:
    """Return the factory of a decoder in whose rows two sequences stand, one behind the other;
    their positions begin anew at 0. `options` are those of the call.

    Without the cache, transformers lets no token attend to the other sequence; with it, it does
    not look for sequences in a row.
    """

    def make() -> Example:
        model = build("AutoModelForCausalLM", "llama", {**COMMON, **GROUPED})
        positions = torch.cat([torch.arange(3), torch.arange(SEQUENCE - 3)]).repeat(BATCH, 1)
        return model, {**labeled_tokens(), "position_ids": positions, **options}

    return make


def flex_llama() -> Example:
    """Attention by `flex_attention`."""
    options = {**COMMON, **GROUPED, "head_dim": 16}
    settings = {"attn_implementation": "flex_attention"}
    return build("AutoModelForCausalLM", "llama", options, **settings), labeled_tokens()


DECODERS: dict[str, Factory] = {
    "gpt2": causal("gpt2", **GPT2),
    "llama": causal("llama", **GROUPED),
    "llama packed": packed_llama(use_cache=False),
    "llama packed with cache": packed_llama(),
    "llama flex": flex_llama,
    "mistral": causal("mistral", **GROUPED, sliding_window=4),
    "qwen2": causal("qwen2", num_key_value_heads=2),
    "qwen3": causal("qwen3", **GROUPED),
    "gemma2": causal("gemma2", **GROUPED, sliding_window=4, query_pre_attn_scalar=8),
    "gemma3": causal("gemma3_text", **GROUPED, sliding_window=4, query_pre_attn_scalar=8),
    "gpt_neox": causal("gpt_neox"),
    "gptj": causal("gptj", **GPT2, rotary_dim=4),
    "opt": causal("opt", ffn_dim=2 * HIDDEN, word_embed_proj_dim=HIDDEN),
    "bloom": causal("bloom", n_layer=LAYERS, n_head=HEADS),
    "falcon": causal("falcon"),
    "phi": causal("phi"),
    "phi3": causal("phi3"),
    "cohere": causal("cohere"),
    "stablelm": causal("stablelm", num_key_value_heads=HEADS),
    "olmo2": causal("olmo2"),
    "granite": causal("granite"),
}
ENCODERS: dict[str, Factory] = {
    "bert": masked("bert"),
    "roberta": masked("roberta"),
    "albert": masked("albert", embedding_size=16),
    "electra": masked("electra", embedding_size=16),
    "distilbert": masked("distilbert", dim=HIDDEN, hidden_dim=64, n_layers=LAYERS, n_heads=HEADS),
    "deberta_v2": masked("deberta-v2"),
    "modernbert": masked("modernbert", cls_token_id=1, sep_token_id=2, local_attention=4),
}
ENCODER_DECODERS: dict[str, Factory] = {
    "t5": sequence_to_sequence("t5", **T5),
    "bart": sequence_to_sequence("bart", **BART),
    "pegasus": sequence_to_sequence("pegasus", **BART),
    "m2m_100": sequence_to_sequence("m2m_100", **BART, **NO_LAYERDROP),
}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "num_key_value_heads": HEADS}
LOCAL_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_key_value_heads": HEADS}
DEEPSEEK = {
    "num_key_value_heads": HEADS,
    "moe_intermediate_size": HIDDEN,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
MIXTURES: dict[str, Factory] = {
    "mixtral": causal("mixtral", **LOCAL_EXPERTS),
    "qwen2_moe": causal(
        "qwen2_moe", **EXPERTS, moe_intermediate_size=32, shared_expert_intermediate_size=32
    ),
    "qwen3_moe": causal("qwen3_moe", **EXPERTS, head_dim=8, moe_intermediate_size=32),
    "olmoe": causal("olmoe", **EXPERTS),
    "gpt_oss": causal("gpt_oss", **LOCAL_EXPERTS, head_dim=8, sliding_window=4),
    "deepseek_v3": causal("deepseek_v3", **DEEPSEEK),
}
MAMBA = {"state_size": 8, "expand": 2}
STATE_SPACE: dict[str, Factory] = {
    "mamba": causal("mamba", **MAMBA),
    "mamba2": causal("mamba2", **MAMBA, num_heads=8, head_dim=8, n_groups=2, chunk_size=4),
    "falcon_mamba": causal("falcon_mamba", **MAMBA),
}
