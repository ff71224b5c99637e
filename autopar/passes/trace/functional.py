"""Writes an exported graph with operators that neither write into an operand nor may return it.

    y = aten.reshape(x, [4, -1])      ->    y = aten.view(x, [4, -1])
    z = aten.to(y, torch.float32)     ->    y in the place of z, where y is of float32

torch's `run_decompositions({})` does that by tracing the whole graph again, which takes longer than
the export did. Most exported graphs write into nothing, and then each call stands for itself: what
it becomes depends on its operator, its constants and the shapes, strides, dtypes and devices of its
operands alone. So every distinct call that changes is decomposed once, all of them in one small
program, and its copies take what came of it. Nodes get the names that torch would have given them.

export.py calls `written_functionally`, and torch's decomposition where that returns None.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from autopar._compat import FakeTensor, OpOverload, has_kernel, name_of_calls, pytree
from autopar.ir.graph import ancestors

aten = torch.ops.aten
_CHANGED = (aten.dropout.default, aten.lift_fresh_copy.default, aten.lift_fresh.default,
    aten.native_batch_norm.default)  # fmt: skip
_CONSTANTS = (int, float, complex, str, bool, type(None), torch.dtype, torch.device, torch.layout,
    torch.memory_format)  # fmt: skip
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _NotAlone(Exception):
    """A call that does not stand for itself: it writes, or a size depends on the data."""


class _Decomposed(NamedTuple):
    """What a call becomes: nodes in order, the placeholders of its tensor operands, and the nodes
    that its results are.
    """

    nodes: list[fx.Node]
    operands: list[fx.Node]
    results: Any


def written_functionally(exported: ExportedProgram) -> fx.Graph | None:
    """Return the graph that `exported.run_decompositions({})` has; None for a graph with writes,
    regions, custom operators, or sizes that depend on the data.
    """
    kinds = {entry.kind for entry in exported.graph_signature.output_specs}
    if kinds != {OutputKind.USER_OUTPUT}:
        return None
    try:
        distinct: dict[Any, fx.Node] = {}
        keys: dict[fx.Node, Any] = {}
        for node in exported.graph.nodes:
            if _writes(node):
                keys[node] = _key(node)
                distinct.setdefault(keys[node], node)
        decomposed = dict(zip(distinct, _decompose(list(distinct.values())), strict=True))
    except _NotAlone:
        return None
    graph = _Writer(exported.graph, {node: decomposed[key] for node, key in keys.items()}).graph
    names = {node.name for node in exported.graph.find_nodes(op="placeholder")}
    if any(node.name in names for node in graph.nodes):
        return None  # torch gives such a node a name of its own
    for old, new in _placeholders(exported.graph, graph):
        new.name = new.target = old.name
    graph.eliminate_dead_code()
    return graph


def _placeholders(old: fx.Graph, new: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    pairs = old.find_nodes(op="placeholder"), new.find_nodes(op="placeholder")
    return list(zip(*pairs, strict=True))


def _writes(node: fx.Node) -> bool:
    """Whether decomposition puts something else in the place of this call: of a composite operator
    that may return its operand or a view of it. Raises _NotAlone.
    """
    if node.op in ("placeholder", "output") or node.target is operator.getitem:
        return False
    if node.op == "get_attr" and not node.users:  # of a region that was inlined
        return False
    op = node.target
    if not isinstance(op, OpOverload) or op.namespace != "aten" or op._schema.is_mutable:
        raise _NotAlone
    leaves = pytree.tree_leaves(node.meta.get("val"))
    sizes = [size for x in leaves for size in (x.shape if isinstance(x, torch.Tensor) else (x,))]
    if any(isinstance(size, _SYMBOLS) for size in sizes):
        raise _NotAlone
    if op in _CHANGED or torch.Tag.maybe_aliasing_or_mutating in op.tags:
        return True
    aliases = any(argument.alias_info for argument in op._schema.arguments)
    return aliases and has_kernel(op, "CompositeImplicitAutograd")


def _key(node: fx.Node) -> Any:
    """Return what two calls have in common that become the same. Raises _NotAlone."""
    places = {source: place for place, source in enumerate(node.all_input_nodes)}

    def of(value: Any) -> Any:
        if isinstance(value, fx.Node):
            x = value.meta.get("val")
            if not isinstance(x, FakeTensor) or x.layout != torch.strided:
                raise _NotAlone
            if x.is_conj() or x.is_neg():
                raise _NotAlone
            return "tensor", places[value], tuple(x.shape), x.stride(), x.dtype, x.device
        if isinstance(value, list | tuple):
            return type(value).__name__, *map(of, value)
        if not isinstance(value, _CONSTANTS):
            raise _NotAlone
        return type(value), repr(value)  # 1 is not True, and 0.0 not -0.0

    named = ((name, of(value)) for name, value in node.kwargs.items())
    return node.target, of(node.args), *named


class _Calls(nn.Module):
    """Calls operators, each on tensors of its own, and returns all results."""

    def __init__(self, calls: list[fx.Node]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        values, results = iter(tensors), []
        for node in self.calls:
            operands = {source: next(values) for source in node.all_input_nodes}
            args, kwargs = fx.map_arg((node.args, node.kwargs), operands.__getitem__)
            results.append(_target(node)(*args, **kwargs))
        return results


def _target(node: fx.Node) -> Callable[..., Any]:
    assert callable(node.target)
    return node.target


def _decompose(calls: list[fx.Node]) -> list[_Decomposed]:
    """Return what torch's decomposition makes of each call. Raises _NotAlone."""
    if not calls:
        return []
    values = [source.meta["val"] for node in calls for source in node.all_input_nodes]
    program = torch.export.export(_Calls(calls), tuple(map(_like, values)), strict=False)
    program = program.run_decompositions({})
    signature = program.graph_signature
    if any(entry.kind is not OutputKind.USER_OUTPUT for entry in signature.output_specs):
        raise _NotAlone
    placeholders = iter(program.graph.find_nodes(op="placeholder"))
    results = iter(program.graph.output_node().args[0])
    decomposed = []
    for node in calls:
        operands = [next(placeholders) for _ in node.all_input_nodes]
        own = pytree.tree_map(lambda _: next(results), node.meta["val"])
        nodes = _between(program.graph, operands, pytree.tree_leaves(own))
        decomposed.append(_Decomposed(nodes, operands, own))
    return decomposed


