"""Op sharding rules of reductions, norms and softmax, and of embeddings.

Example: a sum over a split dim is partial; a softmax over a split dim has a sharded implementation
(ops/sharded), so that dim is `shared`; an amax may not be split on the dims it reduces. Importing
this file enters the rules in the table.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace

import torch
from torch import fx

from autopar.ir.sharding_rule import (
    TABLE,
    OpShardingRule,
    bound,
    operands_of,
    results_of,
    rule,
    value_of,
)
from autopar.ops.rules import aten, name_dims, operand_shape, rule_for, unsplit
from autopar.ops.rules.pointwise import entries_of, pointwise


@rule_for((aten.sum.dim_IntList, aten.mean.dim, aten.sum.default, aten.mean.default))
def sum_rule(node: fx.Node) -> OpShardingRule:
    """Return the rule of a sum or a mean: partial over a split dim that it sums; a mean is scaled
    first (see local.py).
    """
    return _reduction(node, summed=True)


@rule_for(
    (
        aten.amax.default,
        aten.amin.default,
        aten.var.correction,
        aten.var.dim,
        aten.var_mean.correction,
        aten.var_mean.dim,
        aten.std.correction,
        aten.std.dim,
        aten.argmax.default,
        aten.argmin.default,
        aten.max.dim,
        aten.min.dim,
        aten.aminmax.default,
        aten.median.dim,
        aten.mode.default,
        aten.kthvalue.default,
        aten.prod.dim_int,
        aten.any.dim,
        aten.all.dim,
        aten.logsumexp.default,
    )
)
def reduction_rule(node: fx.Node) -> OpShardingRule:
    """Return the rule of a reduction whose reduced dims may not be split."""
    return _reduction(node, summed=False)


@rule_for(aten.linalg_vector_norm.default)
def vector_norm(node: fx.Node) -> OpShardingRule:
    """Return the rule of a norm of real numbers, whose reduced dims may be split where its order
    is positive and finite: the sums of powers are then added over the axes. The maximum of infinite
    order and the count of order 0 stay unsharded along these dims.
    """
    norm_rule = _reduction(node, summed=False)
    source = operands_of(node)[0]
    assert source is not None
    if not 0 < bound(node)["ord"] < math.inf or value_of(source).is_complex():
        return norm_rule
    return replace(norm_rule, shared=norm_rule.whole, whole=frozenset())


@rule_for((aten.nansum.default, aten.count_nonzero.default, aten.count_nonzero.dim_IntList))
def count_rule(node: fx.Node) -> OpShardingRule:
    """Return the rule of a sum of something that is not linear in the operand: partial over a split
    dim that it sums, but no partial value passes through.
    """
    return replace(_reduction(node, summed=True), linear=())


@rule_for(aten.histc.default)
def histogram(node: fx.Node) -> OpShardingRule:
    """Return the rule "... -> n" of counts in n bins, as of a router's choices: sums over all
    elements, where the bounds are given; else these depend on every element.
    """
    (source,) = operands_of(node)
    assert source is not None
    values, sizes = bound(node), dict[str, int]()
    dims = tuple(name_dims(operand_shape(source), sizes))
    has_range = values["min"] != values["max"]
    elements = frozenset(sizes)
    sizes["n"] = values["bins"]
    return OpShardingRule(
        (dims,),
        ((("n",),),),
        sizes,
        sum=elements if has_range else frozenset(),
        whole=frozenset({"n"}) | (frozenset() if has_range else elements),
    )


@rule_for((aten.cosine_similarity.default, aten.pairwise_distance.default))
def similarity(node: fx.Node) -> OpShardingRule:
    """Return the rule of a comparison of two broadcast tensors along one dim, which stays
    unsharded.
    """
    tensors = [n for n in operands_of(node) if n is not None]
    shape = torch.broadcast_shapes(*(operand_shape(n) for n in tensors))
    entries = entries_of(node, tuple(shape))
    if not shape:
        return unsplit(node, source="rule")
    values = bound(node)
    dim = values.get("dim", -1) % len(shape)
    keep = values.get("keepdim", False)
    result = tuple(
        () if j == dim else d for j, d in enumerate(entries.results[0]) if keep or j != dim
    )
    return replace(entries, results=(result,), whole=frozenset({f"d{dim}"}), linear=())


def _reduction(node: fx.Node, summed: bool) -> OpShardingRule:
    source = operands_of(node)[0]
    assert source is not None
    sizes: dict[str, int] = {}
    dims = name_dims(operand_shape(source), sizes)
    removed, keep = reduced_dims(node), bound(node).get("keepdim", False)
    result = tuple(
        () if j in removed else d for j, d in enumerate(dims) if keep or j not in removed
    )
    factors = frozenset(f"d{j}" for j in removed)
    linear = (frozenset({0}),) if summed else ()
    return OpShardingRule(
        (tuple(dims),),
        (result,) * len(results_of(node)),
        sizes,
        linear=linear,
        sum=factors if summed else frozenset(),
        whole=frozenset() if summed else factors,
    )


def reduced_dims(node: fx.Node) -> set[int]:
    """Return the dims that a reduction removes: all of them where it names none."""
    source = operands_of(node)[0]
    assert source is not None
    count, dim = len(operand_shape(source)), bound(node).get("dim")
    if dim is None or dim == []:
        return set(range(count))
    return {d % count for d in (dim if isinstance(dim, list | tuple) else [dim])}


@rule_for((aten.layer_norm.default, aten.rms_norm.default))
def norm(node: fx.Node) -> OpShardingRule:
    """Return the rule "... d, d, d -> ... d": one normalised dim may be split, with its statistics
    reduced over the axes; of several, none may be.
    """
    source, *affine = operands_of(node)
    assert source is not None
    sizes: dict[str, int] = {}
    dims = name_dims(operand_shape(source), sizes)
    normalised = tuple(dims[len(dims) - len(bound(node)["normalized_shape"]) :])
    factors = frozenset(name for (name,) in normalised)
    one_dim, no_factors = len(normalised) == 1, frozenset[str]()
    return OpShardingRule(
        (tuple(dims), *(None if n is None else normalised for n in affine)),
        (tuple(dims),),
        sizes,
        shared=factors if one_dim else no_factors,
        whole=no_factors if one_dim else factors,
    )


@rule_for(aten.group_norm.default)
def group_norm(node: fx.Node) -> OpShardingRule:
    """Return the rule "b (g c) ..., (g c), (g c) -> b (g c) ...": samples and groups may be split.
    The statistics run over the channels and pixels of a group, which may be split where there is
    one group, with the statistics reduced over the axes.
    """
    source, *affine = operands_of(node)
    assert source is not None
    shape, sizes = operand_shape(source), dict[str, int]()
    dims = name_dims(shape, sizes)
    groups = bound(node)["num_groups"]
    del sizes["d1"]
    sizes["g"], sizes["c"] = groups, shape[1] // groups
    channels = ("g", "c")
    own = (dims[0], channels, *dims[2:])
    of_group, no_factors = frozenset(sizes) - {"d0", "g"}, frozenset[str]()
    return OpShardingRule(
        (own, *(None if n is None else (channels,) for n in affine)),
        (own,),
        sizes,
        shared=of_group if groups == 1 else no_factors,
        whole=no_factors if groups == 1 else of_group,
    )


@rule_for(aten.instance_norm.default)
def instance_norm(node: fx.Node) -> OpShardingRule:
    """Return the rule "b c ..., c, c, c, c -> b c ...": the statistics run over the pixels of one
    channel of one sample, and are reduced over the axes that split them. With running statistics
    pixels stay unsharded.
    """
    source, *affine = operands_of(node)
    assert source is not None
    sizes: dict[str, int] = {}
    dims = name_dims(operand_shape(source), sizes)
    pixels, no_factors = frozenset(sizes) - {"d0", "d1"}, frozenset[str]()
    computed = bound(node)["use_input_stats"] and bound(node)["running_mean"] is None
    return OpShardingRule(
        (tuple(dims), *(None if n is None else (dims[1],) for n in affine)),
        (tuple(dims),),
        sizes,
        shared=pixels if computed else no_factors,
        whole=no_factors if computed else pixels,
    )


@rule_for(
    (
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_no_training.default,
    )
)
def batch_norm(node: fx.Node) -> OpShardingRule:
    """Return the rule "b c ..., then c each -> b c ..., then c each": in training the statistics
    run over all dims but the channels, and are reduced over the axes that split these dims.
    """
    source, *affine = operands_of(node)
    assert source is not None
    sizes: dict[str, int] = {}
    dims = name_dims(operand_shape(source), sizes)
    others, channels = frozenset(sizes) - {"d1"}, (dims[1],)
    training = node.target is not aten._native_batch_norm_legit_no_training.default
    if training and not bound(node)["training"]:
        return unsplit(node)  # torch.nn calls the other op then
    results = [tuple(dims), *([channels] * (len(results_of(node)) - 1))]
    if not training:  # no statistics: two empty results
        sizes["none"] = 0
        results[1:] = [(("none",),)] * 2
    return OpShardingRule(
        (tuple(dims), *(None if n is None else channels for n in affine)),
        tuple(results),
        sizes,
        shared=others if training else others | {"d1"},
        whole=frozenset() if training else frozenset({"none"}),
    )


@rule_for(
    (
        aten.softmax.int,
        aten._softmax.default,
        aten.log_softmax.int,
        aten._log_softmax.default,
    )
)
def softmax(node: fx.Node) -> OpShardingRule:
    """Return the pointwise rule with the dim of the softmax as a factor that the sharded op may
    split.
    """
    pointwise_rule = pointwise(node)
    dim = bound(node)["dim"] % len(pointwise_rule.results[0])
    return OpShardingRule(
        pointwise_rule.operands,
        pointwise_rule.results,
        pointwise_rule.sizes,
        shared=frozenset({f"d{dim}"}),
    )


rule(aten.embedding.default, "v d, ... -> ... d", sum="v", index="1", linear=("0",))
_plain_embedding = TABLE[aten.embedding.default]


@rule_for(aten.embedding.default)
def embedding(node: fx.Node) -> OpShardingRule:
    """Return the rule by which rows and tokens may be split, unless gradients are scaled by how
    often a row is looked up, which depends on the unsharded batch.
    """
    plain_rule = _plain_embedding(node)
    if not bound(node)["scale_grad_by_freq"]:
        return plain_rule
    return replace(plain_rule, whole=frozenset(plain_rule.sizes) - {"d"})


@rule_for(aten.embedding_bag.padding_idx)
def embedding_bag(node: fx.Node) -> OpShardingRule:
    """Return the rule "v d, (b l), o, (b l) -> b d" of bags of one length l: bags and the width may
    be split, rows stay unsharded. Bags of unequal lengths stay unsharded too, and so do those whose
    gradients are scaled by how often a row is looked up in the whole batch.

    The other three results are for the backward alone; where the graph uses one, nothing is split.
    """
    unsplit_rule = unsplit(node, source="rule")
    weight = operands_of(node)[0]
    used_results = {user.args[1] for user in node.users if user.target is operator.getitem}
    if weight is None or used_results != {0}:
        return unsplit_rule
    table, indices, *others = unsplit_rule.operands
    (bags, _), *other_results = unsplit_rule.results
    assert table is not None
    sizes = {**unsplit_rule.sizes, "d": operand_shape(weight)[1]}
    shared, length = frozenset({"d"}), bag_length(node)
    if length and not bound(node)["scale_grad_by_freq"]:
        sizes |= {"b": sizes[bags[0]], "l": length}
        bags, indices, shared = ("b",), (("b", "l"),), frozenset({"b", "d"})
        others = [others[0], *(None if dims is None else indices for dims in others[1:])]
    return replace(
        unsplit_rule,
        operands=((table[0], ("d",)), indices, *others),
        results=((bags, ("d",)), *other_results),
        sizes=sizes,
        whole=unsplit_rule.whole | ({"l"} & set(sizes)),
        shared=shared,
    )


def bag_length(node: fx.Node) -> int:
    """Return the length of the bags of an embedding bag where they all have one, as in a batch of
    rows of indices: their offsets are then a range of the graph. 0 elsewhere.
    """
    values = bound(node)
    indices, offsets = values["indices"], values["offsets"]
    if offsets.target is not aten.arange.start_step or values["include_last_offset"]:
        return 0
    span, count = bound(offsets), operand_shape(indices)[0]
    step = span["step"]
    even = span["start"] == 0 and isinstance(step, int) and step > 0 and count % step == 0
    return step if even and operand_shape(offsets)[0] * step == count else 0
