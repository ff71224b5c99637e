"""The sharding rule of a node: from the table, or by trial for ops that are not in it and for
custom autograd functions.

In a trial the op of the node runs on random operands, unsharded and sliced (see trials.py). A dim
is a factor where the forward and the backward commute with slicing it. A custom function whose
tensors are too large to try is tried with smaller dims:

    (64, 4096, 4096) -> (64, 4096, 4096)    is tried as    (12, 20, 20) -> (12, 20, 20)

A function whose trial fails, or gives other shapes than the smaller dims should, runs unsplit.
passes/annotate.py calls `rule_of`, `probe`, `function_rule` and `unrepeatable`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

import autopar.ops.rules.matmul  # this and the next two fill TABLE
import autopar.ops.rules.reductions
import autopar.ops.rules.shapes  # noqa: F401
from autopar.ir.sharding_rule import (
    TABLE,
    OpShardingRule,
    bound,
    operands_of,
    results_of,
    shape_of,
    value_of,
)
from autopar.ops.rules import floating
from autopar.ops.rules.pointwise import pointwise
from autopar.ops.rules.trials import Call, differing_results, rule_by_trial

_PROBED_ELEMENTS = 1 << 20  # larger tensors are not probed: the op then runs unsplit, and is listed


def rule_of(node: fx.Node) -> OpShardingRule | None:
    """Return the sharding rule of a node, or None where neither the table nor the pointwise tag
    covers its op.
    """
    build = TABLE.get(node.target)
    if build is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        build = pointwise
    return None if build is None else _only_floats_partial(node, build(node))


def _only_floats_partial(node: fx.Node, made: OpShardingRule) -> OpShardingRule:
    """Return the rule without the partial pass-through of integers and flags: dividing or reducing
    them gives another dtype, and an op that makes them of floats would round each part.
    """
    if not all(floating(value) for value in results_of(node)):
        return replace(made, linear=())
    not_floating = {
        i for i, n in enumerate(operands_of(node)) if n is not None and not floating(value_of(n))
    }
    return replace(made, linear=tuple(group for group in made.linear if not group & not_floating))


def probe(node: fx.Node, known: dict[object, OpShardingRule | None]) -> OpShardingRule | None:
    """Return the rule of a node by trial, or None where no dim of its results commutes with
    slicing.

    It is None too for ops that are random, that do not run on the CPU or on fake tensors, that fail
    in their backward, and whose operands have more than a million elements. `known` is a cache of
    the rules by op, shapes and other arguments, which this function extends.
    """
    operands = operands_of(node)
    values = [value_of(n) for n in operands if n is not None]
    if not values or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return None
    if not all(isinstance(value, Tensor) for value in (*values, *results_of(node))):
        return None
    key = _key(node, values)
    if key not in known:
        small = all(value.numel() <= _PROBED_ELEMENTS for value in values)
        rule = rule_by_trial(_function_of(node), values) if small else None
        known[key] = rule if rule is None or _has_graph_shapes(rule, node) else None
    cached = known[key]
    return None if cached is None else _with_absent(cached, operands)


def _has_graph_shapes(spec: OpShardingRule, node: fx.Node) -> bool:
    """Whether the results of the rule have the shapes that they have in the graph: an op that reads
    memory as another dtype gives other shapes on the float64 operands of a trial.
    """
    shapes = [tuple(spec.sizes[name] for (name,) in dims) for dims in spec.results]
    return shapes == [shape_of(value) for value in results_of(node)]


def _key(node: fx.Node, values: Sequence[Tensor]) -> object:
    """Return the key of a node in the cache: its op, the shapes and dtypes of its operands, and its
    other arguments.
    """
    others = fx.map_arg((node.args, node.kwargs), lambda n: None)
    return node.target, tuple((shape_of(v), v.dtype) for v in values), str(others)


def _with_absent(spec: OpShardingRule, operands: Sequence[fx.Node | None]) -> OpShardingRule:
    """Return the rule with None for each optional operand that is absent."""
    present = iter(spec.operands)
    return replace(spec, operands=tuple(None if n is None else next(present) for n in operands))


def _function_of(node: fx.Node) -> Call:
    """Return the op as a function of its tensors; where the graph passes one tensor twice, the two
    may differ.
    """

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
    """Whether a custom op gives other results when it runs again on the same operands: it draws
    random numbers without a tag that says so, or keeps a state.

    Only results that are used count. It is False for ops that do not run on the CPU or whose
    operands are large.
    """
    if getattr(node.target, "namespace", "aten") in ("aten", "prims", "autopar"):
        return False
    values = [value_of(n) for n in operands_of(node) if n is not None]
    if any(not isinstance(v, Tensor) or v.numel() > _PROBED_ELEMENTS for v in values):
        return False
    is_tuple = isinstance(value_of(node), list | tuple)
    used = {user.args[1] for user in node.users} if is_tuple else {0}
    return any(index in used for index in differing_results(_function_of(node), values))


_FULL_SIZE_ELEMENTS = 1 << 16  # larger tensors of custom functions are made smaller
_UNCHANGED_SIZE = 8  # sizes up to this are not made smaller
_SMALL = (
    12,
    20,
    28,
    18,
    30,
    42,
    45,
    50,
    24,
    36,
)  # the sizes that stand for larger ones, in order of size


def function_rule(
    node: fx.Node, known: dict[object, OpShardingRule | None]
) -> OpShardingRule | None:
    """Return the rule of a node whose target is a custom function, or None where it runs unsplit.
    `known` is the cache of `probe`.
    """
    values = [value_of(operand) for operand in operands_of(node) if operand is not None]
    shapes = [shape_of(value) for value in (*values, *results_of(node))]
    if all(math.prod(shape) <= _FULL_SIZE_ELEMENTS for shape in shapes):
        return probe(node, known)
    key = "smaller", node.target, tuple(shapes), tuple(value.dtype for value in values)
    if key not in known:
        known[key] = _rule_by_smaller_trial(node, values, shapes)
    return known[key]


def _rule_by_smaller_trial(
    node: fx.Node, values: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]
) -> OpShardingRule | None:
    """Return the rule of a custom function, tried with smaller dims, in the sizes of the node."""
    small = _small_sizes(shapes)
    if small is None:
        return None
    small_values = [
        torch.empty(_shrink(small, shape_of(value)), dtype=value.dtype, device="meta")
        for value in values
    ]

    def call(tensors: Sequence[Tensor]) -> list[Tensor]:
        assert callable(node.target)
        results = node.target(*tensors)
        return [results] if isinstance(results, Tensor) else list(results)

    rule = rule_by_trial(call, small_values)
    if rule is None:
        return None
    dims = [*rule.operands, *rule.results]
    tried_shapes = [
        _shape_of(rule.sizes, tensor_dims) for tensor_dims in dims if tensor_dims is not None
    ]
    if tried_shapes != [_shrink(small, shape) for shape in shapes]:
        return None
    large = {small_size: size for size, small_size in small.items()}
    return replace(rule, sizes={name: large.get(n, n) for name, n in rule.sizes.items()})


def _small_sizes(shapes: Sequence[tuple[int, ...]]) -> dict[int, int] | None:
    """Return a small size for every large one; None where there are more large sizes than small
    ones.
    """
    sizes = sorted({size for shape in shapes for size in shape if size > _UNCHANGED_SIZE})
    return dict(zip(sizes, _SMALL, strict=False)) if len(sizes) <= len(_SMALL) else None


def _shrink(small: dict[int, int], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape with the large sizes replaced."""
    return tuple(small.get(size, size) for size in shape)


def _shape_of(sizes: dict[str, int], dims: Sequence[tuple[str, ...]]) -> tuple[int, ...]:
    """Return the shape of a tensor from the sizes of the factors of its dims."""
    return tuple(math.prod(sizes[name] for name in names) for names in dims)
