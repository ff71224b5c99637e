"""Op kinds that have weights: products, attention, convolutions, norms, recurrent layers."""

from __future__ import annotations

from .table import FROM_IDS, op

# -- products --------------------------------------------------------------------------------------
LINEAR = "self.{m} = nn.Linear({h}, {o}, bias={flag})"
op("linear", "self.{m}({x})", init=LINEAR, weight=8)
op(
    "mlp",
    "{x} + self.{m}b(F.gelu(self.{m}a({x})))",
    init="self.{m}a = nn.Linear({h}, {o})\nself.{m}b = nn.Linear({o}, {h})",
    weight=4,
)
op(
    "swiglu",
    "gate, value = self.{m}a({x}).chunk(2, -1)\nself.{m}b(F.silu(gate) * value)",
    init="self.{m}a = nn.Linear({h}, 2 * {o}, bias={flag})\nself.{m}b = nn.Linear({o}, {h})",
    weight=3,
)
op("glu", "F.glu(self.{m}({x}), -1)", init="self.{m} = nn.Linear({h}, 2 * {o})")
op("twice", "self.{m}(self.{m}({x}).tanh())", init="self.{m} = nn.Linear({h}, {h})")
op(
    "weight_used_twice",
    "{x} @ self.{m}.weight.T @ self.{m}.weight + self.{m}.weight.sum()",
    init=LINEAR,
)
op("transposed_weight", "{x} @ self.{m}", init="self.{m} = nn.Parameter(torch.randn({h}, {o}) / 4)")
op("row_linear", "self.{m}({x}.mT).mT", init="self.{m} = nn.Linear({shape[-2]}, {o})")
op("bilinear", "self.{m}({x}, {y})", init="self.{m} = nn.Bilinear({h}, {h}, {o}, bias={flag})")
op("einsum", "torch.einsum('...h,ho->...o', {x}, self.{m})",
   init="self.{m} = nn.Parameter(torch.randn({h}, {o}) / 4)")  # fmt: skip
op("grouped_linear", "torch.einsum('...gi,goi->...go', {x}.unflatten(-1, ({k}, -1)), "
   "self.{m}).flatten(-2)",
   init="self.{m} = nn.Parameter(torch.randn({k}, {o}, {h} // {k}) / 4)")  # fmt: skip
op("gram", "torch.bmm({x}, {y}.mT) / {h}", when="n == 3")
op("baddbmm", "torch.baddbmm({x}, {x} @ {y}.mT, {y}, beta=0.5, alpha=0.1)", when="n == 3")
op("addmm", "torch.addmm(self.{m}b, {x}.flatten(0, -2), self.{m}, beta=0.5).unflatten(0, "
   "{shape[:-1]})", init="self.{m} = nn.Parameter(torch.randn({h}, {o}) / 4)\n"
   "self.{m}b = nn.Parameter(torch.randn({o}))")  # fmt: skip
op("outer", "torch.einsum('...i,...j->...ij', {x}, {y}).flatten(-2)", when="h <= 8")
op("lora", "self.{m}({x}) + {x} @ self.{m}a.T @ self.{m}b.T",
   init=LINEAR + ".requires_grad_(False)\nself.{m}a = nn.Parameter(torch.randn(2, {h}) / 4)\n"
   "self.{m}b = nn.Parameter(torch.randn({o}, 2) / 4)")  # fmt: skip
op("frozen", "self.{m}({x})", init=LINEAR + ".requires_grad_(False)")
op("experts", "p = self.{m}r({x}).softmax(-1)\n"
   "sum(p[..., i, None] * self.{m}[i]({x}) for i in range(3))",
   init="self.{m} = nn.ModuleList(nn.Linear({h}, {o}) for _ in range(3))\n"
   "self.{m}r = nn.Linear({h}, 3)")  # fmt: skip
