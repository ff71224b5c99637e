"""The pass that finds what attention masks say, so that no rank makes the mask of all queries and
keys.

    le(k, q)                              is_causal=True, and no mask
    and(gt(k, q - 4), le(k, q))           before=3, after=0
    and(le(k, q), index(padding, [b, k])) keys=[padding], after=0
    eq(index(segment, [b, q]), index(segment, [b, k]))
                                          [segment], [segment], "eq"

Models of transformers make a bool mask (batch, 1, queries, keys) of positions, segments of packed
documents and padding. A mask that is an "and" of conditions, each on the positions of query and key
or on a vector of the queries and one of the keys, becomes its description
(ops/sharded/masked_attention.py). Constant vectors are evaluated: a window as long as the sequence
is no window. All other masks, and those of attention whose heads are masked apart, stay as they
are.

Long attention becomes `masked_attention`, in blocks, which holds no mask and skips the keys that no
query of a block sees, but runs again in the backward. Where it is short, has dropout or skips too
little, torch's op stays, and its mask is a `block_mask`: each rank makes its own part, once for all
layers.

A traced program enters and leaves. planner.py runs it before `annotate`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autopar._compat import LazyGraphModule, without_modes
from autopar.ir.band import LONG, Band
from autopar.ir.graph import add_call, add_node, copy_graph
from autopar.ir.program import Program, renamed_outputs, same_inputs, same_outputs
from autopar.ir.sharding_rule import ATTENTION_BACKWARD, bound, shape_of, value_of
from autopar.ops.devices import rename_devices
from autopar.ops.sharded.masked_attention import BLOCK_MASK, MASKED_ATTENTION

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default

_AND = {
    aten.__and__.Tensor,
    aten.bitwise_and.Tensor,
    aten.logical_and.default,
}
_TRIANGLES = {aten.tril.default, aten.triu.default}
_NOT = {aten.logical_not.default, aten.bitwise_not.default}
_NAMES = ("eq", "ne", "le", "lt", "ge", "gt")
_COMPARE = {getattr(getattr(aten, n), kind): n for n in _NAMES for kind in ("Tensor", "Scalar")}
_SWAPPED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq", "ne": "ne"}
_OPPOSITE = {"le": "gt", "lt": "ge", "ge": "lt", "gt": "le", "eq": "ne", "ne": "eq"}
_BATCH, _QUERY, _KEY = 0, 2, 3  # the dims of a mask; 1: heads
_LARGE = 1 << 28  # bytes of one row of the batch: a mask that no rank is to hold


def masks(program: Program) -> Program:
    """Return the program with descriptions in the place of the masks that are understood; the same
    program where it has none.
    """
    nodes = program.module.graph.find_nodes(op="call_function", target=SDPA)
    if not any(_is_masked(node) for node in nodes):
        return program
    graph = copy_graph(program.module.graph)
    reader, rewritten = _Reader(), False
    for node in graph.find_nodes(op="call_function", target=SDPA):
        if _is_masked(node):
            description = reader.read(bound(node)["attn_mask"])
            rewritten = rewritten or description is not None
            if description is not None:
                _replace(graph, node, description)
    if not rewritten:
        return program
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    outputs = renamed_outputs(program.signature.outputs, graph)
    return dataclasses.replace(
        program,
        module=LazyGraphModule(program.module, graph),
        signature=dataclasses.replace(program.signature, outputs=outputs),
    )


def check(program: Program) -> None:
    """The contract: inputs and outputs match the signature, no attention has both a mask and
    `is_causal`, and a description has as many comparisons as pairs of vectors.
    """
    same_inputs(program)
    same_outputs(program)
    for node in program.module.graph.nodes:
        if node.target is SDPA:
            values = bound(node)
            both = values["attn_mask"] is not None and values["is_causal"]
            assert not both, f"{node.name} has a mask and is causal"
        elif node.target in (MASKED_ATTENTION, BLOCK_MASK):
            values = bound(node)
            counts = {len(values["queries"]), len(values["keys"]), len(values["compare"].split())}
            assert len(counts) == 1, f"{node.name} compares vectors that it does not have"


def _is_masked(node: fx.Node) -> bool:
    """Whether a node is attention with a bool mask for all heads."""
    mask = bound(node)["attn_mask"] if node.target is SDPA else None
    if not isinstance(mask, fx.Node) or value_of(mask).dtype is not torch.bool:
        return False
    shape, query = shape_of(value_of(mask)), shape_of(value_of(node))
    return len(query) == 4 and len(shape) <= 4 and shape[-3:-2] in ((), (1,))


# -- descriptions ----------------------------------------------------------------------------------
class _Vector(NamedTuple):
    """Numbers of the queries or of the keys: those of a node plus an offset, or a constant. `dims`
    are the dims of a mask that the dims of the node are.
    """

    node: fx.Node | None
    dims: tuple[int, ...]
    offset: float
    side: int | None  # _QUERY, _KEY, or None for the same number everywhere
    constant: Tensor | None  # (rows of the batch or 1, queries or keys or 1), without the offset


class _Pair(NamedTuple):
    """A condition: this comparison holds of the query's number and the key's. None: of True."""

    name: str
    query: _Vector | None
    key: _Vector | None


class _Description(NamedTuple):
    band: Band
    pairs: tuple[_Pair, ...]
    shape: tuple[int, int]  # queries and keys
    nodes: dict[_Vector | str, fx.Node]  # the vectors that are in the graph already


class _NotDescribed(Exception):
    """A mask says something that no description can."""


class _Reader:
    """Reads masks, each once, and evaluates the constants that they are made of."""

    def __init__(self) -> None:
        self.known: dict[fx.Node, _Description | None] = {}
        self.constants: dict[fx.Node, Tensor | None] = {}
        self.shape: tuple[int, ...] = ()

    def read(self, mask: fx.Node) -> _Description | None:
        """Return what a mask says, None where it is no description."""
        if mask not in self.known:
            self.shape = shape_of(value_of(mask))
            self.shape = (1,) * (4 - len(self.shape)) + self.shape
            try:
                self.known[mask] = self._description(mask)
            except _NotDescribed:
                self.known[mask] = None
        return self.known[mask]

    def _description(self, mask: fx.Node) -> _Description:
        *_, queries, keys = self.shape
        if queries == 1 or keys == 1:
            raise _NotDescribed
        band, pairs = Band(), []
        for condition in self._conditions(mask, range(4)):
            if isinstance(condition, Band):
                band = band.meet(condition)
            else:
                pairs.append(condition)
        band, pairs = _within_segments(band, list(dict.fromkeys(pairs)))
        return _Description(band.within(queries, keys), tuple(pairs), (queries, keys), {})

    # -- conditions --------------------------------------------------------------------------------
    def _conditions(self, node: fx.Node, dims: Sequence[int]) -> list[Band | _Pair]:
        """Return the conditions that a node's value is the "and" of. `dims`: the dims of the mask
        that the last dims of the node are.
        """
        dims = tuple(dims)[-len(shape_of(value_of(node))) :] if shape_of(value_of(node)) else ()
        if node.target in _AND and all(isinstance(n, fx.Node) for n in node.args):
            return [c for n in node.args for c in self._conditions(_node(n), dims)]
        inner = self._unwrapped(node, dims)
        if inner is not None:
            return self._conditions(*inner)
        if self._side(node, dims) != (_QUERY, _KEY):
            return self._of_one_side(self._vector(node, dims))
        if node.target in _COMPARE:
            return self._comparison(_COMPARE[node.target], node.args[0], node.args[1], dims)
        operand = _node(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        if node.target in _NOT and operand is not None and operand.target in _COMPARE:
            opposite = _OPPOSITE[_COMPARE[operand.target]]
            return self._comparison(opposite, operand.args[0], operand.args[1], dims)
        if node.target in _TRIANGLES and operand is not None and _is_true(operand):
            diagonal = int(bound(node)["diagonal"])
            lower = node.target is aten.tril.default
            return [Band(None, diagonal) if lower else Band(-diagonal, None)]
        raise _NotDescribed

    def _unwrapped(
        self, node: fx.Node, dims: tuple[int, ...]
    ) -> tuple[fx.Node, tuple[int, ...]] | None:
        """Return the operand of a node that only adds dims, and its dims; None for others."""
        if node.target is aten.expand.default:
            inner = _node(node.args[0])
            count = len(shape_of(value_of(inner)))
            return inner, dims[len(dims) - count :]
        if node.target is aten.unsqueeze.default:
            place = int(bound(node)["dim"]) % len(dims)
            return _node(node.args[0]), (*dims[:place], *dims[place + 1 :])
        return None

    def _side(self, node: fx.Node, dims: tuple[int, ...]) -> tuple[int, ...]:
        """Return along which of queries and keys a value varies."""
        sizes = shape_of(value_of(node))
        varies = {dim for dim, size in zip(dims, sizes, strict=True) if size > 1}
        if varies - {_BATCH, _QUERY, _KEY}:
            raise _NotDescribed
        return tuple(sorted(varies - {_BATCH}))

    def _of_one_side(self, vector: _Vector) -> list[Band | _Pair]:
        """Return the condition that a bool vector is True; none where it is known to be."""
        if vector.constant is not None and bool(vector.constant.all()):
            return []
        if vector.side is None:
            raise _NotDescribed
        pair = (vector, None) if vector.side == _QUERY else (None, vector)
        return [_Pair("eq", *pair)]

    def _comparison(
        self, name: str, left: Any, right: Any, dims: tuple[int, ...]
    ) -> list[Band | _Pair]:
        """Return what a comparison of numbers of the queries with numbers of the keys says."""
        if isinstance(left, fx.Node) and isinstance(right, int | float):
            return self._of_distance(name, left, right, dims)
        if not (isinstance(left, fx.Node) and isinstance(right, fx.Node)):
            raise _NotDescribed
        first, second = (self._vector(n, dims[len(dims) - _rank(n) :]) for n in (left, right))
        return _compared(name, first, second)

    def _of_distance(
        self, name: str, left: fx.Node, limit: float, dims: tuple[int, ...]
    ) -> list[Band | _Pair]:
        """Return what a comparison of a difference, or of its absolute value, with a number
        says.
        """
        absolute = left.target is aten.abs.default
        difference = _node(left.args[0]) if absolute else left
        if difference.target is not aten.sub.Tensor or bound(difference)["alpha"] != 1:
            raise _NotDescribed
        operands = difference.args[:2]
        if not all(isinstance(n, fx.Node) for n in operands):
            raise _NotDescribed
        first, second = (
            self._vector(_node(n), dims[len(dims) - _rank(_node(n)) :]) for n in operands
        )
        shifted = second._replace(offset=second.offset + limit)
        if not absolute:
            return _compared(name, first, shifted)
        if name not in ("le", "lt"):
            raise _NotDescribed
        other = second._replace(offset=second.offset - limit)
        return [*_compared(name, first, shifted), *_compared(_SWAPPED[name], first, other)]

    # -- vectors -----------------------------------------------------------------------------------
    def _vector(self, node: fx.Node, dims: tuple[int, ...]) -> _Vector:
        """Return the numbers that a node holds, as those of the node that they come from."""
        side = self._side(node, dims)
        if len(side) > 1:
            raise _NotDescribed
        of = side[0] if side else None
        offset = 0.0
        while True:
            inner = self._unwrapped(node, dims) or self._read_in_order(node, dims)
            if inner is not None:
                node, dims = inner
                continue
            step = _offset(node)
            if step is None:
                break
            node, offset = step[0], offset + step[1]
            dims = dims[len(dims) - _rank(node) :]
        constant = self._constant(node)
        if constant is not None:
            constant = constant.reshape(self._rows(node, dims), -1)
            if len(constant) > 1 and bool((constant == constant[:1]).all()):
                constant = constant[:1]
        return _Vector(node, dims, offset, of, constant)

    def _rows(self, node: fx.Node, dims: tuple[int, ...]) -> int:
        sizes = dict(zip(dims, shape_of(value_of(node)), strict=True))
        return sizes.get(_BATCH, 1)

    def _read_in_order(
        self, node: fx.Node, dims: tuple[int, ...]
    ) -> tuple[fx.Node, tuple[int, ...]] | None:
        """Return x and its dims where a node is x[i, j] or x[j] with indices 0, 1, 2, … that run
        over one dim each.
        """
        if node.target is not aten.index.Tensor:
            return None
        source, indices = _node(node.args[0]), list(bound(node)["indices"])
        shape = shape_of(value_of(source))
        if len(indices) != len(shape) or any(i is None for i in indices):
            return None
        dims_read: list[int] = []
        for index, size in zip(indices, shape, strict=True):
            value = self._constant(index)
            own = dims[len(dims) - _rank(index) :]
            varies = [d for d, n in zip(own, shape_of(value_of(index)), strict=True) if n > 1]
            if value is None or value.numel() != size or len(varies) > 1:
                return None
            if not torch.equal(value.flatten(), torch.arange(size, dtype=value.dtype)):
                return None
            free = [d for d in (_BATCH, *dims[::-1]) if d not in dims_read]
            dims_read.append(varies[0] if varies else free[0])
        ascending = dims_read == sorted(dims_read) and len(set(dims_read)) == len(dims_read)
        return (source, tuple(dims_read)) if ascending else None

    def _constant(self, node: fx.Node) -> Tensor | None:
        """Return the value of a node that depends on no input, where it is no larger than vectors
        of the batch are; None for others.
        """
        if node not in self.constants:
            self.constants[node] = self._evaluated(node)
        return self.constants[node]

    def _evaluated(self, node: fx.Node) -> Tensor | None:
        value = node.meta.get("val")
        limit = self.shape[_BATCH] * (self.shape[_QUERY] + self.shape[_KEY])
        known = isinstance(value, Tensor) and value.numel() <= limit
        if node.op != "call_function" or not known or node.target in (SDPA, MASKED_ATTENTION):
            return None
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return None
        operands = {n: self._constant(n) for n in node.all_input_nodes}
        if any(operand is None for operand in operands.values()):
            return None
        cpu = torch.device("cpu")
        args, kwargs = (
            fx.map_arg(rename_devices(x, lambda _: cpu), operands.__getitem__)
            for x in (node.args, node.kwargs)
        )
        function: Any = node.target
        with without_modes(), torch.no_grad():
            result = function(*args, **kwargs)
        return result if isinstance(result, Tensor) else None


def _is_true(node: fx.Node) -> bool:
    """Whether a node is True, or a number other than 0, everywhere."""
    return node.target is aten.full.default and bool(node.args[1])


def _rank(node: fx.Node) -> int:
    return len(shape_of(value_of(node)))


def _node(value: Any) -> fx.Node:
    assert isinstance(value, fx.Node), value
    return value


def _offset(node: fx.Node) -> tuple[fx.Node, float] | None:
    """Return x and a number where a node is x plus or minus the number, of integers; else None."""
    if node.target not in (aten.add.Tensor, aten.sub.Tensor) or value_of(node).is_floating_point():
        return None
    values = bound(node)
    number = values["other"]
    if not isinstance(values["self"], fx.Node) or isinstance(number, fx.Node):
        return None
    if not isinstance(number, int) or not isinstance(values["alpha"], int):
        return None
    step = number * values["alpha"]
    return values["self"], -step if node.target is aten.sub.Tensor else step


def _compared(name: str, left: _Vector, right: _Vector) -> list[Band | _Pair]:
    """Return the conditions of a comparison: none where it always holds, a band where positions are
    compared, else a pair.
    """
    if left.side == _KEY or right.side == _QUERY:
        left, right, name = right, left, _SWAPPED[name]
    if left.side == _KEY or right.side == _QUERY:
        raise _NotDescribed  # both are numbers of the queries, or of the keys
    if left.constant is not None and right.constant is not None:
        if _holds_everywhere(name, left.constant + left.offset, right.constant + right.offset):
            return []
        starts = _start_of_count(left), _start_of_count(right)
        if starts[0] is not None and starts[1] is not None and name != "ne":
            return [_band(name, starts[0], starts[1])]
    return [_Pair(name, left, right)]


def _holds_everywhere(name: str, left: Tensor, right: Tensor) -> bool:
    """Whether a comparison holds of every two of these numbers."""
    low, high = (left.min(), left.max()), (right.min(), right.max())
    match name:
        case "le" | "lt":
            return bool(low[1] <= high[0] if name == "le" else low[1] < high[0])
        case "ge" | "gt":
            return bool(low[0] >= high[1] if name == "ge" else low[0] > high[1])
        case "eq":
            return bool(low[0] == low[1] == high[0] == high[1])
    return bool(low[1] < high[0] or low[0] > high[1])


def _start_of_count(vector: _Vector) -> int | None:
    """Return s of a vector s, s + 1, s + 2, …; None of others."""
    values = vector.constant
    if vector.side is None or values is None or len(values) > 1 or values.is_floating_point():
        return None
    if values.dtype is torch.bool or vector.offset != int(vector.offset):
        return None
    first = values[0, :1]
    rising = torch.arange(values.shape[1], dtype=values.dtype)
    return int(first) + int(vector.offset) if torch.equal(values[0], rising + first) else None


def _band(name: str, query: int, key: int) -> Band:
    """Return the band of a comparison of i + `query` with j + `key`."""
    bands = {
        "ge": Band(None, query - key),
        "gt": Band(None, query - key - 1),
        "le": Band(key - query, None),
        "lt": Band(key - query - 1, None),
    }
    return bands["ge"].meet(bands["le"]) if name == "eq" else bands[name]


def _within_segments(band: Band, pairs: list[_Pair]) -> tuple[Band, list[_Pair]]:
    """Return the band and pairs where comparisons of positions within a segment have become bands.

    transformers numbers packed documents by where positions do not go up by one:
    cumsum(diff(positions) != 1). Within one of these, positions differ as indices do.
    """
    segmented = {
        positions
        for pair in pairs
        if pair.name == "eq" and pair.query and pair.key and _same_numbers(pair.query, pair.key)
        if (positions := _numbered_by(pair.query.node)) is not None
    }
    left: list[_Pair] = []
    for pair in pairs:
        query, key = pair.query, pair.key
        if (
            query is not None
            and key is not None
            and query.node in segmented
            and query.node is key.node
            and pair.name not in ("ne",)
            and query.offset == int(query.offset)
            and key.offset == int(key.offset)
        ):
            band = band.meet(_band(pair.name, int(query.offset), int(key.offset)))
        else:
            left.append(pair)
    return band, left


def _same_numbers(query: _Vector, key: _Vector) -> bool:
    return query.node is key.node and query.offset == key.offset


def _numbered_by(segments: fx.Node | None) -> fx.Node | None:
    """Return the positions of which `segments` is cumsum(diff(positions) != 1), with a first
    difference of 1; None where it is something else.
    """
    if segments is None or segments.target is not aten.cumsum.default:
        return None
    breaks, rank = _node(segments.args[0]), _rank(segments)
    if int(bound(segments)["dim"]) % rank != rank - 1:
        return None
    if breaks.target is not aten.ne.Scalar or breaks.args[1] != 1:
        return None
    steps = _node(breaks.args[0])
    if steps.target is not aten.diff.default:
        return None
    values = bound(steps)
    before, positions = values["prepend"], _node(values["self"])
    plain = values["n"] == 1 and int(values["dim"]) % rank == rank - 1 and values["append"] is None
    if not plain or not isinstance(before, fx.Node):
        return None
    first = _offset(before)
    if first is None or first[1] != -1 or first[0].target is not aten.slice.Tensor:
        return None
    cut = bound(first[0])
    is_first = (cut["dim"] % rank, cut["start"] or 0, cut["end"]) == (rank - 1, 0, 1)
    return positions if cut["self"] is positions and is_first else None


# -- writing ---------------------------------------------------------------------------------------
def _replace(graph: fx.Graph, node: fx.Node, description: _Description) -> None:
    """Put attention by a description in the place of a node."""
    values, (band, pairs, (rows, columns), _) = bound(node), description
    operands = (values["query"], values["key"], values["value"])
    causal = not pairs and band.is_causal
    last = node.prev
    with graph.inserting_before(node):
        device = value_of(node).device
        write = _Writer(graph, description, device)
        vectors = (
            [write.vector(p.query, rows) for p in pairs],
            [write.vector(p.key, columns) for p in pairs],
            " ".join(p.name for p in pairs),
        )
        if causal or (not pairs and band == Band()):
            node.args = (*operands, None, values["dropout_p"], causal)
        elif values["dropout_p"] or not _pays_in_blocks(band, rows, columns):
            own_device = torch.device(device.type)
            arguments: tuple[Any, ...] = (*vectors, *band, rows, columns, own_device, [], [])
            key = f"mask {arguments}"
            if key not in description.nodes:
                description.nodes[key] = add_call(graph, BLOCK_MASK, arguments)
            node.args = (*operands, description.nodes[key], values["dropout_p"], False)
        else:
            arguments = (*operands, *vectors, *band, values["scale"], [], [])
            new = add_node(graph, MASKED_ATTENTION, arguments, node.meta["val"])
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
    keep = {k: v for k, v in node.kwargs.items() if k in ("scale", "enable_gqa")}
    node.kwargs = keep
    for new in _nodes_between(last, node):
        new.meta = {**{k: v for k, v in node.meta.items() if k != "val"}, **new.meta}


def _pays_in_blocks(band: Band, queries: int, keys: int) -> bool:
    """Whether attention in blocks is faster than with a mask, or the mask is too large."""
    if queries * keys < LONG**2:
        return False
    in_blocks = band.share(queries, keys) * (2 + ATTENTION_BACKWARD)
    return in_blocks < 1 + ATTENTION_BACKWARD or queries * keys >= _LARGE


def _nodes_between(last: fx.Node, node: fx.Node) -> list[fx.Node]:
    """Return the nodes after one and before another."""
    nodes, cursor = [], last.next
    while cursor is not node:
        nodes.append(cursor)
        cursor = cursor.next
    return nodes


class _Writer:
    """Adds the vectors of a description to a graph, each once."""

    def __init__(self, graph: fx.Graph, description: _Description, device: torch.device) -> None:
        self.graph, self.nodes, self.device = graph, description.nodes, device

    def vector(self, vector: _Vector | None, length: int) -> fx.Node:
        """Return a node of a vector, (batch or 1, length). None: True everywhere."""
        key: Any = f"true {length}" if vector is None else (vector._replace(constant=None), length)
        if key not in self.nodes:
            self.nodes[key] = self._vector_node(vector, length)
        return self.nodes[key]

    def _vector_node(self, vector: _Vector | None, length: int) -> fx.Node:
        if vector is None:
            options = {"dtype": torch.bool, "device": torch.device(self.device.type)}
            return add_call(self.graph, aten.full.default, ([1, length], True), options)
        node = _node(vector.node)
        rows = dict(zip(vector.dims, shape_of(value_of(node)), strict=True)).get(_BATCH, 1)
        own = value_of(node).numel() // rows
        if shape_of(value_of(node)) != (rows, own):
            node = add_call(self.graph, aten.reshape.default, (node, [rows, own]))
        if own != length:
            node = add_call(self.graph, aten.expand.default, (node, [rows, length]))
        if vector.offset:
            step = int(vector.offset) if vector.offset == int(vector.offset) else vector.offset
            node = add_call(self.graph, aten.add.Tensor, (node, step))
        return node
