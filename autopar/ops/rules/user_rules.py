"""Rules for ops of the user's own, which are tried when they are entered.

    autopar.rule(torch.ops.mine.scale_rows, "m n, m -> m n")

An op and a pattern enter, as in ir/sharding_rule.py. The op runs on small random operands, unsplit
and split on each factor that the pattern lets an axis split, forward and backward; where numbers
differ the rule is refused. What remains is a line of TABLE, as autopar's own. Users call it before
they plan, on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from autopar._compat import OpOverload, pytree
from autopar.errors import InputError
from autopar.ir import sharding_rule
from autopar.ir.sharding_rule import (
    TABLE,
    Dims,
    OpShardingRule,
    Pattern,
    PatternError,
    RuleBuilder,
)
from autopar.ops.rules.trials import Trial, TrialOp, all_near, gradients_add_up

_SIZES = (4, 6, 8, 10, 12, 14)  # of the factors of an example, in their order; 2 divides each
_OWN: dict[Any, str] = {}  # the ops that have a rule of the user's, and the rule in words


def rule(
    op: Any,
    pattern: str,
    *,
    sum: str = "",
    whole: str = "",
    added: str = "",
    linear: tuple[str, ...] = (),
    product: str | None = None,
    example: tuple[Any, ...] | None = None,
) -> None:
    """Say how an `op` of your own may be split over ranks, and try it.

    >>> import autopar
    >>> @torch.library.custom_op("docs::scale_rows", mutates_args=())
    ... def scale_rows(x: Tensor, scale: Tensor) -> Tensor:
    ...     return x * scale[:, None]
    >>> _ = scale_rows.register_fake(lambda x, scale: torch.empty_like(x))
    >>> autopar.rule(scale_rows, "m n, m -> m n", linear=("0", "1"))

    `pattern` lists the factors of every operand and every result as einsum does, `(a b)` for a dim
    that is made of two, `...` for any dims. Where an axis splits a factor, operands and results
    that have it are split there.

    - `sum`: factors that the op sums; where an axis splits one, the results are partial sums.
    - `whole`: factors that no axis may split, as those that the op sorts along.
    - `added`: the numbers of operands that are added once, such as a bias ("2").
    - `linear`: groups of operands through which partial sums pass, each operand ("0", "1") or
      several together ("0 1").
    - `product`: the roles of a matmul's factors, "m | n | k", for its FLOPs and named layouts.
    - `example`: arguments to try it with, where it takes others than float tensors. Each factor
      that may be split has an even size of 4 or more.

    Raises InputError where the pattern does not fit, and where the op computes something else on
    parts than on the whole, naming the factor.
    """
    target = _overload(op)
    if target in TABLE and target not in _OWN:
        raise InputError(f"autopar.rule: {target} has a rule of autopar's own")
    if pattern.count("->") != 1:
        raise InputError(f"autopar.rule: {pattern!r} is no pattern such as 'm k, k n -> m n'")
    allowed: dict[str, Any] = {"sum": sum, "whole": whole, "added": added}
    allowed |= {"linear": linear, "product": product}
    build = sharding_rule.rule_builder(target, pattern, **allowed)
    TABLE[target] = _checked(target, pattern, build, example)
    said = "".join(f", {name}={value!r}" for name, value in allowed.items() if value)
    _OWN[target] = f"{target} as {pattern!r}{said}"


def entered_rules() -> str:
    """Return the rules of the user's own in words, by which ranks compare what they have."""
    return "; ".join(sorted(_OWN.values())) or "none"


def _overload(op: Any) -> OpOverload:
    """Return the overload of `torch.ops.mine.op`, or of what torch.library.custom_op returns."""
    target = getattr(op, "_opoverload", op)
    target = getattr(target, "default", target)
    if not isinstance(target, OpOverload):
        raise InputError(
            f"autopar.rule takes an op of torch.ops or of torch.library.custom_op, not {op!r}: "
            "make the function a custom op first"
        )
    return target