op("top_expert", "p, i = self.{m}r({x}).softmax(-1).topk(2, -1)\n"
   "torch.einsum('...eo,...e->...o', torch.einsum('...h,eho->...eo', {x}, self.{m}), "
   "torch.zeros(*{shape[:-1]}, 4).scatter(-1, i, p))",
   init="self.{m} = nn.Parameter(torch.randn(4, {h}, {o}) / 4)\nself.{m}r = nn.Linear({h}, 4)",
)  # fmt: skip
op("parameter_list", "sum({x} * p for p in self.{m})",
   init="self.{m} = nn.ParameterList(torch.randn({h}) for _ in range(2))")  # fmt: skip
op("weight_norm", "self.{m}({x})",
   init="self.{m} = torch.nn.utils.parametrizations.weight_norm(nn.Linear({h}, {o}))")  # fmt: skip
op("spectral_norm", "self.{m}({x})",
   init="self.{m} = torch.nn.utils.parametrizations.spectral_norm(nn.Linear({h}, {o}))"
)  # fmt: skip
op("orthogonal_weight", "self.{m}({x})",
   init="self.{m} = torch.nn.utils.parametrizations.orthogonal(nn.Linear({h}, {h}))")  # fmt: skip
op("weight_from_weight", "F.linear({x}, self.{m} / self.{m}.norm(dim={pick(0, 1)}, keepdim=True))",
   init="self.{m} = nn.Parameter(torch.randn({o}, {h}))")  # fmt: skip
op("hyper_weight", "torch.einsum('b...h,bho->b...o', {x}, "
   "self.{m}({x}.flatten(1, -2).mean(1) if {n} > 2 else {x}).unflatten(-1, ({h}, 2)))",
   init="self.{m} = nn.Linear({h}, 2 * {h})", when="h <= 8")  # fmt: skip

# -- attention -------------------------------------------------------------------------------------
QKV = "self.{m}a = nn.Linear({h}, 3 * {h}, bias={flag2})\nself.{m}b = nn.Linear({h}, {h})"
SPLIT = (
    "q, k, v = (t.unflatten(-1, ({k}, -1)).transpose(1, 2) for t in self.{m}a({x}).chunk(3, -1))\n"
)


def attention(name: str, text: str, split: str = SPLIT, init: str = QKV, **more: float) -> None:
    """Of q, k and v (b, heads, s, e)."""
    lines = text.split("\n")
    joined = "self.{m}b((" + lines[-1] + ").transpose(1, 2).flatten(2))"
    op(name, split + "\n".join([*lines[:-1], joined]), init=init, when="n == 3", **more)


SDPA = "F.scaled_dot_product_attention"
attention("attention", SDPA + "(q, k, v, is_causal={flag})", weight=3)
attention("attention_scaled", SDPA + "(q, k, v, scale=0.3)")
attention("attention_bool_mask", SDPA + "(q, k, v, attn_mask={given(f'torch.rand({b}, 1, {c}, {c})"
          " > 0.3', 'eye')})")  # fmt: skip
attention("attention_trained_bias", SDPA + "(q, k, v, attn_mask=self.{m}c)",
          init=QKV + "\nself.{m}c = nn.Parameter(torch.randn({k}, {c}, {c}))")  # fmt: skip
attention("attention_alibi", "d = torch.arange({c})[:, None] - torch.arange({c})\n"
          "a = q @ k.mT + d.abs() * -0.5 ** torch.arange({k})[:, None, None]\n"
          "a.softmax(-1) @ v")  # fmt: skip
attention("attention_by_hand", "a = (q @ k.mT / q.shape[-1] ** 0.5)\n"
          "a = a.masked_fill(torch.ones({c}, {c}, dtype=torch.bool).triu(1), -1e9)\n"
          "a.softmax(-1) @ v")  # fmt: skip
attention("attention_by_einsum", "a = torch.einsum('bhqe,bhke->bhqk', q, k).softmax(-1)\n"
          "torch.einsum('bhqk,bhkv->bhqv', a, v)")  # fmt: skip
