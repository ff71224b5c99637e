"""Op sharding rules: how an op may be split, in a notation of factors as in einsum and einops.

    rule(aten.linear.default, "... k, n k, n -> ... n", sum="k", added="2")

Every operand and every result lists the factors (loop dims) of its dims, outer first inside
parentheses. If a mesh axis splits factor f, operands with f are sharded on it, operands without it
replicated; results with f are sharded, results without it partial. Keywords say what else an op
allows:

    sum        factors that results lack because they are summed: results are partial where split
    whole      factors that no axis may split
    shared     factors that a sharded implementation may split: results that lack them are invariant
    added      operands that are added once: partial where the result is partial
    linear     groups of operands ("0", "0 1") through which partial values pass together
    index      operand -> factor that this operand indexes: without gradient, never partial
    product    "m | n | k": the roles of the factors of a matmul

An op whose backward is not linear in its incoming gradient (a custom one that clips) is
`nonlinear`: no rank may run it on a partial gradient, so where it is not split it is I. ops/rules
fills the `TABLE` of rules; annotate, strategy.py and cost read the rule of each node.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar._compat import OpOverload
from autopar.ir.band import Band

Dims = tuple[tuple[str, ...], ...]  # the factors of every dim of one tensor, outer first
KEY_HEADS, HEADS_OF_A_KEY = "g", "r"  # factors of attention: its queries have g · r heads


class PatternError(AssertionError):
    """A rule's pattern does not fit the tensors it was applied to: a mistake in the table."""


# The matmuls of attention's backward over those of its forward: five (the scores again, and the
# gradients of scores, values, queries and keys) over two. Source: FlashAttention-2, arXiv
# 2307.08691, section 3.
ATTENTION_BACKWARD = 2.5


class Attends(NamedTuple):
    """The properties of an attention that its time depends on besides its FLOPs. Keys are never
    split. `head_size`: the mean of the queries' and the values'. `share`: of attention computed in
    blocks (ops/sharded/masked_attention.py), the share of all pairs of queries and keys in them.
    """

    keys: int
    head_size: float
    causal: bool
    share: float | None = None

    def flops(self, queries: float) -> float:
        """Return the FLOPs of one forward with so many queries, over all samples and heads.
        Kernels skip the blocks that a causal mask hides, so half of the matmuls is counted; that
        holds for as many queries as keys.

        >>> Attends(8, 4.0, True).flops(8)
        512.0
        """
        pairs = queries * self.keys
        share = (0.5 if self.causal else 1.0) if self.share is None else self.share
        return 4.0 * pairs * self.head_size * share

    @property
    def backward_times(self) -> float:
        """The FLOPs of the backward over those of the forward; that of attention computed in blocks
        runs the forward again.
        """
        return ATTENTION_BACKWARD + (self.share is not None)


@dataclass(frozen=True)
class OpShardingRule:
    """How one node may be split: the factors of its operands and results, their sizes, and what
    each allows.
    """

    operands: tuple[Dims | None, ...]  # None: an absent operand
    results: tuple[Dims, ...]
    sizes: dict[str, int]
    sum: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    added: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    index: frozenset[int] = frozenset()
    product: tuple[frozenset[str], frozenset[str], frozenset[str]] | None = None
    flops: float = 0.0  # of one forward
    attends: Attends | None = None  # for attention
    band: Band | None = None  # for attention whose queries see other keys by their positions
    nonlinear: bool = False
    # Factors whose parts are not equal work, as experts with unequal numbers of tokens: where one
    # is split, the busiest rank does `skew` times the mean.
    uneven: frozenset[str] = frozenset()
    skew: float = 1.0
    inside: tuple[Dims, ...] = ()  # tensors that the op makes on the way, by their factors
    source: str = "rule"  # the source of the rule: "rule", "probe", or "none"

    def splittable(self, factor: str) -> bool:
        """Whether an axis may split this factor."""
        if factor in self.whole or self.sizes[factor] == 1:
            return False
        in_results = all(any(factor in dim for dim in result) for result in self.results)
        return in_results or factor in self.sum or factor in self.shared


RuleBuilder = Callable[[fx.Node], OpShardingRule]
TABLE: dict[Any, RuleBuilder] = {}


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a node's (fake) value."""
    return tuple(int(size) for size in value.shape)


def value_of(node: fx.Node) -> Any:
    """Return the (fake) value of a node."""
    return node.meta["val"]


def arguments_of(node: fx.Node) -> list[Any]:
    """Return the arguments in the schema of a node's op."""
    assert isinstance(node.target, OpOverload), node.target
    return list(node.target._schema.arguments)


