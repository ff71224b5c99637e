"""Traces a model for planning: on all rows, or for a step in micro-batches on those of one.

Example: with `microbatches=4`, inputs of 64 rows are traced with their first 16; the program of one
micro-batch is planned as any other. Every tensor whose first dim is that of the first tensor is
divided by rows, the others are the same in all micro-batches. The whole batch is traced, too: what
a micro-batch is made of is seen beside it. A model and its inputs enter; a traced program and the
micro-batches leave `trace_step`, which api.py and runtime/apply.py call; passes/microbatches.py
says what a division may be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from autopar._compat import pytree
from autopar.errors import InputError, PlanError, TraceError
from autopar.ir.containers import register, tensors_in
from autopar.ir.program import Program
from autopar.passes import annotate, draws, masks, trace
from autopar.passes.batch_numbers import COUNTS, REORDERS
from autopar.passes.microbatches import Microbatches, in_microbatches
from autopar.passes.pass_manager import PassManager
from autopar.passes.trace.experts import one_op_of_experts
from autopar.passes.trace.signature import without_cache

aten = torch.ops.aten


class Call(NamedTuple):
    """The arguments of a call of the model, by position and by name."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Inputs = Call | tuple[Any, ...] | list[Any] | Mapping[str, Any] | torch.Tensor


def call_arguments(inputs: Inputs) -> Call:
    """Return (args, kwargs) of the model call from what a user passes: a tuple of positional
    arguments, a dict of keyword arguments, or one tensor. Raises InputError for anything else.
    """
    if isinstance(inputs, Call):
        call = inputs
    elif isinstance(inputs, Mapping):
        call = Call((), dict(inputs))
    elif isinstance(inputs, torch.Tensor):
        call = Call((inputs,), {})
    elif isinstance(inputs, tuple | list):
        call = Call(tuple(inputs), {})
    else:
        raise InputError(
            "inputs are a tuple of positional arguments, a dict of keyword arguments, or one "
            f"tensor, not {type(inputs).__name__}"
        )
    register((call.args, call.kwargs))
    return call


def trace_model(model: nn.Module, inputs: Inputs, manager: PassManager | None = None) -> Program:
    """Return the program that exporting and simplifying the model on these inputs gives."""
    args, kwargs = call_arguments(inputs)
    with without_cache(model, kwargs), one_op_of_experts(model):
        return _traced(model, args, kwargs, manager)


def _traced(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], manager: PassManager | None
) -> Program:
    """Run the trace pass."""
    run = (manager or PassManager()).run
    return run("trace", model, lambda module: trace.trace(module, args, kwargs), trace.check)


@dataclass
class KnownTraces:
    """What was traced so far of a model on the same inputs: one of so many micro-batches, and all
    rows, annotated. A search over divisions plans one trace for many numbers of stages.
    """

    steps: dict[int, tuple[Program, Microbatches | None]] = field(default_factory=dict)
    full_batch: Program | None = None


def trace_step(
    model: nn.Module,
    inputs: Inputs,
    count: int,
    manager: PassManager | None = None,
    known: KnownTraces | None = None,
) -> tuple[Program, Microbatches | None]:
    """Return the traced program of one of `count` micro-batches of a step on these inputs, and the
    micro-batches; None for one. `known`: traces of this model on these inputs, to which this one is
    added. Raises PlanError where the step cannot be divided, InputError where its rows cannot.
    """
    known = KnownTraces() if known is None else known
    if count in known.steps:
        program, microbatches = known.steps[count]
        manager = manager or PassManager()
        return manager.run("trace", program, lambda traced: traced, trace.check), microbatches
    known.steps[count] = _trace_step(model, inputs, count, manager, known)
    return known.steps[count]


