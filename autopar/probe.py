"""Rules found by trial, for ops without a line in the table.

The op of a node runs on random operands, whole and cut: `trials` says how. A dim is a factor where
the forward and the backward commute with slicing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.sharding_rule import Spec, bound, operands_of, results_of, shape_of, value_of
from autopar.trials import Call, differing_results, spec_by_trial

_ELEMENTS = 1 << 20  # larger tensors are not probed: the op then runs unsplit, and is listed


def probe(node: fx.Node, known: dict[object, Spec | None]) -> Spec | None:
    """The rule of a node by trial, or None where no dim of its results commutes with slicing.

    None too for ops that are random, that do not run on the CPU or on fake tensors, that fail in
    their backward, and whose operands have more than a million elements. `known` keeps what was
    found for the same op, shapes and other arguments.
    """
    operands = operands_of(node)
    values = [value_of(n) for n in operands if n is not None]
    if not values or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return None
    if not all(isinstance(value, Tensor) for value in (*values, *results_of(node))):
        return None
    key = _key(node, values)
    if key not in known:
        small = all(value.numel() <= _ELEMENTS for value in values)
        found = spec_by_trial(_caller(node), values) if small else None
        known[key] = found if found is None or _fits(found, node) else None
    spec = known[key]
    return None if spec is None else _with_absent(spec, operands)


def _fits(spec: Spec, node: fx.Node) -> bool:
    """Whether the results have the shapes that they have in the graph: what reads memory as another
    type makes others of float64.
    """
    shapes = [tuple(spec.sizes[name] for (name,) in dims) for dims in spec.results]
    return shapes == [shape_of(value) for value in results_of(node)]


def _key(node: fx.Node, values: Sequence[Tensor]) -> object:
    others = fx.map_arg((node.args, node.kwargs), lambda n: None)
    return node.target, tuple((shape_of(v), v.dtype) for v in values), str(others)


def _with_absent(spec: Spec, operands: Sequence[fx.Node | None]) -> Spec:
    """The rule with None for each optional operand that is absent."""
    present = iter(spec.operands)
    return replace(spec, operands=tuple(None if n is None else next(present) for n in operands))


def _caller(node: fx.Node) -> Call:
    """The op as a function of its tensors, which may be others where the graph passes one twice."""

    def call(tensors: Sequence[Tensor]) -> list[Tensor]:
        remaining = iter(tensors)

        def fill(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [fill(item) for item in value]
            return next(remaining) if isinstance(value, fx.Node) else value

        arguments = {name: fill(value) for name, value in bound(node).items()}
        assert callable(node.target)
        result = node.target(**arguments)
        return list(result) if isinstance(result, list | tuple) else [result]

    return call


def unrepeatable(node: fx.Node) -> bool:
    """Whether an op of someone's own gives other results where it runs again on the same operands:
    it draws random numbers of which its tags say nothing, or it keeps a state. Of results that are
    used; False for ops that do not run on the CPU or whose operands are large.
    """
    if getattr(node.target, "namespace", "aten") in ("aten", "prims", "autopar"):
        return False
    values = [value_of(n) for n in operands_of(node) if n is not None]
    if any(not isinstance(v, Tensor) or v.numel() > _ELEMENTS for v in values):
        return False
    several = isinstance(value_of(node), list | tuple)
    used = {user.args[1] for user in node.users} if several else {0}
    return any(index in used for index in differing_results(_caller(node), values))
