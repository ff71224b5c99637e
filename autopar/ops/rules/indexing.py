"""Op sharding rules of ops that read or write entries by index: index_select, gather, scatter,
slices that are written, advanced indexing, one-hot codes and searches in sorted rows.

Example: index_select of rows of (v, d) by n indices is "v d, n -> n d": the indices and the width
may be split, the rows that are read may not. A scatter_add adds its source to its first operand, so
the entries that are added may be split too: the result is then partial. Importing this file enters
the rules in the table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from autopar.ir.sharding_rule import (
    Dims,
    OpShardingRule,
    bound,
    operands_of,
    results_of,
    rule,
    shape_of,
    value_of,
)
from autopar.ops.rules import aten, name_dims, operand_shape, rule_for, unsplit

_FIRST = (frozenset({0}),)


@rule_for(aten.index_select.default)
def index_select(node: fx.Node) -> OpShardingRule:
    """Return the rule "... v ..., n -> ... n ...": the dim that is read stays unsharded."""
    source, index = operands_of(node)
    assert source is not None and index is not None
    sizes: dict[str, int] = {}
    dims = name_dims(operand_shape(source), sizes)
    if not dims or not operand_shape(index):
        return unsplit(node, source="rule")
    dim = bound(node)["dim"] % len(dims)
    sizes["n"] = operand_shape(index)[0]
    return OpShardingRule(
        (tuple(dims), (("n",),)),
        (tuple(("n",) if i == dim else d for i, d in enumerate(dims)),),
        sizes,
        whole=frozenset({f"d{dim}"}),
        linear=_FIRST,
        index=frozenset({1}),
    )


@rule_for((aten.gather.default, aten.take_along_dim.default))
def gather(node: fx.Node) -> OpShardingRule:
    """Return the rule "... v ..., ... n ... -> ... n ...". Another dim may be split where both
    operands have it in full, or where one of them repeats it (take_along_dim).
    """
    source, index = operands_of(node)
    assert source is not None and index is not None
    shape, places, result = operand_shape(source), operand_shape(index), shape_of(value_of(node))
    dim = bound(node)["dim"]
    if dim is None or not shape or len(shape) != len(places):
        return unsplit(node, source="rule")
    sizes: dict[str, int] = {}
    unsharded: set[str] = set()
    dims: list[list[tuple[str, ...]]] = [[], [], []]
    repeats = node.target is aten.take_along_dim.default
    for i, (own, place, size) in enumerate(zip(shape, places, result, strict=True)):
        sizes[f"d{i}"] = size
        read = own == size and i != dim % len(shape)
        if not read:
            sizes[f"v{i}"] = own
            unsharded.add(f"v{i}")
        if not read and i != dim % len(shape) and not (repeats and own == 1):
            unsharded.add(f"d{i}")  # a gather may read the first rows only
        dims[0].append((f"d{i}",) if read else (f"v{i}",))
        dims[1].append((f"d{i}",) if place == size else ())
        dims[2].append((f"d{i}",))
    operand_dims = (tuple(dims[0]), tuple(dims[1]))
    return OpShardingRule(
        operand_dims,
        (tuple(dims[2]),),
        sizes,
        whole=frozenset(unsharded),
        linear=_FIRST,
        index=frozenset({1}),
    )


@rule_for(
    (
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter_add.default,
        aten.scatter_reduce.two,
    )
)
def scatter(node: fx.Node) -> OpShardingRule:
    """Return the rule "... v ..., ... n ..., ... n ... -> ... v ...": a dim that all operands have
    in full may be split; what a scatter_add adds may be split along n as well.

    No partial value passes through a scatter that overwrites: where an index comes twice, ranks may
    keep different entries.
    """
    tensors = [n for n in operands_of(node) if n is not None]
    shapes = [operand_shape(n) for n in tensors]
    if not shapes[0] or any(len(shape) != len(shapes[0]) for shape in shapes):
        return unsplit(node, source="rule")
    dim = bound(node)["dim"] % len(shapes[0])
    adds = node.target is aten.scatter_add.default
    sizes: dict[str, int] = {}
    unsharded, summed = set(), set()
    operands: list[list[tuple[str, ...]]] = [[] for _ in shapes]
    for i, lengths in enumerate(zip(*shapes, strict=True)):
        if i != dim and len(set(lengths)) == 1:
            sizes[f"d{i}"] = lengths[0]
            names = [f"d{i}"] * len(lengths)
        else:
            names = [f"v{i}", f"n{i}", f"s{i}"][: len(lengths)]
            if adds and i == dim and lengths[1] == lengths[2]:
                names[2] = names[1]
                summed.add(names[1])
            sizes.update(zip(names, lengths, strict=True))
            unsharded |= set(names) - summed
        for own, name in zip(operands, names, strict=True):
            own.append((name,))
    dims = tuple(tuple(own) for own in operands)
    return OpShardingRule(
        dims,
        (dims[0],),
        sizes,
        sum=frozenset(summed),
        whole=frozenset(unsharded),
        added=frozenset({0}) if adds else frozenset(),
        linear=(frozenset({0, 2}),) if adds else (),
        index=frozenset({1}),
    )


@rule_for(aten.index_add.default)
def index_add(node: fx.Node) -> OpShardingRule:
    """Return the rule "... v ..., n, ... n ... -> ... v ...": the entries that are added may be
    split.
    """
    source, index, added = operands_of(node)
    assert source is not None and index is not None and added is not None
    sizes: dict[str, int] = {}
    dims = name_dims(operand_shape(source), sizes)
    if not dims or len(operand_shape(added)) != len(dims):
        return unsplit(node, source="rule")
    dim = bound(node)["dim"] % len(dims)
    sizes["n"] = operand_shape(added)[dim]
    return OpShardingRule(
        (
            tuple(dims),
            (("n",),),
            tuple(("n",) if i == dim else d for i, d in enumerate(dims)),
        ),
        (tuple(dims),),
        sizes,
        sum=frozenset({"n"}),
        whole=frozenset({f"d{dim}"}),
        added=frozenset({0}),
        linear=(frozenset({0, 2}),),
        index=frozenset({1}),
    )


@rule_for((aten.slice_scatter.default, aten.select_scatter.default, aten.index_copy.default))
def slice_scatter_rule(node: fx.Node) -> OpShardingRule:
    """Return the rule "... v ..., ... n ... -> ... v ..." of x[..., a:b] = y, of x[..., i] = y,
    where y has no n, and of index_copy: the dim that is written stays unsharded.
    """
    operands = [n for n in operands_of(node) if n is not None]
    shapes = [operand_shape(n) for n in operands]
    if not shapes[0]:
        return unsplit(node, source="rule")
    sizes: dict[str, int] = {}
    dims = name_dims(shapes[0], sizes)
    dim = bound(node)["dim"] % len(dims)
    written: tuple[tuple[str, ...], ...] = ()
    if len(shapes[-1]) == len(dims):
        sizes["n"], written = shapes[-1][dim], (("n",),)
    source = (*dims[:dim], *written, *dims[dim + 1 :])
    index = ((("n",),) if shapes[1] else (),) if len(operands) == 3 else ()
    return OpShardingRule(
        (tuple(dims), *index, source),
        (tuple(dims),),
        sizes,
        whole=frozenset({f"d{dim}"} | ({"n"} if written else set())),
        linear=(frozenset({0, len(operands) - 1}),),
        index=frozenset({1}) if index else frozenset(),
    )


# -- advanced indexing -----------------------------------------------------------------------------
def _indexed(
    shape: tuple[int, ...], indices: Sequence[fx.Node | None], sizes: dict[str, int]
) -> tuple[Dims, list[Dims | None], Dims, set[str], set[str]] | None:
    """Return for x[indices]: (dims of x, dims of each index, dims of the result, factors of x that
    are indexed, factors of the indices); None where an index is a mask.
    """
    present = [(i, operand_shape(n)) for i, n in enumerate(indices) if n is not None]
    masks = any(n is not None and value_of(n).dtype in (torch.bool, torch.uint8) for n in indices)
    if masks or not present:
        return None
    dims = name_dims(shape, sizes)
    places = torch.broadcast_shapes(*(own for _, own in present))
    entries = name_dims(tuple(places), sizes, "n")
    index_dims: list[Dims | None] = [None] * len(indices)
    for i, own in present:
        aligned = entries[len(entries) - len(own) :]
        index_dims[i] = tuple(
            () if size == 1 else dim for size, dim in zip(own, aligned, strict=True)
        )
    at = [i for i, _ in present]
    remaining = [d for i, d in enumerate(dims) if i not in at]
    adjacent = at == list(range(at[0], at[-1] + 1))
    first = at[0] if adjacent else 0
    result = (*remaining[:first], *entries, *remaining[first:])
    return (
        tuple(dims),
        index_dims,
        result,
        {f"d{i}" for i in at},
        {name for (name,) in entries},
    )


@rule_for(aten.index.Tensor)
def index(node: fx.Node) -> OpShardingRule:
    """Return the rule of x[:, i, j]: what the indices run over and the dims without an index may be
    split, the dims that are read may not. An index that is a mask leaves all unsharded.
    """
    source, *indices = operands_of(node)
    assert source is not None
    sizes: dict[str, int] = {}
    read = _indexed(operand_shape(source), indices, sizes)
    if read is None:
        return unsplit(node, source="rule")
    dims, index_dims, result, indexed, _ = read
    return OpShardingRule(
        (dims, *index_dims),
        (result,),
        sizes,
        whole=frozenset(indexed),
        linear=_FIRST,
        index=frozenset(range(1, len(indices) + 1)),
    )


@rule_for(aten.index_put.default)
def index_put(node: fx.Node) -> OpShardingRule:
    """Return the rule of x[:, i, j] = y or += y: the dims without an index may be split, and where
    it adds, the entries that are added too.
    """
    source, *indices, values = operands_of(node)
    assert source is not None and values is not None
    sizes: dict[str, int] = {}
    written = _indexed(operand_shape(source), indices, sizes)
    if written is None:
        return unsplit(node, source="rule")
    dims, index_dims, entries, indexed, places = written
    own = operand_shape(values)
    aligned = entries[len(entries) - len(own) :]
    if len(own) > len(entries):
        return unsplit(node, source="rule")
    value_dims = tuple(() if s == 1 else d for s, d in zip(own, aligned, strict=True))
    adds, last = bool(bound(node)["accumulate"]), len(indices) + 1
    return OpShardingRule(
        (dims, *index_dims, value_dims),
        (dims,),
        sizes,
        sum=frozenset(places) if adds else frozenset(),
        whole=frozenset(indexed | (set() if adds else places)),
        added=frozenset({0}) if adds else frozenset(),
        linear=(frozenset({0, last}),) if adds else (),
        index=frozenset(range(1, last)),
    )


# -- codes and searches ----------------------------------------------------------------------------
rule(aten.one_hot.default, "... -> ... n", whole="n")
rule(aten.bucketize.Tensor, "..., n -> ...", whole="n")


@rule_for(aten.searchsorted.Tensor)
def search_sorted(node: fx.Node) -> OpShardingRule:
    """Return the rule "... n, ... v -> ... v" of a search of values in sorted rows; in one sorted
    row, "n, ... -> ...".
    """
    rows, values, sorter = operands_of(node)
    assert rows is not None and values is not None
    sizes: dict[str, int] = {"n": operand_shape(rows)[-1]}
    dims = tuple(name_dims(shape_of(results_of(node)[0]), sizes))
    row_dims = (*(dims[:-1] if len(operand_shape(rows)) > 1 else ()), ("n",))
    return OpShardingRule(
        (row_dims, dims, None if sorter is None else row_dims),
        (dims,),
        sizes,
        whole=frozenset({"n"}),
    )
