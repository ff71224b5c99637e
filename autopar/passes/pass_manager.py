"""The runner of passes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from torch import fx

from autopar.ir.program import Program

Progress = Callable[[str], None]
T = TypeVar("T")


class PassManager:
    """Runs passes one after the other, checks each one's contract, and keeps what it made.
    `progress` is called with the name of each pass as it starts.
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
        self.progress(name)
        start = time.perf_counter()
        program = step(given)
        check(program)
        self.graphs[name] = program.module
        self.seconds[name] = time.perf_counter() - start
        return program
