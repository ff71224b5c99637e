"""A call of a model with other rows."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar._compat import pytree
from autopar.planner.tracing import Call
from models import Example


def call_of(example: Example, rows: int) -> Call:
    """A call of an example's model with so many of its rows, again from the first where needed."""
    _, args, kwargs = example
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    batch = len(tensors[0])

    def cut(x: Tensor) -> Tensor:
        if not x.dim() or len(x) != batch:
            return x
        return torch.cat([x] * -(-rows // batch))[:rows]

    return Call(*pytree.tree_map_only(torch.Tensor, cut, (args, kwargs)))
