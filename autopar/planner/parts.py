"""Traces a model for a step in micro-batches: on the rows of one part, and divides the step.

Example: with `microbatches=4`, inputs of 64 rows are traced with their first 16; the program of one
part is planned as any other. Every tensor whose first dim is that of the first tensor is divided by
rows, the others are the same in all parts. planner.py and runtime/apply.py call `trace_step`;
passes/microbatches.py says what a division may be.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar._compat import pytree
from autopar.errors import InputError, PlanError
from autopar.ir.program import Annotations, Program
from autopar.passes import annotate, random_masks
from autopar.passes.microbatches import Parts, in_parts
from autopar.passes.pass_manager import PassManager
from autopar.planner.planner import Call, Inputs, call_arguments, trace_model


def trace_step(
    model: nn.Module, inputs: Inputs, count: int, manager: PassManager | None = None
) -> tuple[Program, Parts | None]:
    """Return the traced program of one of `count` parts of a step on these inputs, and the parts;
    None for one. Raises PlanError where the step cannot be divided, InputError where its rows
    cannot.
    """
    if count == 1:
        return trace_model(model, inputs, manager), None
    call = call_arguments(inputs)
    split, rows = rows_of(call, count)
    program = random_masks.random_masks(trace_model(model, _first(call, split, rows), manager))
    if any(e.kind == "user" and e.trainable for e in program.signature.inputs):
        raise PlanError(
            "micro-batches: an input requires a gradient, which would be of one part alone. Leave "
            "microbatches at 1"
        )
    looked_at = program
    if rows == 1:  # dims of one row belong to no rule
        looked_at = random_masks.random_masks(trace_model(model, _first(call, split, 2)))
    return in_parts(program, count, split, _facts(program, looked_at))


def rows_of(call: Call, count: int) -> tuple[frozenset[int], int]:
    """Return the positions of the inputs that are divided by rows, and the rows of a part. Raises
    InputError where no input has rows, or their number is no multiple of `count`.
    """
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) else () for x in leaves]
    batch = next((shape[0] for shape in shapes if shape), 0)
    if not batch or batch % count:
        raise InputError(
            f"microbatches is {count}, and the inputs have {batch or 'no'} rows: it must divide "
            "their number"
        )
    split = (place for place, shape in enumerate(shapes) if shape and shape[0] == batch)
    return frozenset(split), batch // count


def _first(call: Call, split: frozenset[int], rows: int) -> Call:
    """Return a call with the first rows alone."""
    leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
    first: list[Any] = [x[:rows] if place in split else x for place, x in enumerate(leaves)]
    return Call(*pytree.tree_unflatten(first, structure))


def _facts(program: Program, looked_at: Program) -> Annotations:
    """Return the annotations of a program, or of the same program on more rows."""
    names = [[(n.name, n.op, n.target) for n in p.module.graph.nodes] for p in (program, looked_at)]
    if names[0] != names[1]:
        raise PlanError(
            "micro-batches: the model computes otherwise on one row than on two, so that nothing "
            "is known about parts of one row. Ask for fewer parts"
        )
    annotations = annotate.annotate(looked_at).annotations
    assert annotations is not None
    return annotations
