"""Op sharding rules of matmuls and convolutions.

Example: mm is "m k, k n -> m n": m and n may be split, and a split k makes the result partial.
`matmul` gives the roles of the factors, by which named layouts and SUMMA find the rows, columns
and summed dims of a matmul. Importing this file enters the rules in the table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import fx

from autopar.ir.sharding_rule import (
    Dims,
    OpShardingRule,
    bound,
    operands_of,
    rule,
    shape_of,
    value_of,
)
from autopar.ops.rules import aten, name_dims, operand_shape, rule_for, unsplit

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


@rule_for(aten.matmul.default)
def matmul(node: fx.Node) -> OpShardingRule:
    """Return the rule of a matmul with broadcast batch dims; either operand may be a vector."""
    left, right = (n for n in operands_of(node) if n is not None)
    a, b = operand_shape(left), operand_shape(right)
    sizes: dict[str, int] = {"k": a[-1]}
    result: list[tuple[str, ...]] = []
    batch = shape_of(value_of(node))[: max(len(a), len(b)) - 2]
    for i, size in enumerate(batch):
        sizes[f"b{i}"] = size
        result.append((f"b{i}",))
    left_dims, right_dims = broadcast(a[:-2], result), broadcast(b[:-2], result)
    rows: list[tuple[str, ...]] = []
    columns: list[tuple[str, ...]] = []
    if len(a) > 1:
        sizes["m"] = a[-2]
        rows = [("m",)]
    if len(b) > 1:
        sizes["n"] = b[-1]
        columns = [("n",)]
    batch_names = frozenset(f"b{i}" for i in range(len(batch)))
    return OpShardingRule(
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


def align(
    shape: tuple[int, ...], result: Sequence[tuple[str, ...]]
) -> list[tuple[int, tuple[str, ...]]]:
    """Return (size, factors) of each dim of an operand that is aligned with a result on the
    right.
    """
    return list(zip(shape, result[len(result) - len(shape) :], strict=True))


def broadcast(shape: tuple[int, ...], result: Sequence[tuple[str, ...]]) -> Dims:
    """Return the dims of an operand that is broadcast to dims with these factors, aligned on the
    right.
    """
    return tuple(() if size == 1 else dim for size, dim in align(shape, result))


@rule_for(aten.addmm.default)
def addmm(node: fx.Node) -> OpShardingRule:
    """Return the rule "n, m k, k n -> m n"; the added operand may also be (m, n), or have dims of
    1.
    """
    added, left, right = (n for n in operands_of(node) if n is not None)
    (m, k), n = operand_shape(left), operand_shape(right)[1]
    result = (("m",), ("n",))
    return OpShardingRule(
        (broadcast(operand_shape(added), result), (("m",), ("k",)), (("k",), ("n",))),
        (result,),
        {"m": m, "n": n, "k": k},
        sum=frozenset({"k"}),
        added=frozenset({0}),
        linear=(frozenset({0, 1}), frozenset({0, 2})),
        flops=2.0 * m * n * k,
        product=(frozenset({"m"}), frozenset({"n"}), frozenset({"k"})),
    )


@rule_for(
    (
        aten.conv1d.default,
        aten.conv2d.default,
        aten.conv3d.default,
        aten.conv1d.padding,
        aten.conv2d.padding,
        aten.conv3d.padding,
    )
)
def convolution(node: fx.Node) -> OpShardingRule:
    """Return the rule "b (g c) h w, (g o) c i j, (g o) -> b (g o) y z": pixels stay unsharded,
    groups may be split like samples.
    """
    source, weight, _ = operands_of(node)
    assert source is not None and weight is not None
    outputs, channels, *kernel = operand_shape(weight)
    groups = bound(node)["groups"]
    shape, pixels = operand_shape(source), shape_of(value_of(node))[-len(kernel) :]
    sizes = {"g": groups, "c": channels, "o": outputs // groups}
    batch = name_dims(shape[: -len(kernel) - 1], sizes, "b")
    flops = 2.0 * math.prod((*shape[: -len(kernel) - 1], outputs, channels, *kernel, *pixels))
    before = name_dims(shape[-len(kernel) :], sizes, "h")
    window, after = name_dims(tuple(kernel), sizes, "i"), name_dims(pixels, sizes, "y")
    unsharded = frozenset(name for (name,) in (*before, *window, *after))
    return OpShardingRule(
        ((*batch, ("g", "c"), *before), (("g", "o"), ("c",), *window), (("g", "o"),)),
        ((*batch, ("g", "o"), *after),),
        sizes,
        sum=frozenset({"c"}),
        whole=unsharded,
        added=frozenset({2}),
        linear=(frozenset({0, 2}), frozenset({1, 2})),
        flops=flops,
        product=(
            frozenset({"g", *(name for (name,) in batch)}),
            frozenset({"o"}),
            frozenset({"c"}),
        ),
    )


@rule_for(
    (
        aten.conv_transpose1d.default,
        aten.conv_transpose2d.input,
        aten.conv_transpose3d.input,
    )
)
def transposed_convolution(node: fx.Node) -> OpShardingRule:
    """Return the rule "b (g c) h w, (g c) o i j, (g o) -> b (g o) y z": that of a convolution with
    the weight's channels the other way round.
    """
    source, weight, _ = operands_of(node)
    assert source is not None and weight is not None
    channels, outputs, *kernel = operand_shape(weight)
    groups = bound(node)["groups"]
    shape, pixels = operand_shape(source), shape_of(value_of(node))[-len(kernel) :]
    sizes = {"g": groups, "c": channels // groups, "o": outputs}
    batch = name_dims(shape[: -len(kernel) - 1], sizes, "b")
    flops = 2.0 * math.prod((*shape, outputs, *kernel))
    before = name_dims(shape[-len(kernel) :], sizes, "h")
    window, after = name_dims(tuple(kernel), sizes, "i"), name_dims(pixels, sizes, "y")
    return OpShardingRule(
        ((*batch, ("g", "c"), *before), (("g", "c"), ("o",), *window), (("g", "o"),)),
        ((*batch, ("g", "o"), *after),),
        sizes,
        sum=frozenset({"c"}),
        whole=frozenset(name for (name,) in (*before, *window, *after)),
        added=frozenset({2}),
        linear=(frozenset({0, 2}), frozenset({1, 2})),
        flops=flops,
        product=(
            frozenset({"g", *(name for (name,) in batch)}),
            frozenset({"o"}),
            frozenset({"c"}),
        ),
    )


# -- products in other words -----------------------------------------------------------------------
rule(aten.outer.default, "m, n -> m n", linear=("0", "1"))
rule(aten.dot.default, "k, k ->", sum="k", linear=("0", "1"))
rule(aten.vdot.default, "k, k ->", sum="k", linear=("0", "1"))
rule(
    aten.bilinear.default,
    "... i, ... k, n i k, n -> ... n",
    sum="i k",
    added="3",
    linear=("0 3", "1 3", "2 3"),
)


@rule_for(aten.baddbmm.default)
def baddbmm(node: fx.Node) -> OpShardingRule:
    """Return the rule "b m n, b m k, b k n -> b m n"; the added operand may have fewer dims, or
    dims of 1.
    """
    added, left, right = (n for n in operands_of(node) if n is not None)
    (b, m, k), n = operand_shape(left), operand_shape(right)[2]
    result = (("b",), ("m",), ("n",))
    return OpShardingRule(
        (
            broadcast(operand_shape(added), result),
            (("b",), ("m",), ("k",)),
            (("b",), ("k",), ("n",)),
        ),
        (result,),
        {"b": b, "m": m, "n": n, "k": k},
        sum=frozenset({"k"}),
        added=frozenset({0}),
        linear=(frozenset({0, 1}), frozenset({0, 2})),
        flops=2.0 * b * m * n * k,
        product=(frozenset({"b", "m"}), frozenset({"n"}), frozenset({"k"})),
    )


@rule_for(aten.einsum.default)
def einsum(node: fx.Node) -> OpShardingRule:
    """Return the rule that an einsum's equation says: its letters are the factors, and those that
    the result lacks are summed. Of two operands it is a matmul.

    A letter that comes twice in one operand (a diagonal) stays unsharded, and so does one of an
    operand that is repeated along it (of size 1 there).
    """
    tensors = [n for n in operands_of(node) if n is not None]
    shapes = [operand_shape(n) for n in tensors]
    inputs, output = _einsum_letters(
        bound(node)["equation"], [len(shape) for shape in shapes], len(shape_of(value_of(node)))
    )
    sizes: dict[str, int] = {}
    for letters, shape in zip(inputs, shapes, strict=True):
        for letter, size in zip(letters, shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1)) if size else 0
    unsharded = {x for letters in inputs for x in letters if letters.count(x) > 1}
    operands = tuple(
        tuple(() if size != sizes[x] else (x,) for x, size in zip(letters, shape, strict=True))
        for letters, shape in zip(inputs, shapes, strict=True)
    )
    result = tuple((letter,) for letter in output)
    flops, product = 0.0, None
    if len(inputs) == 2 and not unsharded:
        left, right = (frozenset(x for dim in dims for x in dim) for dims in operands)
        summed = left & right - frozenset(output)
        product = (left - summed, right - left, summed)
        flops = 2.0 * math.prod(sizes.values()) if summed else 0.0
    return OpShardingRule(
        operands,
        (result,),
        sizes,
        sum=frozenset(sizes) - frozenset(output),
        whole=frozenset(unsharded),
        linear=tuple(frozenset({i}) for i in range(len(tensors))),
        product=product if flops else None,
        flops=flops,
    )


def _einsum_letters(
    equation: str, counts: Sequence[int], result_count: int
) -> tuple[list[list[str]], list[str]]:
    """Return the names of the dims of every operand and of the result of an einsum. The dims that
    an ellipsis stands for are aligned on the right: "…0" is the last of them.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    words = left.split(",")

    def letters(word: str, count: int) -> list[str]:
        before, dots, after = word.partition("...")
        unnamed = count - len(before) - len(after)
        return [*before, *(f"…{i}" for i in reversed(range(unnamed if dots else 0))), *after]

    inputs = [letters(word, count) for word, count in zip(words, counts, strict=True)]
    if arrow:
        return inputs, letters(right, result_count)
    named_letters = "".join(words).replace("...", "")
    once = sorted(x for x in set(named_letters) if named_letters.count(x) == 1)
    unnamed = max(len([x for x in dims if x.startswith("…")]) for dims in inputs)
    return inputs, [*(f"…{i}" for i in reversed(range(unnamed))), *once]


