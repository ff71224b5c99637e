"""The communication of a plan as a closed form in the sizes of the model and of the mesh's axes.

For example 2·(1 - 1/Gx)·e·b·s·h/(Gdata·Gz·Gy) is the all-reduce over x of a matmul's result: every
collective of the emitted graph sends a part of an unsharded value that is a product of local sizes,
so its bytes are the ring's part (`communication.sent`) times that product. Equal collectives are
added up, over layers too.

`plan.formula(pattern)` calls `formula`; the result evaluates at other sizes and prints itself.
symbols.py names the sizes.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import sympy
from numpy.typing import NDArray
from rich.table import Table
from sympy import Expr, Integer, Symbol

from autopar.cost.communication import SentCollective, sent, sent_collectives
from autopar.cost.microbatches import times
from autopar.cost.symbols import Names, meaning
from autopar.errors import PlanError
from autopar.ir.layout import Layout
from autopar.ir.program import Program

Sizes = Mapping[str, Any]
ELEMENT = Symbol("e", positive=True)


def ranks_of(axis: str) -> Symbol:
    """Return the symbol of an axis' size: Gx for x."""
    return Symbol(f"G{axis}", positive=True)


def group_of(axes: Iterable[str]) -> Expr:
    """Return the number of ranks of a group over these axes."""
    return sympy.prod([ranks_of(axis) for axis in axes])


@dataclass(frozen=True)
class Term:
    """Equal collectives: `count` of them, each of `elements` (the unsharded value of the ring
    formulas) of `element_bytes`, over `axes`.
    """

    kind: str
    axes: tuple[str, ...]
    backward: bool
    elements: Expr
    element_bytes: Expr
    count: int = 1

    @property
    def bytes(self) -> Expr:
        """Bytes that a rank sends in all of them."""
        return (
            self.count * sent(self.kind, group_of(self.axes)) * self.elements * self.element_bytes
        )


