"""Op sharding rules of recurrent layers: LSTM, GRU and plain ones, of any number of layers and both
directions.

Example: an LSTM of 32 samples of 128 steps reads one step after the other, and each sample by
itself: samples may be split, steps and features may not. passes/draws.py takes layers with dropout
between them apart. Importing this file enters the rules in the table.
"""

from __future__ import annotations

import math
from itertools import count

from torch import fx

from autopar.ir.sharding_rule import (
    Dims,
    OpShardingRule,
    bound,
    operands_of,
    results_of,
    shape_of,
)
from autopar.ops.rules import aten, operand_shape, rule_for

_SAMPLES = "b"


@rule_for((aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input))
def recurrent(node: fx.Node) -> OpShardingRule:
    """Return the rule of a recurrent layer. Its states have the samples in their second dim, its
    input and its output in the first or second, its weights have none.
    """
    arguments, names = bound(node), count()
    sizes: dict[str, int] = {}

    def dims(shape: tuple[int, ...], samples: int | None) -> Dims:
        factors = []
        for place, size in enumerate(shape):
            name = _SAMPLES if place == samples else f"w{next(names)}"
            sizes[name] = size
            factors.append((name,))
        return tuple(factors)

    shapes = [operand_shape(n) for n in operands_of(node) if n is not None]
    weights = len(arguments["params"])
    of_input = 0 if arguments["batch_first"] else 1
    operands = (
        dims(shapes[0], of_input),
        *(dims(shape, 1) for shape in shapes[1:-weights]),
        *(dims(shape, None) for shape in shapes[-weights:]),
    )
    outputs = [shape_of(value) for value in results_of(node)]
    results = (dims(outputs[0], of_input), *(dims(shape, 1) for shape in outputs[1:]))
    rows = math.prod(shapes[0][:-1])  # a sample at a step is multiplied with each matrix once
    matrices = [math.prod(shape) for shape in shapes[-weights:] if len(shape) == 2]
    return OpShardingRule(
        operands,
        results,
        sizes,
        whole=frozenset(sizes) - {_SAMPLES},
        flops=2.0 * rows * sum(matrices),
    )