def _checked(
    target: OpOverload, pattern: str, build: RuleBuilder, example: tuple[Any, ...] | None
) -> RuleBuilder:
    """Return the builder of rules for the op, after trials on an example."""
    call = f"autopar.rule({target}, {pattern!r})"
    arguments = _example(call, target, pattern) if example is None else example
    node = _node(call, target, arguments)
    try:
        rule = build(node)
    except (PatternError, KeyError, ValueError) as error:
        raise InputError(f"{call}: {error}") from None
    _refuse_names(call, rule)
    trial = _Trial(call, target, arguments, rule)
    trial.check()
    linear = gradients_add_up(trial.op, trial.trial)
    return build if linear else lambda node: replace(build(node), nonlinear=True)


def _refuse_names(call: str, rule: OpShardingRule) -> None:
    """Raise InputError where a keyword names a factor that it cannot be said of."""
    for name in sorted((rule.sum | rule.whole) - rule.sizes.keys()):
        raise InputError(f"{call}: no dim has the factor {name!r}")
    for name in sorted(rule.sum):
        if any(_has(dims, name) for dims in rule.results):
            raise InputError(f"{call}: factor {name!r} is in a result, so it is not summed")


def _example(call: str, target: OpOverload, pattern: str) -> tuple[Any, ...]:
    """Return random operands that fit a pattern."""
    rest = [a for a in target._schema.arguments if "Tensor" not in str(a.type)]
    if any(not argument.has_default_value() for argument in rest):
        raise InputError(f"{call}: the op takes more than tensors, so give example=(arguments)")
    sizes: dict[str, int] = {}
    operands: list[Tensor] = []
    for dims in Pattern(target, pattern).operands:
        shape = []
        for factors in dims:
            for name in factors:
                if name != "1":
                    sizes.setdefault(name, _SIZES[len(sizes) % len(_SIZES)])
            shape.append(math.prod(sizes.get(name, 1) for name in factors))
        generator = torch.Generator().manual_seed(len(operands))
        operands.append(torch.randn(shape, generator=generator, dtype=torch.float64))
    return tuple(operands)


def _node(call: str, target: OpOverload, arguments: tuple[Any, ...]) -> fx.Node:
    """Return the op as a node of a graph, with the values of an example."""
    graph = fx.Graph()

    def placeholder(value: Tensor) -> fx.Node:
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["val"] = value
        return node

    node = graph.call_function(target, pytree.tree_map_only(Tensor, placeholder, tuple(arguments)))
    try:
        node.meta["val"] = target(*arguments)
    except Exception as error:
        raise InputError(f"{call}: the op fails on its example: {error}") from error
    return node


Part = tuple[list[Tensor], list[Tensor]]  # the operands and cotangents of one rank


