"""Constraints: what a layout asks of the search, as a role for each mesh axis.

Example: in FSDP's layout the one axis may split only the batch, and every parameter is stored split
on it. A `Constraint` maps patterns of module paths to roles; it narrows the choices of a node and
the ways to store a parameter, and `Offered` is what remains for one node. named_layouts.py builds
constraints; exact_search.py, bound.py, why.py and bounds/option_costs.py apply them.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.ir.dim_roles import Factors, Kinds, has_weight, loop_dim_of
from autopar.ir.layout import I, Layout, R, State
from autopar.ir.mesh import Mesh
from autopar.ir.sharding_rule import HEADS_OF_A_KEY, KEY_HEADS, OpShardingRule
from autopar.ir.strategy import (
    AxisChoice,
    AxisOrders,
    PartialPassThrough,
    Shapes,
    Slot,
    Strategy,
    strategies,
)


@dataclass(frozen=True)
class Role:
    """What one mesh axis may do.

    `takes`: the loop dims of a matmul with a weight, among "mnk". `splits`: the atoms it may split:
    "batch", "sequence", "features" (neither of the two), "residual" and "inner" (features of the
    residual stream, and the others; a weight matmul that has none takes any feature), "unsequenced"
    (batch and features), "any". `elsewhere`: the same for ops other than matmuls ("" is as
    `splits`), and "sequence": the residual stream is split on its sequence, all else as "inner".
    `stored`: how parameters are stored: "whole", "every" (all are split), "split" (all but
    vectors), "any", or the loop dim of their matmul that is split, "n" or "k". `spread`: other ops
    split wherever they can. `apart`: no other axis takes the same loop dim of a matmul with a
    weight. `experts`: it splits experts where their weights are multiplied. `heads`: it splits the
    heads of attention, whatever it splits elsewhere.
    """

    takes: str = "mnk"
    splits: str = "any"
    elsewhere: str = ""
    stored: str = "any"
    spread: bool = False
    apart: bool = False
    experts: bool = False
    heads: bool = False

    def stores(self, dims: int, letters: Sequence[str | None]) -> list[bool]:
        """Return which of several ways to store a parameter with `dims` dims fit. Each way is the
        loop dim that its digit splits ("": not one of a matmul), or None if unsharded.
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
    """What a layout asks of the nodes on a mesh: a role per axis by module pattern. The first
    pattern that matches counts; a module without one is free.
    """

    name: str
    rules: tuple[tuple[str, tuple[Role, ...] | None], ...] = ()
    kinds: Kinds = field(default_factory=Kinds)
    letters: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # the loop dim of every dim of a parameter
    panels: tuple[str, ...] = ()  # SUMMA's row and column axes
    # how parameters are stored already, by placeholder: those have no other choice
    stored: Mapping[str, Layout] = field(default_factory=dict)
    free: bool = field(init=False, compare=False)  # whether it asks nothing of any module

    def __post_init__(self) -> None:
        object.__setattr__(self, "free", not self.rules)

    def roles(self, path: str) -> tuple[Role, ...] | None:
        """Return the role of every axis in the module at this path, None where it is free."""
        return next((roles for pattern, roles in self.rules if fits(path, pattern)), None)

    def narrow(
        self,
        path: str,
        rule: OpShardingRule,
        factors: Factors,
        per_axis: Sequence[Sequence[AxisChoice]],
    ) -> list[list[AxisChoice]]:
        """Return the choices that the layout leaves a node on each axis; all of them where it would
        leave none.
        """
        roles = self.roles(path)
        if roles is None:
            return [list(choices) for choices in per_axis]
        return [
            self.narrow_axis(role, rule, factors, choices) or list(choices)
            for role, choices in zip(roles, per_axis, strict=True)
        ]

    def narrow_axis(
        self, role: Role, rule: OpShardingRule, factors: Factors, choices: Sequence[AxisChoice]
    ) -> list[AxisChoice]:
        """Return the choices that a role leaves of one axis; the list may be empty."""
        slots: list[Slot] = [c for c in choices if isinstance(c, Slot)]
        idle: list[AxisChoice] = [c for c in choices if not isinstance(c, Slot)]

        def among(splits: str, letters: str = "") -> list[AxisChoice]:
            return [
                s
                for s in slots
                if self.kinds.allowed(splits, factors[s.factor][s.position])
                and (not letters or loop_dim_of(rule, s.factor) in letters)
            ]

        if role.experts and rule.product is not None and (split := among("experts")):
            if self._on_experts(rule, factors):
                return split
            if not has_weight(rule):  # as a dispatch of tokens to experts
                return [*split, *among(role.splits)]
        if role.heads and rule.attends is not None:
            return [s for s in slots if s.factor in (KEY_HEADS, HEADS_OF_A_KEY)]
        features_or_splits = "features" if role.splits in ("residual", "inner") else role.splits
        if has_weight(rule):
            taken = among(role.splits, role.takes) or among(features_or_splits, role.takes)
            # Tensor parallelism splits every expert, as long as there is something to split.
            inner = [s for s in taken if getattr(s, "factor", "") not in rule.uneven]
            return inner or taken or idle
        if rule.product is not None:
            wider = among(features_or_splits) if self._of_weight(rule, factors) else []
            return among(role.splits) or [*wider, *idle]
        if role.elsewhere == "sequence" and self._on_residual(factors):
            return among("sequence") or idle
        splits = "inner" if role.elsewhere == "sequence" else role.elsewhere or role.splits
        allowed = among(splits)
        if role.experts and (of_experts := among("experts")):
            return [*allowed, *of_experts] if allowed else [*of_experts, *idle]
        rows = splits in ("batch", "sequence")
        if rows and not allowed and math.prod(rule.sizes.values()) > 1:
            # Sums over rows are scalars by the time they are communicated.
            return [c for c in idle if not isinstance(c, PartialPassThrough)]
        if rows or role.spread:
            return allowed or idle
        return [*allowed, *idle]

    def _on_experts(self, rule: OpShardingRule, factors: Factors) -> bool:
        """Whether an operand holds something of each expert and nothing of a sample, as a weight
        of theirs.
        """
        weights = [
            {a.number for dim in dims for name in dim for a in factors[name]}
            for dims in rule.operands
            if dims is not None
        ]
        return any(x & self.kinds.experts and not x & self.kinds.batch for x in weights) and (
            bool(rule.uneven) or not has_weight(rule)
        )

    def _of_weight(self, rule: OpShardingRule, factors: Factors) -> bool:
        """Whether a product has an operand of n that holds nothing of a sample, as convolutions."""
        assert rule.product is not None
        return any(
            dims is not None
            and any(name in rule.product[1] for dim in dims for name in dim)
            and not any(
                atom.number in self.kinds.batch
                for dim in dims
                for name in dim
                for atom in factors[name]
            )
            for dims in rule.operands
        )

    def _on_residual(self, factors: Factors) -> bool:
        return any(
            atom.number in self.kinds.residual for chain in factors.values() for atom in chain
        )

    def joint(
        self, path: str, rule: OpShardingRule, strategies: Sequence[Strategy]
    ) -> list[Strategy]:
        """Return the strategies in which axes that must stay apart do; all of them where
        none does.
        """
        roles = self.roles(path)
        if roles is None or not has_weight(rule):
            return list(strategies)

        def stay_apart(strategy: Strategy) -> bool:
            letters = [slot and loop_dim_of(rule, slot.factor) for slot in strategy.slots]
            return all(
                letters.count(taken) == 1
                for taken, role in zip(letters, roles, strict=True)
                if taken and role.apart
            )

        return [strategy for strategy in strategies if stay_apart(strategy)] or list(strategies)

    def storage(self, name: str, path: str, candidates: Sequence[Layout]) -> list[Layout]:
        """Return the stored layouts of a parameter that obey the layout, axis by axis as far as its
        sizes allow. Only plain layouts remain: optimizers, checkpoints and `full_tensor` read
        stored parameters as DTensors, which express nothing else. The graph reshards from there to
        the digits that matmuls want.
        """
        layouts = [layout for layout in candidates if layout.is_plain]
        for index, role in enumerate(self.roles(path) or ()):
            letters = [self._letter(name, layout.states[index]) for layout in layouts]
            fits = role.stores(len(candidates[0].shape), letters)
            layouts = [layout for layout, fit in zip(layouts, fits, strict=True) if fit] or layouts
        return layouts

    def stored_already(self, name: str, gradient: bool) -> Layout | None:
        """Return the layout in which a parameter is stored already, None where it may be chosen. A
        value with a gradient is invariant where it is whole (I), one without is replicated (R).
        """
        layout = self.stored.get(name)
        if layout is None:
            return None
        for axis, state in zip(layout.mesh.names, layout.states, strict=True):
            if state.kind in ("I", "R"):
                layout = layout.with_state(axis, I if gradient else R)
        return layout

    def _letter(self, name: str, state: State) -> str | None:
        """Return the loop dim that a parameter's digit splits: None if unsharded, "" if unknown."""
        if state.kind != "S":
            return None
        return self.letters[name][state.dim] if name in self.letters else ""


