"""The way of a plan through the code: which function calls which, from the traced model to the plan
of gpt2 on 8 ranks, in the order in which a reader meets them.

    python -m benchmarks.planning.calls [--ranks 8] [--model gpt2] [--all]

The list has each pair (calling, called) of functions in different modules of planner/ and passes/
once, at its first execution. Modules of ir/ and cost/ are leaves: each counts once, at its first
call. A stop is a change of the module called, a return is a stop at a module that was a stop
before: `N stops, M returns` says how often a reader turns to another file, and how often back.
Every stop is a line, with the functions called there and the modules that call them; a return
begins with "<-". `--all` prints the pairs themselves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

import autopar
from autopar.planner import planner
from autopar.tools.targets import Batch, resolve

AUTOPAR = Path(autopar.__file__).parent


class Function(NamedTuple):
    """A function of autopar: its module, as "planner/solve", and its name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Calls:
    """What a trace function notes: distinct pairs of functions, in the order of their first calls.
    It sees calls of Python functions alone; a profile function would be called for those of C, too,
    and take ten times as long.
    """

    def __init__(self) -> None:
        self.pairs: dict[tuple[Function, Function], None] = {}
        self._stack: list[Function] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        module = _module(frame.f_code.co_filename)
        if not module:
            return None
        frame.f_trace_lines = False
        called = Function(module, frame.f_code.co_qualname)
        if self._stack and self._stack[-1].module != module:
            self.pairs.setdefault((self._stack[-1], called))
        self._stack.append(called)
        return self._leave

    def _leave(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "return":
            self._stack.pop()


class Stop(NamedTuple):
    """Neighbours among the pairs that are called in one module."""

    module: str
    pairs: list[tuple[Function, Function]]

    def __str__(self) -> str:
        callers = dict.fromkeys(calling.module for calling, _ in self.pairs)
        called = dict.fromkeys(function.name for _, function in self.pairs)
        return f"{self.module}: {', '.join(called)}  (from {', '.join(callers)})"


def stops(pairs: dict[tuple[Function, Function], None]) -> list[Stop]:
    """Return the modules called, in order: neighbours that are equal are one, and a leaf is there
    once.

    >>> a, b = Function("planner/a", "f"), Function("cost/b", "g")
    >>> pairs = {(b, a): None, (a, b): None, (b, Function("planner/a", "h")): None}
    >>> [stop.module for stop in stops(pairs)]
    ['planner/a', 'cost/b', 'planner/a']
    """
    listed: list[Stop] = []
    for calling, called in pairs:
        module = called.module
        is_leaf = module.startswith(("ir/", "cost/"))
        if listed and listed[-1].module == module:
            listed[-1].pairs.append((calling, called))
        elif module.startswith(("planner/", "passes/")) or (
            is_leaf and all(stop.module != module for stop in listed)
        ):
            listed.append(Stop(module, [(calling, called)]))
    return listed


@cache
def _module(path: str) -> str:
    """The module of autopar that a file is, as "planner/search"; "" for others."""
    if not path.startswith(str(AUTOPAR)):
        return ""
    return str(Path(path).relative_to(AUTOPAR).with_suffix(""))


@contextmanager
def noted_after_tracing(calls: Calls) -> Iterator[None]:
    """Note calls from the moment at which the model is traced: tracing is torch's own work."""
    trace_step = planner.trace_step

    def trace(*args: Any) -> Any:
        traced = trace_step(*args)
        sys.settrace(calls)
        return traced

    try:
        with patch.object(planner, "trace_step", trace):
            yield
    finally:
        sys.settrace(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--all", action="store_true", help="print every pair, not the stops alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = resolve(options.model, Batch.parse("16x1024"), options.ranks, False)
    calls = Calls()
    with noted_after_tracing(calls):
        autopar.plan(target.model, options.ranks, target.inputs, smaller=False)
    if options.all:
        for calling, called in calls.pairs:
            print(f"{calling} -> {called}")
    listed = stops(calls.pairs)
    assert listed, "no call was noted: the model is traced elsewhere"
    seen: set[str] = set()
    for stop in listed:
        print("<-" if stop.module in seen else "  ", stop)
        seen.add(stop.module)
    print(f"{len(listed)} stops, {len(listed) - len(seen)} returns")


if __name__ == "__main__":
    main()
