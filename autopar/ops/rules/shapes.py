"""Op sharding rules of ops that change shapes: views, permutations, tensors made from nothing, and
ops that cut, join, pad or run along one dim.

Example: a chunk of a dim of 12 into three pieces reads the dim as "(pieces piece)", of sizes 3 and
4: an axis may split "piece", which each result has too, but not "pieces". Importing this file
enters the rules in the table; ops/local.py uses `slice_extent` and the tuples of ops.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from autopar.ir.sharding_rule import (
    Dims,
    OpShardingRule,
    bound,
    operands_of,
    results_of,
    shape_of,
    value_of,
    view_factors,
)
from autopar.ops.rules import aten, name_dims, operand_shape, rule_for, unsplit
from autopar.ops.rules.pointwise import expand_like_identity, pointwise


@rule_for(
    (
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.squeeze.default,
        aten.unsqueeze.default,
        aten.view_as.default,
    )
)
def view(node: fx.Node) -> OpShardingRule:
    """Return the rule of a reshape, whose factors are those common to both shapes."""
    source = operands_of(node)[0]
    assert source is not None
    if 0 in operand_shape(source):
        return unsplit(node, source="rule")
    sizes, left, right, unsharded = view_factors(operand_shape(source), shape_of(value_of(node)))
    absent = (None,) * (len(operands_of(node)) - 1)
    return OpShardingRule(
        (left, *absent), (right,), sizes, whole=unsharded, linear=(frozenset({0}),)
    )


@rule_for((aten.permute.default, aten.transpose.int, aten.t.default, aten.numpy_T.default))
def permutation(node: fx.Node) -> OpShardingRule:
    """Return the rule of an op that permutes the dims."""
    source = operands_of(node)[0]
    assert source is not None
    shape = operand_shape(source)
    sizes: dict[str, int] = {}
    dims = name_dims(shape, sizes)
    values = bound(node)
    order = list(range(len(shape)))
    if node.target is aten.permute.default:
        order = [d % len(shape) for d in values["dims"]]
    elif node.target is aten.transpose.int:
        a, b = values["dim0"] % len(shape), values["dim1"] % len(shape)
        order[a], order[b] = order[b], order[a]
    else:
        order.reverse()
    return OpShardingRule(
        (tuple(dims),), (tuple(dims[d] for d in order),), sizes, linear=(frozenset({0}),)
    )


@rule_for((aten.expand.default, aten.expand_as.default, aten.broadcast_to.default))
def expand(node: fx.Node) -> OpShardingRule:
    """Return the rule of an expand: dims of 1 that grow have a factor in the result alone."""
    rule = pointwise(node)
    absent = (None,) * (len(rule.operands) - 1)
    return OpShardingRule(
        (rule.operands[0], *absent), rule.results, rule.sizes, linear=(frozenset({0}),)
    )


FILLS = (aten.full.default, aten.zeros.default, aten.ones.default)

# The random draws that a planned graph has: passes/draws.py makes all others of these.
DRAWS = (aten.rand.default, aten.randn.default, aten.randint.low)


SMALL_CONSTANTS = (
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.scalar_tensor.default,
    aten.eye.default,
    aten.empty.memory_format,
)


NEW_FILLS = (aten.new_zeros.default, aten.new_ones.default, aten.new_full.default)


@rule_for((*FILLS, *DRAWS))
def fill(node: fx.Node) -> OpShardingRule:
    """Return the rule of a tensor of one number, or of random ones: each dim may be split."""
    sizes: dict[str, int] = {}
    return OpShardingRule((), (tuple(name_dims(shape_of(value_of(node)), sizes)),), sizes)


@rule_for(SMALL_CONSTANTS)
def fill_unsharded(node: fx.Node) -> OpShardingRule:
    """Return the rule of small tensors made from nothing: they are made unsharded, then sliced."""
    return unsplit(node, source="rule")


@rule_for(NEW_FILLS)
def new_fill(node: fx.Node) -> OpShardingRule:
    """Return the rule of a tensor of one number whose operand gives the dtype and device only."""
    rule = unsplit(node)
    sizes = dict(rule.sizes)
    result = tuple(name_dims(shape_of(value_of(node)), sizes))
    return OpShardingRule(rule.operands, (result,), sizes, whole=rule.whole)


def pieces(node: fx.Node, dim: int, count: int, size: int) -> tuple[dict[str, int], Dims, Dims]:
    """Return (sizes, dims of the joined tensor, dims of a piece) for a dim cut into `count` equal
    pieces of `size`: "(pieces piece)" joined, "piece" in each piece.
    """
    value = value_of(node)
    sizes: dict[str, int] = {}
    dims = name_dims(shape_of(value), sizes)
    dim %= len(dims)
    del sizes[f"d{dim}"]
    sizes["pieces"], sizes["piece"] = count, size
    joined = [*dims[:dim], ("pieces", "piece"), *dims[dim + 1 :]]
    single = [*dims[:dim], ("piece",), *dims[dim + 1 :]]
    return sizes, tuple(joined), tuple(single)


def unsharded_dim(node: fx.Node, dim: int, linear: bool = True) -> OpShardingRule:
    """Return the rule of an op that works along one dim, which may change size, and leaves the
    other dims alone.
    """
    source = operands_of(node)[0]
    assert source is not None
    return unsharded_dims(node, {dim % len(operand_shape(source))}, linear)


def unsharded_dims(node: fx.Node, along: set[int], linear: bool = True) -> OpShardingRule:
    """Return the rule of an op that works along some dims of its first operand, which may change
    size, and leaves the other dims alone. Dims are counted from 0.
    """
    source = operands_of(node)[0]
    assert source is not None
    sizes: dict[str, int] = {}
    dims = name_dims(operand_shape(source), sizes)
    unsharded = {f"d{j}" for j in along}
    results = []
    for i, value in enumerate(results_of(node)):
        resized = {f"r{i}_{j}": shape_of(value)[j] for j in along}
        sizes.update(resized)
        unsharded |= set(resized)
        results.append(tuple((f"r{i}_{j}",) if j in along else d for j, d in enumerate(dims)))
    absent = (None,) * (len(operands_of(node)) - 1)
    groups = (frozenset({0}),) if linear else ()
    return OpShardingRule(
        (tuple(dims), *absent), tuple(results), sizes, whole=frozenset(unsharded), linear=groups
    )


@rule_for(
    (
        aten.split.Tensor,
        aten.unsafe_split.Tensor,
        aten.split_with_sizes.default,
        aten.chunk.default,
    )
)
def split(node: fx.Node) -> OpShardingRule:
    """Return the rule of a split: equal pieces may be split inside, unequal ones stay unsharded."""
    source = operands_of(node)[0]
    assert source is not None
    dim = bound(node)["dim"]
    lengths = {shape_of(value)[dim] for value in results_of(node)}
    if len(lengths) > 1:
        return unsharded_dim(node, dim)
    count = len(results_of(node))
    sizes, joined, single = pieces(source, dim, count, lengths.pop())
    return OpShardingRule(
        (joined,),
        (single,) * count,
        sizes,
        whole=frozenset({"pieces"}),
        linear=(frozenset({0}),),
    )


@rule_for(aten.slice.Tensor)
def slice_(node: fx.Node) -> OpShardingRule:
    """Return the rule of a slice; one that is a piece of equal pieces may be split inside."""
    source = operands_of(node)[0]
    assert source is not None
    values = bound(node)
    dim, size = values["dim"], operand_shape(source)[values["dim"]]
    start, length = slice_extent(node)
    if length == size:
        return expand_like_identity(node)
    if values["step"] == 1 and length and size % length == 0 and start % length == 0:
        sizes, joined, single = pieces(source, dim, size // length, length)
        return OpShardingRule(
            (joined,), (single,), sizes, whole=frozenset({"pieces"}), linear=(frozenset({0}),)
        )
    return unsharded_dim(node, dim)


def slice_extent(node: fx.Node) -> tuple[int, int]:
    """Return (first index, number of entries) that an aten.slice takes of its dim."""
    values = bound(node)
    source = node.args[0]
    assert isinstance(source, fx.Node)
    size = operand_shape(source)[values["dim"]]
    start = values["start"] or 0
    start = max(0, start + size) if start < 0 else min(start, size)
    return start, shape_of(value_of(node))[values["dim"]]


@rule_for(aten.cat.default)
def cat(node: fx.Node) -> OpShardingRule:
    """Return the rule of a concatenation: equal pieces may be split inside, unequal ones stay
    unsharded.
    """
    tensors = [n for n in operands_of(node) if n is not None]
    dim = bound(node)["dim"]
    lengths = {operand_shape(n)[dim] for n in tensors}
    all_operands = (frozenset(range(len(tensors))),)
    if len(lengths) == 1:
        sizes, joined, single = pieces(tensors[0], dim, len(tensors), lengths.pop())
        return OpShardingRule(
            (single,) * len(tensors),
            (joined,),
            sizes,
            whole=frozenset({"pieces"}),
            linear=all_operands,
        )
    sizes = {}
    dims = name_dims(shape_of(value_of(node)), sizes)
    dim %= len(dims)
    operands = []
    for i, tensor in enumerate(tensors):
        sizes[f"p{i}"] = operand_shape(tensor)[dim]
        operands.append(tuple((f"p{i}",) if j == dim else d for j, d in enumerate(dims)))
    unsharded = frozenset({f"d{dim}", *(f"p{i}" for i in range(len(tensors)))})
    return OpShardingRule(
        tuple(operands), (tuple(dims),), sizes, whole=unsharded, linear=all_operands
    )


@rule_for(aten.stack.default)
def stack(node: fx.Node) -> OpShardingRule:
    """Return the rule of a stack: the new dim stays unsharded."""
    tensors = [n for n in operands_of(node) if n is not None]
    sizes: dict[str, int] = {}
    dims = name_dims(shape_of(value_of(node)), sizes)
    dim = bound(node)["dim"] % len(dims)
    single = tuple(d for j, d in enumerate(dims) if j != dim)
    return OpShardingRule(
        (single,) * len(tensors),
        (tuple(dims),),
        sizes,
        whole=frozenset({f"d{dim}"}),
        linear=(frozenset(range(len(tensors))),),
    )


@rule_for((aten.select.int, aten.unbind.int))
def select(node: fx.Node) -> OpShardingRule:
    """Return the rule of an op that takes single indices of a dim, which stays unsharded."""
    source = operands_of(node)[0]
    assert source is not None
    sizes: dict[str, int] = {}
    dims = name_dims(operand_shape(source), sizes)
    dim = bound(node)["dim"] % len(dims)
    remaining_dims = tuple(d for j, d in enumerate(dims) if j != dim)
    count = len(results_of(node))
    return OpShardingRule(
        (tuple(dims),),
        (remaining_dims,) * count,
        sizes,
        whole=frozenset({f"d{dim}"}),
        linear=(frozenset({0}),),
    )


@rule_for(aten.constant_pad_nd.default)
def constant_pad(node: fx.Node) -> OpShardingRule:
    """Return the rule of a constant pad: zeros keep a partial value partial."""
    values = bound(node)
    return _padding(node, values["pad"], values["value"] in (None, 0))


@rule_for(aten.pad.default)
def pad(node: fx.Node) -> OpShardingRule:
    """Return the rule of a pad in any mode: all but a constant other than zero keep a partial value
    partial.
    """
    values = bound(node)
    linear = values["mode"] != "constant" or values["value"] in (None, 0)
    return _padding(node, values["pad"], linear)


def _padding(node: fx.Node, amounts: list[int], linear: bool) -> OpShardingRule:
    """Return the rule of a pad: padded dims stay unsharded."""
    source = operands_of(node)[0]
    assert source is not None
    sizes: dict[str, int] = {}
    dims = name_dims(operand_shape(source), sizes)
    results, unsharded = list(dims), set()
    for i, size in enumerate(shape_of(value_of(node))):
        if any(amounts[2 * (len(dims) - 1 - i) : 2 * (len(dims) - i)]):
            sizes[f"r{i}"] = size
            results[i] = (f"r{i}",)
            unsharded |= {f"d{i}", f"r{i}"}
    groups = (frozenset({0}),) if linear else ()
    return OpShardingRule(
        (tuple(dims),), (tuple(results),), sizes, whole=frozenset(unsharded), linear=groups
    )


@rule_for(
    (
        aten.cumsum.default,
        aten.cumprod.default,
        aten.logcumsumexp.default,
        aten.cummax.default,
        aten.cummin.default,
        aten.sort.default,
        aten.sort.stable,
        aten.argsort.default,
        aten.argsort.stable,
        aten.topk.default,
    )
)
def along(node: fx.Node) -> OpShardingRule:
    """Return the rule of an op that runs along one dim, which stays unsharded."""
    return unsharded_dim(node, bound(node)["dim"], linear=node.target is aten.cumsum.default)


@rule_for(aten.glu.default)
def glu(node: fx.Node) -> OpShardingRule:
    """Return the rule "(halves x) -> x" of a gated linear unit: an axis may split x."""
    source = operands_of(node)[0]
    assert source is not None
    dim = bound(node)["dim"]
    sizes, joined, single = pieces(source, dim, 2, shape_of(value_of(node))[dim])
    return OpShardingRule((joined,), (single,), sizes, whole=frozenset({"pieces"}))


@rule_for((aten.repeat.default, aten.tile.default))
def repeat(node: fx.Node) -> OpShardingRule:
    """Return the rule "x -> (r x)" of a repeated tensor: copies may be split as well as entries."""
    source = operands_of(node)[0]
    assert source is not None
    shape, result = operand_shape(source), shape_of(value_of(node))
    if 0 in result:
        return unsplit(node, source="rule")
    sizes: dict[str, int] = {}
    dims = name_dims(shape, sizes)
    new = len(result) - len(shape)
    results: list[tuple[str, ...]] = []
    for i, size in enumerate(result):
        own = () if i < new else dims[i - new]
        sizes[f"r{i}"] = size // (1 if i < new else shape[i - new])
        results.append((f"r{i}", *own))
    return OpShardingRule((tuple(dims),), (tuple(results),), sizes, linear=(frozenset({0}),))


@rule_for(aten.repeat_interleave.self_int)
def repeat_interleave(node: fx.Node) -> OpShardingRule:
    """Return the rule "x -> (x r)": copies may be split as well as entries. Without a dim it is
    "x y -> (x y r)".
    """
    source = operands_of(node)[0]
    assert source is not None
    values = bound(node)
    sizes: dict[str, int] = {}
    dims = name_dims(operand_shape(source), sizes)
    sizes["r"] = values["repeats"]
    if 0 in sizes.values():
        return unsplit(node, source="rule")
    if values["dim"] is None:
        result: tuple[tuple[str, ...], ...] = ((*(name for (name,) in dims), "r"),)
    else:
        dim = values["dim"] % len(dims)
        result = tuple((*d, "r") if i == dim else d for i, d in enumerate(dims))
    return OpShardingRule((tuple(dims),), (result,), sizes, linear=(frozenset({0}),))


@rule_for((aten.tril.default, aten.triu.default))
def triangle(node: fx.Node) -> OpShardingRule:
    """Return the rule of a triangle of the last two dims, which stay unsharded."""
    dims = len(shape_of(value_of(node)))
    return unsharded_dims(node, {dims - 2, dims - 1})


@rule_for((aten.view_as_real.default, aten.view_as_complex.default))
def complex_as_real(node: fx.Node) -> OpShardingRule:
    """Return the rule "... -> ... 2" of complex numbers as pairs, or that backwards."""
    source = operands_of(node)[0]
    assert source is not None
    shape, result = operand_shape(source), shape_of(value_of(node))
    sizes: dict[str, int] = {}
    dims = tuple(name_dims(min(shape, result, key=len), sizes))
    sizes["complex"] = 2
    before, after = (dims, (*dims, ("complex",)))
    if len(shape) > len(result):
        before, after = after, before
    return OpShardingRule((before,), (after,), sizes, whole=frozenset({"complex"}))


@rule_for(aten.diff.default)
def diff(node: fx.Node) -> OpShardingRule:
    """Return the rule of differences along one dim, which stays unsharded, as does that of what is
    prepended and appended.
    """
    operands = operands_of(node)
    assert operands[0] is not None
    sizes: dict[str, int] = {}
    dims = name_dims(operand_shape(operands[0]), sizes)
    dim = bound(node)["dim"] % len(dims)

    def of_length(name: str, size: int) -> tuple[tuple[str, ...], ...]:
        sizes[name] = size
        return tuple((name,) if j == dim else d for j, d in enumerate(dims))

    others = [
        None if n is None else of_length(f"d{dim}_{i}", operand_shape(n)[dim])
        for i, n in enumerate(operands[1:])
    ]
    result = of_length(f"r{dim}", shape_of(value_of(node))[dim])
    present = frozenset(i for i, n in enumerate(operands) if n is not None)
    own = {name for d in (dims, *filter(None, others), result) for name in d[dim]}
    return OpShardingRule(
        (tuple(dims), *others), (result,), sizes, whole=frozenset(own), linear=(present,)
    )


@rule_for(aten.flip.default)
def flip(node: fx.Node) -> OpShardingRule:
    """Return the rule of a flip: flipped dims stay unsharded."""
    rule = expand_like_identity(node)
    dims = len(rule.results[0])
    return dataclasses.replace(rule, whole=frozenset(f"d{d % dims}" for d in bound(node)["dims"]))
