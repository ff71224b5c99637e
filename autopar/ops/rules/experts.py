"""The op sharding rule of a layer of experts: `autopar::experts` (ops/experts.py).

Example: of Mixtral's it is "t d, t k, t k, e (two f) d, , e o f -> t o": rows of tokens may be
split, and experts and their inner width too, over both of which the result is a sum. Importing this
file enters the rule in the table.
"""

from __future__ import annotations

from torch import fx

from autopar.ir.sharding_rule import Dims, OpShardingRule, bound, operands_of, shape_of, value_of
from autopar.ops.experts import BODIES, SKEW, experts_op
from autopar.ops.rules import operand_shape, rule_for


@rule_for(experts_op)
def experts(node: fx.Node) -> OpShardingRule:
    """Return the rule with the dims of up and down as the node's body has them."""
    tokens, index, _, up, up_bias, down, down_bias, norm = operands_of(node)
    assert tokens is not None and index is not None and up is not None and down is not None
    body = BODIES[bound(node)["body"]]
    (rows, width), choices = operand_shape(tokens), operand_shape(index)[1]
    count, *down_dims = operand_shape(down)
    inner = down_dims[0 if body.transposed else 1]
    out = shape_of(value_of(node))[1]
    sizes = {"t": rows, "e": count, "f": inner, "d": width, "k": choices, "o": out}
    wide: tuple[str, ...] = ("f",)
    if body.gated:
        sizes["two"] = operand_shape(up)[2 if body.transposed else 1] // inner
        wide = ("two", "f") if body.concatenated else ("f", "two")
    up_dims: Dims = (("d",), wide) if body.transposed else (wide, ("d",))
    results: Dims = (("f",), ("o",)) if body.transposed else (("o",), ("f",))
    rows_of: Dims = (("t",), ("k",))  # what is made on the way: a row for each choice
    splits_inner = body.splits_inner and norm is None
    unsharded = {"d", "k", "o", "two"} | (set() if splits_inner else {"f"})
    return OpShardingRule(
        (
            (("t",), ("d",)),
            (("t",), ("k",)),
            (("t",), ("k",)),
            (("e",), *up_dims),
            None if up_bias is None else (("e",), wide),
            (("e",), *results),
            None if down_bias is None else (("e",), ("o",)),
            None if norm is None else (("o",),),
        ),
        ((("t",), ("o",)),),
        sizes,
        sum=frozenset({"e", "f"}),
        whole=frozenset(unsharded & sizes.keys()),
        added=frozenset({6}),
        linear=(frozenset({2}),),
        index=frozenset({1}),
        product=(frozenset({"t"}), frozenset({"e", "f"}), frozenset()),
        flops=2.0 * rows * choices * inner * (width * sizes.get("two", 1) + out),
        uneven=frozenset({"e"}),
        skew=SKEW,
        inside=((*rows_of, ("d",)), (*rows_of, wide), (*rows_of, ("f",)), (*rows_of, ("o",))),
    )
