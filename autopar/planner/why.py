"""Why a subgraph has its layout: the runners-up, and how much more each would cost in the full
plan.

Example: plan.why("layers.*.mlp.up") prints the choice "up x→n y→m" and a row per runner-up with its
extra seconds and bytes. A runner-up is fixed in all the nodes asked about, and everything else is
searched again around it, so its cost elsewhere (reshards, storage) is in the difference. An
annotated program, its plan and a pattern enter, a `Why` leaves. Called by PlanContext.why.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections import defaultdict
from typing import Any

from rich.console import Group
from rich.table import Table
from torch import fx

from autopar.cost.peak import peak
from autopar.cost.summary import letter_of
from autopar.errors import PlanError
from autopar.ir.graph import module_path, where
from autopar.ir.plan import Plan
from autopar.ir.plan_table import format_bytes, format_seconds
from autopar.ir.program import Program
from autopar.ir.strategy import AxisChoice, split_of
from autopar.passes import emit_program, recompute
from autopar.planner.bound import Bound, bound_on, near
from autopar.planner.constraint import Constraint
from autopar.planner.exact_search import Near, search, search_nearly
from autopar.planner.objective import CostTerms, cost_terms
from autopar.planner.plan_notes import uneven_notes_at
from autopar.planner.request import Layouts
from autopar.planner.space import candidates

_AROUND = (8, 4, 2)  # options per region elsewhere; fewer where tables outgrow memory
_READ = (4, 8, 16, 32, 64, 128)  # options per region among which runners-up are sought
_EACH = 4  # runners-up tried for every matmul
_NAMED = 6  # nodes whose choice is shown


@dataclasses.dataclass(frozen=True)
class Runner:
    """A choice that was not made: what it splits, how many seconds more the step would take (in all
    and by term), and how many bytes more a rank would hold at the peak.
    """

    layout: str
    more_seconds: float
    by_term: CostTerms
    more_bytes: float
    plan: Plan = dataclasses.field(repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class Why:
    """The answer of `plan.why`: print it with rich. `seconds` and `peak_bytes` are those of the
    chosen plan; recomputed blocks are not in the seconds. `notes`: sizes that no axis divides here.
    """

    pattern: str
    chosen: str
    seconds: float
    peak_bytes: float
    runners: tuple[Runner, ...]
    notes: tuple[str, ...] = ()

    def facts(self) -> dict[str, Any]:
        """Return everything but the plans as a dict."""
        facts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        names = ("layout", "more_seconds", "by_term", "more_bytes")
        return facts | {"runners": [{n: getattr(r, n) for n in names} for r in self.runners]}

    def __rich__(self) -> Group:
        title = f"{self.pattern}: {self.chosen}; the step takes {format_seconds(self.seconds)}"
        table = Table(title=title, title_justify="left", caption_justify="left")
        table.add_column("instead", overflow="fold")
        table.add_column("step", justify="right")
        table.add_column("of which", overflow="fold")
        table.add_column("memory", justify="right")
        for runner in self.runners:
            share = runner.more_seconds / self.seconds if self.seconds else 0.0
            by_size = sorted(runner.by_term.items(), key=lambda pair: -abs(pair[1]))
            terms = [
                f"{name} {_signed_seconds(s)}"
                for name, s in by_size
                if abs(s) > 1e-4 * self.seconds
            ]
            memory = (
                f"{'-' if runner.more_bytes < 0 else '+'}{format_bytes(abs(runner.more_bytes))}"
            )
            step = f"{_signed_seconds(runner.more_seconds)} ({share:+.2%})"
            table.add_row(runner.layout, step, ", ".join(terms) or "nothing to speak of", memory)
        table.caption = "\n".join((self._remark(), *self.notes))
        return Group(table)

    def _remark(self) -> str:
        if not self.runners:
            return "the layout leaves no other way here on this mesh"
        open_ = any(runner.more_seconds < 0 for runner in self.runners)
        faster = "; what is faster holds more, or lies within the search's gap" if open_ else ""
        return f"each fixed here, everything else searched again around it; modelled{faster}"


def why(program: Program, plan: Plan, layout: Layouts, pattern: str) -> Why:
    """Return the choice at the nodes that the pattern names, by module path or by name, and up to
    five runners-up. `program`: annotated. Raises PlanError where the pattern names nothing.
    """
    return _Question(program, plan, layout, pattern).answer()


class _Question:
    """One question to a plan: the groups of nodes asked about, and the searches around them."""

    def __init__(self, program: Program, plan: Plan, layout: Layouts, pattern: str) -> None:
        self.program, self.plan = program, plan
        self.pattern, self.world = pattern, plan.world
        self.groups = _groups(program, plan, pattern)
        self.spent = cost_terms(program, plan, plan.world)
        self.constraint = self._constraint(layout)

    def answer(self) -> Why:
        """Return the choice and its runners-up, the cheapest first."""
        plans: dict[str, Plan] = {}
        if self.plan.mesh.axes:
            bound = bound_on(self.program, self.plan.mesh, self.constraint, self.world)
            for names in self.groups:
                for choice in self._others(bound, names):
                    plan = self._around(bound, names, choice)
                    if plan is not None:
                        text = self._text(plan)
                        if text not in plans or plan.seconds < plans[text].seconds:
                            plans[text] = plan
        chosen = self._text(self.plan)
        plans.pop(chosen, None)
        best = sorted(plans.items(), key=lambda pair: pair[1].seconds)[:5]
        peak_bytes = self.plan.peak_bytes
        runners = tuple(self._runner(text, plan) for text, plan in best)
        chain_names = [name for names in self.groups for name in names]
        notes = uneven_notes_at(self.program, self.plan, chain_names)
        return Why(self.pattern, chosen, sum(self.spent.values()), peak_bytes, runners, notes)

    def _constraint(self, layout: Layouts) -> Constraint:
        """Return the constraint under which the plan was searched."""
        constraints = [
            c for m, c in candidates(layout, self.world.ranks, self.program) if m == self.plan.mesh
        ]
        if len(constraints) == 1:
            return constraints[0]
        seconds = sum(self.spent.values())

        def off(rules: Constraint) -> float:
            plan = search_nearly(self.program, self.plan.mesh, self.world, rules)
            return abs(plan.seconds - seconds)

        return min(constraints, key=off)

    def _others(self, bound: Bound, names: list[str]) -> list[tuple[AxisChoice, ...]]:
        """Return the most promising joint choices of the group's first node that split
        differently.
        """
        choices: dict[tuple[str, ...], tuple[AxisChoice, ...]] = {}
        chosen = self.plan.choices[names[0]].splits
        for most in _READ:
            for joint in near(bound, math.inf, most).get(names[0], ()):
                splits = tuple(map(split_of, joint))
                if splits != chosen:
                    choices.setdefault(splits, joint)
            if len(choices) >= _EACH:
                break
        return list(choices.values())[:_EACH]

    def _around(
        self, bound: Bound, names: list[str], choice: tuple[AxisChoice, ...]
    ) -> Plan | None:
        """Return the best plan in which these nodes make this choice; None where there is none."""
        for most in _AROUND:
            among: Near = {**near(bound, math.inf, most), **dict.fromkeys(names, (choice,))}
            try:
                return search(
                    self.program,
                    self.plan.mesh,
                    self.world,
                    self.constraint,
                    among,
                )
            except PlanError:
                continue
        return None

    def _runner(self, text: str, plan: Plan) -> Runner:
        terms = cost_terms(self.program, plan, self.world)
        more = {
            name: terms.get(name, 0.0) - self.spent.get(name, 0.0)
            for name in {**self.spent, **terms}
        }
        more_bytes = self._peak(plan) - self.plan.memory.waiting if self.plan.memory else 0.0
        return Runner(text, sum(terms.values()) - sum(self.spent.values()), more, more_bytes, plan)

    def _peak(self, plan: Plan) -> float:
        plan = dataclasses.replace(
            plan, recompute=self.plan.recompute, regather=self.plan.regather, rerun=self.plan.rerun
        )
        program = emit_program(dataclasses.replace(self.program, plan=plan), self.world)
        program = recompute.recompute(program)
        return peak(program, self.plan.optimizer, self.world).peak

    def _text(self, plan: Plan) -> str:
        """Return what the nodes asked about split, such as "up x→n y→m, down x→k y→m"."""
        texts = []
        for names in self.groups[:_NAMED]:
            letters = [letter_of(self.program, names[0], s) for s in plan.choices[names[0]].splits]
            axes = zip(plan.mesh.names, letters, strict=True)
            split = " ".join(f"{axis}→{letter}" for axis, letter in axes)
            texts.append(f"{self._short(names[0])} {split}".strip())
        more = len(self.groups) - _NAMED
        return ", ".join(texts) + (f", and {more} more" if more > 0 else "")

    def _short(self, name: str) -> str:
        node = next(n for n in self.program.module.graph.nodes if n.name == name)
        last = module_path(node).rpartition(".")[2]
        same = [g for g in self.groups if _path(self.program, g[0]) == _path(self.program, name)]
        return last if last and len(same) == 1 else name


def _groups(program: Program, plan: Plan, pattern: str) -> list[list[str]]:
    """Return the matmuls (else all nodes) that the pattern names, in groups; nodes that are equal
    but for the number of their layer form one group. Raises PlanError where the pattern names
    nothing.
    """
    nodes = [n for n in program.module.graph.nodes if n.name in plan.choices]
    named = [n for n in nodes if n.name == pattern] or [
        n
        for n in nodes
        if fnmatch.fnmatch(module_path(n), pattern)
        or fnmatch.fnmatch(module_path(n), pattern + ".*")
    ]
    if not named:
        paths = dict.fromkeys(chain.name for chain in program.chains)
        raise PlanError(
            f"{pattern!r} names no node whose layout was chosen; subgraphs are "
            f"{', '.join([*paths][:12])}{', …' if len(paths) > 12 else ''}; nodes such as "
            f"{where(nodes[0]) if nodes else 'none'}"
        )
    assert program.annotations is not None
    specs = program.annotations.specs
    selected = [n for n in named if specs[n.name].product] or named
    groups: dict[tuple[str, str, int], list[str]] = defaultdict(list)
    times: dict[tuple[str, str], int] = defaultdict(int)
    for node in selected:
        place = module_path(node), str(node.target)
        times[place] += 1
        groups[re.sub(r"\d+", "*", place[0]), place[1], times[place]].append(node.name)
    return list(groups.values())


def _path(program: Program, name: str) -> str:
    """Return the module path of a node."""
    node: fx.Node = next(n for n in program.module.graph.nodes if n.name == name)
    return module_path(node)


def _signed_seconds(seconds: float) -> str:
    """Return a difference of seconds with its sign, such as "+12.3 µs"."""
    size = abs(seconds)
    text = f"{size * 1e6:.1f} µs" if size < 1e-3 else format_seconds(size)
    return f"{'-' if seconds < 0 else '+'}{text}"
