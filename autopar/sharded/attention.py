"""Attention with dropout: the plain formula, so that the mask of dropped weights does not depend on
the layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dropout import dropout
from .index import Digit


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    p: float,
    is_causal: bool,
    scale: float | None,
    seed: Tensor,
    coordinates: Sequence[Tensor],
    digits_by_dim: Sequence[Sequence[Digit]],
    shape: Sequence[int],
) -> Tensor:
    """softmax(query · keyᵀ · scale + mask) · value with dropout of the weights; query (…, heads, q,
    e), key and value (…, groups, k, ·).

    `shape` is the global shape of the weights (…, heads, q, k); see `dropout` for `seed`,
    `coordinates`, `digits_by_dim`.
    """
    repeats = query.shape[-3] // key.shape[-3] if query.dim() > 2 else 1
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.mT * scale
    if is_causal:
        kept = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~kept, float("-inf"))
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        )
    weights = torch.softmax(scores, -1) if mask is None else _weights(scores)
    return dropout(weights, p, seed, coordinates, digits_by_dim, shape) @ value


def _weights(scores: Tensor) -> Tensor:
    """Softmax that gives zeros, as torch's attention does, to a query from which a mask hides every
    key.
    """
    blind = (scores == float("-inf")).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(blind, 0), -1).masked_fill(blind, 0)
