"""Compares a step in micro-batches with that of the whole batch, both on one device, in float64.

`verify` holds the ranks against the program of one micro-batch; here all micro-batches together are
held against the graph of the whole batch: every result and every gradient. Random numbers are left
out on both sides, as each micro-batch draws others. api.py calls `compare_microbatches`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar._compat import pytree
from autopar.errors import VerificationError
from autopar.ir.graph import copy_graph
from autopar.ir.program import Program
from autopar.ir.sharding_rule import arguments_of
from autopar.ops.rules.shapes import DRAWS
from autopar.passes.microbatches import Microbatches
from autopar.runtime.reference import double_by_default, tensor_to_float64, to_float64

aten = torch.ops.aten
_DROPS = ("dropout_p", "p")
_LEAST = 1e-6  # of the largest gradient: what is smaller may be zero but for rounding


def leaves_of_microbatches(
    inputs: Any, microbatches: Microbatches, totals: fx.GraphModule | None
) -> list[list[Any]]:
    """Return the leaves of each micro-batch's call, the totals over the whole batch after them."""
    leaves = [
        tensor_to_float64(x) if isinstance(x, Tensor) else x for x in pytree.tree_leaves(inputs)
    ]
    calls = [list(_rows(leaves, microbatches, number)) for number in range(microbatches.count)]
    if totals is None:
        return calls
    shares = [totals(*(call[place] for place in microbatches.reads)) for call in calls]
    sums = [torch.stack(each).sum(0, dtype=each[0].dtype) for each in zip(*shares, strict=True)]
    return [[*call, *sums] for call in calls]


def _rows(leaves: Sequence[Any], microbatches: Microbatches, number: int) -> Iterator[Any]:
    for place, leaf in enumerate(leaves):
        divided = place in microbatches.split
        yield leaf.unflatten(0, (microbatches.count, -1))[number] if divided else leaf


def compare_microbatches(
    full: Program, microbatch: Program, microbatches: Microbatches, inputs: Any, tolerance: float
) -> list[Any]:
    """Return the leaves of the first micro-batch's call, after a comparison of all micro-batches
    with the full batch. Raises VerificationError with the result or the gradient that is off the
    most.
    """
    with double_by_default():
        totals = microbatches.totals
        if totals is not None:
            totals = to_float64(Program(totals, microbatch.signature)).module
        calls = leaves_of_microbatches(inputs, microbatches, totals)
        full, microbatch = to_float64(full), to_float64(microbatch)
        expected = _step(full, pytree.tree_leaves(inputs), microbatch.tensors)
        steps = [_step(microbatch, leaves, microbatch.tensors) for leaves in calls]
    results = [
        _together(state, [step_results[place] for step_results, _ in steps])
        for place, state in enumerate(microbatches.results)
    ]
    gradients = {name: _together("sum", [f[1][name] for f in steps]) for name in expected[1]}
    least = _LEAST * max(
        (float(x.abs().max()) for x in expected[1].values() if x.numel()), default=0.0
    )
    errors = {
        f"result {number}": _error(a, b, 0.0)
        for number, (a, b) in enumerate(zip(results, expected[0], strict=True))
    }
    errors |= {
        f"gradient of {name}": _error(x, expected[1][name], least) for name, x in gradients.items()
    }
    worst = max(errors, key=lambda name: errors[name], default="")
    if worst and not errors[worst] <= tolerance:
        raise VerificationError(
            f"a step in {microbatches.count} micro-batches is not the step of the whole batch: "
            f"{worst} is off by {errors[worst]:.1e}, past {tolerance:.0e}"
        )
    return calls[0]


def _step(
    program: Program, leaves: Sequence[Any], tensors: dict[str, Tensor]
) -> tuple[list[Any], dict[str, Tensor]]:
    """Return the results of a step and the gradients of its first scalar, by parameter."""
    own = {
        entry.target: tensors[entry.target].detach().clone().requires_grad_(entry.trainable)
        for entry in program.signature.inputs
        if entry.kind != "user"
    }
    values = [
        _in_float64(leaves[entry.position or 0]) if entry.kind == "user" else own[entry.target]
        for entry in program.signature.inputs
    ]
    results = list(_without_draws(program.module)(*values))
    loss = next(x for x in results if isinstance(x, Tensor) and not x.dim() and x.requires_grad)
    trained = {name: x for name, x in own.items() if x.requires_grad}
    by_parameter = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(x) if gradient is None else gradient
        for (name, x), gradient in zip(trained.items(), by_parameter, strict=True)
    }
    return [x.detach() for x in results], gradients


def _in_float64(leaf: Any) -> Any:
    return tensor_to_float64(leaf) if isinstance(leaf, Tensor) else leaf


def _without_draws(module: fx.GraphModule) -> fx.GraphModule:
    """Return the module with every rate of dropout zero, and one number in the place of random
    ones.
    """
    graph = copy_graph(module.graph)
    for node in list(graph.nodes):
        if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            continue
        if node.target in DRAWS:
            *limits, size = node.args
            number = sum(limits) // 2 if limits else 0.5
            with graph.inserting_before(node):
                full = graph.call_function(aten.full.default, (size, number), node.kwargs)
            node.replace_all_uses_with(full)
            graph.erase_node(node)
            continue
        for place, argument in enumerate(arguments_of(node)):
            if argument.name in _DROPS and place < len(node.args):
                node.update_arg(place, 0.0)
            elif argument.name in node.kwargs and argument.name in _DROPS:
                node.update_kwarg(argument.name, 0.0)
    return fx.GraphModule(module, graph)


def _together(state: str, each: Sequence[Tensor]) -> Tensor:
    """Return the result of the step, of what its micro-batches returned."""
    if state == "rows":
        return torch.cat(list(each))
    return sum(each[1:], each[0]) if state == "sum" else each[0]


def _error(actual: Tensor, expected: Tensor, least: float) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    largest = max(float(expected.abs().max()) if expected.numel() else 0.0, least, 1e-30)
    return float((actual - expected).abs().max()) / largest if actual.numel() else 0.0
