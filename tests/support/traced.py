"""Traces a model, and runs a traced graph on one device, as a reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopar._compat import pytree
from autopar.ir.program import Program
from autopar.passes import annotate, trace
from autopar.passes.trace.signature import bind


def annotated(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Program:
    """The traced model with its annotations and chains: what a search begins with."""
    return annotate.chains(annotate.annotate(trace.trace(model, args, dict(kwargs or {}))))


def run(
    program: Program,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> Any:
    """Run the traced graph on one device and return what the model returns.

    Mutated buffers keep their old values. `tensors` and what it raises: see `bind`.
    """
    values = bind(program, args, kwargs, tensors)
    results = iter(program.module(*values))
    leaves = []
    for output in program.signature.outputs:
        value = output.constant if output.node is None else next(results)
        if output.kind == "user":
            leaves.append(value)
    return pytree.tree_unflatten(leaves, program.signature.out_tree)