attention("linear_attention", "q, k = F.elu(q) + 1, F.elu(k) + 1\nq @ (k.mT @ v) / {c}")
attention("attention_rotary",
          "t = torch.arange({c})[:, None] * 0.5 ** torch.arange({h} // {k})\n"
          "turn = lambda u: u * t.cos() + u.roll(1, -1) * t.sin()\n"
          + SDPA + "(turn(q), turn(k), v, is_causal=True)")  # fmt: skip
attention("attention_window", "i = torch.arange({c})\nnear = (i[:, None] - i).abs() <= 1\n"
          + SDPA + "(q, k, v, attn_mask=near)")  # fmt: skip
attention("query_norm", "q, k = F.rms_norm(q, (q.shape[-1],)), F.rms_norm(k, (q.shape[-1],))\n"
          + SDPA + "(q, k, v)")  # fmt: skip
GQA_SPLIT = (
    "q, k, v = self.{m}a({x}).split([{g} * {r} * {e}, {g} * {e}, {g} * {e}], -1)\n"
    "q, k, v = (t.unflatten(-1, (-1, {e})).transpose(1, 2) for t in (q, k, v))\n"
)
GQA = (
    "self.{m}a = nn.Linear({h}, {g} * ({r} + 2) * {e})\nself.{m}b = nn.Linear({g} * {r} * {e}, {h})"
)
attention("gqa", SDPA + "(q, k, v, is_causal={flag}, enable_gqa=True)", GQA_SPLIT, GQA, weight=2)
attention("gqa_repeated", "k, v = k.repeat_interleave({r}, 1), v.repeat_interleave({r}, 1)\n"
          + SDPA + "(q, k, v)", GQA_SPLIT, GQA)  # fmt: skip
attention("gqa_expanded", "k, v = (t[:, :, None].expand(-1, -1, {r}, -1, -1).flatten(1, 2) "
          "for t in (k, v))\n" + SDPA + "(q, k, v, is_causal=True)", GQA_SPLIT, GQA)  # fmt: skip
op("multihead_attention", "self.{m}({x}, {x}, {x}, need_weights={flag})[0]", when="n == 3",
   init="self.{m} = nn.MultiheadAttention({h}, {k}, batch_first={flag2})")  # fmt: skip
op("cross_attention", "self.{m}({x}, {given(f'torch.randn({b}, 3, {h})')}, {given(f'torch.randn({b}"
   ", 3, {h})')})[0]", when="n == 3",
   init="self.{m} = nn.MultiheadAttention({h}, {k}, batch_first=True)")  # fmt: skip
op("encoder_layer", "self.{m}({x})", when="n == 3",
   init="self.{m} = nn.TransformerEncoderLayer({h}, {k}, {o}, dropout=0.0, batch_first={flag}, "
   "norm_first={flag2})")  # fmt: skip
op("decoder_layer", "self.{m}({x}, {y}, tgt_mask=torch.ones({c}, {c}, dtype=torch.bool).triu(1))",
   when="n == 3", init="self.{m} = nn.TransformerDecoderLayer({h}, {k}, {o}, dropout=0.0, "
   "batch_first=True)")  # fmt: skip

# -- convolutions ----------------------------------------------------------------------------------
op("conv1d", "self.{m}({x}.mT).mT", when="n == 3",
   init="self.{m} = nn.Conv1d({h}, {o}, 3, padding=1, bias={flag})")  # fmt: skip
op("conv1d_strided", "self.{m}({x})", when="n == 3 and h > 3",
   init="self.{m} = nn.Conv1d({c}, {o}, 2, stride=2)")  # fmt: skip
op("conv1d_depthwise", "self.{m}({x}.mT).mT", when="n == 3",
   init="self.{m} = nn.Conv1d({h}, {h}, 3, padding='same', groups={h})")  # fmt: skip
