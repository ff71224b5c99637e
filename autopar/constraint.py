"""What a layout asks of the search: the role of each mesh axis, and what it leaves a node."""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import fx

from autopar.graphs import producer
from autopar.layout import Layout, State
from autopar.mesh import Mesh
from autopar.program import Annotations, Atom, Program
from autopar.rules import Spec, operands_of
from autopar.strategies import Choice, Shapes, Slot, Strategy, Through, strategies

aten = torch.ops.aten
Factors = dict[str, tuple[Atom, ...]]
_CARRY_ON = (aten._to_copy.default, aten.t.default, aten.transpose.int, aten.permute.default)


@dataclass(frozen=True)
class Role:
    """What one mesh axis may do.

    `takes`: the loop dims of a product with a weight, among "mnk". `splits`: which atoms it may
    split, "batch", "features" (what is neither batch nor sequence), "residual" and "inner"
    (features of the residual stream, and the others; a product with a weight that has none takes
    any feature), "unsequenced" (batch and features), "any". `elsewhere`: the same for ops that are
    no product ("" is as `splits`), and "sequence": the residual stream is split on its sequence,
    all else as "inner". `stored`: of parameters, "whole", "every" (all are split), "split" (all but
    vectors), "any", or the loop dim of their product that is split, "n" or "k". `spread`: ops that
    are no product split where they can. `apart`: no other axis takes the same loop dim of
    a product with a weight.
    """

    takes: str = "mnk"
    splits: str = "any"
    elsewhere: str = ""
    stored: str = "any"
    spread: bool = False
    apart: bool = False

    def stores(self, dims: int, letters: Sequence[str | None]) -> list[bool]:
        """Which of these ways to store a parameter of so many dims fit: each the loop dim that its
        digit splits ("": not one of a product), or None without a digit.
        """
        if self.stored == "whole":
            return [letter is None for letter in letters]
        if self.stored == "every" or (self.stored == "split" and dims > 1):
            return [letter is not None for letter in letters]
        if self.stored in ("n", "k") and any(letters):
            return [letter == self.stored for letter in letters]
        return [True] * len(letters)


@dataclass(frozen=True)
class Kinds:
    """Which atoms of a model are its batch, its sequence, and its residual stream: read off inputs
    and parameters.
    """

    batch: frozenset[int] = frozenset()
    sequence: frozenset[int] = frozenset()
    residual: frozenset[int] = frozenset()

    def allowed(self, splits: str, atom: Atom) -> bool:
        number = atom.number
        match splits:
            case "batch":
                return number in self.batch
            case "sequence":
                return number in self.sequence
            case "residual":
                return number in self.residual
            case "features":
                return number not in self.batch | self.sequence
            case "unsequenced":
                return number not in self.sequence
            case "inner":
                return number not in self.batch | self.sequence | self.residual
        return True


