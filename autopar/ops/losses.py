"""Rules of ops that index by tokens: embedding and cross entropy."""

from __future__ import annotations

from torch import fx

from ..rules import Spec, bound, operands_of, rule, value_of
from .common import aten, floating, named, operand_shape, spec, unsplit

rule(aten.embedding.default, "v d, ... -> ... d", sum="v", index="1", linear=("0",))


@spec(aten.cross_entropy_loss.default)
def cross_entropy(node: fx.Node) -> Spec:
    """Tokens are summed (partial, divided by the global count), classes may be split: the result is
    then invariant.
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
    kept = bound(node)["reduction"] == 0
    return Spec(
        (tuple(dims), tokens, None if weight is None else (dims[class_dim],)),
        (tokens if kept else (),),
        sizes,
        sum=frozenset() if kept else frozenset(d[0] for d in tokens),
        shared=frozenset(dims[class_dim]),
        index=frozenset({1}),
    )