op("conv1d_causal", "self.{m}(F.pad({x}.mT, (2, 0))).mT", when="n == 3",
   init="self.{m} = nn.Conv1d({h}, {o}, 3, padding_mode='zeros')")  # fmt: skip
op("conv1d_circular", "self.{m}({x}.mT).mT", when="n == 3 and c > 1",
   init="self.{m} = nn.Conv1d({h}, {o}, 3, padding=1, padding_mode='circular')")  # fmt: skip
op("conv_transpose1d", "self.{m}({x}.mT).mT", when="n == 3",
   init="self.{m} = nn.ConvTranspose1d({h}, {o}, 2, stride=2)")  # fmt: skip
op("conv2d", "self.{m}({x})", when="n == 4", weight=6,
   init="self.{m} = nn.Conv2d({c}, {o}, 3, padding=1, bias={flag})")  # fmt: skip
op("conv2d_grouped", "self.{m}({x})", when="n == 4", weight=2,
   init="self.{m} = nn.Conv2d({c}, {kc} * {pick(1, 2, 3)}, 1, groups={kc})")  # fmt: skip
op("conv2d_patches", "self.{m}({x}).flatten(2).mT", when="n == 4 and h >= 2 and shape[2] >= 2",
   init="self.{m} = nn.Conv2d({c}, {o}, 2, stride=2)")  # fmt: skip
op("conv2d_dilated", "self.{m}({x})", when="n == 4",
   init="self.{m} = nn.Conv2d({c}, {o}, 3, padding=2, dilation=2, padding_mode="
   "{pick(repr('zeros'), repr('replicate'))})")  # fmt: skip
op("conv_transpose2d", "self.{m}({x})", when="n == 4",
   init="self.{m} = nn.ConvTranspose2d({c}, {o}, 2, stride=2)")  # fmt: skip
op("conv3d", "self.{m}({x}[:, None]).flatten(1, 2)", when="n == 4",
   init="self.{m} = nn.Conv3d(1, 2, 3, padding=1)")  # fmt: skip

# -- norms -----------------------------------------------------------------------------------------
AFFINE = "elementwise_affine={flag}"
op("layer_norm", "self.{m}({x})", init="self.{m} = nn.LayerNorm({h}, " + AFFINE + ")", weight=3,
   when="h > 1")  # fmt: skip
op("layer_norm_of_two_dims", "self.{m}({x})", when="n >= 3 and h > 1",
   init="self.{m} = nn.LayerNorm({shape[-2:]})")  # fmt: skip
op("rms_norm", "self.{m}({x})", init="self.{m} = nn.RMSNorm({h}, " + AFFINE + ")", weight=2)
op("batch_norm", "self.{m}({x})", when="n == 2",
   init="self.{m} = nn.BatchNorm1d({h}, affine={flag}, track_running_stats={flag2})")  # fmt: skip
op("batch_norm_of_sequences", "self.{m}({x}.mT).mT", when="n == 3",
   init="self.{m} = nn.BatchNorm1d({h}, momentum={pick(0.1, None)})")  # fmt: skip
op("batch_norm_2d", "self.{m}({x})", when="n == 4", weight=3,
   init="self.{m} = nn.BatchNorm2d({c}, affine={flag})")  # fmt: skip
op("batch_norm_eval", "self.{m}({x}.flatten(1)).view({shape})",
   init="self.{m} = nn.BatchNorm1d({size // b}).eval()")  # fmt: skip
op("group_norm", "self.{m}({x})", when="n >= 3 and size // b // kc > 1",
   init="self.{m} = nn.GroupNorm({kc}, {c})")  # fmt: skip
op("instance_norm", "self.{m}({x})", when="n == 3 and h > 1",
   init="self.{m} = nn.InstanceNorm1d({c}, affine={flag}, track_running_stats={flag2})"
)  # fmt: skip
op("instance_norm_2d", "self.{m}({x})", when="n == 4 and h > 1",
   init="self.{m} = nn.InstanceNorm2d({c}, affine={flag}, track_running_stats={flag2})"
)  # fmt: skip
op("response_norm", "F.local_response_norm({x}, 2)", when="n >= 3")

