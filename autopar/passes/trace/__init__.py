"""The first pass: a model and example inputs become one forward graph of ATen operators.

The graph is that of `torch.export`: functional, with composite operators (linear, layer_norm,
scaled dot product attention, cross entropy) left intact, then simplified. What a graph would
silently lose is refused first: the model is called twice to find side effects.

attribute_reads.py records what of its modules a forward reads, export.py calls torch.export and
explains its failures, functional.py makes the exported graph functional, derivatives.py records
forwards that take derivatives, simplify.py removes ops that compute nothing, signature.py binds
calls to the planned arguments, original.py compares a trace with the model, and side_effects.py and
model_state.py find what a call of the model does besides computing its result. reuse.py and
resize.py spare the export of a model that was exported before, at this batch size or another.
planner/planner.py and runtime/calibrate_on_ranks.py call `trace`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    InputSpec,
    OutputKind,
    TensorArgument,
)

from autopar._compat import LazyGraphModule, pytree
from autopar.ir.program import (
    Input,
    Output,
    Program,
    Signature,
    renamed_outputs,
    same_inputs,
    same_outputs,
    under_autocast,
)
from autopar.ops.devices import take_numbers_off
from autopar.passes.trace.attribute_reads import AttributeReads
from autopar.passes.trace.derivatives import DerivativeCalls
from autopar.passes.trace.export import (
    Captured,
    capture,
    data_advice,
    exported_anew,
    exported_with_derivatives,
    place,
    refusal,
)
from autopar.passes.trace.original import refuse_difference
from autopar.passes.trace.resize import ExportedOnce
from autopar.passes.trace.reuse import Record, captured_before, keep, traced_before
from autopar.passes.trace.side_effects import refuse_side_effects
from autopar.passes.trace.signature import check_call, signature_of
from autopar.passes.trace.simplify import detach, simplify

KINDS: dict[InputKind, Literal["parameter", "buffer", "constant"]] = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}
GENERATOR_ADVICE = (
    "Leave generator= out: every layout then draws the same numbers, which torch.manual_seed "
    "starts. Or draw outside of the model and pass the numbers as an input."
)
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def trace(
    model: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Program:
    """Capture `model(*args, **kwargs)` as a Program. Neither the model nor the inputs are changed.

    Only shapes, dtypes and devices matter, no value is read: parameters and inputs may be real, on
    the meta device, or fake. A tensor on the meta device is taken to be where the others are, or on
    the CPU. Every input that is no tensor becomes part of the trace, and so do `model.training` and
    the autocast around this call.

    Raises InputError if these are no arguments of its forward, TraceError if the model cannot be
    one graph: a branch or a shape that depends on the values of a tensor, a parameter or an input
    that is changed in place, calls that differ from one another (`side_effects`), an error of its
    own.

    >>> program = trace(nn.Linear(4, 2), (torch.ones(3, 4),))
    >>> [node.name for node in program.module.graph.nodes]
    ['p_weight', 'p_bias', 'input_1', 'linear', 'output']
    """
    args, kwargs = tuple(args), dict(kwargs or {})
    check_call(model, args, kwargs)
    known = traced_before(model, args, kwargs)
    if known is not None:
        return known
    record, reads, derivatives = Record(model), AttributeReads(model), DerivativeCalls()
    earlier = captured_before(model, args, kwargs, record, reads)
    if earlier is None:
        record, reads = Record(model), AttributeReads(model)
        written = refuse_side_effects(model, args, kwargs, (record, reads, derivatives))
        export = exported_with_derivatives if derivatives.taken else exported_anew
        capture_of_call = capture(model, args, kwargs, export)
        once = ExportedOnce(capture_of_call.exported, capture_of_call.inputs, written)
    else:
        capture_of_call, once = earlier
    exported, originals = capture_of_call.captured, capture_of_call.originals
    graph = exported.graph
    _give_lasting_names(graph)
    results = _read_outputs(exported)
    _refuse_lost_writes(model, once.written, {o.target for o in results if o.kind == "mutation"})
    nodes, fixed, tensors = _read_inputs(model, exported, originals, args, kwargs)
    leaves = {node for node, entry in nodes.items() if entry.trainable or entry.kind == "user"}
    with _symbols_refused(model, graph):
        simplify(graph, leaves)
        take_numbers_off(graph)
    _refuse_subgraphs(model, graph)
    _refuse_symbols(model, graph)
    _refuse_strides(model, graph)
    graph.lint()
    signature = Signature(
        inputs=tuple(nodes.values()),
        outputs=renamed_outputs(results, graph),
        in_tree=pytree.tree_structure((args, kwargs)),
        out_tree=exported.out_tree,
        fixed=fixed,
        training=model.training,
        forward=signature_of(model),
        autocast=under_autocast(_device_types(graph)),
        reads=frozenset(reads.attributes),
    )
    program = Program(LazyGraphModule(exported.graph_module, graph), signature, tensors)
    if derivatives.taken:
        refuse_difference(model, program, (args, kwargs))
    keep(model, args, kwargs, record, program, None if derivatives.taken else once)
    return program


def _refuse_lost_writes(model: nn.Module, written: set[str], remaining: set[str]) -> None:
    """Refuse a write into a buffer by an op whose result nothing uses. Export drops such an op, and
    with it a write that its signature does not mention, as in ops of normalisation.
    """
    buffers = dict(model.named_buffers(remove_duplicate=False))
    ids = {id(buffers[name]) for name in remaining if name in buffers}
    lost = sorted(name for name in written if id(buffers.get(name)) not in ids)
    if lost:
        reason = f"forward writes into the buffer {lost[0]} by an op whose result nothing uses"
        advice = "Return or use what that module computes, or leave the module out."
        raise refusal(model, reason, "", advice)


# What feeds the graph and what it returns.


def _give_lasting_names(graph: fx.Graph) -> None:
    """Give placeholders names that every copy of the graph keeps: fx renames one that Python has
    taken, as `input`.
    """
    copy = fx.Graph()
    for node in graph.find_nodes(op="placeholder"):
        node.name = copy.placeholder(node.name).name


def _read_inputs(
    model: nn.Module,
    exported: Captured,
    originals: dict[int, torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[dict[fx.Node, Input], tuple[tuple[int, Any], ...], dict[str, torch.Tensor]]:
    """Return the Input of every placeholder that stays, the arguments that are no tensors, and the
    tensors that the model holds. Other placeholders are erased.
    """
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    pairs = list(zip(placeholders, exported.graph_signature.input_specs, strict=True))
    leaves = pytree.tree_flatten_with_path((args, kwargs))[0]
    user = [(node, entry) for node, entry in pairs if entry.kind is InputKind.USER_INPUT]
    entries, fixed = _user_inputs(user, leaves)
    other_pairs = [(node, entry) for node, entry in pairs if entry.kind is not InputKind.USER_INPUT]
    values = _tensors_of(model, exported, originals)
    tensors: dict[str, torch.Tensor] = {}
    entries |= _inputs_of(model, other_pairs, values, tensors)
    for node in placeholders:
        if node not in entries:
            exported.graph.erase_node(node)
    return {node: entries[node] for node in placeholders if node in entries}, fixed, tensors


def _user_inputs(
    pairs: list[tuple[fx.Node, InputSpec]], leaves: list[tuple[pytree.KeyPath, Any]]
) -> tuple[dict[fx.Node, Input], tuple[tuple[int, Any], ...]]:
    """Return the Inputs of the tensors that the user passes, and the (position, value) of other
    arguments. Export keeps a placeholder for each leaf, in order.
    """
    entries, fixed = {}, []
    for position, ((node, entry), (path, value)) in enumerate(zip(pairs, leaves, strict=True)):
        if isinstance(entry.arg, TensorArgument):
            needs = value.requires_grad
            entries[node] = Input(
                "user", node.name, _path(path), trainable=needs, position=position
            )
        else:
            fixed.append((position, value))
    return entries, tuple(fixed)


def _device_types(graph: fx.Graph) -> set[str]:
    """Return the device types of all tensors that the graph is fed with."""
    values = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
    return {value.device.type for value in values if isinstance(value, torch.Tensor)}


def _path(path: pytree.KeyPath) -> str:
    """Return the path of a leaf of (args, kwargs) as "args[0]" or "kwargs['labels']"."""
    root = "args" if path[0] == pytree.SequenceKey(0) else "kwargs"
    return root + pytree.keystr(path[1:])


def _tensors_of(
    model: nn.Module, exported: Captured, originals: dict[int, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return every tensor that the model holds or that export found in its code, by every name."""
    values: dict[str, torch.Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    for name, constant in exported.constants.items():
        if name not in values and isinstance(constant, torch.Tensor):
            values[name] = originals.get(id(constant), constant)
    return values


def _inputs_of(
    model: nn.Module,
    pairs: list[tuple[fx.Node, InputSpec]],
    values: dict[str, torch.Tensor],
    tensors: dict[str, torch.Tensor],
) -> dict[fx.Node, Input]:
    """Return one Input for each tensor, and fill `tensors`. Tied weights are merged into one."""
    names: dict[int, list[str]] = {}
    for name, value in values.items():
        names.setdefault(id(value), []).append(name)
    first_node: dict[int, fx.Node] = {}
    entries: dict[fx.Node, Input] = {}
    for node, entry in pairs:
        if _is_generator(node):
            reason = "forward draws from a torch.Generator of its own"
            raise refusal(model, reason, place(next(iter(node.users), node)), GENERATOR_ADVICE)
        if entry.kind not in KINDS or entry.target not in values:
            reason = f"{entry.target!r} is a {entry.kind.name.lower()}, not a tensor"
            raise refusal(model, reason, "", "Turn it into a tensor or a Python number.")
        value = values[entry.target]
        if id(value) in first_node:
            node.replace_all_uses_with(first_node[id(value)])
            continue
        aliases = tuple(names[id(value)])
        first_node[id(value)] = node
        entries[node] = Input(
            KINDS[entry.kind], node.name, aliases[0], aliases, value.requires_grad,
            persistent=entry.persistent is not False,
        )  # fmt: skip
        tensors[aliases[0]] = value
    return entries


def _is_generator(node: fx.Node) -> bool:
    """Whether a placeholder stands for the generator of random numbers that its users draw from."""
    return bool(node.users) and all(user.kwargs.get("generator") is node for user in node.users)


def _read_outputs(exported: Captured) -> list[Output]:
    """Return the graph's outputs, in order. The output node is changed to return tensors only,
    flat.
    """
    (output,) = (node for node in exported.graph.nodes if node.op == "output")
    results, values = [], []
    for entry, value in zip(exported.graph_signature.output_specs, output.args[0], strict=True):
        mutation = entry.kind is OutputKind.BUFFER_MUTATION
        kind: Literal["mutation", "user"] = "mutation" if mutation else "user"
        if isinstance(entry.arg, ConstantArgument):
            results.append(Output(kind, None, constant=entry.arg.value))
        else:
            results.append(Output(kind, "", target=entry.target or ""))
            values.append(_cut(value) if mutation else value)
    output.args = (tuple(values),)
    return results


def _cut(value: fx.Node) -> fx.Node:
    """Detach a buffer's new value: the next step must not reach into this one's backward."""
    with value.graph.inserting_after(value):
        return detach(value)


def _refuse_subgraphs(model: nn.Module, graph: fx.Graph) -> None:
    """Refuse operators that take a function of the model as an operand, such as `flex_attention`
    and `torch.cond`: export makes a graph of that function, which no sharding rule describes.
    """
    for node in graph.find_nodes(op="get_attr"):
        for user in node.users:
            reason = f"{user.target} takes a function as an operand"
            raise refusal(
                model,
                reason,
                place(user),
                "Write it with operators of tensors: torch.where in the place of torch.cond, "
                "attn_implementation='sdpa' in that of flex_attention.",
            )


@contextmanager
def _symbols_refused(model: nn.Module, graph: fx.Graph) -> Iterator[None]:
    """Explain an error of a rewrite that has compared a size which depends on the data. Sizes that
    a rewrite removes are not refused.
    """
    try:
        yield
    except Exception:
        _refuse_symbols(model, graph)
        raise


def _refuse_symbols(model: nn.Module, graph: fx.Graph) -> None:
    """Refuse symbolic shapes: every shape must be a number by now."""
    for node in graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
            if any(isinstance(size, SYMBOLS) for size in sizes):
                reason = f"{node.target} gives a shape or a number that depends on the data"
                code = f"{node.meta.get('stack_trace')} {node.meta.get('nn_module_stack')}"
                raise refusal(model, reason, place(node), data_advice(code))


def _refuse_strides(model: nn.Module, graph: fx.Graph) -> None:
    """Refuse as_strided of a tensor that is not contiguous: it reads the memory of one device."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default):
        if node.args[0].target is not torch.ops.aten.contiguous.default:
            reason = "as_strided reads a tensor that is not contiguous by its place in memory"
            raise refusal(
                model,
                reason,
                place(node),
                "Make it contiguous first, or use unfold, a slice or gather.",
            )


def check(program: Program) -> None:
    """The contract: placeholders and outputs match the signature, and every node has a value."""
    same_inputs(program)
    same_outputs(program)
    for node in program.module.graph.nodes:
        assert node.op in ("placeholder", "output") or "val" in node.meta, (
            f"{node.name} has no value"
        )
