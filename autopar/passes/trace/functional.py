"""Writes an exported graph with operators that neither write into an operand nor may return it.

    y = aten.reshape(x, [4, -1])      ->    y = aten.view(x, [4, -1])
    z = aten.to(y, torch.float32)     ->    y in the place of z, where y is of float32
    aten.add_(y, 1)                   ->    w = aten.add(y, 1), in the place of y from here on

torch's `run_decompositions({})` does that by tracing the whole graph again, which takes longer than
the export did. But each call stands for itself: what it becomes depends on its operator, its
constants and the shapes, strides, dtypes and devices of its operands alone. So every distinct call
that changes is decomposed once, all of them in one small program, and its copies take what came of
it. A write into what the graph has made is followed through all views of it, as torch's
functionalization does (torch/csrc FunctionalStorageImpl: a base, and views that are taken again).
Nodes get the names that torch would have given them.

export.py calls `written_functionally`, and torch's decomposition where that returns None.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx.experimental.proxy_tensor import make_fx

from autopar._compat import FakeTensor, OpOverload, has_kernel, name_of_calls, pytree
from autopar.ir.graph import ancestors

aten = torch.ops.aten
_CHANGED = (aten.dropout.default, aten.lift_fresh_copy.default, aten.lift_fresh.default,
    aten.native_batch_norm.default)  # fmt: skip
# Views, copies and dropout: functorch takes them apart as export does, in a tenth of the time.
_SIMPLE = {aten.atleast_1d.default, aten.atleast_2d.default, aten.atleast_3d.default,
    aten.broadcast_to.default, aten.chunk.default, aten.contiguous.default, aten.dropout.default,
    aten.expand_as.default, aten.flatten.using_ints, aten.mT.default, aten.moveaxis.int,
    aten.moveaxis.intlist, aten.movedim.int, aten.movedim.intlist, aten.narrow.default,
    aten.numpy_T.default, aten.positive.default, aten.ravel.default, aten.reshape.default,
    aten.reshape_as.default, aten.split.sizes, aten.swapaxes.default, aten.swapdims.default,
    aten.tensor_split.indices, aten.tensor_split.sections, aten.to.device, aten.to.dtype,
    aten.to.dtype_layout, aten.to.other, aten.unflatten.int, aten.view_as.default}  # fmt: skip
_CONSTANTS = (int, float, complex, str, bool, type(None), torch.dtype, torch.device, torch.layout,
    torch.memory_format)  # fmt: skip
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _NotAlone(Exception):
    """A call that does not stand for itself: it writes into what the graph was given, or in a way
    that is not followed here, or a size depends on the data.
    """


class _Decomposed(NamedTuple):
    """What a call becomes: nodes in order, the placeholders of its tensor operands, and the nodes
    that its results are.
    """

    nodes: list[fx.Node]
    operands: list[fx.Node]
    results: Any


def written_functionally(exported: ExportedProgram) -> fx.Graph | None:
    """Return the graph that `exported.run_decompositions({})` has; None for a graph with regions,
    custom operators, writes into what it was given, or sizes that depend on the data.
    """
    kinds = {entry.kind for entry in exported.graph_signature.output_specs}
    if kinds != {OutputKind.USER_OUTPUT}:
        return None
    try:
        distinct: dict[Any, fx.Node] = {}
        keys: dict[fx.Node, Any] = {}
        for node in exported.graph.nodes:
            if _is_decomposed(node):
                keys[node] = _key(node)
                distinct.setdefault(keys[node], node)
        decomposed = dict(zip(distinct, _decompose(list(distinct.values())), strict=True))
        calls = {node: decomposed[key] for node, key in keys.items()}
        graph = _Writer(exported.graph, calls).graph
    except _NotAlone:
        return None
    placeholders = exported.graph.find_nodes(op="placeholder")
    names = {node.name for node in placeholders}
    if any(node.name in names for node in graph.nodes):
        return None  # torch gives such a node a name of its own
    for old, new in zip(placeholders, graph.find_nodes(op="placeholder"), strict=True):
        new.name = new.target = old.name
    graph.eliminate_dead_code()
    return graph


def _is_decomposed(node: fx.Node) -> bool:
    """Whether decomposition puts something else in the place of this call, whatever was written
    before: of a composite operator that may return its operand or a view of it. Raises _NotAlone.
    """
    if node.op in ("placeholder", "output") or node.target is operator.getitem:
        return False
    if node.op == "get_attr" and not node.users:  # of a region that was inlined
        return False
    op = node.target
    if not isinstance(op, OpOverload) or op.namespace not in ("aten", "autopar"):
        raise _NotAlone
    if op._schema.is_mutable:
        _without_write(op)
        return False
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
    """Return the operator of a call; of dropout what torch's decomposition takes it apart by."""
    target: Any = node.target
    return target.decompose if target is aten.dropout.default else target