@dataclass(frozen=True)
class Formula:
    """The bytes that a rank sends in a training step, for the subgraphs that `pattern` names.

    `sizes` are the plan's own: the value of every symbol of `terms` there. The formula holds
    wherever the same layout does; at sizes that do not divide, it gives what no plan could do.

    Example: plan.formula("blocks.*.mlp").bytes(Gx=[1, 2, 4], Gy=[4, 2, 1])
    """

    pattern: str
    chains: tuple[str, ...]
    terms: tuple[Term, ...]
    sizes: dict[Symbol, float]

    @property
    def forward(self) -> Expr:
        return sympy.Add(*(term.bytes for term in self.terms if not term.backward))

    @property
    def backward(self) -> Expr:
        return sympy.Add(*(term.bytes for term in self.terms if term.backward))

    @property
    def total(self) -> Expr:
        return self.forward + self.backward

    def bytes(self, **sizes: Any) -> NDArray[np.float64]:
        """Return the bytes that a rank sends at these sizes: numbers or arrays that broadcast; the
        plan's own for sizes that are not named. Raises PlanError for a name that the formula does
        not have.
        """
        sent_bytes = self.each(**sizes)
        shape = np.broadcast_shapes(*(np.shape(size) for size in sizes.values()))
        return sum(
            (term.count * sent for term, sent in zip(self.terms, sent_bytes, strict=True)),
            np.zeros(shape),
        )

    def each(self, **sizes: Any) -> list[NDArray[np.float64]]:
        """Return the bytes that a rank sends in one collective of every term, at these sizes."""
        values = self._values(sizes)
        return [
            np.asarray(
                sent(term.kind, math.prod(values[ranks_of(a)] for a in term.axes)) * value_bytes
            )
            for term, value_bytes in zip(self.terms, self.wholes(**sizes), strict=True)
        ]

    def wholes(self, **sizes: Any) -> list[NDArray[np.float64]]:
        """Return the bytes of the unsharded value (the ring formulas' B) of one collective of every
        term: what `cost.communication.collective_cost` prices.
        """
        return [
            np.asarray(value_bytes) for value_bytes in self._wholes(*self._values(sizes).values())
        ]

    def _values(self, sizes: Sizes) -> dict[Symbol, NDArray[np.float64]]:
        """Return the value of every symbol: the given sizes, and the plan's own for others."""
        named = {symbol.name: symbol for symbol in self.sizes}
        unknown = [name for name in sizes if name not in named]
        if unknown:
            raise PlanError(
                f"the formula of {self.pattern} has no size {', '.join(unknown)}; it has "
                f"{', '.join(named)}"
            )
        named_sizes = {named[name]: size for name, size in sizes.items()}
        return {s: np.asarray(named_sizes.get(s, own), np.float64) for s, own in self.sizes.items()}

    @cached_property
    def _wholes(self) -> Any:
        """A function from the sizes to the unsharded bytes of one collective of every term."""
        wholes = [term.elements * term.element_bytes for term in self.terms]
        return sympy.lambdify(list(self.sizes), wholes, "numpy")

    # -- for people --------------------------------------------------------------------------------
    def lines(self) -> Iterator[tuple[bool, str, tuple[str, ...], int, str]]:
        """Yield (backward, kind, axes, how many, the closed form of their bytes), in the order of
        the step. Float32 sums inside sharded ops have lines of their own.
        """
        grouped: dict[tuple[bool, str, tuple[str, ...], Expr], list[Term]] = {}
        for term in sorted(self.terms, key=lambda term: term.backward):
            key = (term.backward, term.kind, term.axes, term.element_bytes)
            grouped.setdefault(key, []).append(term)
        for (backward, kind, axes, size), terms in grouped.items():
            elements = _sum_text([term.count * term.elements for term in terms], list(self.sizes))
            text = f"{_ring_share(kind, axes)}*{size}*{elements}"
            yield backward, kind, axes, sum(term.count for term in terms), text

    def _legend(self) -> str:
        meanings = {symbol: f" {meaning(symbol)}" for symbol in self.sizes if meaning(symbol)}
        meanings[ELEMENT] = " bytes an element"
        return ", ".join(f"{s} = {size}{meanings.get(s, '')}" for s, size in self.sizes.items())

    def _heading(self) -> str:
        subgraphs = (
            f"{len(self.chains)} × {self.pattern}" if len(self.chains) > 1 else self.chains[0]
        )
        return f"bytes a rank sends in a step: {subgraphs}"

    def _sums(self) -> str:
        values = self._values({})
        mb = [float(term.subs(values)) / 1e6 for term in (self.forward, self.backward)]
        return f"{mb[0]:.3f} MB forward + {mb[1]:.3f} MB backward = {sum(mb):.3f} MB"

    def __str__(self) -> str:
        lines = [self._heading()]
        for backward, kind, axes, count, text in self.lines():
            which = "backward" if backward else "forward "
            lines.append(f"  {which} {count:3d} {kind} {'+'.join(axes)}: {text}")
        return "\n".join([*lines, f"  sum: {self._sums()}", f"  where {self._legend()}"])

    def __rich__(self) -> Table:
        table = Table(title=self._heading(), title_justify="left", caption_justify="left")
        for name in ("", "collectives", "bytes"):
            table.add_column(name, overflow="fold")
        for backward, kind, axes, count, text in self.lines():
            which = "backward" if backward else "forward"
            table.add_row(which, f"{count} {kind} {'+'.join(axes)}", text)
        table.caption = f"sum: {self._sums()}\nwhere {self._legend()}"
        return table


def _ring_share(kind: str, axes: tuple[str, ...]) -> str:
    """Return the ring's share of the bytes, as people write it."""
    group = _divisor_text(group_of(axes))
    factor = "2*" if kind == "all_reduce" else ""
    return f"{factor}(1 - 1/{group})" + (f"/{group}" if kind == "all_to_all" else "")


def _divisor_text(expression: Expr) -> str:
    """Return an expression as it stands on the right of a division."""
    return str(expression) if expression.is_Symbol else f"({expression})"


