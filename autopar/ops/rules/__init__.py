"""The table of op sharding rules: how each aten op may be split.

Example: linear is "... k, n k, n -> ... n" with k summed, one line in the notation of
ir/sharding_rule.py. Where that does not suffice, a short function builds the rule from the node,
and `rule_for` enters it in the table. There is a file for each kind of op: matmul, attention,
pointwise, reductions, losses, indexing, windows, recurrent, experts and shapes. passes/annotate.py
asks probe.py for the rule of every node, from this table or by trial; ops/local.py emits the ops on
their shards.

Here are the helpers of these files: `name_dims((8, 6), sizes)` returns [("d0",), ("d1",)] and sets
sizes to {"d0": 8, "d1": 6}.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.ir.sharding_rule import (
    TABLE,
    Dims,
    OpShardingRule,
    operands_of,
    results_of,
    shape_of,
    value_of,
)

aten = torch.ops.aten


def rule_for(
    target: Any,
) -> Callable[[Callable[[fx.Node], OpShardingRule]], Callable[[fx.Node], OpShardingRule]]:
    """Return a decorator that enters a function as the rule of one op or of several."""

    def enter(build: Callable[[fx.Node], OpShardingRule]) -> Callable[[fx.Node], OpShardingRule]:
        for op in target if isinstance(target, tuple) else (target,):
            TABLE[op] = build
        return build

    return enter


def unsplit(node: fx.Node, source: str = "none") -> OpShardingRule:
    """Return the rule of an op of which nothing is known: every dim is unsharded."""
    operands = operands_of(node)
    shapes = [None if n is None else operand_shape(n) for n in operands]
    outputs = [shape_of(v) for v in results_of(node) if isinstance(v, torch.Tensor)]
    sizes: dict[str, int] = {}

    def dims(shape: tuple[int, ...]) -> Dims:
        factors = []
        for size in shape:
            sizes[name := f"w{len(sizes)}"] = size
            factors.append((name,))
        return tuple(factors)

    operand_dims = tuple(None if s is None else dims(s) for s in shapes)
    result_dims = tuple(dims(s) for s in outputs)
    return OpShardingRule(operand_dims, result_dims, sizes, whole=frozenset(sizes), source=source)


def operand_shape(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of an operand that is a tensor."""
    value = value_of(node)
    assert isinstance(value, torch.Tensor), (node, value)
    return shape_of(value)


def name_dims(
    shape: tuple[int, ...], sizes: dict[str, int], prefix: str = "d"
) -> list[tuple[str, ...]]:
    """Return one factor of its own for each dim of a shape, and enter their sizes in `sizes`."""
    dims: list[tuple[str, ...]] = []
    for i, size in enumerate(shape):
        sizes[f"{prefix}{i}"] = size
        dims.append((f"{prefix}{i}",))
    return dims


def floating(value: Any) -> bool:
    """Whether a value is a tensor of a floating-point dtype."""
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


__all__ = [
    "DRAWS",
    "FILLS",
    "NEW_FILLS",
    "losses",
    "pieces",
    "pointwise",
    "products",
    "reductions",
    "rule_of",
    "slice_extent",
    "unsplit",
    "views",
]
