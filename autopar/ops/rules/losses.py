"""Op sharding rules of losses: entry by entry (mse, KL divergence, binary cross entropy) or row by
row (cosine embedding, triplet margin, negative log-likelihood, CTC).

Example: a cosine embedding loss of (n, d) and (n, d) may be split along its rows n: their losses
are kept, summed to a partial value, or averaged over all rows of all ranks. A mean that leaves
tokens out or weights them divides by what counts on all ranks, so it is invariant over the tokens'
axes. Importing this file enters the rules in the table; ops/local.py divides the means.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

import autopar.ops.ctc  # noqa: F401  # defines its operator
from autopar.ir.sharding_rule import (
    OpShardingRule,
    bound,
    operands_of,
    shape_of,
    value_of,
)
from autopar.ops.rules import aten, floating, name_dims, operand_shape, rule_for, unsplit
from autopar.ops.rules.pointwise import entries_of

_NONE, _MEAN, _SUM = range(3)  # aten's numbers of reductions

ENTRYWISE_LOSSES = (
    aten.mse_loss.default,
    aten.l1_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.binary_cross_entropy.default,
    aten.kl_div.default,
    aten.poisson_nll_loss.default,
    aten.soft_margin_loss.default,
    aten.hinge_embedding_loss.default,
    aten.margin_ranking_loss.default,
)
ROW_LOSSES = (
    aten.cosine_embedding_loss.default,
    aten.triplet_margin_loss.default,
    aten.multilabel_margin_loss.default,
)


# Their backward kernels divide a mean by the entries of the operand whose gradient they compute,
# so a broadcast operand's depends on how it is cut. torch.nn.functional expands it first.
_UNBROADCAST = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
)


@rule_for(ENTRYWISE_LOSSES)
def entrywise_loss(node: fx.Node) -> OpShardingRule:
    """Return the rule of a loss of each entry, of operands that are broadcast, which is then kept,
    summed, or averaged over all entries.
    """
    shapes = [operand_shape(n) for n in operands_of(node) if n is not None]
    if node.target in _UNBROADCAST and shapes[0] != shapes[1]:
        return unsplit(node, source="rule")
    entries = replace(entries_of(node, tuple(torch.broadcast_shapes(*shapes))), linear=())
    return _reduced(node, entries)


@rule_for(ROW_LOSSES)
def row_loss(node: fx.Node) -> OpShardingRule:
    """Return the rule of a loss of each row, "n d, n d, n -> n": rows may be split, what a row
    consists of stays unsharded.
    """
    tensors = [n for n in operands_of(node) if n is not None]
    shapes = [operand_shape(n) for n in tensors]
    first = shapes[0]
    if any(shape not in (first, first[:-1]) for shape in shapes) or not first:
        return unsplit(node, source="rule")
    sizes: dict[str, int] = {}
    dims = tuple(name_dims(first, sizes))
    unreduced = bound(node)["reduction"] == _NONE
    if unreduced and shape_of(value_of(node)) != first[:-1]:
        return unsplit(node, source="rule")
    rows = OpShardingRule(
        tuple(dims[: len(shape)] for shape in shapes),
        (dims[:-1],),
        sizes,
        whole=frozenset({f"d{len(first) - 1}"}),
    )
    return _reduced(node, rows)


def _reduced(node: fx.Node, entries: OpShardingRule) -> OpShardingRule:
    """Return the rule of the losses of single entries, reduced as the node asks: a sum or a mean is
    partial over the axes that split them.
    """
    if bound(node)["reduction"] == _NONE:
        return entries
    return replace(entries, results=((),), sum=frozenset(n for (n,) in entries.results[0]))


@rule_for(aten.cross_entropy_loss.default)
def cross_entropy(node: fx.Node) -> OpShardingRule:
    """Return the rule by which classes and tokens may be split, and tokens alone where the targets
    are probabilities.
    """
    target = operands_of(node)[1]
    assert target is not None
    if not floating(value_of(target)):
        return _token_loss(node, split_classes=True)
    return _loss_of_probabilities(node)


@rule_for(aten.nll_loss_nd.default)
def negative_log_likelihood(node: fx.Node) -> OpShardingRule:
    """Return the rule by which tokens may be split; classes stay unsharded."""
    return _token_loss(node, split_classes=False)


def _token_loss(node: fx.Node, split_classes: bool) -> OpShardingRule:
    """Return the rule "n c ..., n ..., c -> n ..." of a loss of tokens by class indices. A mean is
    invariant over the tokens' axes, as it needs their number everywhere; a sum is partial over
    them.
    """
    logits, target, weight = operands_of(node)
    assert logits is not None and target is not None
    shape = operand_shape(logits)
    class_dim = 1 if len(shape) > 1 else 0
    sizes: dict[str, int] = {}
    dims = name_dims(shape, sizes)
    tokens = tuple(d for j, d in enumerate(dims) if j != class_dim)
    reduction = bound(node)["reduction"]
    split = frozenset(d[0] for d in tokens)
    classes = frozenset(dims[class_dim])
    return OpShardingRule(
        (tuple(dims), tokens, None if weight is None else (dims[class_dim],)),
        (tokens if reduction == _NONE else (),),
        sizes,
        sum=split if reduction == _SUM else frozenset(),
        shared=(classes if split_classes else frozenset())
        | (split if reduction == _MEAN else frozenset()),
        whole=frozenset() if split_classes else classes,
        index=frozenset({1}),
    )


def _loss_of_probabilities(node: fx.Node) -> OpShardingRule:
    """Return the rule "n c ..., n c ..., c -> n ..." of a cross entropy with probabilities as
    targets, whose mean divides by the number of tokens.
    """
    logits, _, weight = operands_of(node)
    assert logits is not None
    shape = operand_shape(logits)
    class_dim = 1 if len(shape) > 1 else 0
    sizes: dict[str, int] = {}
    dims = tuple(name_dims(shape, sizes))
    tokens = tuple(d for j, d in enumerate(dims) if j != class_dim)
    rows = OpShardingRule(
        (dims, dims, None if weight is None else (dims[class_dim],)),
        (tokens,),
        sizes,
        whole=frozenset(dims[class_dim]),
    )
    return _reduced(node, rows)


@rule_for(torch.ops.autopar.ctc_loss.default)
def connectionist(node: fx.Node) -> OpShardingRule:
    """Return the rule "t n c, n s, n, n -> n": samples may be split, steps and classes may not."""
    steps, targets = operands_of(node)[:2]
    assert steps is not None and targets is not None
    sizes = dict(zip("tnc", operand_shape(steps), strict=True))
    sizes["s"] = operand_shape(targets)[1]
    samples = ("n",)
    return OpShardingRule(
        ((("t",), samples, ("c",)), (samples, ("s",)), (samples,), (samples,)),
        ((samples,),),
        sizes,
        whole=frozenset("tcs"),
        index=frozenset({1, 2, 3}),
    )