class Offered(NamedTuple):
    """What the axes may do at a node: per axis the choices `allowed` of `every` choice, or one of
    the `joint` choices, with these `orders` of the axes that share an atom. `free`: the layout asks
    nothing of the node.
    """

    free: bool
    every: Sequence[Sequence[AxisChoice]] = ()
    allowed: Sequence[Sequence[AxisChoice]] = ()
    joint: tuple[tuple[AxisChoice, ...], ...] | None = None
    orders: AxisOrders = None

    def legal(
        self,
        rule: OpShardingRule,
        factors: Factors,
        mesh: Mesh,
        operand_shapes: Shapes,
        result_shapes: tuple[tuple[int, ...], ...],
    ) -> list[Strategy]:
        """Return the strategies that fit. Where what the layout asks of the axes does not fit
        together, axes may be idle.
        """
        node_facts = rule, factors, mesh, operand_shapes, result_shapes
        if self.joint is not None:
            return strategies(
                *node_facts, self.joint, may_idle=True, all_orders=True, axis_orders=self.orders
            )
        legal = strategies(*node_facts, itertools.product(*self.allowed), not self.free)
        return legal or strategies(
            *node_facts, itertools.product(*self._relaxed_choices()), not self.free
        )

    def _relaxed_choices(self) -> list[list[AxisChoice]]:
        return [
            [
                *allowed_choices,
                *(c for c in all_choices if c not in allowed_choices and not isinstance(c, Slot)),
            ]
            for allowed_choices, all_choices in zip(self.allowed, self.every, strict=True)
        ]


def fits(path: str, pattern: str) -> bool:
    """Whether a module path matches a pattern or lies below a module that does."""
    return pattern == "*" or fnmatch.fnmatch(path, pattern) or fnmatch.fnmatch(path, f"{pattern}.*")
