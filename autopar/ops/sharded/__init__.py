"""Sharded ops: differentiable functions on the rank's local tensors that emitted graphs call where
the dim that an op reduces is split.

Example: `layer_norm` of x (..., 64) where the last dim of 256 lies on four ranks. ops/local.py
emits these calls, except `linear` and `summa_linear`, which the passes kernel_choice and summa put
in place of a matmul.

Where a dim lies on several axes, each holds one digit of its index: `digits` is a sequence of
(axis, stride, size), which says that the axis holds (i // stride) % size of the GLOBAL index i.
`coordinates` is a sequence of int64 tensors of shape (1,), the rank's own coordinates on those
axes, in the same order. Digits may come in any order; nothing here takes mesh order for stride
order.
"""

from autopar.ops.sharded.attention import attention
from autopar.ops.sharded.dropout import dropout
from autopar.ops.sharded.matmul import linear, summa_linear
from autopar.ops.sharded.norms import layer_norm, log_softmax, rms_norm, softmax
from autopar.ops.sharded.vocabulary import Digit, cross_entropy, embedding

__all__ = [
    "Digit",
    "attention",
    "cross_entropy",
    "dropout",
    "embedding",
    "layer_norm",
    "linear",
    "log_softmax",
    "rms_norm",
    "softmax",
    "summa_linear",
]
