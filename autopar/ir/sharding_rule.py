"""The notation in which ops say how they may be split: factors, as in einsum and einops.

    rule(aten.linear.default, "... k, n k, n -> ... n", sum="k", added="2")

Every operand and every result lists the factors (loop dims) of its dims, outer first inside
parentheses. If a mesh axis is given factor f, operands with f are sharded on it, operands without
it replicated; results with f are sharded, results without it partial. What else an op allows is
said by name:

    sum      factors that results lack because they are summed: results are partial where split
    whole    factors that no axis may split
    shared   factors that a sharded implementation may split: results that lack them are invariant
    added    operands that are added once: partial where the result is partial
    linear   groups of operands ("0", "0 1") through which partial values pass together
    index    operand -> factor that this operand indexes: without gradient, never partial
    product  "m | n | k": the roles of the factors of a matrix product

An op whose backward is not linear in the gradient it is given (a custom one that clips) is
`nonlinear`: no rank may run it on a part of that gradient, so where it is not split it is I.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from autopar._compat import OpOverload

Dims = tuple[tuple[str, ...], ...]  # the factors of every dim of one tensor, outer first


class PatternError(AssertionError):
    """A rule's pattern does not fit the tensors it was applied to: a mistake in the table."""


# The products of attention's backward against those of its forward: five (the scores again, and
# the gradients of scores, values, queries and keys) against two. Source: FlashAttention-2, arXiv
# 2307.08691, section 3.
ATTENTION_BACKWARD = 2.5


class Attends(NamedTuple):
    """What the time of an attention depends on besides its FLOPs, and no layout changes: keys are
    never split. `head_size`: the mean of that of the queries and that of the values.
    """

    keys: int
    head_size: float
    causal: bool

    def flops(self, queries: float) -> float:
        """Of one forward of so many queries, over all samples and heads. Kernels skip what a causal
        mask hides, block by block, so half of the products is counted: as many queries as keys.

        >>> Attends(8, 4.0, True).flops(8)
        512.0
        """
        return 4.0 * queries * self.keys * self.head_size / (2 if self.causal else 1)


@dataclass(frozen=True)
class OpShardingRule:
    """How one node may be split: the factors of its operands and results, their sizes, and what
    each allows.
    """

    operands: tuple[Dims | None, ...]  # None: an operand that is absent
    results: tuple[Dims, ...]
    sizes: dict[str, int]
    sum: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    added: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    index: frozenset[int] = frozenset()
    product: tuple[frozenset[str], frozenset[str], frozenset[str]] | None = None
    flops: float = 0.0  # of one forward evaluation
    attends: Attends | None = None  # of attention
    nonlinear: bool = False
    found: str = "rule"  # "rule", "probe", or "none": where it came from

    def splittable(self, factor: str) -> bool:
        if factor in self.whole or self.sizes[factor] == 1:
            return False
        kept = all(any(factor in dim for dim in result) for result in self.results)
        return kept or factor in self.sum or factor in self.shared


RuleBuilder = Callable[[fx.Node], OpShardingRule]
TABLE: dict[Any, RuleBuilder] = {}


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of a node's (fake) value."""
    return tuple(int(size) for size in value.shape)


def value_of(node: fx.Node) -> Any:
    return node.meta["val"]


def arguments_of(node: fx.Node) -> list[Any]:
    """What the op's schema says of each of its arguments."""
    assert isinstance(node.target, OpOverload), node.target
    return list(node.target._schema.arguments)


