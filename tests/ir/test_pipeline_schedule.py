"""Schedules of pipelines: complete, in an order that can run, bubbles, what is in flight."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping as torch_mapping

import autopar
from autopar.cost.pipeline import StageSeconds, simulate_pipeline
from autopar.ir.pipeline_schedule import (
    SCHEDULES,
    Pipeline,
    actions,
    most_in_flight,
    pipeline_of,
    runs_in_halves,
)

CASES = [
    pytest.param(
        name,
        pipeline_of(name, ranks, rounds),
        microbatches,
        marks=[pytest.mark.slow] * (ranks > 8),
        id=f"{name}, {ranks} ranks, {rounds} rounds, {microbatches} micro-batches",
    )
    for name, known in SCHEDULES.items()
    for ranks in (2, 4, 8, 16, 32, 64)
    for rounds in (1, 2, 3)
    for microbatches in ((4, 8) if ranks <= 4 else (ranks, 3 * ranks // 2, 2 * ranks))
    if known.least_rounds <= rounds <= (known.most_rounds or rounds)
    if name != "dualpipev" or microbatches >= ranks * rounds  # at least as many as stages
]
IN_HALVES = [case for case in CASES if SCHEDULES[case.values[0]].splits]


@pytest.mark.parametrize(("name", "pipeline", "microbatches"), CASES)
def test_every_forward_and_backward_runs_once_and_the_step_ends(
    name: str, pipeline: Pipeline, microbatches: int
) -> None:
    schedule = actions(name, pipeline, microbatches)
    kinds: dict[tuple[int, int], str] = {}
    for rank, own in enumerate(schedule):
        for action in own:
            assert pipeline.rank_of(action.stage) == rank
            key = action.stage, action.microbatch
            kinds[key] = kinds.get(key, "") + action.kind
    assert len(kinds) == pipeline.stages * microbatches
    assert {*kinds.values()} <= ({"FB", "FIW"} if SCHEDULES[name].splits else {"FB"})
    assert runs_in_halves(schedule) == ("FIW" in kinds.values()) == SCHEDULES[name].splits
    stages = [StageSeconds(1.0, 2.0, inputs=1.0, weights=1.0)] * pipeline.stages
    step = simulate_pipeline(pipeline, schedule, stages)
    assert step.seconds >= 3.0 * microbatches * pipeline.rounds  # that many seconds a rank computes


@pytest.mark.parametrize(("name", "pipeline", "microbatches"), CASES)
def test_a_rank_holds_as_many_activations_as_its_schedule_says(
    name: str, pipeline: Pipeline, microbatches: int
) -> None:
    """PipeDream-Flush holds as many as there are ranks from this one on; interleaved 1F1B warms up
    with twice as many more as there are ranks after it (arXiv 2104.04473, section 2.2) and zero
    bubble with as many; a V holds on every rank what the first one does under 1F1B.
    """
    ranks, rounds = pipeline.ranks, pipeline.rounds
    all_of_them = microbatches * rounds
    earlier = (rounds - 1) * (microbatches // max(1, microbatches // ranks))
    for rank, own in enumerate(actions(name, pipeline, microbatches)):
        after = ranks - 1 - rank
        bound = {
            "gpipe": all_of_them,
            "looped-bfs": all_of_them,
            "1f1b": after + 1,
            "interleaved": earlier + 2 * after + 1,
            "zero-bubble": earlier + after + 1,
            "zbv": min(2 * ranks, microbatches + 1 + rank),
            "dualpipev": 2 * ranks + 1,
        }[name]
        in_flight = most = 0
        for action in own:
            in_flight += {"F": 1, "W": 0}.get(action.kind, -1)
            most = max(most, in_flight)
        assert most == min(bound, all_of_them), (rank, most)


@pytest.mark.parametrize(
    ("name", "pipeline", "microbatches"), [case for case in CASES if case.values[0] != "zbv"]
)
def test_the_bubble_does_not_grow_with_the_micro_batches(
    name: str, pipeline: Pipeline, microbatches: int
) -> None:
    """Where the two halves of a backward take as long as a forward: of zero bubble and DualPipeV
    one forward for each rank after the first, of the others three.
    """
    stages = [StageSeconds(1.0, 2.0, inputs=1.0, weights=1.0)] * pipeline.stages
    step = simulate_pipeline(pipeline, actions(name, pipeline, microbatches), stages)
    wait = step.seconds - 3.0 * microbatches * pipeline.rounds
    assert wait == (pipeline.ranks - 1) * (1 if SCHEDULES[name].splits else 3)


@pytest.mark.parametrize(
    ("name", "pipeline", "microbatches"), [c for c in IN_HALVES if c.values[1].rounds > 1]
)
def test_schedules_in_two_halves_are_those_of_torch(
    name: str, pipeline: Pipeline, microbatches: int
) -> None:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    listed = get_schedule_ops(SCHEDULES[name].torch, pipeline.ranks, microbatches, pipeline.rounds)
    for own, theirs in zip(actions(name, pipeline, microbatches), listed, strict=True):
        leaves = [leaf for x in theirs if x is not None for leaf in x.sub_actions or (x,)]
        assert [f"{x.stage}{x.kind}{x.microbatch}" for x in own] == [*map(str, leaves)]
    v = torch_mapping(pipeline.ranks, pipeline.stages, style="v" if pipeline.folds else "loop")
    assert {stage: pipeline.rank_of(stage) for stage in range(pipeline.stages)} == v


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_bubbles_are_those_of_the_papers(ranks: int) -> None:
    """(S-1)/m of the ideal step for GPipe and 1F1B (arXiv 2104.04473, section 2.2), a v-th of that
    interleaved.
    """
    microbatches = 2 * ranks
    plain = [StageSeconds(1.0, 2.0)] * ranks
    for name in ("gpipe", "1f1b"):
        step = simulate_pipeline(
            Pipeline(ranks), actions(name, Pipeline(ranks), microbatches), plain
        )
        assert step.seconds == pytest.approx(3.0 * (microbatches + ranks - 1))
    halves = [StageSeconds(0.5, 1.0)] * 2 * ranks
    twice = Pipeline(ranks, 2)
    step = simulate_pipeline(twice, actions("interleaved", twice, microbatches), halves)
    assert step.seconds == pytest.approx(3.0 * (microbatches + (ranks - 1) / 2))


def test_weights_fill_the_bubble() -> None:
    """Where a forward and both halves of a backward take as long, ZB-H1 has a third of 1F1B's
    bubble (arXiv 2401.10241, table 1), and the V none but its start and end.
    """
    ranks, microbatches = 4, 8
    stages = [StageSeconds(1.0, 2.0, inputs=1.0, weights=1.0)] * ranks
    seconds = {
        name: simulate_pipeline(
            Pipeline(ranks), actions(name, Pipeline(ranks), microbatches), stages
        )
        for name in ("1f1b", "zero-bubble")
    }
    waits = {name: step.seconds - 3.0 * microbatches for name, step in seconds.items()}
    assert waits == {"1f1b": pytest.approx(9.0), "zero-bubble": pytest.approx(3.0)}
    halves = [StageSeconds(0.5, 1.0, inputs=0.5, weights=0.5)] * 2 * ranks
    folded = pipeline_of("zbv", ranks, 2)
    step = simulate_pipeline(folded, actions("zbv", folded, microbatches), halves)
    assert step.seconds - 3.0 * microbatches == pytest.approx(1.5)


def test_one_forward_one_backward_holds_few_and_gpipe_all() -> None:
    pipeline, microbatches = Pipeline(4), 8
    in_flight = {
        name: [
            most_in_flight(own, r) for r, own in enumerate(actions(name, pipeline, microbatches))
        ]
        for name in ("gpipe", "1f1b")
    }
    assert in_flight == {"gpipe": [8, 8, 8, 8], "1f1b": [4, 3, 2, 1]}


def test_sends_and_the_end_of_a_step_take_their_time() -> None:
    pipeline = Pipeline(2)
    stages = [StageSeconds(1.0, 2.0, end=0.5, send=0.25)] * 2
    step = simulate_pipeline(pipeline, actions("1f1b", pipeline, 1), stages)
    assert step.seconds == pytest.approx(1 + 0.25 + 3 + 0.25 + 2 + 0.5)


def test_a_schedule_that_is_not_for_these_numbers_is_refused() -> None:
    with pytest.raises(autopar.PlanError, match=r"'zbv' has 2 stages a rank \(rounds=2\), not 1"):
        actions("zbv", Pipeline(2), 4)
    with pytest.raises(autopar.PlanError, match="at least as many microbatches as stages"):
        actions("dualpipev", Pipeline(4, 2), 4)
    with pytest.raises(autopar.PlanError, match=r"2 or more stages a rank \(rounds\), not 1"):
        actions("interleaved", Pipeline(2), 4)
    with pytest.raises(
        autopar.PlanError, match="is not for 4 ranks of 2 stages and 9 micro-batches"
    ):
        actions("interleaved", Pipeline(4, 2), 9)