@rule_for(aten.cdist.default)
def cdist(node: fx.Node) -> OpShardingRule:
    """Return the rule "... m k, ... n k -> ... m n" of the distances between rows."""
    left, right = (n for n in operands_of(node) if n is not None)
    a, b, result = operand_shape(left), operand_shape(right), shape_of(value_of(node))
    sizes = {"m": a[-2], "n": b[-2], "k": a[-1]}
    batch = name_dims(result[:-2], sizes, "b")
    return OpShardingRule(
        (
            (*broadcast(a[:-2], batch), ("m",), ("k",)),
            (*broadcast(b[:-2], batch), ("n",), ("k",)),
        ),
        ((*batch, ("m",), ("n",)),),
        sizes,
        whole=frozenset({"k"}),
    )


@rule_for(aten._weight_norm.default)
def weight_norm(node: fx.Node) -> OpShardingRule:
    """Return the rule of a weight scaled to a norm for each entry of one dim, the only one that may
    be split.
    """
    direction, norm = operands_of(node)
    assert direction is not None and norm is not None
    sizes: dict[str, int] = {}
    dims = name_dims(operand_shape(direction), sizes)
    dim = bound(node)["dim"]
    if not 0 <= dim < len(dims) or operand_shape(norm)[dim] != sizes[f"d{dim}"]:
        return unsplit(node, source="rule")
    own = tuple(d if i == dim else () for i, d in enumerate(dims))
    return OpShardingRule(
        (tuple(dims), own),
        (tuple(dims),),
        sizes,
        whole=frozenset(sizes) - {f"d{dim}"},
        linear=(frozenset({1}),),
    )
