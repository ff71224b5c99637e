"""The way of a plan through the code is followed from the trace to the plan."""

from __future__ import annotations

import torch
from torch import nn

import autopar
from benchmarks.planning.calls import Calls, noted_after_tracing, stops


def test_calls_are_noted_from_the_trace_to_the_plan() -> None:
    calls = Calls()
    with noted_after_tracing(calls):
        autopar.plan(nn.Linear(8, 8), 2, torch.ones(4, 8), smaller=False)
    modules = [stop.module for stop in stops(calls.pairs)]
    order = [modules.index(name) for name in ("passes/annotate", "planner/solve", "planner/fit")]
    assert order == sorted(order)
    assert not any(name.startswith("passes/trace") for name in modules)
