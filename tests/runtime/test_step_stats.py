"""`par.stats()`: what training took since the last look, beside the plan."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import autopar
from autopar.cost.throughput import throughput
from autopar.runtime.training import step_stats


def parallel(rows: int = 8) -> tuple[autopar.ParallelModule, torch.Tensor]:
    x = torch.ones(rows, 16)
    return autopar.parallelize(nn.Linear(16, 32), 1, (x,)), x


def test_steps_since_the_last_look_are_counted() -> None:
    par, x = parallel()
    assert par.stats() is None
    par(x).sum().backward()
    assert par.stats() is None  # the first step warms up
    begin = time.perf_counter()
    for _ in range(3):
        par(x).sum().backward()
    passed = time.perf_counter() - begin
    seen = par.stats()
    assert seen is not None and seen.steps == 3 and 0 < seen.seconds <= 2 * passed
    assert par.stats() is None  # nothing since
    par(x)
    again = par.stats()
    assert again is not None and again.steps == 1


def test_evaluation_and_other_shapes_are_no_steps() -> None:
    par, x = parallel()
    for _ in range(2):
        par(x)
    with torch.no_grad():
        par(x)
    par(torch.ones(4, 16))
    seen = par.stats()
    assert seen is not None and seen.steps == 1


def test_a_copy_counts_its_own_steps() -> None:
    import copy

    par, x = parallel()
    twin = copy.deepcopy(par)
    for _ in range(3):
        twin(x)
    assert par.stats() is None
    seen = twin.stats()
    assert seen is not None and seen.steps == 2


def test_figures_stand_next_to_the_planned_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    par, x = parallel()
    times = iter((0.0, 1.0, 2.0))
    monkeypatch.setattr(step_stats.time, "perf_counter", lambda: next(times))
    for _ in range(5):
        par(x)
    seen = par.stats()
    assert seen is not None and seen.seconds == 0.25 and seen.steps == 4
    planned = throughput(par.plan, (x,))
    assert seen.planned == planned and planned is not None and seen.measured is not None
    assert seen.measured.rate == 8 / 0.25 and seen.measured.unit == "samples"
    ratio = seen.planned_seconds / 0.25
    assert seen.measured.utilization == pytest.approx(planned.utilization * ratio)
    assert seen.peak_bytes is None and seen.planned_peak_bytes == par.plan.peak_bytes
    assert str(seen).startswith("4 steps of 250.00 ms (planned ") and "not counted" in str(seen)