def _decompose(calls: list[fx.Node]) -> list[_Decomposed]:
    """Return what torch's decomposition makes of each call. Raises _NotAlone."""
    simple = [node for node in calls if node.target in _SIMPLE]
    others = [node for node in calls if node.target not in _SIMPLE]
    decomposed = {**_taken_apart(simple, _functional), **_taken_apart(others, _exported)}
    return [decomposed[node] for node in calls]


def _taken_apart(
    calls: list[fx.Node], trace: Callable[[_Calls, tuple[torch.Tensor, ...]], fx.Graph]
) -> dict[fx.Node, _Decomposed]:
    """Return what each of these calls becomes in the graph that `trace` makes of all."""
    if not calls:
        return {}
    values = [source.meta["val"] for node in calls for source in node.all_input_nodes]
    graph = trace(_Calls(calls), tuple(map(_empty_like, values)))
    placeholders = iter(graph.find_nodes(op="placeholder"))
    results = iter(pytree.tree_leaves(graph.output_node().args[0]))
    decomposed = {}
    for node in calls:
        operands = [next(placeholders) for _ in node.all_input_nodes]
        own = pytree.tree_map(lambda _: next(results), node.meta["val"])
        nodes = _nodes_between(graph, operands, pytree.tree_leaves(own))
        decomposed[node] = _Decomposed(nodes, operands, own)
    return decomposed


def _functional(calls: _Calls, tensors: tuple[torch.Tensor, ...]) -> fx.Graph:
    """Return the graph of composite operators, taken apart, that write into nothing."""
    with torch.no_grad():
        return make_fx(torch.func.functionalize(lambda *own: calls(*own)))(*tensors).graph


def _exported(calls: _Calls, tensors: tuple[torch.Tensor, ...]) -> fx.Graph:
    """Return the graph that torch's export and decomposition make, which takes ten times as long.
    Raises _NotAlone.
    """
    program = torch.export.export(calls, tensors, strict=False).run_decompositions({})
    if any(e.kind is not OutputKind.USER_OUTPUT for e in program.graph_signature.output_specs):
        raise _NotAlone
    return program.graph


def _empty_like(value: FakeTensor) -> torch.Tensor:
    with value.fake_mode:
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )


def _nodes_between(graph: fx.Graph, operands: list[fx.Node], results: list[Any]) -> list[fx.Node]:
    """Return the nodes that lead from these operands to these results, in order."""
    reached = ancestors(node for node in results if isinstance(node, fx.Node)) - set(operands)
    return [node for node in graph.nodes if node in reached]


# -- writes ----------------------------------------------------------------------------------------
def _without_write(op: OpOverload) -> OpOverload:
    """Return the operator that computes what `op` writes into its first operand. Raises _NotAlone
    where it has none, draws numbers, or changes a shape in place.
    """
    name, overload = op._schema.name.removeprefix("aten::"), op._overloadname
    written = [a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments]
    functional = getattr(getattr(aten, name.removesuffix("_"), None), overload, None)
    if (
        op.namespace != "aten"
        or not name.endswith("_")
        or functional is None
        or written != [True, *[False] * (len(written) - 1)]
        or {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view} & {*op.tags}
        or any(has_kernel(each, "CompositeImplicitAutograd") for each in (op, functional))
    ):
        raise _NotAlone
    assert isinstance(functional, OpOverload)
    return functional


@dataclass(eq=False)
class _Storage:
    """The memory of a tensor and its views: the node that is its latest content, how often it was
    written, and whether it is an input of the graph.
    """

    base: fx.Node
    writes: int
    is_input: bool


