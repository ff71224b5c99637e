"""Numbers that change from call to call: inputs of a graph, where forward computes with them alone.

    for i in range(50):
        par(x, beta=i / 50)    # planned twice: for the first value, and for every other one

A float or int among the arguments, or a plain attribute of a module, is part of a trace. Where two
calls differ in it, the model is traced with its value, and with a tensor without dims in its place.
The second graph must be the first one but for arithmetic on such tensors, and that arithmetic, done
by Python on the value, must give the very numbers that stand in the first graph. Then no branch,
shape or conversion hangs on the number, and the first graph gets it as an input.
`isinstance(beta, float)` and `math.exp(beta)` fail this: every value has a graph of its own.
runtime/training/call_graphs.py calls these.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from autopar._compat import pytree
from autopar.errors import TraceError
from autopar.ir.graph import copy_graph
from autopar.ir.program import Input, Program
from autopar.passes.trace.signature import as_planned_call
from autopar.planner.tracing import Call, trace_model
from autopar.runtime.training.module_state import ModuleState
from autopar.runtime.training.step_graph import StepGraph

# The dtypes that tensors stand in with for a trace: next to others they make no result wider, as
# numbers make none.
DTYPES: Mapping[type, torch.dtype] = {float: torch.bfloat16, int: torch.int8}


class Number(NamedTuple):
    """A number that changed: its name in messages, its type, and where it is: the position among
    the leaves of the call, or the module and the attribute.
    """

    name: str
    kind: type
    position: int | None = None
    path: tuple[str, str] | None = None


def changed_numbers(
    graph: StepGraph, state: ModuleState, call: Call, module: nn.Module
) -> tuple[list[Number], Call]:
    """Return the numbers in which a call differs from those that a graph is for, and the call with
    its arguments as the graph has them; no number where it differs in something else, too.
    """
    signature = graph.signature
    leaves = as_planned_call(signature.forward, signature.in_tree, *call)
    if leaves is None or module.training != signature.training:
        return [], call
    call = Call(*pytree.tree_unflatten(leaves, signature.in_tree))
    paths = pytree.tree_flatten_with_path(tuple(call))[0]
    numbers = []
    for position, planned in signature.fixed:
        value = leaves[position]
        if type(value) is type(planned) and value == planned:
            continue
        if type(value) is not type(planned) or type(value) not in DTYPES:
            return [], call
        name = pytree.keystr(paths[position][0][1:]).strip("[']")
        numbers.append(Number(f"the argument {name}", type(value), position))
    for (where, attribute), now, before in state.changed():
        if type(now) is not type(before) or type(now) not in DTYPES:
            return [], call
        name = f"{where}.{attribute}" if where else attribute
        numbers.append(Number(name, type(now), path=(where, attribute)))
    return numbers, call


@contextmanager
def with_tensors(model: nn.Module, call: Call, numbers: list[Number]) -> Iterator[Call]:
    """Put tensors in the place of numbers, in the model for the time of the context; yield the call
    with those in it.
    """
    leaves, structure = pytree.tree_flatten(tuple(call))
    modules = dict(model.named_modules(remove_duplicate=False))
    before = []
    for number in numbers:
        if number.position is not None:
            leaves[number.position] = torch.zeros((), dtype=DTYPES[number.kind])
        elif number.path is not None:
            attributes, name = modules[number.path[0]].__dict__, number.path[1]
            before.append((attributes, name, attributes[name]))
            attributes[name] = torch.zeros((), dtype=DTYPES[number.kind])
    try:
        yield Call(*pytree.tree_unflatten(leaves, structure))
    finally:
        for attributes, name, value in before:
            attributes[name] = value


def traced_with_inputs(model: nn.Module, call: Call, numbers: list[Number]) -> Program | None:
    """Return the model's trace with these numbers as inputs, None where they are more than operands
    of arithmetic. Raises TraceError as a trace of the call does.
    """
    special = trace_model(model, call)
    try:
        with with_tensors(model, call, numbers) as tensor_call:
            general = trace_model(model, tensor_call)
    except TraceError:
        return None
    leaves = pytree.tree_leaves(tuple(call))
    modules = dict(model.named_modules(remove_duplicate=False))
    inputs: dict[str, tuple[Input, Any]] = {}
    for entry in general.signature.inputs:
        for number in numbers:
            if number.position is not None and entry.position == number.position:
                inputs[entry.node] = entry, leaves[number.position]
            elif number.path is not None and entry.kind == "constant":
                where, attribute = number.path
                if entry.target == (f"{where}.{attribute}" if where else attribute):
                    inputs[entry.node] = entry, modules[where].__dict__[attribute]
    return _with_inputs(special, general, inputs)


def _with_inputs(
    special: Program, general: Program, inputs: Mapping[str, tuple[Input, Any]]
) -> Program | None:
    """Return `special`, traced with numbers, with the inputs that `general` has in their place;
    None where they are not one graph but for arithmetic.
    """
    computed = _arithmetic(general.module.graph, {n: value for n, (_, value) in inputs.items()})
    if computed is None:
        return None
    operands = _operands(special.module.graph, general.module.graph, computed)
    if operands is None:
        return None
    graph = copy_graph(special.module.graph)
    by_name = {node.name: node for node in graph.nodes}
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    entries, tensors, copies = [], dict(special.tensors), dict[fx.Node, fx.Node]()
    for node in computed:
        with graph.inserting_after(last):
            if node.op == "placeholder":
                entry, value = inputs[node.name]
                last = copies[node] = graph.placeholder(node.name)
                last.meta["val"] = node.meta["val"].new_empty((), dtype=torch.float64)
                entries.append(replace(entry, node=last.name))
                if entry.kind == "constant":
                    tensors[entry.target] = torch.tensor(value, dtype=torch.float64)
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
                target: Any = node.target
                last = copies[node] = graph.call_function(target, args, kwargs)
                last.meta["val"] = node.meta["val"].new_empty((), dtype=torch.float64)
    for name, number in operands:
        _compute_with(graph, by_name[name], copies[number])
    positions = {entry.position for entry in entries}
    signature = special.signature
    signature = replace(
        signature,
        inputs=(*signature.inputs, *entries),
        fixed=tuple(fixed for fixed in signature.fixed if fixed[0] not in positions),
        reads=signature.reads | general.signature.reads,
    )
    graph.lint()
    return replace(
        special,
        module=fx.GraphModule(special.module, graph),
        signature=signature,
        tensors=tensors,
    )


def _arithmetic(graph: fx.Graph, values: Mapping[str, Any]) -> dict[fx.Node, Any] | None:
    """Return the nodes that compute with the numbers alone, in order, each with its value as Python
    computes it; None where one is no arithmetic, or is returned.
    """
    computed: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            if node.name in values:
                computed[node] = values[node.name]
            continue
        inputs = node.all_input_nodes
        if node.op == "output":
            if any(n in computed for n in inputs):
                return None
        elif inputs and all(n in computed for n in inputs):
            compute = _PYTHON.get(node.target)
            if compute is None or node.kwargs:
                return None
            try:
                computed[node] = compute(*(computed.get(x, x) for x in node.args))
            except ArithmeticError:
                return None
    return computed


aten = torch.ops.aten
_PYTHON: dict[Any, Any] = {
    aten.add.Tensor: operator.add,
    aten.sub.Tensor: operator.sub,
    aten.mul.Tensor: operator.mul,
    aten.div.Tensor: operator.truediv,
    aten.neg.default: operator.neg,
    aten.rsub.Scalar: lambda a, b: b - a,
    aten.pow.Tensor_Scalar: operator.pow,
    aten.reciprocal.default: lambda a: 1 / a,
}
_OPERATIONS = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
_LOW = (torch.float16, torch.bfloat16)

Operand = tuple[str, fx.Node]  # a node of the special graph, a number


def _operands(
    special: fx.Graph, general: fx.Graph, computed: Mapping[fx.Node, Any]
) -> list[Operand] | None:
    """Return where the special graph has values of the general graph's numbers; None where the
    graphs are not one but for that.
    """
    nodes = [node for node in general.nodes if node not in computed]
    others = list(special.nodes)
    if len(nodes) != len(others):
        return None
    match: dict[fx.Node, fx.Node] = {}
    operands: list[Operand] = []

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, fx.Node):
            return match.get(a) is b
        if isinstance(a, list | tuple):
            return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
        return type(a) is type(b) and bool(a == b)

    for node, other in zip(nodes, others, strict=True):
        match[node] = other
        if node.op != other.op:
            return None
        if {*node.kwargs} != {*other.kwargs} or not all(
            same(value, other.kwargs[name]) for name, value in node.kwargs.items()
        ):
            return None
        if node.op == "call_function":
            args, target = node.args, node.target
            number_first = len(args) == 2 and args[0] in computed
            if number_first and target in (aten.add.Tensor, aten.mul.Tensor) and not node.kwargs:
                args = args[1], args[0]
            elif number_first and target is aten.sub.Tensor and not node.kwargs:
                args, target = (args[1], args[0]), aten.rsub.Scalar
            if target is not other.target or len(args) != len(other.args):
                return None
            for place, (a, b) in enumerate(zip(args, other.args, strict=True)):
                if isinstance(a, fx.Node) and a in computed:
                    allowed = place == 1 and target in (*_OPERATIONS, aten.rsub.Scalar)
                    if not allowed or type(b) not in DTYPES or b != computed[a]:
                        return None
                    operands.append((other.name, a))
                elif not same(a, b):
                    return None
            if not _same_values(node.meta["val"], other.meta["val"]):
                return None
        elif node.op == "output" and not same(node.args, other.args):
            return None
    return operands


def _compute_with(graph: fx.Graph, node: fx.Node, number: fx.Node) -> None:
    """Let a node compute with a number's tensor as it does with the number: in its own dtype, which
    for narrow ones is float32.
    """
    value = node.meta["val"]
    wide = torch.float32 if value.dtype in _LOW else value.dtype
    x: Any = node.args[0]
    with graph.inserting_before(node):

        def cast(source: fx.Node, dtype: torch.dtype) -> fx.Node:
            if source.meta["val"].dtype == dtype:
                return source
            moved = graph.call_function(aten._to_copy.default, (source,), {"dtype": dtype})
            moved.meta = {**source.meta, "val": source.meta["val"].to(dtype)}
            return moved

        operands = (cast(x, wide) if value.dtype in _LOW else x, cast(number, wide))
        target: Any = node.target
        if target is aten.rsub.Scalar:
            target, operands = aten.sub.Tensor, (operands[1], operands[0])
        result = graph.call_function(target, operands, node.kwargs)
        result.meta = {**node.meta, "val": value.to(wide)}
        result = cast(result, value.dtype)
    node.replace_all_uses_with(result)
    name = node.name
    graph.erase_node(node)
    result.name = name


def _same_values(value: Any, other: Any) -> bool:
    """Whether two results have the same shapes and dtypes."""
    ours, theirs = pytree.tree_leaves(value), pytree.tree_leaves(other)
    return len(ours) == len(theirs) and all(
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and (a.shape, a.dtype) == (b.shape, b.dtype)
        for a, b in zip(ours, theirs, strict=True)
    )