def _sum_text(terms: Iterable[Expr], order: list[Symbol]) -> str:
    """Return a sum of products of sizes as text, with the terms of one denominator over it."""
    by_denominator: dict[Expr, Expr] = {}
    for term in terms:
        numerator, denominator = term.as_numer_denom()
        by_denominator[denominator] = by_denominator.get(denominator, Integer(0)) + numerator
    texts = []
    for denominator, numerator in by_denominator.items():
        number, divisor = denominator.as_coeff_Mul()
        text = _factors_text(sympy.factor_terms(numerator / number), order)
        texts.append(text if divisor == 1 else f"{text}/{_divisor_text(divisor)}")
    return texts[0] if len(texts) == 1 else f"({' + '.join(texts)})"


def _factors_text(expression: Expr, order: list[Symbol]) -> str:
    """Return a product as text with its symbols in this order, b*s*h; sympy's order is the
    alphabet's.
    """

    def place(factor: Expr) -> tuple[int, str]:
        base = factor.as_base_exp()[0]
        in_order = base in order
        return (order.index(base) if in_order else len(order) if base.is_Add else -1), str(factor)

    if expression.is_Add:
        return "(" + " + ".join(_factors_text(term, order) for term in expression.args) + ")"
    factors = sorted(sympy.Mul.make_args(expression), key=place)
    return "*".join(_factors_text(f, order) if f.is_Add else str(f) for f in factors)


# -- from a program --------------------------------------------------------------------------------
def formula(source: Program, program: Program, pattern: str = "*") -> Formula:
    """Return the formula of the bytes sent by the subgraphs that `pattern` names; a pattern that
    ends in a module's name means all below it.

    `source` is the traced and annotated program, `program` what was emitted for its plan. Raises
    PlanError where the pattern names no subgraph.
    """
    chains = [name for name in _chains(program) if _fits(name, pattern)]
    if not chains:
        names_text = ", ".join(_chains(program))
        raise PlanError(f"{pattern!r} names no subgraph of the plan; there are {names_text}")
    names = Names(source)
    counts: dict[Term, int] = {}
    sizes = [
        collective.element_bytes
        for collective in sent_collectives(program)
        if not collective.inside
    ]
    usual_bytes = max(set(sizes), key=sizes.count, default=4.0)
    for collective, count in zip(sent_collectives(program), times(program), strict=True):
        if collective.chain in chains:
            term = _term(collective, names, usual_bytes)
            counts[term] = counts.get(term, 0) + count
    terms = tuple(
        Term(t.kind, t.axes, t.backward, t.elements, t.element_bytes, count)
        for t, count in counts.items()
    )
    return Formula(pattern, tuple(chains), terms, _own_sizes(terms, names, program, usual_bytes))


def _chains(program: Program) -> list[str]:
    return list(
        dict.fromkeys(
            [c.name for c in program.chains] + [m.chain for m in sent_collectives(program)]
        )
    )


def _fits(name: str, pattern: str) -> bool:
    return fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(name, f"{pattern}.*")


def _term(move: SentCollective, names: Names, usual: float) -> Term:
    """Return the term of one collective. `inside` a sharded op the bytes of an element are a
    number, as they are not the model's.
    """
    elements: Expr = Integer(move.times)
    for dim in move.dims:
        elements *= _local(move.layout, dim, names.size(move.atoms[dim]))
    if move.traffic.collective == "all_to_all":
        elements *= group_of(move.axes)
    symbolic = move.element_bytes == usual and not move.inside
    size: Expr = ELEMENT if symbolic else Integer(move.element_bytes)
    return Term(move.traffic.collective, move.axes, move.backward, elements, size)


def _local(layout: Layout, dim: int, size: Expr) -> Expr:
    """Return the part of a dim of this size that a rank has."""
    return size / group_of(digit.axis for digit in layout.digits(dim))


def _own_sizes(
    terms: Iterable[Term], names: Names, program: Program, usual: float
) -> dict[Symbol, float]:
    """Return the plan's own value of every symbol that the terms use, and of every axis."""
    assert program.plan is not None
    used: set[Any] = set()
    for term in terms:
        used |= term.bytes.free_symbols
    axes = {ranks_of(axis.name): axis.size for axis in program.plan.mesh.axes}
    all_sizes: dict[Any, float] = {**names.sizes, **axes, ELEMENT: usual}
    return {symbol: size for symbol, size in all_sizes.items() if symbol in used or symbol in axes}