def bound(node: fx.Node) -> dict[str, Any]:
    """The node's arguments by the names of its op's schema, defaults filled in."""
    values: dict[str, Any] = {}
    for position, argument in enumerate(arguments_of(node)):
        if position < len(node.args):
            values[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            values[argument.name] = node.kwargs[argument.name]
        else:
            values[argument.name] = argument.default_value if argument.has_default_value() else None
    return values


def operands_of(node: fx.Node) -> list[fx.Node | None]:
    """The tensors that a node takes, in the order of its schema; lists are laid out flat, absent
    optional ones are None.
    """
    if not isinstance(node.target, OpOverload):
        return [argument for argument in node.args if isinstance(argument, fx.Node)]
    found: list[fx.Node | None] = []
    values = bound(node)
    for argument in arguments_of(node):
        if "Tensor" not in str(argument.type):
            continue
        value = values[argument.name]
        if isinstance(value, list | tuple):
            found.extend(item if isinstance(item, fx.Node) else None for item in value)
        else:
            found.append(value if isinstance(value, fx.Node) else None)
    return found


def results_of(node: fx.Node) -> list[Any]:
    """The (fake) tensors that a node returns; None for results that are no tensors."""
    value = value_of(node)
    return list(value) if isinstance(value, list | tuple) else [value]


def rule(
    target: Any,
    pattern: str,
    *,
    sum: str = "",
    whole: str = "",
    shared: str = "",
    added: str = "",
    linear: tuple[str, ...] = (),
    index: str = "",
    product: str | None = None,
) -> None:
    """Add one line to the table; see the module's docstring for the notation."""
    line = _Pattern(target, pattern)

    def build(node: fx.Node) -> OpShardingRule:
        operands, results, sizes = line.fitted(node)
        roles = None
        if product:
            m, n, k = (_names(part, sizes) for part in product.split("|"))
            roles = (m, n, k)
        return OpShardingRule(
            operands,
            results,
            sizes,
            _names(sum, sizes),
            _names(whole, sizes),
            _names(shared, sizes),
            _numbers(added),
            tuple(_numbers(group) for group in linear),
            _numbers(index),
            roles,
            2.0 * math.prod(sizes.values()) if roles else 0.0,
        )

    TABLE[target] = build


Fitted = tuple[tuple[Dims | None, ...], tuple[Dims, ...], dict[str, int]]


class _Pattern:
    """The pattern of one line of the table."""

    def __init__(self, target: Any, text: str) -> None:
        self.target, self.text = target, text
        left, right = text.split("->")
        self.operands = [_parse(part) for part in left.split(",")]
        self.results = [_parse(part) for part in right.split(",")]

    def fitted(self, node: fx.Node) -> Fitted:
        """The factors of a node's operands and results, and the factors' sizes."""
        tensors = [None if n is None else shape_of(value_of(n)) for n in operands_of(node)]
        outputs = [shape_of(value) for value in results_of(node) if value is not None]
        sizes: dict[str, int] = {}
        try:
            operands = tuple(
                None if shape is None else _match(dims, shape, sizes)
                for dims, shape in zip(self.operands, tensors, strict=False)
            )
            results = tuple(
                _match(dims, shape, sizes)
                for dims, shape in zip(self.results, outputs, strict=False)
            )
        except PatternError as error:
            raise PatternError(
                f"{self.target}: {self.text!r} does not fit {tensors} -> {outputs}: {error}"
            ) from None
        return operands, results, sizes


def _names(text: str, sizes: dict[str, int]) -> frozenset[str]:
    """Factors by name; "...": all those of the dims that it stands for."""
    rest = [name for name in sizes if name.startswith("_")]
    words = ((rest if word == "..." else [word]) for word in text.split())
    return frozenset(name for found in words for name in found)


def _numbers(text: str) -> frozenset[int]:
    return frozenset(int(number) for number in text.split())


_TOKEN = re.compile(r"\(([^)]*)\)|(\S+)")


def _parse(text: str) -> list[tuple[str, ...]]:
    return [tuple((group or single).split()) for group, single in _TOKEN.findall(text)]


def _match(dims: list[tuple[str, ...]], shape: tuple[int, ...], sizes: dict[str, int]) -> Dims:
    """The factors of every dim of a tensor of this shape; fills in and checks their sizes."""
    spread = [dim for dim in dims if dim == ("...",)]
    extra = len(shape) - (len(dims) - len(spread))
    if extra < 0 or (extra and not spread):
        raise PatternError(f"{len(shape)} dims for {len(dims)} patterns")
    full: list[tuple[str, ...]] = []
    for dim in dims:
        full.extend([(f"_{i}",) for i in range(extra)] if dim == ("...",) else [dim])
    for factors, size in zip(full, shape, strict=True):
        _solve(factors, size, sizes)
    return tuple(tuple(f for f in factors if f != "1") for factors in full)


def _solve(factors: tuple[str, ...], size: int, sizes: dict[str, int]) -> None:
    """Set the one unknown factor of a dim, and check that the product is its size."""
    if factors == ("1",):
        if size != 1:
            raise PatternError(f"size {size} where 1 is wanted")
        return
    known = math.prod(sizes[f] for f in factors if f in sizes)
    unknown = [f for f in factors if f not in sizes]
    if len(unknown) == 1 and known and size % known == 0:
        sizes[unknown[0]] = size // known
    elif unknown or known != size:
        raise PatternError(f"factors {' '.join(factors)} of sizes {sizes} for a dim of {size}")


@dataclass
class _Walk:
    """Two shapes walked together: the factors of each side's dims, where products agree."""

    sizes: dict[str, int] = field(default_factory=dict)
    left: list[tuple[str, ...]] = field(default_factory=list)
    right: list[tuple[str, ...]] = field(default_factory=list)


def view_factors(
    source: tuple[int, ...], target: tuple[int, ...]
) -> tuple[dict[str, int], Dims, Dims, frozenset[str]]:
    """The factors of a view between two shapes of equal size: (8, 4, 5) -> (2, 16, 5) is "(a b) c d
    -> a (b c) d".

    Returns (sizes, dims of the source, dims of the target, factors that cannot be split). Where a
    stretch of the two shapes shares no divisor chain ((6, 2) -> (4, 3) does from the outside up to
    2), what remains of it is one unsplittable factor a side.
    """
    walk = _Walk()
    whole: set[str] = set()
    i = j = 0
    while i < len(source) or j < len(target):
        a, b, i, j = _stretch(source, target, i, j)
        _stretch_factors(walk, whole, a, b)
    return walk.sizes, tuple(walk.left), tuple(walk.right), frozenset(whole)


def _stretch(
    source: tuple[int, ...], target: tuple[int, ...], i: int, j: int
) -> tuple[list[int], list[int], int, int]:
    """The shortest next stretch of dims of both shapes with equal products."""
    a = list(source[i : i + 1])
    b = list(target[j : j + 1])
    i, j = i + len(a), j + len(b)
    while math.prod(a) != math.prod(b):
        if (math.prod(a) < math.prod(b) and i < len(source)) or j >= len(target):
            a.append(source[i])
            i += 1
        else:
            b.append(target[j])
            j += 1
    return a, b, i, j


def _stretch_factors(walk: _Walk, whole: set[str], a: list[int], b: list[int]) -> None:
    """Cut both sides at the suffix products of either that form one divisor chain."""
    total = math.prod(a)
    cuts = _chain(_suffixes(a) | _suffixes(b), total)
    names: list[tuple[str, int, int]] = []  # factor, unit, size; outer first
    for unit, upper in zip(cuts[1:], cuts[:-1], strict=True):
        name = f"f{len(walk.sizes)}"
        walk.sizes[name] = upper // unit
        names.append((name, unit, upper // unit))
    for dims, out in ((a, walk.left), (b, walk.right)):
        flat = total
        for size in dims:
            unit = flat // size
            inside = tuple(n for n, u, s in names if u >= unit and u * s <= flat and s > 1)
            if math.prod(walk.sizes[n] for n in inside) != size:
                extra = f"f{len(walk.sizes)}"
                walk.sizes[extra] = size
                whole.update((extra, *(n for n, u, s in names if u < flat and u * s > unit)))
                inside = (extra,)
            out.append(inside)
            flat = unit


def _suffixes(dims: list[int]) -> set[int]:
    units, unit = {1}, 1
    for size in reversed(dims):
        unit *= size
        units.add(unit)
    return units


def _chain(units: set[int], total: int) -> list[int]:
    """The members of `units` that form a divisor chain, walked from the outside (`total`) in; 1
    closes it.
    """
    chain = [total]
    for unit in sorted(units, reverse=True):
        if unit < chain[-1] and chain[-1] % unit == 0:
            chain.append(unit)
    if chain[-1] != 1:
        chain.append(1)
    return chain
