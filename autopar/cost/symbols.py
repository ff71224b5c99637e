"""Names for the sizes of a model, as formulas use them: batch b, sequence s, residual width h,
inner width f, vocabulary v, attention heads, their size d.

They are read off the roles that atoms play: the kinds of the inputs' dims, the loop dims of the
matmuls with a weight, and what attention, embeddings and cross-entropy do with them. formula.py
makes a `Names` of a traced and annotated program and asks for the expression of each atom.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from sympy import Expr, Integer, Symbol

from autopar.ir.dim_roles import dim_kinds, loop_dim_atoms, weight_matmuls
from autopar.ir.program import Atom, Program
from autopar.ir.sharding_rule import OpShardingRule

_LITERAL = 4  # up to this, a size without a role, such as the 3 of a fused qkv, stays a number
_ATTENTION = {"g", "r", "q", "e", "k", "v"}  # the factors of scaled_dot_product_attention

MEANING = {
    "b": "batch",
    "s": "sequence",
    "h": "residual width",
    "f": "inner width",
    "v": "vocabulary",
    "c": "rows of another table",
    "heads": "attention heads",
    "g": "key heads",
    "r": "heads a key head",
    "d": "head size",
    "n": "a size without a role",
}


class Names:
    """The names of every atom of a traced and annotated program.

    `of`: an expression for each atom, by its number; `sizes`: the values of its symbols. Atoms that
    one dim is cut into keep the dim's name: the halves of a rotated head are 2 · (d/2).
    """

    def __init__(self, source: Program) -> None:
        self.of: dict[int, Expr] = {}
        self.sizes: dict[Symbol, int] = {}
        self._symbols: dict[tuple[str, int], Symbol] = {}
        for name, atoms in _roles(source):
            self._assign(name, atoms)

    def size(self, atoms: Iterable[Atom]) -> Expr:
        """Return the product of these atoms as an expression."""
        product: Expr = Integer(1)
        for atom in atoms:
            if atom.number not in self.of:
                self._assign("n", (atom,))
            product *= self.of[atom.number]
        return product

    def _assign(self, name: str, atoms: tuple[Atom, ...]) -> None:
        """Give these atoms of one dim the name, as far as they have none: the largest gets the
        symbol.
        """
        new = [atom for atom in atoms if atom.number not in self.of]
        largest = max(new, key=lambda atom: atom.size, default=None)
        if largest is None:
            return
        for atom in new:
            self.of[atom.number] = Integer(atom.size)
        if largest.size > _LITERAL or (name != "n" and len(new) == len(atoms)):
            others = math.prod(atom.size for atom in new) // largest.size
            self.of[largest.number] = self._symbol(name, largest.size * others) / others

    def _symbol(self, name: str, size: int) -> Symbol:
        """Return the symbol of a role and a size; layers share it where both are the same."""
        if (name, size) not in self._symbols:
            count = sum(role == name for role, _ in self._symbols)
            symbol = Symbol(f"{name}{count + 1}" if count else name, positive=True)
            self._symbols[name, size] = symbol
            self.sizes[symbol] = size
        return self._symbols[name, size]


def meaning(symbol: Symbol) -> str:
    """Return the meaning of a symbol in words: "f2" is another inner width."""
    return MEANING.get(symbol.name.rstrip("0123456789"), "")


def _roles(source: Program) -> Iterator[tuple[str, tuple[Atom, ...]]]:
    """Yield (name, the atoms that carry it), the surest roles first."""
    notes = source.annotations
    assert notes is not None
    yield "b", () if notes.batch is None else (notes.batch,)
    yield from (("s", dims) for dims in _token_dims(source))
    rules = [(rule, notes.factors[name]) for name, rule in notes.specs.items()]
    for rule, factors in rules:
        yield from _attention_roles(rule, factors)
    yield from _table_roles(rules)
    yield from _matmul_roles(source)


def _token_dims(source: Program) -> Iterator[tuple[Atom, ...]]:
    """Yield the second dim of a user's input, where it is the sequence."""
    assert source.annotations is not None
    sequence = dim_kinds(source).sequence
    for entry in source.signature.inputs:
        dims = source.annotations.dims.get((entry.node, 0), ())
        if entry.kind == "user" and len(dims) > 1 and sequence & {a.number for a in dims[1]}:
            yield dims[1]


def _attention_roles(
    rule: OpShardingRule, factors: dict[str, tuple[Atom, ...]]
) -> Iterator[tuple[str, tuple[Atom, ...]]]:
    """Yield the roles in an attention: heads, sequence and head size."""
    if not rule.sizes.keys() >= _ATTENTION:
        return
    grouped = rule.sizes["r"] > 1
    yield ("g" if grouped else "heads"), factors["g"]
    for factor, name in (("r", "r"), ("q", "s"), ("k", "s"), ("v", "d"), ("e", "d")):
        yield name, factors[factor]


def _table_roles(
    specs: list[tuple[OpShardingRule, dict[str, tuple[Atom, ...]]]],
) -> Iterator[tuple[str, tuple[Atom, ...]]]:
    """Yield the classes and rows that tokens index: the largest are the vocabulary."""
    tables = []
    for rule, factors in specs:
        if rule.index:
            tables += [(rule.sizes[f], factors[f]) for f in (*rule.shared, *rule.sum & {"v"})]
    largest = max((size for size, _ in tables), default=0)
    for size, atoms in tables:
        yield ("v" if size == largest else "c"), atoms


def _matmul_roles(source: Program) -> Iterator[tuple[str, tuple[Atom, ...]]]:
    """Yield the roles in the matmuls with a weight: residual width first, then inner width."""
    residual = dim_kinds(source).residual
    sides = [loop_dim_atoms(source, node) for node, _ in weight_matmuls(source)]
    for side in sides:
        for letter in "kn":
            yield "h", tuple(atom for atom in side[letter] if atom.number in residual)
    for side in sides:
        for letter in "kn":
            yield "f", side[letter]
