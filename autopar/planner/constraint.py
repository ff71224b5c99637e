"""What a layout asks of the search: the role of each mesh axis, and what it leaves a node."""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from autopar.ir.dim_roles import Factors, Kinds, has_weight, loop_dim_of
from autopar.ir.layout import Layout, State
from autopar.ir.mesh import Mesh
from autopar.ir.sharding_rule import OpShardingRule
from autopar.ir.strategy import Choice, PartialPassThrough, Shapes, Slot, Strategy, strategies

aten = torch.ops.aten


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
        self,
        path: str,
        spec: OpShardingRule,
        factors: Factors,
        per_axis: Sequence[Sequence[Choice]],
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
        self, role: Role, spec: OpShardingRule, factors: Factors, choices: Sequence[Choice]
    ) -> list[Choice]:
        """What a role leaves of the choices of its axis; perhaps none."""
        slots: list[Slot] = [c for c in choices if isinstance(c, Slot)]
        idle: list[Choice] = [c for c in choices if not isinstance(c, Slot)]

        def among(splits: str, letters: str = "") -> list[Choice]:
            return [
                s
                for s in slots
                if self.kinds.allowed(splits, factors[s.factor][s.position])
                and (not letters or loop_dim_of(spec, s.factor) in letters)
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
            return [c for c in idle if not isinstance(c, PartialPassThrough)]
        if splits == "batch" or role.spread:
            return allowed or idle
        return [*allowed, *idle]

    def _on_residual(self, factors: Factors) -> bool:
        return any(
            atom.number in self.kinds.residual for chain in factors.values() for atom in chain
        )

    def joint(self, path: str, spec: OpShardingRule, found: Sequence[Strategy]) -> list[Strategy]:
        """The strategies in which axes that shall stay apart do; all of them where none does."""
        roles = self.roles(path)
        if roles is None or not has_weight(spec):
            return list(found)

        def stay_apart(strategy: Strategy) -> bool:
            letters = [slot and loop_dim_of(spec, slot.factor) for slot in strategy.slots]
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
        spec: OpShardingRule,
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


def fits(path: str, pattern: str) -> bool:
    return pattern == "*" or fnmatch.fnmatch(path, pattern) or fnmatch.fnmatch(path, f"{pattern}.*")
