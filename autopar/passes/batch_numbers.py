"""The numbers in a micro-batch's graph that are those of the whole batch.

Example: `loss.sum() / x.shape[0]` is traced as a division by the rows of a micro-batch; in a step
of several micro-batches it divides by the rows of all. Shapes stay those of the micro-batch.
microbatches.py asks for every call, with the same call in the graph of the whole batch beside it.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.ops.rules.shapes import DRAWS, FILLS, NEW_FILLS

aten = torch.ops.aten

COUNTS = (aten.arange.default, aten.arange.start, aten.arange.start_step)
REORDERS = (
    aten.unsqueeze.default,
    aten.reshape.default,
    aten.view.default,
    aten.expand.default,
    aten._to_copy.default,
    aten.permute.default,
)
_SHAPED = frozenset(  # their arguments are shapes and places
    {
        *FILLS,
        *NEW_FILLS,
        *DRAWS,
        *COUNTS,
        *REORDERS,
        aten._unsafe_view.default,
        aten.slice.Tensor,
        aten.repeat.default,
    }
)
_VALUED = frozenset(  # their arguments are numbers to compute with
    {
        *(op.Tensor for op in (aten.add, aten.sub, aten.rsub, aten.mul, aten.div)),
        *(op.Scalar for op in (aten.add, aten.sub, aten.rsub, aten.mul, aten.div)),
        aten.pow.Tensor_Scalar,
        aten.scalar_tensor.default,
    }
)


def take_numbers(node: fx.Node, full_batch: fx.Node) -> bool:
    """Give a call of a micro-batch the numbers that it computes with in a step of the whole batch.
    Return whether that is known: an argument may depend on the number of rows in another way.
    """
    for place, (own, other) in enumerate(zip(node.args, full_batch.args, strict=True)):
        if isinstance(own, fx.Node) or str(own) == str(other):
            continue
        fills = node.target in (*FILLS, *NEW_FILLS, *DRAWS)  # of a shape, and numbers
        if node.target in _VALUED or (fills and not isinstance(own, list | tuple)):
            node.update_arg(place, other)
        elif node.target not in _SHAPED:
            return False
    return str(node.kwargs) == str(full_batch.kwargs)