def _trace_step(
    model: nn.Module, inputs: Inputs, count: int, manager: PassManager | None, known: KnownTraces
) -> tuple[Program, Microbatches | None]:
    if count == 1:
        return trace_model(model, inputs, manager), None
    call = call_arguments(inputs)
    rows = rows_of(call) // count
    if rows * count != rows_of(call):
        raise InputError(
            f"microbatches is {count}, and the inputs have {rows_of(call) or 'no'} rows: it must "
            "divide their number"
        )
    if known.full_batch is None:
        whole = known.steps[1][0] if 1 in known.steps else trace_model(model, call)
        known.full_batch = annotate.annotate(masks.masks(draws.draws(whole)))
    full_batch = known.full_batch
    traced, split = _trace_microbatch(model, call, _divided(call, full_batch), count, manager)
    program = masks.masks(draws.draws(traced))
    if any(e.kind == "user" and e.trainable for e in program.signature.inputs):
        raise PlanError(
            "micro-batches: an input requires a gradient, which would be of one micro-batch alone. "
            "Leave microbatches at 1"
        )
    return in_microbatches(program, full_batch, count, split)


def _trace_microbatch(
    model: nn.Module, call: Call, split: frozenset[int], count: int, manager: PassManager | None
) -> tuple[Program, frozenset[int]]:
    """Return the traced program of one micro-batch, and the inputs that are divided by rows:
    `split`, and where the model cannot run on that, all that are as long. No op that is left of the
    graph may tie them: labels of a loss that is not returned.
    """
    rows = rows_of(call) // count
    leaves = enumerate(pytree.tree_leaves((call.args, call.kwargs)))
    tensors = {place: x for place, x in leaves if isinstance(x, torch.Tensor) and x.dim()}
    as_long = split | {place for place, x in tensors.items() if len(x) == rows * count}
    for divided in dict.fromkeys((split, as_long)):
        try:
            return trace_model(model, _first_rows(call, divided, rows), manager), divided
        except TraceError as error:
            refused = error
    raise PlanError(
        f"micro-batches: on a {count}th of the rows the model cannot be traced: {refused}. "
        "Leave microbatches at 1"
    ) from refused


def rows_of(call: Call) -> int:
    """Return the size of the first dim of the first tensor that has one, 0 without any."""
    shapes = (tuple(x.shape) for x in tensors_in((call.args, call.kwargs)))
    return next((shape[0] for shape in shapes if shape), 0)


def _divided(call: Call, full_batch: Program) -> frozenset[int]:
    """Return the positions of the inputs that are divided by rows: those whose first dim is that of
    the first tensor. One that only is as long, such as a mask of its tokens, is not.
    """
    assert full_batch.annotations is not None
    dims = full_batch.annotations.dims
    entries = [e for e in full_batch.signature.inputs if e.kind == "user" and dims[e.node, 0]]
    rows = dims[entries[0].node, 0][0] if entries else ()
    numbered = _read_by_number(full_batch, rows_of(call))
    divided = (
        entry.position
        for entry in entries
        if rows and (dims[entry.node, 0][0] == rows or entry.node in numbered)
    )
    return frozenset(place for place in divided if place is not None)


def _read_by_number(full_batch: Program, rows: int) -> set[str]:
    """Return the inputs with a row for each of the batch's that are read by the numbers of rows:
    transformers reads masks of padding so, and no op ties their rows to those of tokens.
    """
    names = set()
    for node in full_batch.module.graph.find_nodes(op="call_function", target=aten.index.Tensor):
        source, places = node.args[0], node.args[1]
        first = places[0] if isinstance(places, list | tuple) and places else None
        if not isinstance(source, fx.Node) or not isinstance(first, fx.Node):
            continue
        source, first = _source_of_view(source), _source_of_view(first)
        counts = first.target in COUNTS and tuple(first.meta["val"].shape) == (rows,)
        if counts and source.op == "placeholder" and source.meta["val"].shape[0] == rows:
            names.add(source.name)
    return names


def _source_of_view(node: fx.Node) -> fx.Node:
    """Return what a node is another view or dtype of."""
    while node.target in REORDERS:
        node = node.all_input_nodes[0]
    return node


def _first_rows(call: Call, split: frozenset[int], rows: int) -> Call:
    """Return a call with the first rows alone."""
    leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
    first: list[Any] = [x[:rows] if place in split else x for place, x in enumerate(leaves)]
    return Call(*pytree.tree_unflatten(first, structure))