@dataclass(frozen=True)
class Constraint:
    """What a layout asks of the nodes on a mesh: a role per axis, by module pattern (the first that
    fits; none: free).
    """

    name: str
    rules: tuple[tuple[str, tuple[Role, ...] | None], ...] = ()
    kinds: Kinds = field(default_factory=Kinds)
    letters: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # of every dim of a parameter, in its product
    panels: tuple[str, ...] = ()  # row and column axis of SUMMA's panels

    def roles(self, path: str) -> tuple[Role, ...] | None:
        return next((roles for pattern, roles in self.rules if fits(path, pattern)), None)

    def narrow(
        self, path: str, spec: Spec, factors: Factors, per_axis: Sequence[Sequence[Choice]]
    ) -> list[list[Choice]]:
        """The choices of each axis for a node that the layout leaves; all of them where it would
        leave none.
        """
        roles = self.roles(path)
        if roles is None:
            return [list(choices) for choices in per_axis]
        return [
            self.narrow_one(role, spec, factors, choices) or list(choices)
            for role, choices in zip(roles, per_axis, strict=True)
        ]

    def narrow_one(
        self, role: Role, spec: Spec, factors: Factors, choices: Sequence[Choice]
    ) -> list[Choice]:
        """What a role leaves of the choices of its axis; perhaps none."""
        slots: list[Slot] = [c for c in choices if isinstance(c, Slot)]
        idle: list[Choice] = [c for c in choices if not isinstance(c, Slot)]

        def among(splits: str, letters: str = "") -> list[Choice]:
            return [
                s
                for s in slots
                if self.kinds.allowed(splits, factors[s.factor][s.position])
                and (not letters or letter(spec, s.factor) in letters)
            ]

        if has_weight(spec):
            either = "features" if role.splits in ("residual", "inner") else role.splits
            return among(role.splits, role.takes) or among(either, role.takes) or idle
        if spec.product is not None:
            return among(role.splits) or idle
        if role.elsewhere == "sequence" and self._on_residual(factors):
            return among("sequence") or idle
        splits = "inner" if role.elsewhere == "sequence" else role.elsewhere or role.splits
        allowed = among(splits)
        if splits == "batch" and not allowed and math.prod(spec.sizes.values()) > 1:
            # Sums over the batch are scalars by the time they travel.
            return [c for c in idle if not isinstance(c, Through)]
        if splits == "batch" or role.spread:
            return allowed or idle
        return [*allowed, *idle]

    def _on_residual(self, factors: Factors) -> bool:
        return any(
            atom.number in self.kinds.residual for chain in factors.values() for atom in chain
        )

    def joint(self, path: str, spec: Spec, found: Sequence[Strategy]) -> list[Strategy]:
        """The strategies in which axes that shall stay apart do; all of them where none does."""
        roles = self.roles(path)
        if roles is None or not has_weight(spec):
            return list(found)

        def stay_apart(strategy: Strategy) -> bool:
            letters = [slot and letter(spec, slot.factor) for slot in strategy.slots]
            return all(
                letters.count(taken) == 1
                for taken, role in zip(letters, roles, strict=True)
                if taken and role.apart
            )

        return [strategy for strategy in found if stay_apart(strategy)] or list(found)

    def storage(self, name: str, path: str, found: Sequence[Layout]) -> list[Layout]:
        """The stored layouts of a parameter that obey the layout: axis by axis, as far as its sizes
        allow. Only plain ones: optimizers, checkpoints and `full_tensor` read what is stored as
        DTensors, which mean nothing else. The graph reshards from there to the digits that products
        want.
        """
        kept = [layout for layout in found if layout.is_plain]
        for index, role in enumerate(self.roles(path) or ()):
            letters = [self._letter(name, layout.states[index]) for layout in kept]
            fits = role.stores(len(found[0].shape), letters)
            kept = [layout for layout, fit in zip(kept, fits, strict=True) if fit] or kept
        return kept

    def _letter(self, name: str, state: State) -> str | None:
        """The loop dim that a parameter's digit splits: None without one, "" if not known."""
        if state.kind != "S":
            return None
        return self.letters[name][state.dim] if name in self.letters else ""

    @property
    def free(self) -> bool:
        return not self.rules


class Offered(NamedTuple):
    """What the axes may do at a node: axis by axis what the layout has `kept` of `every` choice, or
    one of some `joint` choices. `free`: the layout asks nothing of the node.
    """

    free: bool
    every: Sequence[Sequence[Choice]] = ()
    kept: Sequence[Sequence[Choice]] = ()
    joint: tuple[tuple[Choice, ...], ...] | None = None

    def legal(
        self,
        spec: Spec,
        factors: Factors,
        mesh: Mesh,
        operand_shapes: Shapes,
        result_shapes: tuple[tuple[int, ...], ...],
        redundant: bool,
    ) -> list[Strategy]:
        """The strategies that come of it. Where what the layout asks of each axis does not fit
        together, an axis may be idle.
        """
        given = spec, factors, mesh, operand_shapes, result_shapes
        if self.joint is not None:
            return strategies(*given, self.joint, redundant=True, all_orders=True)
        redundant = redundant or not self.free
        found = strategies(*given, itertools.product(*self.kept), redundant)
        return found or strategies(*given, itertools.product(*self._eased()), redundant)

    def _eased(self) -> list[list[Choice]]:
        return [
            [*kept, *(c for c in every if c not in kept and not isinstance(c, Slot))]
            for kept, every in zip(self.kept, self.every, strict=True)
        ]


