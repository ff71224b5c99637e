"""Tiny models with a mixture of experts, of transformers and plain: (model, args, kwargs)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models import Example, ignore_some

BATCH, SEQUENCE, VOCABULARY, HIDDEN, HEADS, EXPERTS = 8, 8, 64, 32, 4, 4
CAPACITY = 4  # tokens of a group that an expert takes, at most


def moe_config(**overrides: Any) -> dict[str, Any]:
    """What those of transformers have in common: four experts, two of which a token goes to."""
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
        **overrides,
    }


def inputs() -> dict[str, Any]:
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))
    return {"input_ids": ids, "labels": ignore_some(ids)}


def mixtral(layers: int = 1) -> Example:
    from transformers.models.mixtral.configuration_mixtral import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM

    torch.manual_seed(0)
    overrides = {"head_dim": 8, "num_local_experts": EXPERTS, "num_hidden_layers": layers}
    config = MixtralConfig(**moe_config(**overrides))
    return MixtralForCausalLM(config).train(), (), inputs()


def qwen3_moe() -> Example:
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

    torch.manual_seed(0)
    overrides = {"head_dim": 8, "num_experts": EXPERTS, "moe_intermediate_size": HIDDEN}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**moe_config(**overrides))).train(), (), inputs()


def olmoe() -> Example:
    """With the router's auxiliary loss, which counts tokens."""
    from transformers.models.olmoe.configuration_olmoe import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeForCausalLM

    torch.manual_seed(0)
    overrides = {"num_experts": EXPERTS, "output_router_logits": True, "router_aux_loss_coef": 0.1}
    return OlmoeForCausalLM(OlmoeConfig(**moe_config(**overrides))).train(), (), inputs()


def gpt_oss() -> Example:
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssForCausalLM

    torch.manual_seed(0)
    overrides = {"head_dim": 8, "num_local_experts": EXPERTS, "sliding_window": SEQUENCE // 2}
    return GptOssForCausalLM(GptOssConfig(**moe_config(**overrides))).train(), (), inputs()


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


class GShard(nn.Module):
    """Plain experts by einsum: every token goes to the best of its experts, in the place that it
    has there, then to the next best, and those beyond the capacity to none. With one choice it is
    Switch Transformer's layer.
    """

    def __init__(
        self,
        hidden: int = HIDDEN,
        inner: int = 2 * HIDDEN,
        experts: int = EXPERTS,
        choices: int = 2,
    ) -> None:
        super().__init__()
        self.choices = choices
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, inner) / 8)
        self.down = nn.Parameter(torch.randn(experts, inner, hidden) / 8)

    def layer(self, x: Tensor) -> Tensor:
        """x: (groups, tokens, width)."""
        gates = self.router(x).softmax(-1)
        taken = torch.zeros_like(gates[:, :1], dtype=torch.int64)
        combine = torch.zeros((), dtype=x.dtype, device=x.device)
        for best in gates.topk(self.choices, -1).indices.unbind(-1):
            chosen = F.one_hot(best, gates.shape[-1])
            place = (chosen.cumsum(1) + taken) * chosen - 1
            taken = taken + chosen.sum(1, keepdim=True)
            places = F.one_hot(place.clamp(0, CAPACITY - 1), CAPACITY)
            places = places * ((place >= 0) & (place < CAPACITY)).unsqueeze(-1)
            combine = combine + places * gates.unsqueeze(-1)
        sent = torch.einsum("gtec,gtd->egcd", (combine > 0).to(x.dtype), x)
        hidden = torch.einsum("egcd,edf->egcf", sent, self.up).relu()
        back = torch.einsum("egcf,efd->egcd", hidden, self.down)
        return x + torch.einsum("gtec,egcd->gtd", combine, back)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def gshard(choices: int = 2) -> Example:
    torch.manual_seed(0)
    model = GShard(choices=choices).double()
    return model, (torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=torch.float64),), {}


def switch() -> Example:
    return gshard(choices=1)


class _LoopOverExperts(nn.Module):
    """The usual loop: each expert takes the tokens that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        chosen, result = self.router(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (places,) = torch.where(chosen == number)
            result = result.index_add(0, places, expert(x[places]))
        return result.mean()


def looped() -> Example:
    return _LoopOverExperts(), (torch.randn(BATCH, HIDDEN),), {}


class _Balanced(nn.Module):
    """A router with Switch's auxiliary loss: the tokens of each expert times its mean gate."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(HIDDEN, EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.layer(x).softmax(-1)
        counts = F.one_hot(gates.argmax(-1), EXPERTS).to(x.dtype).mean(0)
        return gates.square().mean() + EXPERTS * (counts * gates.mean(0)).sum()


def with_auxiliary_loss() -> Example:
    return _Balanced(), (torch.randn(BATCH, HIDDEN),), {}


MOE = {
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "olmoe": olmoe,
    "gpt_oss": gpt_oss,
    "deepseek_v3": deepseek_v3,
    "gshard": gshard,
    "switch": switch,
}
