"""Tiny models with a mixture of experts from transformers, as (model, args, kwargs)."""

from __future__ import annotations

from typing import Any

import torch

from models import Example, ignore_some

BATCH, SEQUENCE, VOCABULARY, HIDDEN, HEADS, EXPERTS = 8, 8, 64, 32, 4, 4


def moe_config(**changes: Any) -> dict[str, Any]:
    """What the four have in common: four experts, two of which a token goes to."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 4 * SEQUENCE,
        "use_cache": False,
        "tie_word_embeddings": False,
        **changes,
    }


def inputs() -> dict[str, Any]:
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))
    return {"input_ids": ids, "labels": ignore_some(ids)}


def mixtral() -> Example:
    from transformers.models.mixtral.configuration_mixtral import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(**moe_config(head_dim=8, num_local_experts=EXPERTS))
    return MixtralForCausalLM(config).train(), (), inputs()


def qwen3_moe() -> Example:
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

    torch.manual_seed(0)
    changes = {"head_dim": 8, "num_experts": EXPERTS, "moe_intermediate_size": HIDDEN}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**moe_config(**changes))).train(), (), inputs()


def olmoe() -> Example:
    """With the router's auxiliary loss, which counts tokens."""
    from transformers.models.olmoe.configuration_olmoe import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeForCausalLM

    torch.manual_seed(0)
    changes = {"num_experts": EXPERTS, "output_router_logits": True, "router_aux_loss_coef": 0.1}
    return OlmoeForCausalLM(OlmoeConfig(**moe_config(**changes))).train(), (), inputs()


def gpt_oss() -> Example:
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssForCausalLM

    torch.manual_seed(0)
    changes = {"head_dim": 8, "num_local_experts": EXPERTS, "sliding_window": SEQUENCE // 2}
    return GptOssForCausalLM(GptOssConfig(**moe_config(**changes))).train(), (), inputs()


def deepseek_v3() -> Example:
    """A dense layer and one of experts."""
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM

    torch.manual_seed(0)
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4}
    heads = {"qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
    layers = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "moe_intermediate_size": HIDDEN}
    config = DeepseekV3Config(**moe_config(**ranks, **heads, **experts, **layers))
    return DeepseekV3ForCausalLM(config).train(), (), inputs()


MOE = {
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "olmoe": olmoe,
    "gpt_oss": gpt_oss,
    "deepseek_v3": deepseek_v3,
}