def _like(value: FakeTensor) -> torch.Tensor:
    with value.fake_mode:
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )


def _between(graph: fx.Graph, operands: list[fx.Node], results: list[Any]) -> list[fx.Node]:
    """Return the nodes that lead from these operands to these results, in order."""
    reached = ancestors(node for node in results if isinstance(node, fx.Node)) - set(operands)
    return [node for node in graph.nodes if node in reached]


class _Writer:
    """Writes a graph anew, in the order and with the names of a trace of it: of a call with several
    results, each is taken at once.
    """

    def __init__(self, old: fx.Graph, decomposed: dict[fx.Node, _Decomposed]) -> None:
        self.graph = fx.Graph()
        values: dict[fx.Node, Any] = {}  # a node, or one of each result
        for number, node in enumerate(old.find_nodes(op="placeholder")):
            values[node] = self.graph.placeholder(f"arg{number}_1")
            values[node].meta = dict(node.meta)
        for node in old.nodes:
            if node in decomposed:
                values[node] = self._take(node, decomposed[node], values)
            elif node.op == "call_function":
                values[node] = self._copy(node, values, node.meta)
            elif node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], values.__getitem__))
                self.graph.output_node().meta = dict(node.meta)

    def _take(self, node: fx.Node, known: _Decomposed, values: dict[fx.Node, Any]) -> Any:
        """Write what a call becomes; return its results."""
        operands = zip(known.operands, node.all_input_nodes, strict=True)
        own = {placeholder: values[source] for placeholder, source in operands}
        for inner in known.nodes:
            own[inner] = self._copy(inner, own, {**node.meta, "val": inner.meta["val"]})
        return fx.map_arg(known.results, own.__getitem__)

    def _copy(self, node: fx.Node, values: dict[fx.Node, Any], meta: dict[str, Any]) -> Any:
        """Write one call; return its node, or those of its results."""
        if node.target is operator.getitem:
            source: Any = node.args[0]
            return values[source][node.args[1]]
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        copy = self._call(_target(node), args, kwargs, meta)
        if not isinstance(meta.get("val"), list | tuple):
            return copy
        return [
            self._call(operator.getitem, (copy, place), {}, {**meta, "val": value})
            for place, value in enumerate(meta["val"])
        ]

    def _call(self, target: Any, args: Any, kwargs: Any, meta: dict[str, Any]) -> fx.Node:
        name = name_of_calls(self.graph, target)
        node = self.graph.create_node("call_function", target, args, kwargs, name)
        node.meta = dict(meta)
        return node
