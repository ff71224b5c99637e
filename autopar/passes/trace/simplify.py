"""Rewrites a freshly exported graph to fewer operators with the same values and gradients.

Casts, copies and expansions that change nothing go, views become reshapes (shards lie otherwise in
memory than the tensors that export saw), and tensors of one number become `full`. REWRITES lists
the rewrite of each operator. `trace` calls `simplify` on the graph that export.py made; export.py
calls `inline_no_grad`, and `secretly_written` to find composite operators that write into an
operand without saying so in their signatures.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import torch
from torch import fx

from autopar._compat import OpOverload, has_kernel, pytree, strict_fake_mode, version_of
from autopar.ir.containers import tensors_in
from autopar.ir.graph import is_inexact
from autopar.ir.sharding_rule import bound

aten = torch.ops.aten
GRAD_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled


def _args(node: Any) -> tuple[Any, ...]:
    """Return a node's arguments, typed Any: the type that fx gives them allows no indexing."""
    return node.args


def inline_no_grad(module: fx.GraphModule) -> None:
    """Inline the regions without gradients of an exported module, whose results are detached.

    Decomposition would inline them too, but forget which lines of the model made them.
    """
    for node in module.graph.find_nodes(op="call_function", target=GRAD_REGION):
        _inline(module, node)
    module.recompile()


def _inline(module: fx.GraphModule, node: fx.Node) -> None:
    """Put the body of a region in the place of its call, unless the body holds modules itself."""
    body: Any = module.get_submodule(_args(node)[1].target)
    inline_no_grad(body)
    if any(inner.op == "get_attr" and inner.users for inner in body.graph.nodes):
        return
    inputs = body.graph.find_nodes(op="placeholder")
    with module.graph.inserting_before(node):
        results: Any = module.graph.graph_copy(body.graph, dict(zip(inputs, _args(node)[2:])))
    for item in list(node.users):
        item.replace_all_uses_with(results[_args(item)[1]])
        module.graph.erase_node(item)
    module.graph.erase_node(node)


def detach(node: fx.Node) -> fx.Node:
    """Return a new node at the graph's insertion point: `node` without its gradient."""
    cut = node.graph.call_function(aten.detach.default, (node,))
    cut.meta = dict(node.meta)
    return cut


def simplify(graph: fx.Graph, leaves: Collection[fx.Node]) -> None:
    """Apply REWRITES to every node, in place, and remove what is not used.

    `leaves` are the placeholders that may carry a gradient.
    """
    nodes = list(graph.nodes)
    _keep_memory_order(graph)
    for node in nodes:
        rewrite = REWRITES.get(node.target)
        if rewrite is None:
            continue
        with graph.inserting_before(node):
            simplified = rewrite(graph, node)
        if simplified is not None and simplified is not node:
            node.replace_all_uses_with(simplified)
            graph.erase_node(node)
    _drop_idle_detach(graph, leaves)
    # Random operators count as impure, but the graph owes nobody a draw whose result is not used.
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))


def _keep_memory_order(graph: fx.Graph) -> None:
    """Give operators that read memory by its strides a contiguous operand: shards have other
    strides, and copies will be dropped.

    Where the operand of `as_strided` was not contiguous, its strides are part of the model: `trace`
    refuses that.
    """
    for target in (aten.view_as_complex.default, aten.view.dtype, aten.as_strided.default):
        for node in graph.find_nodes(op="call_function", target=target):
            source = _args(node)[0]
            if target is aten.as_strided.default and not source.meta["val"].is_contiguous():
                continue
            with graph.inserting_before(node):
                contiguous = graph.call_function(aten.contiguous.default, (source,))
            contiguous.meta = {**source.meta, "val": source.meta["val"].contiguous()}
            node.args = (contiguous, *_args(node)[1:])


def _drop_idle_detach(graph: fx.Graph, leaves: Collection[fx.Node]) -> None:
    """Remove a detach of a value that carries no gradient, as of rotary tables and masks."""
    carries = {node for node in leaves if _is_float(node)}
    for node in list(graph.nodes):
        if node.op != "call_function" or not any(n in carries for n in node.all_input_nodes):
            if node.target is aten.detach.default:
                node.replace_all_uses_with(_args(node)[0])
                graph.erase_node(node)
        elif node.target is not aten.detach.default and _is_float(node):
            carries.add(node)


def _is_float(node: fx.Node) -> bool:
    """Whether a node gives a tensor that may carry a gradient."""
    return any(is_inexact(value.dtype) for value in tensors_in(node.meta.get("val")))


# The rewrites. Each returns the node to put in the place of `node`, or `node` itself.