# -- recurrent -------------------------------------------------------------------------------------
for kind in ("RNN", "GRU", "LSTM"):
    op(kind.lower(), "self.{m}({x})[0]", when="n == 3", weight=0.4,
       init="self.{m} = nn." + kind + "({h}, {pick(2, 3, 4)}, batch_first={flag}, "
       "bidirectional={flag2})")  # fmt: skip
op("gru_cell", "state = torch.zeros({b}, {h})\n" + "for i in range({c}): "
   "state = self.{m}({x}[:, i], state)\nstate", when="n == 3 and c <= 4", weight=0.4,
   init="self.{m} = nn.GRUCell({h}, {h})")  # fmt: skip
op("scan", "state, states = torch.zeros({b}, {h}), []\nfor i in range({c}):\n"
   "    state = torch.tanh(self.{m}(state) + {x}[:, i])\n    states.append(state)\n"
   "torch.stack(states, 1)", when="n == 3 and c <= 4", weight=0.4,
   init="self.{m} = nn.Linear({h}, {h})")  # fmt: skip

# -- weights for every entry -----------------------------------------------------------------------
op("scale", "{x} * self.{m}", init="self.{m} = nn.Parameter(torch.rand({h}) + 0.5)")
op("shift", "{x} + self.{m}", init="self.{m} = nn.Parameter(torch.randn({shape[1:]}))")
op("scalar_weight", "{x} * self.{m}", init="self.{m} = nn.Parameter(torch.tensor(0.7))")
op("prelu", "self.{m}({x})", init="self.{m} = nn.PReLU({pick(1, c)})")
op("class_token", "torch.cat([self.{m}.expand({b}, -1, -1), {x}], 1)", when="n == 3",
   init="self.{m} = nn.Parameter(torch.randn(1, {pick(1, 2)}, {h}))")  # fmt: skip
op("positions", "{x} + self.{m}(torch.arange({c}))", when="n == 3",
   init="self.{m} = nn.Embedding({c} + 2, {h})")  # fmt: skip

# -- embeddings ------------------------------------------------------------------------------------
EMBEDDING = "self.{m} = nn.Embedding({vocabulary}, {o}"
op("embedding", "self.{m}({x})", init=EMBEDDING + ")", kind=FROM_IDS, weight=3)
op("embedding_padded", "self.{m}({x})", init=EMBEDDING + ", padding_idx=1)", kind=FROM_IDS)
op("embedding_by_frequency", "self.{m}({x})", kind=FROM_IDS,
   init=EMBEDDING + ", scale_grad_by_freq=True)")  # fmt: skip
op("embedding_max_norm", "self.{m}({x})", init=EMBEDDING + ", max_norm=1.0)", kind=FROM_IDS,
   weight=0.3)  # fmt: skip
op("embedding_bag", "self.{m}({x})", kind=FROM_IDS,
   init="self.{m} = nn.EmbeddingBag({vocabulary}, {o}, mode={pick(repr('sum'), repr('mean'), "
   "repr('max'))})")  # fmt: skip
op("one_hot", "F.one_hot({x}, {vocabulary}).to(torch.get_default_dtype())", kind=FROM_IDS)
op("tied_embedding", "F.linear(self.{m}({x}).tanh(), self.{m}.weight)", kind=FROM_IDS,
   init=EMBEDDING + ")")  # fmt: skip
op("table_lookup", "self.{m}[{x}]", kind=FROM_IDS,
   init="self.{m} = nn.Parameter(torch.randn({vocabulary}, {o}))")  # fmt: skip
op("embedding_of_two", "self.{m}({x}) + self.{m}b({x} % 3)", kind=FROM_IDS,
   init=EMBEDDING + ")\nself.{m}b = nn.Embedding(3, {o})")  # fmt: skip
