"""Schedules of pipelines: complete, in an order that can run, bubbles, what is in flight."""

from __future__ import annotations

import pytest

import autopar
from autopar.cost.pipeline import StageSeconds, simulate_pipeline
from autopar.ir.pipeline_schedule import (
    SCHEDULES,
    Action,
    Pipeline,
    actions,
    most_in_flight,
)

CASES = [
    (name, Pipeline(ranks, rounds), parts)
    for name, (_, several) in SCHEDULES.items()
    for ranks in (2, 4)
    for rounds in ((2, 3) if several else (1,))
    for parts in (4, 8)
]


@pytest.mark.parametrize(("name", "pipeline", "parts"), CASES)
def test_every_forward_and_backward_runs_once_and_the_step_ends(
    name: str, pipeline: Pipeline, parts: int
) -> None:
    schedule = actions(name, pipeline, parts)
    everything = sorted(action for own in schedule for action in own)
    wanted = sorted(
        Action(kind, stage, part)
        for kind in "FB"
        for stage in range(pipeline.stages)
        for part in range(parts)
    )
    assert everything == wanted
    for own in schedule:
        for action in own:
            if action.kind == "B":
                assert own.index(Action("F", action.stage, action.part)) < own.index(action)
    stages = [StageSeconds(1.0, 2.0)] * pipeline.stages
    step = simulate_pipeline(pipeline, schedule, stages)
    assert step.seconds >= 3.0 * parts * pipeline.rounds  # that many seconds a rank computes


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_bubbles_are_those_of_the_papers(ranks: int) -> None:
    """(S-1)/m of the ideal step for GPipe and 1F1B (arXiv 2104.04473, section 2.2), a v-th of that
    interleaved.
    """
    parts = 2 * ranks
    plain = [StageSeconds(1.0, 2.0)] * ranks
    for name in ("gpipe", "1f1b"):
        step = simulate_pipeline(Pipeline(ranks), actions(name, Pipeline(ranks), parts), plain)
        assert step.seconds == pytest.approx(3.0 * (parts + ranks - 1))
    halves = [StageSeconds(0.5, 1.0)] * 2 * ranks
    twice = Pipeline(ranks, 2)
    step = simulate_pipeline(twice, actions("interleaved", twice, parts), halves)
    assert step.seconds == pytest.approx(3.0 * (parts + (ranks - 1) / 2))


def test_one_forward_one_backward_holds_few_and_gpipe_all() -> None:
    pipeline, parts = Pipeline(4), 8
    held = {
        name: [most_in_flight(own, r) for r, own in enumerate(actions(name, pipeline, parts))]
        for name in ("gpipe", "1f1b")
    }
    assert held == {"gpipe": [8, 8, 8, 8], "1f1b": [4, 3, 2, 1]}


def test_sends_and_the_end_of_a_step_take_their_time() -> None:
    pipeline = Pipeline(2)
    stages = [StageSeconds(1.0, 2.0, end=0.5, send=0.25)] * 2
    step = simulate_pipeline(pipeline, actions("1f1b", pipeline, 1), stages)
    assert step.seconds == pytest.approx(1 + 0.25 + 3 + 0.25 + 2 + 0.5)


def test_a_schedule_that_is_not_for_these_numbers_is_refused() -> None:
    with pytest.raises(autopar.PlanError, match=r"2 or more stages a rank \(rounds\), not 1"):
        actions("interleaved", Pipeline(2), 4)
    with pytest.raises(
        autopar.PlanError, match="is not for 4 ranks of 2 stages and 9 micro-batches"
    ):
        actions("interleaved", Pipeline(4, 2), 9)
