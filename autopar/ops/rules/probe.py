"""Rules found by trial, for ops without a line in the table.

The op of a node runs on random operands, whole and cut: `trials` says how. A dim is a factor where
the forward and the backward commute with slicing it.

Rules of custom autograd functions, by trial, also of those whose tensors are too large to try:
they are tried with smaller dims.

    (64, 4096, 4096) -> (64, 4096, 4096)    is tried as    (12, 20, 20) -> (12, 20, 20)

A function whose trial makes other shapes of the small tensors, or fails, runs unsplit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.sharding_rule import (
    OpShardingRule,
    bound,
    operands_of,
    results_of,
    shape_of,
    value_of,
)
from autopar.ops.rules.trials import Call, differing_results, rule_by_trial

_ELEMENTS = 1 << 20  # larger tensors are not probed: the op then runs unsplit, and is listed


def probe(node: fx.Node, known: dict[object, OpShardingRule | None]) -> OpShardingRule | None:
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
        found = rule_by_trial(_caller(node), values) if small else None
        known[key] = found if found is None or _fits(found, node) else None
    spec = known[key]
    return None if spec is None else _with_absent(spec, operands)


def _fits(spec: OpShardingRule, node: fx.Node) -> bool:
    """Whether the results have the shapes that they have in the graph: what reads memory as another
    type makes others of float64.
    """
    shapes = [tuple(spec.sizes[name] for (name,) in dims) for dims in spec.results]
    return shapes == [shape_of(value) for value in results_of(node)]


def _key(node: fx.Node, values: Sequence[Tensor]) -> object:
    others = fx.map_arg((node.args, node.kwargs), lambda n: None)
    return node.target, tuple((shape_of(v), v.dtype) for v in values), str(others)


def _with_absent(spec: OpShardingRule, operands: Sequence[fx.Node | None]) -> OpShardingRule:
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


_ELEMENTS_AS_THEY_ARE = 1 << 16  # of tensors that are tried as they are
_KEPT = 8  # sizes up to this are not made smaller
_SMALL = (12, 20, 28, 18, 30, 42, 45, 50, 24, 36)  # what others become, in order of size


def function_rule(
    node: fx.Node, known: dict[object, OpShardingRule | None]
) -> OpShardingRule | None:
    """The rule of a node whose target is a custom function, or None: it runs unsplit. `known` is
    that of `probe`.
    """
    values = [value_of(operand) for operand in operands_of(node) if operand is not None]
    shapes = [shape_of(value) for value in (*values, *results_of(node))]
    if all(math.prod(shape) <= _ELEMENTS_AS_THEY_ARE for shape in shapes):
        return probe(node, known)
    key = "smaller", node.target, tuple(shapes), tuple(value.dtype for value in values)
    if key not in known:
        known[key] = _by_smaller_trial(node, values, shapes)
    return known[key]


def _by_smaller_trial(
    node: fx.Node, values: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]
) -> OpShardingRule | None:
    small = _smaller(shapes)
    if small is None:
        return None
    tried = [
        torch.empty(_with(small, shape_of(value)), dtype=value.dtype, device="meta")
        for value in values
    ]

    def call(tensors: Sequence[Tensor]) -> list[Tensor]:
        assert callable(node.target)
        made = node.target(*tensors)
        return [made] if isinstance(made, Tensor) else list(made)

    spec = rule_by_trial(call, tried)
    if spec is None:
        return None
    dims = [*spec.operands, *spec.results]
    made = [_product(spec.sizes, of) for of in dims if of is not None]
    if made != [_with(small, shape) for shape in shapes]:
        return None
    large = {small_size: size for size, small_size in small.items()}
    return replace(spec, sizes={name: large.get(n, n) for name, n in spec.sizes.items()})


def _smaller(shapes: Sequence[tuple[int, ...]]) -> dict[int, int] | None:
    """A small size for every large one; None where there are more of them than there are sizes."""
    sizes = sorted({size for shape in shapes for size in shape if size > _KEPT})
    return dict(zip(sizes, _SMALL, strict=False)) if len(sizes) <= len(_SMALL) else None


def _with(small: dict[int, int], shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(small.get(size, size) for size in shape)


def _product(sizes: dict[str, int], dims: Sequence[tuple[str, ...]]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[name] for name in names) for names in dims)
