"""Op sharding rules of attention, and of the mask that vectors describe.

Example: "b (g r) q e, b g k e, b g k v -> b (g r) q v", where each of g key heads serves r heads of
the queries. Batch, heads and queries may be split; keys and head sizes stay unsharded. Importing
this file enters the rules in the table.
"""

from __future__ import annotations

import math

from torch import fx

from autopar.ir.band import Band
from autopar.ir.sharding_rule import (
    HEADS_OF_A_KEY,
    KEY_HEADS,
    Attends,
    Dims,
    OpShardingRule,
    bound,
    operands_of,
    shape_of,
    value_of,
)
from autopar.ops.rules import aten, name_dims, operand_shape, rule_for, unsplit
from autopar.ops.rules.matmul import broadcast
from autopar.ops.sharded.masked_attention import BLOCK_MASK, MASKED_ATTENTION


@rule_for(aten.scaled_dot_product_attention.default)
def attention(node: fx.Node) -> OpShardingRule:
    """Return the rule "b (g r) q e, b g k e, b g k v -> b (g r) q v": keys stay unsharded. Where
    the queries of a causal one are split, it is computed in blocks (ops/local.py).
    """
    values = bound(node)
    mask = values["attn_mask"]
    causal = bool(values["is_causal"])
    return _attention(node, causal, Band(after=0) if causal else None, [mask])


@rule_for(MASKED_ATTENTION)
def masked_attention(node: fx.Node) -> OpShardingRule:
    """Return the rule "b (g r) q e, b g k e, b g k v, b q, b k -> b (g r) q v" of attention under a
    mask that is described by vectors of the queries and of the keys.
    """
    values = bound(node)
    band = Band(values["before"], values["after"])
    return _attention(node, band.is_causal, band, [*values["queries"], *values["keys"]])


@rule_for(BLOCK_MASK)
def block_mask(node: fx.Node) -> OpShardingRule:
    """Return the rule "b q, b k -> b 1 q k"."""
    b, _, q, k = shape_of(value_of(node))
    sizes = {"b": b, "q": q, "k": k}
    values = bound(node)
    vectors = [
        *((n, "q") for n in values["queries"]),
        *((n, "k") for n in values["keys"]),
    ]
    operands = tuple(_vector_dims(operand_shape(n), [("b",)], name) for n, name in vectors)
    return OpShardingRule(
        operands,
        ((("b",), (), ("q",), ("k",)),),
        sizes,
        whole=frozenset({"k"}),
        index=frozenset(range(len(operands))),
    )


def _vector_dims(shape: tuple[int, ...], leading: list[tuple[str, ...]], name: str) -> Dims:
    """Return the dims of a vector (batch or 1, queries or keys) of a mask's description."""
    return (() if shape[0] == 1 else leading[0], (name,))


def _attention(
    node: fx.Node, causal: bool, band: Band | None, masks: list[fx.Node | None]
) -> OpShardingRule:
    """Return the rule of an attention with this band, and a mask or the vectors that describe
    one.
    """
    query, key, value, *_ = operands_of(node)
    assert query is not None and key is not None and value is not None
    q, k, v, out = (
        operand_shape(query),
        operand_shape(key),
        operand_shape(value),
        shape_of(value_of(node)),
    )
    if q[-3:-2] != out[-3:-2] or k[-3:-2] != v[-3:-2]:
        return unsplit(node)  # heads are broadcast, and not those of keys and values together
    sizes: dict[str, int] = {"q": q[-2], "e": q[-1], "k": k[-2], "v": v[-1]}
    leading = name_dims(out[:-3], sizes, "b")
    heads: list[tuple[str, ...]] = []
    key_heads: list[tuple[str, ...]] = []
    if len(q) > 2:
        sizes[KEY_HEADS], sizes[HEADS_OF_A_KEY] = k[-3], q[-3] // k[-3]
        heads, key_heads = [(KEY_HEADS, HEADS_OF_A_KEY)], [(KEY_HEADS,)]
    in_blocks = node.target is MASKED_ATTENTION
    mask_dims: list[Dims | None] = []
    for i, mask in enumerate(masks):
        if mask is None:
            mask_dims.append(None)
        elif in_blocks:
            name = "q" if i < len(masks) // 2 else "k"
            mask_dims.append(_vector_dims(operand_shape(mask), leading, name))
        else:
            mask_dims.append(broadcast(operand_shape(mask), [*leading, *heads, ("q",), ("k",)]))
    share = band.share(q[-2], k[-2]) if band is not None and in_blocks else None
    attends = Attends(k[-2], (q[-1] + v[-1]) / 2, causal, share)
    return OpShardingRule(
        (
            (*broadcast(q[:-3], leading), *heads, ("q",), ("e",)),
            (*broadcast(k[:-3], leading), *key_heads, ("k",), ("e",)),
            (*broadcast(v[:-3], leading), *key_heads, ("k",), ("v",)),
            *mask_dims,
        ),
        ((*leading, *heads, ("q",), ("v",)),),
        sizes,
        whole=frozenset({"e", "k", "v"}),
        linear=(frozenset({2}),),
        index=frozenset(range(3, 3 + len(masks))) if in_blocks else frozenset(),
        product=(frozenset(sizes) - {"e", "k", "v"}, frozenset(), frozenset()),
        flops=attends.flops(math.prod(out[:-1])),
        attends=attends,
        band=band,
    )
