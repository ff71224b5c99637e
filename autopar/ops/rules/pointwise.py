"""Op sharding rules of pointwise ops: each entry of the result depends on the same entry of the
operands.

Example: in (8, 6) + (6,) both dims may be split, and the second operand is split with the last dim.
rules/__init__.py uses `pointwise` for every op with torch's pointwise tag;
the other files of rules use `pointwise` and `expand_like_identity`.
"""

from __future__ import annotations

from torch import fx

from autopar.ir.sharding_rule import (
    Dims,
    OpShardingRule,
    bound,
    operands_of,
    results_of,
    shape_of,
    value_of,
)
from autopar.ops.rules import aten, floating, name_dims, operand_shape, rule_for

_JOINTLY_LINEAR = {aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor}


_LINEAR_EACH = {aten.mul.Tensor}


_LINEAR_FIRST = {
    aten.div.Tensor,
    aten.div.Scalar,
    aten.mul.Scalar,
    aten.neg.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.contiguous.default,
    aten._to_copy.default,
    aten.dropout.default,
    aten.lift_fresh_copy.default,
    aten.to.dtype,
}


@rule_for(
    (
        aten.clone.default,
        aten.alias.default,
        aten.detach.default,
        aten.contiguous.default,
        aten._to_copy.default,
        aten.lift_fresh_copy.default,
        aten.to.dtype,
        aten.dropout.default,
        aten.ones_like.default,
        aten.zeros_like.default,
        aten.full_like.default,
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
        aten.where.self,
        aten.where.ScalarOther,
        aten.where.ScalarSelf,
        aten.where.Scalar,
        aten.relu.default,
        aten.silu.default,
        aten.gelu.default,
        aten.softplus.default,
        aten.hardtanh.default,
        aten.leaky_relu.default,
        aten.elu.default,
        aten.clamp.default,
        aten.add.Scalar,
        aten.mul.Scalar,
        aten.div.Scalar,
        aten.sub.Scalar,
        aten.copy.default,
        aten.selu.default,
        aten.mish.default,
        aten.log_sigmoid.default,
        aten.relu6.default,
        aten.hardswish.default,
        aten.__and__.Tensor,
        aten.__or__.Tensor,
        aten.__xor__.Tensor,
        aten.bitwise_not.default,
    )
)
def pointwise(node: fx.Node) -> OpShardingRule:
    """Return the rule for right-aligned broadcast: a dim of the result is a factor of every operand
    that has it at full size.
    """
    return entries_of(node, shape_of(results_of(node)[0]))


def entries_of(node: fx.Node, shape: tuple[int, ...]) -> OpShardingRule:
    """Return the rule of an op that computes each entry of a tensor of this shape on its own."""
    sizes: dict[str, int] = {}
    result = tuple(name_dims(shape, sizes))
    operands: list[Dims | None] = []
    for operand in operands_of(node):
        if operand is None:
            operands.append(None)
            continue
        own_shape = operand_shape(operand)
        aligned = result[len(result) - len(own_shape) :]
        operands.append(
            tuple(() if s == 1 else dim for s, dim in zip(own_shape, aligned, strict=True))
        )
    return OpShardingRule(
        tuple(operands), (result,) * len(results_of(node)), sizes, linear=_linear_groups(node)
    )


def _linear_groups(node: fx.Node) -> tuple[frozenset[int], ...]:
    """Return the groups of operands through which partial values pass together."""
    tensors = [i for i, n in enumerate(operands_of(node)) if n is not None]
    if not all(floating(v) for v in results_of(node)):
        return ()
    first = operands_of(node)[0]
    if first is not None and node.target in _LINEAR_FIRST and floating(value_of(first)):
        return (frozenset({0}),)
    if node.target in _JOINTLY_LINEAR and len(tensors) == 2:
        return (frozenset({0, 1}),)
    if node.target in _LINEAR_EACH:
        return tuple(frozenset({i}) for i in tensors)
    if node.target is aten.where.self:
        return (frozenset({1, 2}),)
    if node.target is aten.masked_fill.Scalar and bound(node)["value"] == 0:
        return (frozenset({0}),)
    return ()


def expand_like_identity(node: fx.Node) -> OpShardingRule:
    """Return the pointwise rule of an op whose first operand may be partial."""
    rule = pointwise(node)
    return OpShardingRule(rule.operands, rule.results, rule.sizes, linear=(frozenset({0}),))


@rule_for(aten.prelu.default)
def prelu(node: fx.Node) -> OpShardingRule:
    """Return the rule "b c ..., c -> b c ..."; one slope for all channels is no factor."""
    source, slope = operands_of(node)
    assert source is not None and slope is not None
    sizes: dict[str, int] = {}
    dims = name_dims(operand_shape(source), sizes)
    own_shape = operand_shape(slope)
    own = tuple(() if size == 1 else dims[1] for size in own_shape)
    return OpShardingRule((tuple(dims), own), (tuple(dims),), sizes)
