"""The experts that lie on this rank: tokens of the others' experts give zeros, so that the result
is partial over the axes that split experts.

Example: of 8 experts on 4 ranks each rank holds 2; the experts with global indices 4 and 5 are 0
and 1 on the third. ops/local.py emits this for `autopar::experts`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.ops.experts import expert_layer
from autopar.ops.sharded.vocabulary import Digit, localize


def experts(
    tokens: Tensor,
    index: Tensor,
    scores: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    norm: Tensor | None,
    body: str,
    count: int,
    coordinates: Sequence[Tensor],
    digits: Sequence[Digit],
) -> Tensor:
    """Return what `expert_layer` does for the experts of this rank, of `count` in all; `index` is
    global, and `digits` say which of the experts the rank holds.
    """
    local, owned = localize(index, coordinates, digits)
    inside = owned & (index < count)
    index = torch.where(inside, local, up.shape[0])
    weights = (up, up_bias, down, down_bias, norm)
    return expert_layer(tokens, index, scores, *weights, body, count)
