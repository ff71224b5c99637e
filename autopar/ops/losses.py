"""Rules of ops that index by tokens: embeddings and cross entropy."""

from __future__ import annotations

import operator
from dataclasses import replace

from torch import fx

from autopar.ir.sharding_rule import TABLE, Spec, bound, operands_of, rule, value_of
from autopar.ops.common import aten, floating, named, operand_shape, spec, unsplit

_NONE, _MEAN, _SUM = range(3)  # aten's numbers of reductions

rule(aten.embedding.default, "v d, ... -> ... d", sum="v", index="1", linear=("0",))
_plain_embedding = TABLE[aten.embedding.default]


@spec(aten.embedding.default)
def embedding(node: fx.Node) -> Spec:
    """Rows and tokens may be split, unless gradients are scaled by how often a row is looked up,
    which only the whole batch says.
    """
    made = _plain_embedding(node)
    if not bound(node)["scale_grad_by_freq"]:
        return made
    return replace(made, whole=frozenset(made.sizes) - {"d"})


_BAG_MAX = 2  # the mode that keeps which entries it took


@spec(aten.embedding_bag.padding_idx)
def embedding_bag(node: fx.Node) -> Spec:
    """v d, i, b -> b d: the width may be split, rows and bags stay whole. Three more results are
    for the backward alone; where the graph takes one, or in the mode "max", nothing is split.
    """
    made = unsplit(node, found="rule")
    weight = operands_of(node)[0]
    taken = {user.args[1] for user in node.users if user.target is operator.getitem}
    if weight is None or bound(node)["mode"] == _BAG_MAX or taken != {0}:
        return made
    table, *others = made.operands
    (bags, _), *rest = made.results
    assert table is not None
    return replace(
        made,
        operands=((table[0], ("d",)), *others),
        results=((bags, ("d",)), *rest),
        sizes={**made.sizes, "d": operand_shape(weight)[1]},
        shared=frozenset({"d"}),
    )


@spec(aten.cross_entropy_loss.default)
def cross_entropy(node: fx.Node) -> Spec:
    """Classes may be split, tokens too: of a mean the result is invariant, as it needs their number
    everywhere, a sum is partial over the tokens.
    """
    logits, target, weight = operands_of(node)
    assert logits is not None and target is not None
    if floating(value_of(target)):
        return unsplit(node)
    shape = operand_shape(logits)
    class_dim = 1 if len(shape) > 1 else 0
    sizes: dict[str, int] = {}
    dims = named(shape, sizes)
    tokens = tuple(d for j, d in enumerate(dims) if j != class_dim)
    reduction = bound(node)["reduction"]
    split = frozenset(d[0] for d in tokens)
    return Spec(
        (tuple(dims), tokens, None if weight is None else (dims[class_dim],)),
        (tokens if reduction == _NONE else (),),
        sizes,
        sum=split if reduction == _SUM else frozenset(),
        shared=frozenset(dims[class_dim]) | (split if reduction == _MEAN else frozenset()),
        index=frozenset({1}),
    )
