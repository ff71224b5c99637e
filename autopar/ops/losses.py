"""Rules of ops that index by tokens: embedding and cross entropy."""

from __future__ import annotations

from torch import fx

from ..rules import Spec, bound, operands_of, rule, value_of
from .common import aten, floating, named, operand_shape, spec, unsplit

_NONE, _MEAN, _SUM = range(3)  # aten's numbers of reductions

rule(aten.embedding.default, "v d, ... -> ... d", sum="v", index="1", linear=("0",))


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