def bound(node: fx.Node) -> dict[str, Any]:
    """Return a node's arguments by their names in the op's schema, defaults filled in."""
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
    """Return the tensor arguments of a node in the order of its schema; lists are flattened, absent
    optional ones are None.
    """
    if not isinstance(node.target, OpOverload):
        return [argument for argument in node.args if isinstance(argument, fx.Node)]
    operands: list[fx.Node | None] = []
    arguments = bound(node)
    for argument in arguments_of(node):
        if "Tensor" not in str(argument.type):
            continue
        value = arguments[argument.name]
        if isinstance(value, list | tuple):
            operands.extend(item if isinstance(item, fx.Node) else None for item in value)
        else:
            operands.append(value if isinstance(value, fx.Node) else None)
    return operands


def operand_shapes(node: fx.Node) -> tuple[tuple[int, ...] | None, ...]:
    """Return the shapes of a node's operands, None for one that is absent."""
    return tuple(None if n is None else shape_of(value_of(n)) for n in operands_of(node))


def result_shapes(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a node's results that are tensors."""
    return tuple(shape_of(v) for v in results_of(node) if isinstance(v, torch.Tensor))


def results_of(node: fx.Node) -> list[Any]:
    """Return the (fake) results of a node as a list; results that are no tensors are None."""
    value = value_of(node)
    return list(value) if isinstance(value, list | tuple) else [value]


def rule(target: Any, pattern: str, **allowed: Any) -> None:
    """Add one line to TABLE; the module's docstring explains the notation."""
    TABLE[target] = rule_builder(target, pattern, **allowed)


def rule_builder(
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
) -> RuleBuilder:
    """Return what gives the rule of a node whose op has this line."""
    line = Pattern(target, pattern)

    def build(node: fx.Node) -> OpShardingRule:
        operands, results, sizes = line.fitted(node)
        roles = None
        if product:
            m, n, k = (_factors_in(text, sizes) for text in product.split("|"))
            roles = (m, n, k)
        return OpShardingRule(
            operands,
            results,
            sizes,
            _factors_in(sum, sizes),
            _factors_in(whole, sizes),
            _factors_in(shared, sizes),
            _operands_in(added),
            tuple(_operands_in(group) for group in linear),
            _operands_in(index),
            roles,
            2.0 * math.prod(sizes.values()) if roles else 0.0,
        )

    return build


Fitted = tuple[tuple[Dims | None, ...], tuple[Dims, ...], dict[str, int]]


class Pattern:
    """The parsed pattern of one line of TABLE."""

    def __init__(self, target: Any, text: str) -> None:
        self.target, self.text = target, text
        left, right = text.split("->")
        self.operands = [_parse_dims(dims) for dims in left.split(",")]
        self.results = [_parse_dims(dims) for dims in right.split(",")]

    def fitted(self, node: fx.Node) -> Fitted:
        """Return the factors of a node's operands and results, and the factors' sizes. Raises
        PatternError where the pattern does not fit.
        """
        tensors = operand_shapes(node)
        outputs = [shape_of(value) for value in results_of(node) if value is not None]
        sizes: dict[str, int] = {}
        try:
            operands = tuple(
                None if shape is None else _match_dims(dims, shape, sizes)
                for dims, shape in zip(self.operands, tensors, strict=False)
            )
            results = tuple(
                _match_dims(dims, shape, sizes)
                for dims, shape in zip(self.results, outputs, strict=False)
            )
        except PatternError as error:
            raise PatternError(
                f"{self.target}: {self.text!r} does not fit {tensors} -> {outputs}: {error}"
            ) from None
        return operands, results, sizes


def _factors_in(text: str, sizes: dict[str, int]) -> frozenset[str]:
    """Return the factors that a text lists; "..." stands for all those of the dims it matched."""
    ellipsis_factors = [name for name in sizes if name.startswith("_")]
    factor_groups = ((ellipsis_factors if word == "..." else [word]) for word in text.split())
    return frozenset(name for factors in factor_groups for name in factors)


def _operands_in(text: str) -> frozenset[int]:
    """Return the operands that a text lists by number."""
    return frozenset(int(number) for number in text.split())


_TOKEN = re.compile(r"\(([^)]*)\)|(\S+)")


def _parse_dims(text: str) -> list[tuple[str, ...]]:
    """Return the factors of every dim: "(a b) c" is [("a", "b"), ("c",)]."""
    return [tuple((group or single).split()) for group, single in _TOKEN.findall(text)]


def _match_dims(dims: list[tuple[str, ...]], shape: tuple[int, ...], sizes: dict[str, int]) -> Dims:
    """Return the factors of every dim of a tensor of this shape; set and check their sizes."""
    spread = [dim for dim in dims if dim == ("...",)]
    extra = len(shape) - (len(dims) - len(spread))
    if extra < 0 or (extra and not spread):
        raise PatternError(f"{len(shape)} dims for {len(dims)} patterns")
    full: list[tuple[str, ...]] = []
    for dim in dims:
        full.extend([(f"_{i}",) for i in range(extra)] if dim == ("...",) else [dim])
    for factors, size in zip(full, shape, strict=True):
        _solve_sizes(factors, size, sizes)
    return tuple(tuple(f for f in factors if f != "1") for factors in full)


def _solve_sizes(factors: tuple[str, ...], size: int, sizes: dict[str, int]) -> None:
    """Set the one unknown factor of a dim, and check that its factors multiply to its size."""
    if factors == ("1",):
        if size != 1:
            raise PatternError(f"size {size} where 1 is wanted")
        return
    known_size = math.prod(sizes[f] for f in factors if f in sizes)
    unknown_factors = [f for f in factors if f not in sizes]
    if len(unknown_factors) == 1 and known_size and size % known_size == 0:
        sizes[unknown_factors[0]] = size // known_size
    elif unknown_factors or known_size != size:
        raise PatternError(f"factors {' '.join(factors)} of sizes {sizes} for a dim of {size}")


@dataclass
class _ViewWalk:
    """The factors of the dims of both shapes of a view, as far as they have been walked."""

    sizes: dict[str, int] = field(default_factory=dict)
    left: list[tuple[str, ...]] = field(default_factory=list)
    right: list[tuple[str, ...]] = field(default_factory=list)


def view_factors(
    source: tuple[int, ...], target: tuple[int, ...]
) -> tuple[dict[str, int], Dims, Dims, frozenset[str]]:
    """Return the factors of a view between two shapes of equal size: (sizes, dims of the source,
    dims of the target, factors that cannot be split).

    Example: (8, 4, 5) -> (2, 16, 5) is "(a b) c d -> a (b c) d".

    Where a stretch of the two shapes shares no divisor chain ((6, 2) -> (4, 3) does from the
    outside up to 2), what remains of it is one unsplittable factor a side.
    """
    walk = _ViewWalk()
    unsharded: set[str] = set()
    i = j = 0
    while i < len(source) or j < len(target):
        a, b, i, j = _stretch(source, target, i, j)
        _stretch_factors(walk, unsharded, a, b)
    return walk.sizes, tuple(walk.left), tuple(walk.right), frozenset(unsharded)


def _stretch(
    source: tuple[int, ...], target: tuple[int, ...], i: int, j: int
) -> tuple[list[int], list[int], int, int]:
    """Return the next shortest runs of dims of both shapes with equal products, and their ends."""
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


def _stretch_factors(walk: _ViewWalk, unsharded: set[str], a: list[int], b: list[int]) -> None:
    """Split both sides at the suffix products of either that form one divisor chain, and append the
    factors of their dims to `walk`.
    """
    total = math.prod(a)
    bounds = _divisor_chain(_suffix_products(a) | _suffix_products(b), total)
    pieces: list[tuple[str, int, int]] = []  # factor, unit, size; outer first
    for unit, upper in zip(bounds[1:], bounds[:-1], strict=True):
        name = f"f{len(walk.sizes)}"
        walk.sizes[name] = upper // unit
        pieces.append((name, unit, upper // unit))
    for dims, out in ((a, walk.left), (b, walk.right)):
        flat = total
        for size in dims:
            unit = flat // size
            factors = tuple(n for n, u, s in pieces if u >= unit and u * s <= flat and s > 1)
            if math.prod(walk.sizes[n] for n in factors) != size:
                extra = f"f{len(walk.sizes)}"
                walk.sizes[extra] = size
                unsharded.update((extra, *(n for n, u, s in pieces if u < flat and u * s > unit)))
                factors = (extra,)
            out.append(factors)
            flat = unit


def _suffix_products(dims: list[int]) -> set[int]:
    """Return the products of the last 0, 1, 2, … dims."""
    units, unit = {1}, 1
    for size in reversed(dims):
        unit *= size
        units.add(unit)
    return units


def _divisor_chain(units: set[int], total: int) -> list[int]:
    """Return the members of `units` that form a divisor chain from the outside (`total`) in; 1 ends
    it.
    """
    chain = [total]
    for unit in sorted(units, reverse=True):
        if unit < chain[-1] and chain[-1] % unit == 0:
            chain.append(unit)
    if chain[-1] != 1:
        chain.append(1)
    return chain
