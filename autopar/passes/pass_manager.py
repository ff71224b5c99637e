"""Runs one pass after another, checks the contract of each, and records its graph and its seconds.

    manager = PassManager(print)
    program = manager.run_all(PIPELINE, program, world)
    manager.graphs["summa"], manager.seconds["summa"]

api.py, planner/planner.py and planner/edit.py run all passes through it; a parallel module keeps
the recorded graphs for whoever wants to read them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, TypeVar

from torch import fx

from autopar.ir.program import Program
from autopar.world import World

Progress = Callable[[str], None]
T = TypeVar("T")


class Pass(NamedTuple):
    """A rewrite of a program with a plan: `run(program, world)` returns a new one, and
    `check(program)` raises AssertionError where that one breaks the pass's contract.
    """

    name: str
    run: Callable[[Program, World], Program]
    check: Callable[[Program], None]


class PassManager:
    """Runs passes and records what each of them produced.

    `graphs` and `seconds` hold the graph that a pass returned and the time it took, by the pass's
    name. `progress` is called with that name as the pass starts.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self.progress = progress or (lambda name: None)
        self.graphs: dict[str, fx.GraphModule] = {}
        self.seconds: dict[str, float] = {}

    def run(
        self,
        name: str,
        given: T,
        step: Callable[[T], Program],
        check: Callable[[Program], None],
    ) -> Program:
        """Return `step(given)` after `check` has accepted it. `step` is the pass; `given` is its
        input, a model for `trace` and a Program for every other pass. Raises AssertionError where
        `check` finds a broken contract.
        """
        self.progress(name)
        start = time.perf_counter()
        program = step(given)
        check(program)
        self.graphs[name] = program.module
        self.seconds[name] = time.perf_counter() - start
        return program

    def run_all(self, passes: Iterable[Pass], program: Program, world: World) -> Program:
        """Return the program after these passes, each with its check."""
        for step in passes:
            program = self.run(step.name, program, partial(_run_on, step, world), step.check)
        return program


def _run_on(step: Pass, world: World, program: Program) -> Program:
    return step.run(program, world)
