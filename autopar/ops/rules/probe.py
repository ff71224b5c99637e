"""The sharding rule of a node: from the table, or by trial for ops that are not in it and for
custom autograd functions.

In a trial the op of the node runs on random operands, unsharded and sliced (see trials.py). A dim
is a factor where the forward and the backward commute with slicing it. An op whose tensors are too
large to run is tried with smaller dims, at several sizes (scaled_trials.py). One whose trials fail
runs unsplit.
passes/annotate.py calls `rule_of`, `probe`, `function_rule` and `unrepeatable`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

import autopar.ops.rules.attention  # this and the next eight fill TABLE
import autopar.ops.rules.experts
import autopar.ops.rules.indexing
import autopar.ops.rules.losses
import autopar.ops.rules.matmul
import autopar.ops.rules.recurrent
import autopar.ops.rules.reductions
import autopar.ops.rules.shapes
import autopar.ops.rules.windows  # noqa: F401
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
from autopar.ops.rules.scaled_trials import TRIED_ELEMENTS, scaled_rule, scaled_values
from autopar.ops.rules.trials import Call, differing_results, rule_by_trial


def rule_of(node: fx.Node) -> OpShardingRule | None:
    """Return the sharding rule of a node, or None where neither the table nor the pointwise tag
    covers its op.
    """
    build = TABLE.get(node.target)
    if build is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        build = pointwise
    return None if build is None else _only_floats_partial(node, build(node))


def _only_floats_partial(node: fx.Node, rule: OpShardingRule) -> OpShardingRule:
    """Return the rule without the partial pass-through of integers and flags: dividing or reducing
    them gives another dtype, and an op that makes them of floats would round each part.
    """
    if not all(floating(value) for value in results_of(node)):
        return replace(rule, linear=())
    not_floating = {
        i for i, n in enumerate(operands_of(node)) if n is not None and not floating(value_of(n))
    }
    return replace(rule, linear=tuple(group for group in rule.linear if not group & not_floating))


def probe(node: fx.Node, known: dict[object, OpShardingRule | None]) -> OpShardingRule | None:
    """Return the rule of a node by trial, or None where no dim of its results commutes with
    slicing.

    It is None too for ops that are random, that do not run on the CPU or on fake tensors, and that
    fail in their backward. `known` is a cache of the rules by op, shapes and other arguments, which
    this function extends.
    """
    operands = operands_of(node)
    values = [value_of(n) for n in operands if n is not None]
    if not values or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return None
    if not all(isinstance(value, Tensor) for value in (*values, *results_of(node))):
        return None
    key = _key(node, values)
    if key not in known:
        results = [shape_of(value) for value in results_of(node)]
        call = _function_of(node)
        rule = (
            rule_by_trial(call, values)
            if all(value.numel() <= TRIED_ELEMENTS for value in values)
            else scaled_rule(call, values, results, _integers(node))
        )
        known[key] = rule if rule is None or _has_graph_shapes(rule, node) else None
    cached = known[key]
    return None if cached is None else _with_absent(cached, operands)


def _has_graph_shapes(rule: OpShardingRule, node: fx.Node) -> bool:
    """Whether the results of the rule have the shapes that they have in the graph: an op that reads
    memory as another dtype gives other shapes on the float64 operands of a trial.
    """
    shapes = [tuple(rule.sizes[name] for (name,) in dims) for dims in rule.results]
    return shapes == [shape_of(value) for value in results_of(node)]


def _integers(node: fx.Node) -> list[int]:
    """Return the integers among a node's arguments: dims, sizes, shifts and the like."""
    integers: list[int] = []

    def collect(value: Any) -> None:
        if isinstance(value, list | tuple):
            for item in value:
                collect(item)
        elif isinstance(value, int) and not isinstance(value, bool):
            integers.append(value)

    collect(list(bound(node).values()))
    return integers


def _key(node: fx.Node, values: Sequence[Tensor]) -> object:
    """Return the key of a node in the cache: its op, the shapes and dtypes of its operands, and its
    other arguments.
    """
    others = fx.map_arg((node.args, node.kwargs), lambda n: None)
    return node.target, tuple((shape_of(v), v.dtype) for v in values), str(others)


def _with_absent(rule: OpShardingRule, operands: Sequence[fx.Node | None]) -> OpShardingRule:
    """Return the rule with None for each optional operand that is absent."""
    present = iter(rule.operands)
    return replace(rule, operands=tuple(None if n is None else next(present) for n in operands))


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

    Only results that are used count. It is False for ops that do not run on the CPU. Large operands
    are tried with smaller dims.
    """
    if getattr(node.target, "namespace", "aten") in ("aten", "prims", "autopar"):
        return False
    values = [value_of(n) for n in operands_of(node) if n is not None]
    if any(not isinstance(value, Tensor) for value in values):
        return False
    is_tuple = isinstance(value_of(node), list | tuple)
    used = {user.args[1] for user in node.users} if is_tuple else {0}
    call = _function_of(node)
    return any(
        index in used
        for tried in scaled_values(values, _integers(node))
        for index in differing_results(call, tried)
    )


_FULL_SIZE_ELEMENTS = 1 << 16  # larger tensors of custom functions are made smaller


def function_rule(
    node: fx.Node, known: dict[object, OpShardingRule | None]
) -> OpShardingRule | None:
    """Return the rule of a node whose target is a custom function, or None where it runs unsplit.
    `known` is the cache of `probe`.
    """
    values = [value_of(operand) for operand in operands_of(node) if operand is not None]
    results = [shape_of(value) for value in results_of(node)]
    shapes = [*(shape_of(value) for value in values), *results]
    if all(math.prod(shape) <= _FULL_SIZE_ELEMENTS for shape in shapes):
        return probe(node, known)
    key = "smaller", node.target, tuple(shapes), tuple(value.dtype for value in values)

    def call(tensors: Sequence[Tensor]) -> list[Tensor]:
        assert callable(node.target)
        results = node.target(*tensors)
        return [results] if isinstance(results, Tensor) else list(results)

    if key not in known:
        known[key] = scaled_rule(call, values, results)
    return known[key]