class _View(NamedTuple):
    """A view that was taken of a tensor: the call without its first operand, its node's meta, and
    the place among its results where it has several.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: dict[str, Any]
    place: int | None = None


@dataclass(eq=False)
class _Tensor:
    """A tensor of the old graph: its node in the new one after so many writes into its storage, and
    the views that lead to it from the storage's base.
    """

    node: fx.Node
    storage: _Storage
    views: tuple[_View, ...] = ()
    writes: int = 0


_SCATTERS = {aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default}  # fmt: skip


class _Writer:
    """Writes a graph anew, in the order and with the names of a trace of it: of a call with several
    results, each is taken at once. Raises _NotAlone.
    """

    def __init__(self, old: fx.Graph, decomposed: dict[fx.Node, _Decomposed]) -> None:
        self.graph = fx.Graph()
        values: dict[fx.Node, Any] = {}  # a tensor or another value, or one of each result
        for number, node in enumerate(old.find_nodes(op="placeholder")):
            placeholder = self.graph.placeholder(f"arg{number}_1")
            placeholder.meta = dict(node.meta)
            values[node] = _Tensor(placeholder, _Storage(placeholder, 0, is_input=True))
        for node in old.nodes:
            if node in decomposed:
                values[node] = self._take(node, decomposed[node], values)
            elif node.op == "call_function":
                values[node] = self._copy(node, values, node.meta)
            elif node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], lambda n: self._last_written(values[n])))
                self.graph.output_node().meta = dict(node.meta)

    def _take(self, node: fx.Node, known: _Decomposed, values: dict[fx.Node, Any]) -> Any:
        """Write what a call becomes; return its results."""
        operands = zip(known.operands, node.all_input_nodes, strict=True)
        own = {placeholder: values[source] for placeholder, source in operands}
        for inner in known.nodes:
            own[inner] = self._copy(inner, own, {**node.meta, "val": inner.meta["val"]})
        return fx.map_arg(known.results, own.__getitem__)

    def _copy(self, node: fx.Node, values: dict[fx.Node, Any], meta: dict[str, Any]) -> Any:
        """Write one call; return its result, or each of several."""
        if node.target is operator.getitem:
            source: Any = node.args[0]
            return values[source][node.args[1]]
        operands = {source: self._last_written(values[source]) for source in node.all_input_nodes}
        args, kwargs = fx.map_arg((node.args, node.kwargs), operands.__getitem__)
        op: Any = node.target
        if op._schema.is_mutable:
            written = values[node.all_input_nodes[0]]
            self._write(written, _without_write(op), args, kwargs, meta)
            return written
        results = self._results(op, args, kwargs, meta)
        if not op._schema.arguments or op._schema.arguments[0].alias_info is None:
            tensors = [_Tensor(result, _Storage(result, 0, is_input=False)) for result in results]
        else:
            source = values[node.all_input_nodes[0]]
            view = _View(op, args[1:], kwargs, meta)
            tensors = [
                _Tensor(result, source.storage, (*source.views, view._replace(place=place)))
                for place, result in enumerate(results)
            ]
        return tensors if isinstance(meta.get("val"), list | tuple) else tensors[0]

    def _results(self, op: Any, args: Any, kwargs: Any, meta: dict[str, Any]) -> list[fx.Node]:
        """Write one call that writes into nothing; return the nodes of all its results."""
        call, values = self._call(op, args, kwargs, meta), meta.get("val")
        if not isinstance(values, list | tuple):
            return [call]
        return [
            self._call(operator.getitem, (call, place), {}, {**meta, "val": value})
            for place, value in enumerate(values)
        ]

    def _last_written(self, tensor: _Tensor) -> fx.Node:
        """Return the node of a tensor after all writes into its storage."""
        if tensor.writes < tensor.storage.writes:
            tensor.node, tensor.writes = tensor.storage.base, tensor.storage.writes
            for view in tensor.views:
                tensor.node = self._view(view, tensor.node)
        return tensor.node

    def _write(
        self, tensor: _Tensor, op: OpOverload, args: Any, kwargs: Any, meta: dict[str, Any]
    ) -> None:
        """Write the call of `op` that makes the new content of a tensor, and the new base."""
        storage = tensor.storage
        if storage.is_input:
            raise _NotAlone
        old, new = meta["val"], _computed(op, args, kwargs)
        same_strides = bool(tensor.views) or new.stride() == old.stride()
        if new.dtype != old.dtype or new.shape != old.shape or not same_strides:
            raise _NotAlone
        content = self._call(op, args, kwargs, {**meta, "val": new})
        bases = [storage.base] if tensor.views else []
        for view in tensor.views[:-1]:
            bases.append(self._view(view, bases[-1]))
        for view, base in zip(reversed(tensor.views), reversed(bases), strict=True):
            if view.target not in _SCATTERS:
                raise _NotAlone
            scattered = {**meta, "val": base.meta["val"]}
            content = self._call(
                _SCATTERS[view.target], (base, content, *view.args), view.kwargs, scattered
            )
        storage.base, storage.writes = content, storage.writes + 1
        self._last_written(tensor)

    def _view(self, view: _View, of: fx.Node) -> fx.Node:
        """Take a view of another content of the same base."""
        results = self._results(view.target, (of, *view.args), view.kwargs, view.meta)
        return results[view.place or 0]

    def _call(self, target: Any, args: Any, kwargs: Any, meta: dict[str, Any]) -> fx.Node:
        name = name_of_calls(self.graph, target)
        node = self.graph.create_node("call_function", target, args, kwargs, name)
        node.meta = dict(meta)
        return node


def _computed(op: OpOverload, args: Any, kwargs: Any) -> torch.Tensor:
    """Return what an operator computes of these nodes, as a fake tensor."""
    args, kwargs = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
    result = op(*args, **kwargs)
    assert isinstance(result, FakeTensor)
    return result
