"""Makes the casts explicit that autocast would make inside a composite operator.

Export keeps a composite operator (einsum, cross_entropy_loss) as one node and runs it without
autocast, so casts that autocast would make between the operators of which it consists are lost: the
cross-entropy of bfloat16 logits would be summed in bfloat16 where a GPU sums in float32.

    cross_entropy_loss(logits, targets)                       # on a GPU, under autocast
    cross_entropy_loss(logits.to(float32), targets)           # in the graph

An exported program enters before it is decomposed and is changed in place: the operands of such a
node are cast where that gives the same operations on the same dtypes; else the operators of which
it consists take its place, with their casts. `export.capture` calls `cast_in_composites`, under the
autocast around the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar._compat import OpOverload, TorchDispatchMode, has_kernel, pytree, taken_apart
from autopar.ir.containers import tensors_in
from autopar.ir.graph import called_graphs
from autopar.ir.program import Autocast, under_autocast

aten = torch.ops.aten
_CASTS = (aten._to_copy.default, aten.clone.default, aten.detach.default)
# On a CPU autocast computes these in float32. On a GPU it rounds what they compute on the way, the
# logarithms of probabilities, to bfloat16, and sums in float32: float32 throughout is as good, and
# the operator stays one, with its sharding rule.
_IN_FLOAT32 = (aten.cross_entropy_loss.default,)

_Operations = list[tuple[Any, ...]]  # the operators that ran, each with the dtypes of its operands
_Switches = Sequence[tuple[str, torch.dtype | None]]  # of autocast by device type; None is off


def cast_in_composites(module: fx.GraphModule) -> None:
    """Make the casts explicit in every composite operator of an exported graph and of the regions
    that it calls.
    """
    for node in list(module.graph.nodes):
        blocks = called_graphs(module, node)
        if blocks:
            with ExitStack() as stack:
                _enter_autocast(stack, node)
                for block in blocks:
                    cast_in_composites(block)
        elif isinstance(node.target, OpOverload):
            active = _autocast_within(node, node.target)
            if active:
                _cast_in_node(node, node.target, active)
    module.recompile()


def _enter_autocast(stack: ExitStack, node: fx.Node) -> None:
    """Enter the autocast of a region of the model: wrap_with_autocast(device type, dtype, enabled,
    cache enabled, region, operands).
    """
    if str(node.target) == "wrap_with_autocast":
        kind, dtype, enabled = cast(tuple[str, torch.dtype, bool], node.args[:3])
        stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))


def _autocast_within(node: fx.Node, op: OpOverload) -> Autocast:
    """Return the autocast that is on for the operands of a composite operator that autocast itself
    does not know; else nothing.
    """
    if not has_kernel(op, "CompositeImplicitAutograd"):
        return ()
    active = under_autocast(sorted({x.device.type for x in tensors_in(_operands(node))}))
    known = (f"Autocast{kind.upper()}" for kind, _ in active)
    return () if any(has_kernel(op, key) for key in known) else active


def _cast_in_node(node: fx.Node, op: OpOverload, active: Autocast) -> None:
    """Cast the operands of this node where autocast casts inside its operator, or replace it by
    what the operator does.
    """
    operands = _operands(node)

    def operations(dtype: torch.dtype | None, autocast: _Switches) -> _Operations:
        own = pytree.tree_map(lambda x: _as_dtype(x, dtype), operands)
        return _operations(op, own, autocast)

    if op in _IN_FLOAT32:
        _insert_casts(node, torch.float32)
        return
    wanted = operations(None, active)
    for dtype in (None, torch.float32, *(dtype for _, dtype in active)):
        try:
            casts = operations(dtype, tuple((kind, None) for kind, _ in active))
        except Exception:  # operands of several dtypes, which another cast can mend
            continue
        if casts == wanted:
            if dtype is not None:
                _insert_casts(node, dtype)
            return
    _take_apart(node, op, active)


def _operations(op: OpOverload, operands: Any, autocast: _Switches) -> _Operations:
    """Return what the composite operator runs under this autocast."""
    args, kwargs = operands
    with torch.no_grad(), _switched(autocast), _Recorder() as recorder:
        taken_apart(op)(*args, **kwargs)
    return recorder.operations


@contextmanager
def _switched(autocast: _Switches) -> Iterator[None]:
    with ExitStack() as stack:
        for kind, dtype in autocast:
            enabled = dtype is not None
            stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
        yield


class _Recorder(TorchDispatchMode):
    """Records the operators that compute, with the dtypes of their operands: no casts, no views."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: _Operations = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _CASTS and not func.is_view and func.namespace != "prim":
            dtypes = [x.dtype for x in tensors_in((args, kwargs))]
            self.operations.append((func, *dtypes))
        return func(*args, **(kwargs or {}))


def _insert_casts(node: fx.Node, dtype: torch.dtype) -> None:
    """Cast every operand of floats to this dtype, each by itself, as the operators inside would: so
    the gradients of one that is given twice are added in its own dtype.
    """

    def converted(source: fx.Node) -> fx.Node:
        value = source.meta.get("val")
        if not isinstance(value, torch.Tensor) or _as_dtype(value, dtype) is value:
            return source
        with node.graph.inserting_before(node):
            operand = node.graph.call_function(aten.to.dtype, (source, dtype))
        operand.meta = {**node.meta, "val": _as_dtype(value, dtype)}
        return operand

    node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), converted)


def _take_apart(node: fx.Node, op: OpOverload, active: Autocast) -> None:
    """Replace a composite operator by what it does under this autocast."""
    sources = [source for source in node.all_input_nodes if "val" in source.meta]

    def run(*values: Any) -> Any:
        by_node = dict(zip(sources, values, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: by_node[source])
        return taken_apart(op)(*args, **kwargs)

    with torch.no_grad(), _switched(active):
        traced = make_fx(run)(*(source.meta["val"] for source in sources))
    inputs = traced.graph.find_nodes(op="placeholder")
    copies: dict[fx.Node, Any] = dict(zip(inputs, sources, strict=True))
    with node.graph.inserting_before(node):
        result = node.graph.graph_copy(traced.graph, copies)
    for copy in set(copies.values()) - set(sources):
        copy.meta = {**node.meta, "val": copy.meta["val"]}
    node.replace_all_uses_with(result)  # type: ignore[arg-type]
    node.graph.erase_node(node)


def _operands(node: fx.Node) -> Any:
    operands: Any = fx.map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
    return operands


def _as_dtype(value: Any, dtype: torch.dtype | None) -> Any:
    """Return a tensor of floats with this dtype, and anything else as it is. float64 stays, as
    autocast leaves it.
    """
    narrow = (torch.float16, torch.bfloat16, torch.float32)
    if dtype is None or not isinstance(value, torch.Tensor) or value.dtype not in narrow:
        return value
    return value if value.dtype == dtype else torch.empty_like(value, dtype=dtype)