def goes_with_weight(notes: Annotations, node: fx.Node) -> bool:
    """Whether a node casts or transposes a parameter: it is laid out as the parameter's use wants
    it, whatever a layout asks of its module.
    """
    return node.target in _CARRY_ON and (node.name, 0) in notes.weights


def has_weight(spec: Spec) -> bool:
    """Whether a product has an operand without any dim of m: a weight."""
    if spec.product is None or not spec.product[1]:
        return False
    rows = spec.product[0]
    return any(
        dims is not None
        and not any(f in rows for dim in dims for f in dim)
        and any(f in spec.product[1] for dim in dims for f in dim)
        for dims in spec.operands
    )


def letter(spec: Spec, factor: str) -> str:
    """The loop dim that a factor of a product belongs to."""
    assert spec.product is not None
    return next((x for x, role in zip("mnk", spec.product, strict=True) if factor in role), "")


def fits(path: str, pattern: str) -> bool:
    return pattern == "*" or fnmatch.fnmatch(path, pattern) or fnmatch.fnmatch(path, f"{pattern}.*")


# -- facts about a model ---------------------------------------------------------------------------
def weighted(program: Program) -> Iterator[tuple[fx.Node, Spec]]:
    """The products with a weight, in the order of the graph."""
    assert program.annotations is not None
    for node in program.module.graph.nodes:
        spec = program.annotations.specs.get(node.name)
        if spec is not None and has_weight(spec):
            yield node, spec


def atoms_of(program: Program, node: fx.Node) -> dict[str, tuple[Atom, ...]]:
    """What the loop dims m, n and k of a product are made of."""
    assert program.annotations is not None
    spec, factors = program.annotations.specs[node.name], program.annotations.factors[node.name]
    assert spec.product is not None
    return {
        letter: tuple(atom for factor in role for atom in factors[factor])
        for letter, role in zip("mnk", spec.product, strict=True)
    }


def kinds_of(program: Program) -> Kinds:
    """Batch: the outermost atom of the first input's first dim. Sequence: the second dim of token
    ids. Residual: see `_residual`.
    """
    notes = program.annotations
    assert notes is not None
    sequence: set[int] = set()
    for entry in program.signature.inputs:
        dims = notes.dims.get((entry.node, 0), ())
        node = next(n for n in program.module.graph.nodes if n.name == entry.node)
        if entry.kind == "user" and len(dims) > 1 and not node.meta["val"].dtype.is_floating_point:
            sequence |= {atom.number for atom in dims[1]}
    batch = frozenset() if notes.batch is None else frozenset({notes.batch.number})
    residual = _residual(program)
    return Kinds(batch, frozenset(sequence) - residual, residual)


def _residual(program: Program) -> frozenset[int]:
    """Every second width in the chains of products, from the input of the first one on: that of the
    residual stream, where there is one. A product that has the same kind of width on both sides
    (BERT's head) changes nothing.
    """
    residual: set[int] = set()
    inner: set[int] = set()
    for node, _ in weighted(program):
        sides = atoms_of(program, node)
        far, near = ({atom.number for atom in sides[letter]} for letter in "nk")
        if near & inner or (far & residual and not near & residual):
            near, far = far, near
        residual |= near - inner
        inner |= far - residual
    return frozenset(residual)


def letters_of(program: Program) -> dict[str, tuple[str, ...]]:
    """For every parameter that is the weight of a product: the loop dim of each of its dims."""
    found: dict[str, tuple[str, ...]] = {}
    parameters = {entry.node for entry in program.signature.inputs if entry.kind == "parameter"}
    for node, spec in weighted(program):
        for operand, dims in zip(operands_of(node), spec.operands, strict=True):
            if (
                operand is not None
                and dims is not None
                and producer(operand)[0] in parameters
                and len(dims) > 1
            ):
                found[producer(operand)[0]] = tuple(
                    letter(spec, dim[0]) if dim else "" for dim in dims
                )
    return found
