"""The table: how each op may be split. One line an op where the notation of rules.py suffices, a
short function where it does not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .rules import (
    TABLE,
    Dims,
    Spec,
    bound,
    operands_of,
    results_of,
    rule,
    shape_of,
    value_of,
    view_factors,
)

aten = torch.ops.aten

# -- matrix products -------------------------------------------------------------------------------
rule(
    aten.linear.default,
    "... k, n k, n -> ... n",
    sum="k",
    added="2",
    linear=("0 2", "1 2"),
    product="... | n | k",
)
rule(aten.mm.default, "m k, k n -> m n", sum="k", linear=("0", "1"), product="m | n | k")
rule(aten.bmm.default, "b m k, b k n -> b m n", sum="k", linear=("0", "1"), product="b m | n | k")

# -- embeddings ------------------------------------------------------------------------------------
rule(aten.embedding.default, "v d, ... -> ... d", sum="v", index="1", linear=("0",))


def spec(target: Any) -> Callable[[Callable[[fx.Node], Spec]], Callable[[fx.Node], Spec]]:
    """Enter a function as the rule of one op or of several."""

    def enter(build: Callable[[fx.Node], Spec]) -> Callable[[fx.Node], Spec]:
        for one in target if isinstance(target, tuple) else (target,):
            TABLE[one] = build
        return build

    return enter


def spec_of(node: fx.Node) -> Spec | None:
    """The rule of a node, or None: no line of the table and no tag says how its op may be split."""
    build = TABLE.get(node.target)
    if build is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        build = pointwise
    return None if build is None else _only_floats_partial(node, build(node))


def _only_floats_partial(node: fx.Node, made: Spec) -> Spec:
    """Integers and flags cannot be parts of a sum: dividing or reducing them gives another type."""
    fixed = {
        i for i, n in enumerate(operands_of(node)) if n is not None and not _floating(value_of(n))
    }
    return dataclasses.replace(
        made, linear=tuple(group for group in made.linear if not group & fixed)
    )


def unsplit(node: fx.Node, found: str = "none") -> Spec:
    """The rule of an op that nothing is known of: every dim is whole."""
    operands = operands_of(node)
    shapes = [None if n is None else _shape(n) for n in operands]
    outputs = [shape_of(v) for v in results_of(node) if isinstance(v, torch.Tensor)]
    sizes: dict[str, int] = {}

    def dims(shape: tuple[int, ...]) -> Dims:
        made = []
        for size in shape:
            sizes[name := f"w{len(sizes)}"] = size
            made.append((name,))
        return tuple(made)

    operand_dims = tuple(None if s is None else dims(s) for s in shapes)
    result_dims = tuple(dims(s) for s in outputs)
    return Spec(operand_dims, result_dims, sizes, whole=frozenset(sizes), found=found)


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = value_of(node)
    assert isinstance(value, torch.Tensor), (node, value)
    return shape_of(value)


def _named(
    shape: tuple[int, ...], sizes: dict[str, int], prefix: str = "d"
) -> list[tuple[str, ...]]:
    dims: list[tuple[str, ...]] = []
    for i, size in enumerate(shape):
        sizes[f"{prefix}{i}"] = size
        dims.append((f"{prefix}{i}",))
    return dims


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


# -- pointwise -------------------------------------------------------------------------------------
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


@spec(
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
def pointwise(node: fx.Node) -> Spec:
    """Right-aligned broadcast: a dim of the result is a factor of every operand that has it at full
    size.
    """
    return _entries(node, shape_of(results_of(node)[0]))


def _entries(node: fx.Node, shape: tuple[int, ...]) -> Spec:
    """The rule of an op that makes each entry of a tensor of this shape for itself."""
    sizes: dict[str, int] = {}
    result = tuple(_named(shape, sizes))
    operands: list[Dims | None] = []
    for operand in operands_of(node):
        if operand is None:
            operands.append(None)
            continue
        own = _shape(operand)
        aligned = result[len(result) - len(own) :]
        operands.append(tuple(() if s == 1 else dim for s, dim in zip(own, aligned, strict=True)))
    return Spec(
        tuple(operands), (result,) * len(results_of(node)), sizes, linear=_linear_groups(node)
    )


def _linear_groups(node: fx.Node) -> tuple[frozenset[int], ...]:
    tensors = [i for i, n in enumerate(operands_of(node)) if n is not None]
    if not all(_floating(v) for v in results_of(node)):
        return ()
    first = operands_of(node)[0]
    if first is not None and node.target in _LINEAR_FIRST and _floating(value_of(first)):
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


# -- views -----------------------------------------------------------------------------------------
@spec(
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
def view(node: fx.Node) -> Spec:
    source = operands_of(node)[0]
    assert source is not None
    if 0 in _shape(source):
        return unsplit(node, found="rule")
    sizes, left, right, whole = view_factors(_shape(source), shape_of(value_of(node)))
    rest = (None,) * (len(operands_of(node)) - 1)
    return Spec((left, *rest), (right,), sizes, whole=whole, linear=(frozenset({0}),))


@spec((aten.permute.default, aten.transpose.int, aten.t.default, aten.numpy_T.default))
def permutation(node: fx.Node) -> Spec:
    source = operands_of(node)[0]
    assert source is not None
    shape = _shape(source)
    sizes: dict[str, int] = {}
    dims = _named(shape, sizes)
    values = bound(node)
    order = list(range(len(shape)))
    if node.target is aten.permute.default:
        order = [d % len(shape) for d in values["dims"]]
    elif node.target is aten.transpose.int:
        a, b = values["dim0"] % len(shape), values["dim1"] % len(shape)
        order[a], order[b] = order[b], order[a]
    else:
        order.reverse()
    return Spec((tuple(dims),), (tuple(dims[d] for d in order),), sizes, linear=(frozenset({0}),))


@spec((aten.expand.default, aten.expand_as.default, aten.broadcast_to.default))
def expand(node: fx.Node) -> Spec:
    made = pointwise(node)
    rest = (None,) * (len(made.operands) - 1)
    return Spec((made.operands[0], *rest), made.results, made.sizes, linear=(frozenset({0}),))


# -- pieces of a dim -------------------------------------------------------------------------------
def pieces(node: fx.Node, dim: int, count: int, size: int) -> tuple[dict[str, int], Dims, Dims]:
    """A dim cut into `count` equal pieces of `size`: "(m d)" whole, "d" each piece. Returns (sizes,
    whole's dims, piece's dims).
    """
    value = value_of(node)
    sizes: dict[str, int] = {}
    dims = _named(shape_of(value), sizes)
    dim %= len(dims)
    del sizes[f"d{dim}"]
    sizes["pieces"], sizes["piece"] = count, size
    joined = [*dims[:dim], ("pieces", "piece"), *dims[dim + 1 :]]
    single = [*dims[:dim], ("piece",), *dims[dim + 1 :]]
    return sizes, tuple(joined), tuple(single)


def _whole_dim(node: fx.Node, dim: int, linear: bool = True) -> Spec:
    """An op that works along one dim (which may change size) and leaves the other dims alone."""
    source = operands_of(node)[0]
    assert source is not None
    sizes: dict[str, int] = {}
    dims = _named(_shape(source), sizes)
    dim %= len(dims)
    results = []
    for i, value in enumerate(results_of(node)):
        sizes[f"r{i}"] = shape_of(value)[dim]
        results.append(tuple((f"r{i}",) if j == dim else d for j, d in enumerate(dims)))
    whole = frozenset({f"d{dim}", *(f"r{i}" for i in range(len(results)))})
    rest = (None,) * (len(operands_of(node)) - 1)
    groups = (frozenset({0}),) if linear else ()
    return Spec((tuple(dims), *rest), tuple(results), sizes, whole=whole, linear=groups)


@spec((aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default))
def split(node: fx.Node) -> Spec:
    source = operands_of(node)[0]
    assert source is not None
    dim = bound(node)["dim"]
    lengths = {shape_of(value)[dim] for value in results_of(node)}
    if len(lengths) > 1:
        return _whole_dim(node, dim)
    count = len(results_of(node))
    sizes, joined, single = pieces(source, dim, count, lengths.pop())
    return Spec(
        (joined,), (single,) * count, sizes, whole=frozenset({"pieces"}), linear=(frozenset({0}),)
    )


@spec(aten.slice.Tensor)
def slice_(node: fx.Node) -> Spec:
    source = operands_of(node)[0]
    assert source is not None
    values = bound(node)
    dim, size = values["dim"], _shape(source)[values["dim"]]
    start, length = slice_extent(node)
    if length == size:
        return expand_like_identity(node)
    if values["step"] == 1 and length and size % length == 0 and start % length == 0:
        sizes, joined, single = pieces(source, dim, size // length, length)
        return Spec(
            (joined,), (single,), sizes, whole=frozenset({"pieces"}), linear=(frozenset({0}),)
        )
    return _whole_dim(node, dim)


def slice_extent(node: fx.Node) -> tuple[int, int]:
    """(first index, number of entries) that an aten.slice takes of its dim."""
    values = bound(node)
    source = node.args[0]
    assert isinstance(source, fx.Node)
    size = _shape(source)[values["dim"]]
    start = values["start"] or 0
    start = max(0, start + size) if start < 0 else min(start, size)
    return start, shape_of(value_of(node))[values["dim"]]


def expand_like_identity(node: fx.Node) -> Spec:
    made = pointwise(node)
    return Spec(made.operands, made.results, made.sizes, linear=(frozenset({0}),))


@spec(aten.cat.default)
def cat(node: fx.Node) -> Spec:
    tensors = [n for n in operands_of(node) if n is not None]
    dim = bound(node)["dim"]
    lengths = {_shape(n)[dim] for n in tensors}
    everything = (frozenset(range(len(tensors))),)
    if len(lengths) == 1:
        sizes, joined, single = pieces(tensors[0], dim, len(tensors), lengths.pop())
        return Spec(
            (single,) * len(tensors),
            (joined,),
            sizes,
            whole=frozenset({"pieces"}),
            linear=everything,
        )
    sizes = {}
    dims = _named(shape_of(value_of(node)), sizes)
    dim %= len(dims)
    operands = []
    for i, tensor in enumerate(tensors):
        sizes[f"p{i}"] = _shape(tensor)[dim]
        operands.append(tuple((f"p{i}",) if j == dim else d for j, d in enumerate(dims)))
    whole = frozenset({f"d{dim}", *(f"p{i}" for i in range(len(tensors)))})
    return Spec(tuple(operands), (tuple(dims),), sizes, whole=whole, linear=everything)


@spec(aten.stack.default)
def stack(node: fx.Node) -> Spec:
    tensors = [n for n in operands_of(node) if n is not None]
    sizes: dict[str, int] = {}
    dims = _named(shape_of(value_of(node)), sizes)
    dim = bound(node)["dim"] % len(dims)
    single = tuple(d for j, d in enumerate(dims) if j != dim)
    return Spec(
        (single,) * len(tensors),
        (tuple(dims),),
        sizes,
        whole=frozenset({f"d{dim}"}),
        linear=(frozenset(range(len(tensors))),),
    )


@spec((aten.select.int, aten.unbind.int))
def select(node: fx.Node) -> Spec:
    source = operands_of(node)[0]
    assert source is not None
    sizes: dict[str, int] = {}
    dims = _named(_shape(source), sizes)
    dim = bound(node)["dim"] % len(dims)
    kept = tuple(d for j, d in enumerate(dims) if j != dim)
    count = len(results_of(node))
    return Spec(
        (tuple(dims),),
        (kept,) * count,
        sizes,
        whole=frozenset({f"d{dim}"}),
        linear=(frozenset({0}),),
    )


@spec(aten.constant_pad_nd.default)
def constant_pad(node: fx.Node) -> Spec:
    values = bound(node)
    return _padding(node, values["pad"], values["value"] in (None, 0))


@spec(aten.pad.default)
def pad(node: fx.Node) -> Spec:
    values = bound(node)
    linear = values["mode"] != "constant" or values["value"] in (None, 0)
    return _padding(node, values["pad"], linear)


def _padding(node: fx.Node, amounts: list[int], linear: bool) -> Spec:
    source = operands_of(node)[0]
    assert source is not None
    sizes: dict[str, int] = {}
    dims = _named(_shape(source), sizes)
    results, whole = list(dims), set()
    for i, size in enumerate(shape_of(value_of(node))):
        if any(amounts[2 * (len(dims) - 1 - i) : 2 * (len(dims) - i)]):
            sizes[f"r{i}"] = size
            results[i] = (f"r{i}",)
            whole |= {f"d{i}", f"r{i}"}
    groups = (frozenset({0}),) if linear else ()
    return Spec((tuple(dims),), (tuple(results),), sizes, whole=frozenset(whole), linear=groups)


# -- reductions along dims -------------------------------------------------------------------------
@spec((aten.sum.dim_IntList, aten.mean.dim, aten.sum.default, aten.mean.default))
def summed(node: fx.Node) -> Spec:
    """A sum is partial over a split dim that it sums; so is a mean, once scaled (see local.py)."""
    return _reduction(node, summed=True)


@spec(
    (
        aten.mse_loss.default,
        aten.l1_loss.default,
        aten.smooth_l1_loss.default,
        aten.huber_loss.default,
        aten.binary_cross_entropy_with_logits.default,
    )
)
def elementwise_loss(node: fx.Node) -> Spec:
    """A loss entry by entry, then kept, summed, or averaged over all entries (see local.py)."""
    shapes = [_shape(n) for n in operands_of(node)[:2] if n is not None]
    if shapes[0] != shapes[1]:
        return unsplit(node)  # torch.nn.functional expands them first, so this is rare
    entries = dataclasses.replace(_entries(node, shapes[0]), linear=())
    if bound(node)["reduction"] == 0:
        return entries
    return dataclasses.replace(entries, results=((),), sum=frozenset(entries.sizes))


@spec(
    (
        aten.amax.default,
        aten.amin.default,
        aten.var.correction,
        aten.var.dim,
        aten.argmax.default,
        aten.any.dim,
        aten.all.dim,
        aten.logsumexp.default,
    )
)
def reduced(node: fx.Node) -> Spec:
    return _reduction(node, summed=False)


def _reduction(node: fx.Node, summed: bool) -> Spec:
    source = operands_of(node)[0]
    assert source is not None
    sizes: dict[str, int] = {}
    dims = _named(_shape(source), sizes)
    values = bound(node)
    listed = values.get("dim")
    if listed is None or listed == []:
        listed = list(range(len(dims)))
    gone = {d % len(dims) for d in (listed if isinstance(listed, list | tuple) else [listed])}
    keep = values.get("keepdim", False)
    result = tuple(() if j in gone else d for j, d in enumerate(dims) if keep or j not in gone)
    factors = frozenset(f"d{j}" for j in gone)
    linear = (frozenset({0}),) if summed else ()
    return Spec(
        (tuple(dims),),
        (result,),
        sizes,
        linear=linear,
        sum=factors if summed else frozenset(),
        whole=frozenset() if summed else factors,
    )


@spec((aten.layer_norm.default, aten.rms_norm.default))
def norm(node: fx.Node) -> Spec:
    """ "... d, d, d -> ... d": one normalised dim may be split (its statistics are reduced over the
    axes), several may not.
    """
    source, *affine = operands_of(node)
    assert source is not None
    sizes: dict[str, int] = {}
    dims = _named(_shape(source), sizes)
    own = tuple(dims[len(dims) - len(bound(node)["normalized_shape"]) :])
    factors = frozenset(name for (name,) in own)
    alone, none = len(own) == 1, frozenset[str]()
    return Spec(
        (tuple(dims), *(None if n is None else own for n in affine)),
        (tuple(dims),),
        sizes,
        shared=factors if alone else none,
        whole=none if alone else factors,
    )


@spec(
    (
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_no_training.default,
    )
)
def batch_norm(node: fx.Node) -> Spec:
    """b c ..., then c each -> b c ..., then c each: in training the statistics run over all but the
    channels, which are whole.
    """
    source, *rest = operands_of(node)
    assert source is not None
    sizes: dict[str, int] = {}
    dims = _named(_shape(source), sizes)
    others, channels = frozenset(sizes) - {"d1"}, (dims[1],)
    training = node.target is not aten._native_batch_norm_legit_no_training.default
    results = [tuple(dims), *([channels] * (len(results_of(node)) - 1))]
    if not training:  # no statistics: two empty results
        sizes["none"] = 0
        results[1:] = [(("none",),)] * 2
    return Spec(
        (tuple(dims), *(None if n is None else channels for n in rest)),
        tuple(results),
        sizes,
        shared=frozenset() if training else others | {"d1"},
        whole=others if training else frozenset({"none"}),
    )


@spec(
    (
        aten.softmax.int,
        aten._softmax.default,
        aten.log_softmax.int,
        aten._log_softmax.default,
    )
)
def softmax(node: fx.Node) -> Spec:
    made = pointwise(node)
    dim = bound(node)["dim"] % len(made.results[0])
    return Spec(made.operands, made.results, made.sizes, shared=frozenset({f"d{dim}"}))


@spec((aten.cumsum.default, aten.diff.default, aten.sort.default, aten.topk.default))
def along(node: fx.Node) -> Spec:
    if (
        len([n for n in operands_of(node) if n is not None]) > 1
    ):  # diff with something before or after
        return unsplit(node)
    return _whole_dim(
        node, bound(node)["dim"], linear=node.target in (aten.cumsum.default, aten.diff.default)
    )


@spec(aten.flip.default)
def flip(node: fx.Node) -> Spec:
    made = expand_like_identity(node)
    dims = len(made.results[0])
    return dataclasses.replace(made, whole=frozenset(f"d{d % dims}" for d in bound(node)["dims"]))


# -- products with more than one shape -------------------------------------------------------------
@spec(aten.matmul.default)
def matmul(node: fx.Node) -> Spec:
    left, right = (n for n in operands_of(node) if n is not None)
    a, b = _shape(left), _shape(right)
    sizes: dict[str, int] = {"k": a[-1]}
    result: list[tuple[str, ...]] = []
    batch = shape_of(value_of(node))[: max(len(a), len(b)) - 2]
    for i, size in enumerate(batch):
        sizes[f"b{i}"] = size
        result.append((f"b{i}",))
    left_dims, right_dims = _broadcast(a[:-2], result), _broadcast(b[:-2], result)
    rows: list[tuple[str, ...]] = []
    columns: list[tuple[str, ...]] = []
    if len(a) > 1:
        sizes["m"] = a[-2]
        rows = [("m",)]
    if len(b) > 1:
        sizes["n"] = b[-1]
        columns = [("n",)]
    batch_names = frozenset(f"b{i}" for i in range(len(batch)))
    return Spec(
        ((*left_dims, *rows, ("k",)), (*right_dims, ("k",), *columns)),
        ((*result, *rows, *columns),),
        sizes,
        sum=frozenset({"k"}),
        linear=(frozenset({0}), frozenset({1})),
        flops=2.0 * math.prod(sizes.values()),
        product=(
            batch_names | ({"m"} if rows else set()),
            frozenset({"n"} if columns else ()),
            frozenset({"k"}),
        ),
    )


def _aligned(
    shape: tuple[int, ...], result: Sequence[tuple[str, ...]]
) -> list[tuple[int, tuple[str, ...]]]:
    return list(zip(shape, result[len(result) - len(shape) :], strict=True))


def _broadcast(shape: tuple[int, ...], result: Sequence[tuple[str, ...]]) -> Dims:
    """The dims of an operand that is broadcast to dims with these factors, aligned on the right."""
    return tuple(() if size == 1 else dim for size, dim in _aligned(shape, result))


@spec(aten.addmm.default)
def addmm(node: fx.Node) -> Spec:
    """n, m k, k n -> m n: what is added may also be (m, n), or have dims of 1."""
    added, left, right = (n for n in operands_of(node) if n is not None)
    (m, k), n = _shape(left), _shape(right)[1]
    result = (("m",), ("n",))
    return Spec(
        (_broadcast(_shape(added), result), (("m",), ("k",)), (("k",), ("n",))),
        (result,),
        {"m": m, "n": n, "k": k},
        sum=frozenset({"k"}),
        added=frozenset({0}),
        linear=(frozenset({0, 1}), frozenset({0, 2})),
        flops=2.0 * m * n * k,
        product=(frozenset({"m"}), frozenset({"n"}), frozenset({"k"})),
    )


@spec(
    (
        aten.conv1d.default,
        aten.conv2d.default,
        aten.conv3d.default,
        aten.conv1d.padding,
        aten.conv2d.padding,
        aten.conv3d.padding,
    )
)
def convolution(node: fx.Node) -> Spec:
    """b (g c) h w, (g o) c i j, (g o) -> b (g o) y z: pixels stay whole, groups may be split like
    samples.
    """
    source, weight, _ = operands_of(node)
    assert source is not None and weight is not None
    outputs, channels, *kernel = _shape(weight)
    groups = bound(node)["groups"]
    shape, pixels = _shape(source), shape_of(value_of(node))[-len(kernel) :]
    sizes = {"g": groups, "c": channels, "o": outputs // groups}
    batch = _named(shape[: -len(kernel) - 1], sizes, "b")
    flops = 2.0 * math.prod((*shape[: -len(kernel) - 1], outputs, channels, *kernel, *pixels))
    before = _named(shape[-len(kernel) :], sizes, "h")
    window, after = _named(tuple(kernel), sizes, "i"), _named(pixels, sizes, "y")
    whole = frozenset(name for (name,) in (*before, *window, *after))
    return Spec(
        ((*batch, ("g", "c"), *before), (("g", "o"), ("c",), *window), (("g", "o"),)),
        ((*batch, ("g", "o"), *after),),
        sizes,
        sum=frozenset({"c"}),
        whole=whole,
        added=frozenset({2}),
        linear=(frozenset({0, 2}), frozenset({1, 2})),
        flops=flops,
        product=(
            frozenset({"g", *(name for (name,) in batch)}),
            frozenset({"o"}),
            frozenset({"c"}),
        ),
    )


@spec(aten.scaled_dot_product_attention.default)
def attention(node: fx.Node) -> Spec:
    """b (g r) q e, b g k e, b g k v -> b (g r) q v: the keys stay whole; the queries may be split
    where no offset is needed.
    """
    query, key, value, mask = operands_of(node)
    assert query is not None and key is not None and value is not None
    q, k, v, out = _shape(query), _shape(key), _shape(value), shape_of(value_of(node))
    if q[-3:-2] != out[-3:-2] or k[-3:-2] != v[-3:-2]:
        return unsplit(
            node
        )  # heads that are broadcast, other than those of keys and values together
    sizes: dict[str, int] = {"q": q[-2], "e": q[-1], "k": k[-2], "v": v[-1]}
    leading = _named(out[:-3], sizes, "b")
    heads: list[tuple[str, ...]] = []
    key_heads: list[tuple[str, ...]] = []
    if len(q) > 2:
        sizes["g"], sizes["r"] = k[-3], q[-3] // k[-3]
        heads, key_heads = [("g", "r")], [("g",)]
    mask_dims = (
        None if mask is None else _broadcast(_shape(mask), [*leading, *heads, ("q",), ("k",)])
    )
    causal = bool(bound(node)["is_causal"])
    whole = {"e", "k", "v"} | ({"q"} if causal else set())
    pairs = math.prod(out[:-1]) * k[-2]
    return Spec(
        (
            (*_broadcast(q[:-3], leading), *heads, ("q",), ("e",)),
            (*_broadcast(k[:-3], leading), *key_heads, ("k",), ("e",)),
            (*_broadcast(v[:-3], leading), *key_heads, ("k",), ("v",)),
            mask_dims,
        ),
        ((*leading, *heads, ("q",), ("v",)),),
        sizes,
        whole=frozenset(whole),
        linear=(frozenset({2}),),
        product=(frozenset(sizes) - {"e", "k", "v"}, frozenset(), frozenset()),
        flops=2.0 * pairs * (q[-1] + v[-1]) / (2 if causal else 1),
    )


@spec(aten.cross_entropy_loss.default)
def cross_entropy(node: fx.Node) -> Spec:
    """Tokens are summed (partial, divided by the global count), classes may be split: the result is
    then invariant.
    """
    logits, target, weight = operands_of(node)
    assert logits is not None and target is not None
    if _floating(value_of(target)):
        return unsplit(node)
    shape = _shape(logits)
    class_dim = 1 if len(shape) > 1 else 0
    sizes: dict[str, int] = {}
    dims = _named(shape, sizes)
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


# -- tensors made from nothing ---------------------------------------------------------------------
FILLS = (aten.full.default, aten.zeros.default, aten.ones.default)
MADE = (
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.scalar_tensor.default,
    aten.eye.default,
    aten.empty.memory_format,
)
NEW_FILLS = (aten.new_zeros.default, aten.new_ones.default, aten.new_full.default)


@spec(FILLS)
def fill(node: fx.Node) -> Spec:
    sizes: dict[str, int] = {}
    return Spec((), (tuple(_named(shape_of(value_of(node)), sizes)),), sizes)


@spec(MADE)
def made_whole(node: fx.Node) -> Spec:
    """Small tensors that come from nothing: made whole, then sliced."""
    return unsplit(node, found="rule")


@spec(NEW_FILLS)
def new_fill(node: fx.Node) -> Spec:
    made = unsplit(node)
    sizes = dict(made.sizes)
    result = tuple(_named(shape_of(value_of(node)), sizes))
    return Spec(made.operands, (result,), sizes, whole=made.whole)
