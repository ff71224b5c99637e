"""Through how many rooms planning goes: the calls between modules while gpt2 is planned on 8 ranks.

    python -m benchmarks.planning.calls [--ranks 8] [--model gpt2]

Two numbers, counted once the model is traced: the modules of autopar that are entered, and how
often control goes from one module of autopar/planner back to one that it came from, that is, calls
a function of a module that waits further down the stack. A callback counts, a plain return does
not.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import autopar
from autopar import api
from autopar.cli.targets import Batch, resolve
from autopar.ir.program import Program

AUTOPAR = Path(autopar.__file__).parent


class Calls:
    """What a trace function counts: `entered` modules, and `back`, calls into a module of planner/
    that waits further down the stack of modules. It sees calls of Python functions alone; a profile
    function would be called for those of C, too, and take ten times as long.
    """

    def __init__(self) -> None:
        self.entered: Counter[str] = Counter()
        self.back: Counter[tuple[str, str]] = Counter()
        self._stack: list[str] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        module = _module(frame.f_code.co_filename)
        if not module:
            return None
        frame.f_trace_lines = False
        caller = self._stack[-1] if self._stack else ""
        if module != caller:
            self.entered[module] += 1
            if _searches(module) and _searches(caller) and module in self._stack:
                self.back[caller, module] += 1
        self._stack.append(module)
        return self._leave

    def _leave(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "return":
            self._stack.pop()


@cache
def _module(path: str) -> str:
    """The module of autopar that a file is, as "planner/search"; "" for others."""
    if not path.startswith(str(AUTOPAR)):
        return ""
    return str(Path(path).relative_to(AUTOPAR).with_suffix(""))


def _searches(module: str) -> bool:
    return module.startswith("planner/")


@contextmanager
def counted_after_tracing(calls: Calls) -> Iterator[None]:
    """Count calls from the moment at which the model is traced: tracing is torch's own work."""
    trace_model = api.trace_model

    def trace(*args: Any) -> Program:
        program = trace_model(*args)
        sys.settrace(calls)
        return program

    api.trace_model = trace
    try:
        yield
    finally:
        sys.settrace(None)
        api.trace_model = trace_model


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = resolve(options.model, Batch.parse("16x1024"), options.ranks, False)
    calls = Calls()
    with counted_after_tracing(calls):
        autopar.plan(target.model, options.ranks, target.inputs, smaller=False)
    planner = [name for name in calls.entered if _searches(name)]
    print(f"{len(calls.entered)} modules are entered, {len(planner)} of them in planner/")
    print(f"{sum(calls.back.values())} times back, between {len(calls.back)} pairs of modules:")
    for (caller, module), count in calls.back.most_common(15):
        print(f"  {count:7} {caller} -> {module}")


if __name__ == "__main__":
    main()
