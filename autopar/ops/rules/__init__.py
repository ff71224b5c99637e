"""The table of op sharding rules: how each aten op may be split.

Example: linear is "... k, n k, n -> ... n" with k summed, one line in the notation of
ir/sharding_rule.py. Where that does not suffice, a short function builds the rule from the node.
There is a file for each kind of op: matmul, pointwise, reductions (with losses and embeddings) and
shapes. passes/annotate.py calls `rule_of` for every node, and `probe` (probe.py) for ops without a
rule here; ops/local.py emits the ops on their shards.
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
    """Return the sharding rule of a node, or None where neither the table nor the pointwise tag
    covers its op.
    """
    build = TABLE.get(node.target)
    if build is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        build = pointwise
    return None if build is None else _only_floats_partial(node, build(node))


def _only_floats_partial(node: fx.Node, made: OpShardingRule) -> OpShardingRule:
    """Return the rule without the partial pass-through of integers and flags: dividing or reducing
    them gives another dtype, and an op that makes them of floats would round each part.
    """
    if not all(floating(value) for value in results_of(node)):
        return dataclasses.replace(made, linear=())
    not_floating = {
        i for i, n in enumerate(operands_of(node)) if n is not None and not floating(value_of(n))
    }
    return dataclasses.replace(
        made, linear=tuple(group for group in made.linear if not group & not_floating)
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
