"""The table: how each op may be split. One line an op where the notation of rules.py suffices, a
short function where it does not; a file for each kind of op.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from autopar.ir.sharding_rule import TABLE, OpShardingRule, operands_of, results_of, value_of
from autopar.ops.rules import matmul as products
from autopar.ops.rules import reductions
from autopar.ops.rules import reductions as losses
from autopar.ops.rules import shapes as pieces
from autopar.ops.rules import shapes as views
from autopar.ops.rules.pointwise import pointwise
from autopar.ops.rules.registry import floating, unsplit
from autopar.ops.rules.shapes import FILLS, NEW_FILLS, slice_extent


def rule_of(node: fx.Node) -> OpShardingRule | None:
    """The rule of a node, or None: no line of the table and no tag says how its op may be split."""
    build = TABLE.get(node.target)
    if build is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        build = pointwise
    return None if build is None else _only_floats_partial(node, build(node))


def _only_floats_partial(node: fx.Node, made: OpShardingRule) -> OpShardingRule:
    """Integers and flags cannot be parts of a sum: dividing or reducing them gives another type,
    and an op that makes them of floats would round each part.
    """
    if not all(floating(value) for value in results_of(node)):
        return dataclasses.replace(made, linear=())
    fixed = {
        i for i, n in enumerate(operands_of(node)) if n is not None and not floating(value_of(n))
    }
    return dataclasses.replace(
        made, linear=tuple(group for group in made.linear if not group & fixed)
    )


__all__ = [
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
