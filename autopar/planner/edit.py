"""Edited plans: choices changed by hand are checked against the sharding rules before use. A model,
a plan and inputs enter `renew_plan`, a plan with new figures leaves. Called by api.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Hashable, Iterable, Sequence

from torch import fx

from autopar.errors import PlanError
from autopar.ir.dim_roles import loop_dim_of
from autopar.ir.graph import blocks, carries_gradient, producer, where
from autopar.ir.layout import I, Layout, R, State
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.plan import Choice, Plan
from autopar.ir.program import Annotations, Program
from autopar.ir.sharding_rule import (
    operand_shapes,
    operands_of,
    result_shapes,
    shape_of,
    value_of,
)
from autopar.ir.strategy import (
    AxisChoice,
    Slot,
    Strategy,
    axis_choices,
    placements,
    rule_key,
    strategies,
)

_SHOWN = 12  # strategies that a refusal lists
_ALIKE = 1e-6  # relative: what rounding may change of a figure


def check_edits(program: Program, plan: Plan) -> Plan:
    """Return the plan for this annotated program after checking every part of it, whatever its
    digests say. If they say that only `splits` were edited, layouts follow from these; if only
    layouts were, `splits` do. Raises PlanError with the node, what was asked and what is allowed.
    """
    return _Checker(program, plan).run()


def compare_figures(before: Plan, after: Plan) -> Plan:
    """Return the plan `after` loading, with notes on figures that differ from the file, and without
    a bound that it undercuts: such a plan is outside the layout that the bound is for.
    """
    notes = []
    if before.edited:
        notes.append(f"edited by hand since it was planned: {_listed(sorted(before.edited))}")
    gone = before.copies.keys() - after.copies.keys()
    notes.extend(f"the copy of {name} is dropped: nothing takes it so" for name, _ in sorted(gone))
    figures = {"seconds": "s", "comm_bytes": "bytes", "peak_bytes": "bytes"}
    for name, unit in figures.items():
        old, new = getattr(before, name), getattr(after, name)
        if abs(new - old) > _ALIKE * max(abs(old), abs(new)):
            notes.append(f"{name}: {new:,.6g} {unit} as worked out now, the file says {old:,.6g}")
    bound = after.bound if after.bound <= after.seconds * (1 + _ALIKE) else 0.0
    unsplit = () if before.edited else tuple(dict.fromkeys(after.unsplit))
    smaller = None if before.edited else after.smaller
    return dataclasses.replace(
        after, changed_figures=tuple(notes), bound=bound, unsplit=unsplit, smaller=smaller
    )


class _Checker:
    def __init__(self, program: Program, plan: Plan) -> None:
        assert program.annotations is not None
        self.program, self.plan, self.mesh = program, plan, plan.mesh
        self.notes: Annotations = program.annotations
        self.nodes = {node.name: node for node in program.module.graph.nodes}
        self.known: dict[Hashable, Choice] = {}

    def run(self) -> Plan:
        """Return the plan with every choice completed. Raises PlanError."""
        self._same_mesh()
        names = self.notes.searched & self.notes.specs.keys()
        calls = {n.name for n in self.nodes.values() if n.op == "call_function"}
        stored = {n.name for n in self.nodes.values() if n.op == "placeholder"}
        _same_names("choices", self.plan.choices.keys(), names & calls)
        _same_names("stored", self.plan.stored.keys(), self.notes.searched & stored)
        choices = {name: self._completed_choice(name, c) for name, c in self.plan.choices.items()}
        for name, layout in self.plan.stored.items():
            self._stored(name, layout)
        self._outputs()
        self._blocks()
        plan = dataclasses.replace(self.plan, choices=choices)
        return dataclasses.replace(plan, copies=self._copies(plan))

    def _same_mesh(self) -> None:
        if max(1, self.mesh.size) != self.plan.world.ranks:
            raise PlanError(
                f"the plan's mesh {self.mesh} has {self.mesh.size} ranks, its world "
                f"{self.plan.world.ranks}: edit both or neither"
            )

    # -- nodes -------------------------------------------------------------------------------------
    def _completed_choice(self, name: str, choice: Choice) -> Choice:
        """Return the completed choice; equal layers are checked once."""
        node, rule = self.nodes[name], self.notes.specs[name]
        shapes = operand_shapes(node), result_shapes(node)
        key = rule_key(rule, self.notes.factors[name]), shapes, self._gradient(node)
        if (key, choice) not in self.known:
            self.known[key, choice] = self._choice(name, choice)
        return self.known[key, choice]

    def _choice(self, name: str, choice: Choice) -> Choice:
        """Return the completed choice, derived from the part that was edited."""
        node, edited = self.nodes[name], self.plan.edited
        if self.mesh.axes and len(choice.splits) not in (0, len(self.mesh.axes)):
            raise PlanError(
                f"{where(node)}: the plan splits {_listed(choice.splits)}, the mesh {self.mesh} "
                f"has {len(self.mesh.axes)} axes: one each"
            )
        if not choice.results and not choice.splits:
            raise PlanError(f"{where(node)}: the plan has neither splits nor layouts for it")
        strategy = self._by_splits(node, choice) if not choice.results else None
        if strategy is None:
            strategy = self._by_layouts(node, choice)
        names = [self._names(node, split) for split in strategy.splits]
        if choice.splits and not all(map(operator.contains, names, choice.splits)):
            if edited == {"splits"}:
                strategy = self._by_splits(node, choice)
            elif edited != {"layouts"}:
                raise PlanError(
                    f"{where(node)}: the plan splits {_listed(choice.splits)}, but its operands "
                    f"and results lie as if it split {_listed(strategy.splits)}: change both, or "
                    "remove the one that shall follow from the other"
                )
        return Choice(strategy.splits, strategy.operands, strategy.results)

    def _by_layouts(self, node: fx.Node, choice: Choice) -> Strategy:
        """Return the strategy that has these layouts. Raises PlanError where none has."""
        text = _text(choice.operands, choice.results)
        wanted = [*operand_shapes(node), *result_shapes(node)]
        layouts = [*choice.operands, *choice.results]
        if [None if x is None else x.shape for x in layouts] != wanted:
            raise PlanError(
                f"{where(node)}: the plan has layouts of {_shapes_text(layouts)}, its tensors are "
                f"{', '.join(str(shape) for shape in wanted)}"
            )
        per_axis = []
        for place, axis in enumerate(self.mesh.axes):
            options = self._on_axis(node, axis)
            per_axis.append([x.choices[0] for x in options if _same_states(x, choice, place)])
            if not per_axis[-1]:
                raise PlanError(
                    f"{where(node)}: the plan lays {text}, which no way to run it does on axis "
                    f"{axis.name} of {axis.size}. There it may be {_strategies_text(options)}"
                )
        legal = self._strategies(node, self.mesh, per_axis)
        same = [x for x in legal if (x.operands, x.results) == (choice.operands, choice.results)]
        if not same:
            may = "; ".join(_text(x.operands, x.results) for x in legal[:_SHOWN])
            may = f"it may lie {may}" if may else "so many axes do not fit into one loop dim"
            raise PlanError(
                f"{where(node)}: the plan lays {text}, whose digits do not go together: {may}"
            )
        return next((x for x in same if x.splits == choice.splits), same[0])

    def _by_splits(self, node: fx.Node, choice: Choice) -> Strategy:
        """Return a strategy with these splits; of several the one closest to the layouts given."""
        per_axis = []
        for axis, split in zip(self.mesh.axes, choice.splits, strict=True):
            options = self._on_axis(node, axis)
            names = [self._names(node, x.splits[0]) for x in options]
            fits = [x.choices[0] for x, own in zip(options, names, strict=True) if split in own]
            per_axis.append(fits)
            if not fits:
                able = dict.fromkeys(" or ".join(own) for own in names)
                raise PlanError(
                    f"{where(node)}: the plan splits {split!r} on axis {axis.name} of {axis.size}, "
                    f"which may be {', '.join(able)}"
                )
        legal = self._strategies(node, self.mesh, per_axis)
        if not legal:
            raise PlanError(
                f"{where(node)}: the plan splits {_listed(choice.splits)}, which do not fit "
                f"together: {self._sizes(node)}"
            )
        layouts = (*choice.operands, *choice.results)
        return max(legal, key=lambda x: sum(map(operator.eq, (*x.operands, *x.results), layouts)))

    def _names(self, node: fx.Node, split: str) -> tuple[str, ...]:
        """Return the names of a factor: of a matmul, its loop dim (m, n or k) too."""
        rule = self.notes.specs[node.name]
        loop = loop_dim_of(rule, split) if rule.product is not None and split in rule.sizes else ""
        return (split,) if loop in ("", split) else (split, loop)

    def _sizes(self, node: fx.Node) -> str:
        factors = self.notes.factors[node.name]
        return ", ".join(
            f"{name} is {' × '.join(str(a.size) for a in atoms)}" for name, atoms in factors.items()
        )

    def _on_axis(self, node: fx.Node, axis: Axis) -> list[Strategy]:
        """Return every strategy of the node on a mesh of this axis alone."""
        rule, factors = self.notes.specs[node.name], self.notes.factors[node.name]
        mesh = Mesh((axis,))
        return self._strategies(node, mesh, axis_choices(rule, factors, mesh, self._gradient(node)))

    def _gradient(self, node: fx.Node) -> bool:
        return carries_gradient(self.notes, node)

    def _strategies(
        self, node: fx.Node, mesh: Mesh, per_axis: Sequence[Sequence[AxisChoice]]
    ) -> list[Strategy]:
        rule, factors = self.notes.specs[node.name], self.notes.factors[node.name]
        combinations = itertools.product(*per_axis)
        shapes = operand_shapes(node), result_shapes(node)
        return strategies(rule, factors, mesh, *shapes, combinations, True, True)

    # -- what is stored, handed out, kept ----------------------------------------------------------
    def _stored(self, name: str, layout: Layout) -> None:
        value = (name, 0)
        unsharded = I if value in self.notes.gradient else R
        self._placed(f"{name} is stored", name, layout, unsharded)

    def _outputs(self) -> None:
        laid = self.plan.choices.keys() | self.plan.stored.keys()
        entries = {
            str(number): entry
            for number, entry in enumerate(self.program.signature.outputs)
            if entry.node is not None and producer(self.nodes[entry.node])[0] in laid
        }
        _same_names("outputs", self.plan.outputs.keys(), frozenset(entries))
        for number, layout in self.plan.outputs.items():
            entry = entries[number]
            assert entry.node is not None
            if entry.kind == "mutation" and any(s != I for s in layout.states):
                raise PlanError(
                    f"output {number} is the new value of {entry.target}, which every rank holds "
                    f"whole: the plan lays it {layout}"
                )
            if self.plan.replicated_outputs and layout.axes_of("S"):
                raise PlanError(
                    f"output {number} is {_layout(layout)} by the plan, whose outputs are "
                    "replicated: leave it so, or set `replicated_outputs` to false"
                )
            self._placed(f"output {number} is handed out", entry.node, layout, I)

    def _placed(self, what: str, name: str, layout: Layout, unsplit: State) -> None:
        """Check a layout in which every axis has the state `unsplit` or holds a digit."""
        node = self.nodes[name]
        dims, shape = self.notes.dims[producer(node)], shape_of(value_of(node))
        if layout.shape != shape:
            raise PlanError(f"{what} as {layout.shape} by the plan, its shape is {shape}")
        if not layout.is_plain:
            order = [self.mesh.names[place] for place in self.mesh.storage_order]
            raise PlanError(
                f"{what} {_layout(layout)} by the plan, a tensor of {shape}. Of axes that share "
                f"a dim the first of {_listed(order)} takes the outermost digit, the next one "
                "the outermost of the rest, as plain Shards do: "
                f"{_layout(layout.plain_part())} could be"
            )
        names = {state.dim for state in layout.states if state.kind == "S"}
        choices = [self._slots(dims, axis, unsplit, names) for axis in self.mesh.axes]
        if layout in placements(dims, shape, self.mesh, unsplit, itertools.product(*choices)):
            return
        allowed = []
        for axis in self.mesh.axes:
            layouts = placements(dims, shape, Mesh((axis,)), unsplit)
            states = dict.fromkeys(_state(x.states[0]) for x in layouts)
            allowed.append(f"on axis {axis.name} of {axis.size}: {', '.join(states)}")
        raise PlanError(
            f"{what} {_layout(layout)} by the plan, a tensor of {shape}. Allowed are, alone "
            f"{'; '.join(allowed)}; axes that share a dim take disjoint digits of it"
        )

    def _slots(self, dims: object, axis: Axis, unsplit: State, names: set[int]) -> list[AxisChoice]:
        assert isinstance(dims, tuple)
        return [
            unsplit,
            *(
                Slot(str(dim), place)
                for dim in sorted(names)
                for place, atom in enumerate(dims[dim])
                if not atom.opaque and atom.size % axis.size == 0
            ),
        ]

    def _copies(self, plan: Plan) -> dict[tuple[str, int], Layout]:
        """Return the copies that some consumer still takes."""
        wanted: dict[tuple[str, int], set[Layout | None]] = {}
        for name, choice in plan.choices.items():
            for source, layout in zip(operands_of(self.nodes[name]), choice.operands, strict=True):
                if source is not None:
                    wanted.setdefault(producer(source), set()).add(layout)
        for number, layout in plan.outputs.items():
            entry = self.program.signature.outputs[int(number)]
            wanted.setdefault(producer(self.nodes[str(entry.node)]), set()).add(layout)
        return {v: layout for v, layout in plan.copies.items() if layout in wanted.get(v, ())}

    def _blocks(self) -> None:
        own = blocks(self.nodes.values())
        named = (
            (self.plan.recompute, "recomputes"),
            (self.plan.regather, "regathers"),
            (self.plan.rerun, "reruns"),
        )
        for names, does in named:
            unknown = [name for name in names if name not in own]
            if unknown:
                raise PlanError(
                    f"the plan {does} {unknown[0]!r}; the model's blocks are {_listed(own)}"
                )


def _same_names(what: str, names: Iterable[str], wanted: frozenset[str]) -> None:
    missing, strange = sorted(wanted - set(names)), sorted(set(names) - wanted)
    if missing or strange:
        text = f"lacks {missing[0]!r}" if missing else f"names {strange[0]!r}, which is not there"
        raise PlanError(f"`{what}` of the plan {text}: undo that, or plan again")


def _same_states(strategy: Strategy, choice: Choice, place: int) -> bool:
    """Whether a strategy on one axis gives that axis the states that a choice has."""

    def states_at(operands: Iterable[Layout | None], at: int) -> list[tuple[str, int] | None]:
        states = [None if x is None else x.states[at] for x in operands]
        return [s and (s.kind, s.dim) for s in states]

    choice_states = states_at((*choice.operands, *choice.results), place)
    return choice_states == states_at((*strategy.operands, *strategy.results), 0)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"


def _state(state: State) -> str:
    return f"S({state.dim},{state.stride})" if state.kind == "S" else state.kind


def _layout(layout: Layout | None) -> str:
    return "-" if layout is None else f"({' '.join(_state(s) for s in layout.states)})"


def _text(operands: Sequence[Layout | None], results: Sequence[Layout]) -> str:
    return f"{' '.join(map(_layout, operands))} -> {' '.join(map(_layout, results))}"


def _strategies_text(strategies: list[Strategy]) -> str:
    texts = dict.fromkeys(f"{x.splits[0]}: {_text(x.operands, x.results)}" for x in strategies)
    more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return "; ".join([*texts][:_SHOWN]) + more


def _shapes_text(layouts: Iterable[Layout | None]) -> str:
    return ", ".join("None" if x is None else str(x.shape) for x in layouts)
