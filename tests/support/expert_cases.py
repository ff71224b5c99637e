"""Calls of the op of a mixture of experts, one for each form of a body, for rule_cases.py."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.ops.experts import BODIES, Body, experts_op
from index_cases import distinct
from shards import Case, call, real

TOKENS, WIDTH, EXPERTS, INNER, CHOICES = 6, 4, 6, 6, 2


def _chunked(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return F.silu(gate) * up


def _interleaved(rows: Tensor) -> Tensor:
    return F.gelu(rows[..., ::2]) * (rows[..., 1::2] + 1)


def _normed(rows: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(rows, rows.shape[-1:], weight, 1e-6)


BODIES.update(
    {
        "test-gated": Body(_chunked),
        "test-interleaved": Body(_interleaved, concatenated=False, transposed=True),
        "test-plain": Body(F.gelu, gated=False),
        "test-normed": Body(_chunked, norm=_normed),
        "test-soft": Body(lambda rows: _chunked(rows).softmax(-1), splits_inner=False),
    }
)


def experts(kind: str, bias: bool = False, norm: bool = False, missing: int = 0) -> Case:
    """One call with the body of this kind. `missing`: so many indices are of no expert."""
    body = BODIES[f"test-{kind}"]
    wide = (2 if body.gated else 1) * INNER
    up, down = (EXPERTS, wide, WIDTH), (EXPERTS, WIDTH, INNER)
    if body.transposed:
        up, down = (EXPERTS, WIDTH, wide), (EXPERTS, INNER, WIDTH)
    index = torch.stack([distinct(EXPERTS)[:CHOICES].roll(i) + i for i in range(TOKENS)]) % EXPERTS
    index[:missing] = EXPERTS
    return call(
        experts_op,
        real(TOKENS, WIDTH),
        index,
        real(TOKENS, CHOICES, low=0.1),
        real(*up),
        real(EXPERTS, wide) if bias else None,
        real(*down),
        real(EXPERTS, WIDTH) if bias else None,
        real(WIDTH, low=0.5) if norm else None,
        f"test-{kind}",
        EXPERTS,
        note=kind + (", bias" if bias else "") + (", missing" if missing else ""),
    )


EXPERT_LAYERS = [
    experts("gated"),
    experts("gated", bias=True),
    experts("gated", bias=True, missing=2),
    experts("interleaved", bias=True),
    experts("plain"),
    experts("normed", norm=True),
    experts("soft"),
]
