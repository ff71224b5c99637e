"""Runs one pass after another, checks the contract of each, and records its graph and its seconds.

    manager = PassManager(print)
    program = manager.run_all(PIPELINE, program, world)
    manager.graphs["summa"], manager.seconds["summa"]

api.py, planner/planner.py and planner/edit.py run all passes over programs through it; a parallel
module keeps the recorded graphs for whoever wants to read them. runtime/backends.py runs the passes
over derived graphs through it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, TypeVar

from torch import fx

from autopar.ir.graph_view import show_in_notebooks
from autopar.ir.program import Program
from autopar.ir.progress import step as begin
from autopar.passes.log import note
from autopar.passes.overlap import DerivedGraph, GraphFacts, facts_of
from autopar.world import World

Progress = Callable[[str], None]
T = TypeVar("T")
R = TypeVar("R")


class Pass(NamedTuple):
    """A rewrite of a program with a plan: `run(program, world)` returns a new one, and
    `check(program)` raises AssertionError where that one breaks the pass's contract.
    """

    name: str
    run: Callable[[Program, World], Program]
    check: Callable[[Program], None]


class OverlapPass(NamedTuple):
    """A rewrite of a derived graph: `run(derived, world)` returns the one that takes its place, and
    may change the graph that it was given; `check(before, after)` raises AssertionError where that
    one breaks the pass's contract, by the facts of the graph before.

    `option`: the name in `overlap=` that switches the pass on; "" where it always runs.
    """

    name: str
    run: Callable[[DerivedGraph, World], DerivedGraph]
    check: Callable[[GraphFacts, DerivedGraph], None]
    option: str = ""


class PassManager:
    """Runs passes and records what each of them took and produced.

    `seconds` holds the time that a pass took in all its runs, by its name, and `graphs` the graph
    of the program that it returned last. `progress` is called with that name as the pass starts.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self._report = progress or (lambda name: None)
        self.graphs: dict[str, fx.GraphModule] = {}
        self.seconds: dict[str, float] = {}

    def progress(self, name: str) -> None:
        """Report that a pass, or another step of the work, begins."""
        begin(name)
        self._report(name)

    def run(
        self,
        name: str,
        argument: T,
        step: Callable[[T], R],
        check: Callable[[R], None],
    ) -> R:
        """Return `step(argument)` after `check` has accepted it. `step` is the pass; `argument` is
        its input: a model for `trace`, a Program or a DerivedGraph for every other pass. Raises
        AssertionError where `check` finds a broken contract.
        """
        self.progress(name)
        start = time.perf_counter()
        result = step(argument)
        check(result)
        seconds, graph = time.perf_counter() - start, None
        if isinstance(result, Program):
            self.graphs[name], graph = result.module, result.module.graph
            show_in_notebooks(result.module)
        elif isinstance(result, DerivedGraph):
            graph = result.graph
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        note(name, graph, seconds)
        return result

    def run_all(self, passes: Iterable[Pass], program: Program, world: World) -> Program:
        """Return the program after these passes, each with its check."""
        for step in passes:
            program = self.run(step.name, program, partial(_run_on, step, world), step.check)
        return program

    def run_overlap(
        self, passes: Iterable[OverlapPass], derived: DerivedGraph, world: World
    ) -> DerivedGraph:
        """Return the derived graph after these passes, each with its check."""
        for step in passes:
            check = partial(step.check, facts_of(derived.graph))
            derived = self.run(step.name, derived, partial(_run_on_derived, step, world), check)
        return derived


def _run_on(step: Pass, world: World, program: Program) -> Program:
    return step.run(program, world)


def _run_on_derived(step: OverlapPass, world: World, derived: DerivedGraph) -> DerivedGraph:
    return step.run(derived, world)