class _Trial:
    """An op on an example, unsplit; `check` compares it with the parts of two ranks."""

    def __init__(
        self, call: str, target: OpOverload, arguments: tuple[Any, ...], rule: OpShardingRule
    ) -> None:
        leaves, structure = pytree.tree_flatten(arguments)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def run(tensors: Sequence[Tensor]) -> list[Tensor]:
            values = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                values[place] = tensor
            results = target(*pytree.tree_unflatten(values, structure))
            return list(results) if isinstance(results, list | tuple) else [results]

        operands = [leaves[place].detach() for place in places]
        self.call, self.rule = call, rule
        self.dims = [dims for dims in rule.operands if dims is not None]
        cotangents = [_random_like(x, seed) for seed, x in enumerate(run(operands))]
        self.op = TrialOp(run, tuple(x.is_floating_point() for x in operands))
        try:
            unsharded = self.op.run(operands, cotangents)
        except Exception as error:
            if "no autograd formula was registered" not in str(error):
                raise InputError(f"{call}: the backward fails on the example: {error}") from error
            self.op = TrialOp(run, (False,) * len(operands))  # an op of models that do not train
            unsharded = self.op.run(operands, cotangents)
        self.trial = Trial(operands, cotangents, unsharded)

    def check(self) -> None:
        """Raise InputError where parts do not give the whole."""
        unsharded = self.trial.unsharded
        again = self.op.run(self.trial.operands, self.trial.cotangents)
        if not all_near(again.tensors, unsharded.tensors):
            raise InputError(f"{self.call}: the op gives other numbers when it runs again")
        for factor in self.rule.sizes:
            if self.rule.splittable(factor):
                if self.rule.sizes[factor] % 2:
                    raise InputError(
                        f"{self.call}: factor {factor!r} is {self.rule.sizes[factor]} in the "
                        "example: give one where it is even, or name it in `whole`"
                    )
                partial = not any(_has(dims, factor) for dims in self.rule.results)
                added = self.rule.added if partial else frozenset()
                parts = [self._part(factor, half, added) for half in range(2)]
                self._compare(f"split on {factor!r}", parts, factor, added)
        for group in self.rule.linear:
            which = " and ".join(str(n) for n in sorted(group))
            self._compare(f"with operand {which} in two terms", self._terms(group), "", group)

    def _part(self, factor: str, half: int, added: frozenset[int]) -> Part:
        """Return what a rank that has one half of a factor computes with."""
        trial, dims = self.trial, self.dims
        operands = [
            self._cut(x, d, factor, half) for x, d in zip(trial.operands, dims, strict=True)
        ]
        operands = [x / 2 if n in added else x for n, x in enumerate(operands)]
        pairs = zip(trial.cotangents, self.rule.results, strict=True)
        return operands, [self._cut(x, d, factor, half) for x, d in pairs]

    def _terms(self, group: frozenset[int]) -> list[Part]:
        """Return what two ranks compute with that hold terms of some operands."""
        first = list(self.trial.operands)
        second = list(first)
        for n in group:
            first[n] = _random_like(first[n], 100 + n)
            second[n] = second[n] - first[n]
        return [(first, self.trial.cotangents), (second, self.trial.cotangents)]

    def _compare(self, how: str, parts: list[Part], factor: str, terms: frozenset[int]) -> None:
        """Raise InputError where two ranks compute something else than one; `terms` are operands
        of which each holds a term, and gets the whole gradient.
        """
        try:
            outcomes = [self.op.run(*part) for part in parts]
        except Exception as error:
            raise InputError(f"{self.call}: {how}, the op fails: {error}") from error
        for n, (value, dims) in enumerate(
            zip(self.trial.unsharded.results, self.rule.results, strict=True)
        ):
            actual = [outcome.results[n] for outcome in outcomes]
            self._compare_parts(f"{how}, result {n}", actual, value, dims, factor)
        for n, (gradient, dims) in enumerate(
            zip(self.trial.unsharded.gradients, self.dims, strict=True)
        ):
            if gradient is None:
                continue
            actual = [g for outcome in outcomes if (g := outcome.gradients[n]) is not None]
            what = f"{how}, the gradient of operand {n}"
            if n in terms:
                if not all(all_near([x], [gradient]) for x in actual):
                    raise InputError(f"{self.call}: {what} depends on the rest of the operand")
            else:
                self._compare_parts(what, actual, gradient, dims, factor)

    def _compare_parts(
        self, what: str, actual: list[Tensor], value: Tensor, dims: Dims, factor: str
    ) -> None:
        if _has(dims, factor):
            expected = [self._cut(value, dims, factor, half) for half in range(2)]
            if not all_near(actual, expected):
                raise InputError(f"{self.call}: {what} is not a part of that of one device")
        elif not all_near([actual[0] + actual[1]], [value]):
            raise InputError(f"{self.call}: {what} does not add up to that of one device")

    def _cut(self, x: Tensor, dims: Dims, factor: str, half: int) -> Tensor:
        """Return the entries of a tensor whose index of a factor is in one of its halves."""
        for dim, names in enumerate(dims):
            if factor in names:
                sizes = [self.rule.sizes[name] for name in names]
                outer, inner = x.shape[:dim], x.shape[dim + 1 :]
                digits = x.reshape(*outer, *sizes, *inner)
                part = digits.chunk(2, dim + names.index(factor))[half]
                x = part.reshape(*outer, x.shape[dim] // 2, *inner)
        return x


def _has(dims: Dims, factor: str) -> bool:
    return any(factor in names for names in dims)


def _random_like(x: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