def _operand(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Return the first operand: the operator is the identity in a functional graph."""
    return _args(node)[0]


def _remove(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a check that has no result."""
    assert not node.users, node.format_node()
    graph.erase_node(node)


def _reshape(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Turn a view into a reshape: export chose view by strides that a shard may not have."""
    node.target = aten.reshape.default
    return _same(graph, node)


def _same(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Return the operand where shape, dtype and device stay the same."""
    before, after = _args(node)[0].meta["val"], node.meta["val"]
    return _args(node)[0] if _alike(before, after) else node


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors agree in shape, dtype and device."""
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _type_as(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Turn `type_as` into a cast: it needs the dtype, not the tensor that has it."""
    return _like(graph, _args(node)[0], node)


def _copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Turn `copy(old, new)` into `new` with the shape and dtype of `old`."""
    return _like(graph, _args(node)[1], node)


def _like(graph: fx.Graph, value: fx.Node, node: fx.Node) -> fx.Node:
    """Return `value`, cast and expanded to the dtype, device and shape of `node`."""
    before, after = value.meta["val"], node.meta["val"]
    if (before.dtype, before.device) != (after.dtype, after.device):
        value = graph.call_function(aten._to_copy.default, (value,), _placement(before, after))
        value.meta = {**node.meta, "val": before.to(after.dtype)}
    if before.shape != after.shape:
        value = graph.call_function(aten.expand.default, (value, list(after.shape)))
        value.meta = dict(node.meta)
    return value


def _placement(before: torch.Tensor, after: torch.Tensor) -> dict[str, Any]:
    """Return the options of the cast from one tensor's dtype and device to another's."""
    moved = {} if before.device == after.device else {"device": after.device}
    return {"dtype": after.dtype, **moved}


def _full(value: float | bool | None = None) -> Callable[[fx.Graph, fx.Node], fx.Node]:
    """Return a rewrite to `full`, a tensor of one number that depends on no other tensor. `value`
    None stands for the node's last argument.
    """

    def rewrite(graph: fx.Graph, node: fx.Node) -> fx.Node:
        result = node.meta["val"]
        number = value if value is not None else _args(node)[-1]
        if isinstance(number, fx.Node):
            return node
        options = {"dtype": result.dtype, "device": result.device, "pin_memory": False}
        full = graph.call_function(aten.full.default, (list(result.shape), number), options)
        full.meta = dict(node.meta)
        return full

    return rewrite


def _fill(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Turn `fill(old, value)` into `value` with the shape and dtype of `old`."""
    return _like(graph, _args(node)[1], node)


def _item(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Simplify the result that this `getitem` takes, of broadcast_tensors and native_dropout."""
    source, index = _args(node)
    if source.target is aten.broadcast_tensors.default:
        return _like(graph, _args(source)[0][index], node)
    if source.target is aten.native_dropout.default and index == 0:
        return _dropout(graph, source, node)
    return node


def _cat(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Drop the empty tensors of a concatenation, such as a rotary embedding of every feature has
    for the features that it does not rotate.
    """
    tensors, *dim = _args(node)
    nonempty = [x for x in tensors if x.meta["val"].numel()] or list(tensors)[:1]
    if len(nonempty) == 1 and _alike(nonempty[0].meta["val"], node.meta["val"]):
        return nonempty[0]
    if len(nonempty) < len(tensors) and nonempty[0].meta["val"].dim() == node.meta["val"].dim():
        node.args = (nonempty, *dim)
    return node


def _dropout(graph: fx.Graph, node: fx.Node, result: fx.Node) -> fx.Node:
    """Turn native_dropout, which gives (value, mask), into dropout where nothing uses the mask, and
    into its operand where it drops nothing.
    """
    value, rate, training = _args(node)
    if any(_args(user)[1] == 1 and user.users for user in node.users):
        return result
    if training is False or rate == 0:
        return value
    dropout = graph.call_function(aten.dropout.default, (value, rate, True))
    dropout.meta = dict(result.meta)
    return dropout


def _place_complex(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Turn a write into a slice of complex numbers, which torch does not differentiate as
    slice_scatter and select_scatter, into `index_copy`, which it does.
    """
    result, arguments = node.meta["val"], bound(node)
    if not result.is_complex():
        return node
    value, source, dim = arguments["self"], arguments["src"], arguments["dim"]
    rows = range(result.shape[dim])
    if node.target is aten.select_scatter.default:
        rows = rows[arguments["index"] :][:1]
        added = graph.call_function(aten.unsqueeze.default, (source, dim))
        added.meta = {**node.meta, "val": source.meta["val"].unsqueeze(dim)}
        source = added
    else:
        rows = rows[arguments["start"] : arguments["end"] : arguments["step"]]
    options = {"device": result.device, "pin_memory": False}
    index = graph.call_function(aten.arange.start_step, (rows.start, rows.stop, rows.step), options)
    index.meta = {**node.meta, "val": result.new_empty(len(rows), dtype=torch.int64)}
    placed = graph.call_function(aten.index_copy.default, (value, dim, index, source))
    placed.meta = dict(node.meta)
    return placed


_SPARSE = ("sparse", "sparse_grad")


def _dense_gradient(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Make an embedding or a gather give its gradient as a dense tensor, which collectives can sum:
    `sparse=True` changes the form of the gradient, not its value.
    """
    op: Any = node.target
    names = [argument.name for argument in op._schema.arguments]
    node.args = tuple(
        False if name in _SPARSE else value for name, value in zip(names, _args(node), strict=False)
    )
    node.kwargs = {name: value for name, value in node.kwargs.items() if name not in _SPARSE}
    return node


def _twice_transposed(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Return what is transposed twice."""
    source = _args(node)[0]
    return _args(source)[0] if source.target is aten.t.default else node


REWRITES: dict[Any, Callable[[fx.Graph, fx.Node], fx.Node | None]] = {
    aten._assert_tensor_metadata.default: _remove,
    aten._assert_scalar.default: _remove,
    aten._assert_async.default: _remove,
    aten._assert_async.msg: _remove,
    aten.sym_constrain_range.default: _remove,
    aten.sym_constrain_range_for_size.default: _remove,
    aten.alias.default: _operand,
    aten.clone.default: _operand,
    aten.lift_fresh_copy.default: _operand,
    aten.contiguous.default: _operand,
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.reshape.default: _same,
    aten.expand.default: _same,
    aten.cat.default: _cat,
    aten.slice_scatter.default: _place_complex,
    aten.select_scatter.default: _place_complex,
    aten.slice.Tensor: _same,
    aten._to_copy.default: _same,
    aten.type_as.default: _type_as,
    aten.copy.default: _copy,
    aten.fill.Tensor: _fill,
    aten.fill.Scalar: _full(),
    aten.full_like.default: _full(),
    aten.new_full.default: _full(),
    aten.zeros.default: _full(0),
    aten.zeros_like.default: _full(0),
    aten.new_zeros.default: _full(0),
    aten.new_empty.default: _full(0),  # what is read of it is written first
    aten.empty_like.default: _full(0),
    aten.ones.default: _full(1),
    aten.ones_like.default: _full(1),
    aten.new_ones.default: _full(1),
    aten.embedding.default: _dense_gradient,
    aten.embedding_bag.padding_idx: _dense_gradient,
    aten.gather.default: _dense_gradient,
    aten.t.default: _twice_transposed,
    operator.getitem: _item,
}


def secretly_written(graph: fx.Graph) -> dict[OpOverload, fx.Node]:
    """Return the composite operators of a graph that change an operand though their signatures do
    not say so, each with a node that calls it.
    """
    writers: dict[OpOverload, fx.Node] = {}
    for node in graph.nodes:
        op = node.target
        if not isinstance(op, OpOverload) or op._schema.is_mutable or not _may_be_composite(op):
            continue
        signature = (op, _flags(node))
        if signature not in _WRITES:
            writes = _writes(op, node)
            if writes is None:
                continue
            _WRITES[signature] = writes
        if _WRITES[signature]:
            writers.setdefault(op, node)
    return writers


_WRITES: dict[tuple[OpOverload, str], bool] = {}  # of composite operators, whatever the sizes are


def _flags(node: fx.Node) -> str:
    """Return a call's arguments in words, but for tensors and numbers: which there are."""

    def kind(value: Any) -> Any:
        return type(value).__name__ if type(value) in (int, float) else value

    return str(pytree.tree_map(kind, fx.map_arg((node.args, node.kwargs), lambda n: "tensor")))


@cache
def _may_be_composite(op: OpOverload) -> bool:
    """Whether there may be something to decompose an operator into."""
    return has_kernel(op, "CompositeImplicitAutograd") or bool(op.py_kernels)


def _writes(op: OpOverload, node: fx.Node) -> bool | None:
    """Whether an operator writes into an operand: fake tensors count in-place changes. None where
    it does not run.
    """
    operands: dict[fx.Node, Any] = {}

    def fake(value: torch.Tensor) -> torch.Tensor:
        return torch.empty(value.shape, dtype=value.dtype)

    def stand_in(source: fx.Node) -> Any:
        operands[source] = pytree.tree_map_only(torch.Tensor, fake, source.meta.get("val"))
        return operands[source]

    with strict_fake_mode(), torch.no_grad():
        try:
            args, kwargs = fx.map_arg((node.args, node.kwargs), stand_in)
            op.decompose(*args, **kwargs)  # does nothing where there is nothing to decompose
        except Exception:  # a shape that depends on the data: refused later on, by its line
            return None
    return any(version_of(x) > 0 for x in tensors_in(operands))
