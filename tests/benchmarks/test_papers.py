"""The model of a step behind model/papers.py, and the published figures that it must give."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from autopar import Grid4D
from benchmarks.model import papers, steps
from benchmarks.model.steps import KINDS, PERLMUTTER, Execution, Job, Step

SMALL = Job("gpt-5b", PERLMUTTER, 8, 16)


@pytest.mark.slow_cells("grid0", "grid1")
@pytest.mark.parametrize("grid", [Grid4D(x=4, y=2, z=2, data=2), Grid4D(x=2, z=2, data=2)])
def test_a_layer_sends_what_plans_of_two_depths_differ_by(grid: Grid4D) -> None:
    """Read off one grid of one model, evaluated on another of another. Without a y axis the bias of
    q, k and v is stored whole, so it is not gathered: that, and no byte besides, is the difference.
    """
    counts = {"Gx": grid.x, "Gy": grid.y, "Gz": grid.z, "Gdata": grid.data}
    world = PERLMUTTER.world(math.prod(counts.values()))
    two, three = (steps.planned(SMALL.sizes, n, world, SMALL.batch, grid) for n in (2, 3))
    size, sizes = SMALL.sizes, counts | {"b": 16, "s": 2048}
    sizes |= {"h": size.width, "f": 4 * size.width, "heads": size.heads}
    sizes |= {"d": size.width // size.heads, "v": size.vocabulary}
    layer_words = [
        float(f.bytes(**{s.name: sizes[s.name] for s in f.sizes if s.name in sizes}))
        for f in (steps.moved().layer, steps.moved().rest)
    ]
    bias = 0 if grid.y > 1 else 2 * 3 * size.width
    assert abs(layer_words[0] - (three.comm_bytes - two.comm_bytes)) == bias
    assert abs(layer_words[1] - (two.comm_bytes - 2 * layer_words[0])) == 2 * bias


@pytest.mark.slow
def test_the_seconds_of_axonns_own_model() -> None:
    rows = list(papers.axonns_own_model())
    assert len(rows) == 6
    for row in rows:
        assert row.ratio == pytest.approx(1.05, abs=0.1), row.what


@pytest.mark.slow
def test_more_samples_leave_megatrons_stages_a_smaller_bubble() -> None:
    jobs = [Job("gpt-5b", papers.DGX_A100, 16, batch) for batch in (8, 16, 32)]
    seconds = [steps.pipelined(job, tensor=2, stages=4) for job in jobs]
    for few, many in itertools.pairwise(seconds):
        assert 1.4 * few < many < 2 * few
    assert seconds[2] / seconds[1] > seconds[1] / seconds[0]


@pytest.mark.slow
def test_atps_words_from_an_emitted_plan() -> None:
    for row in papers.atp_words():
        assert row.ratio == pytest.approx(1), row.what


def test_the_flops_of_a_step() -> None:
    """57 % of the peak of 1024 A100 are the published 182 Pflop/s."""
    job = Job("gpt-80b", PERLMUTTER, 1024, 1024)
    seconds = job.flops / 182e15
    assert job.of_peak(seconds) == pytest.approx(0.57, abs=0.005)
    assert job.flops > 96 * 1024 * 2048 * 42 * 12288**2


def step(sharding: Execution, **seconds: float) -> Step:
    moving = dict.fromkeys(KINDS, 0.0) | seconds
    return Step(Grid4D(z=8), sharding, 10, 1.0, 2.0, moving, dict.fromkeys(KINDS, 0.0))


def test_what_hides_under_what() -> None:
    once, twice = Execution(1, saves_weights=True), Execution(1, saves_weights=False)
    assert step(once).seconds() == step(once).compute == 42
    gathers = step(twice, gather=1.5)
    assert gathers.exposed(overlap=False) == 30 and gathers.exposed(overlap=True) == 10
    assert step(once, gather=1.5).exposed(overlap=False) == 15
    assert step(once, backward=1.25).exposed(overlap=True) == 2.5  # dW's product takes 1
    assert step(once, scatter=2.5).exposed(overlap=True) == 5  # the backward takes 2
    both = step(once, backward=1.0, scatter=1.5)
    assert both.exposed(overlap=True) == 5 and both.exposed(overlap=False) == 25
    assert step(once, forward=0.5, gradients=0.25).exposed(overlap=True) == 12.5
    # Each half of the batch gathers again, twice.
    halves = step(Execution(2, saves_weights=False), gather=0.75)
    assert halves.exposed(overlap=False) == 30 and halves.exposed(overlap=True) == 10


def test_memory_decides_how_a_step_is_run() -> None:
    job = Job("gpt-20b", PERLMUTTER, 32, 1024)
    deep = Grid4D(z=32)
    (execution,) = steps.executions(job, deep)
    assert not execution.saves_weights and execution.microbatches > 1  # 20B whole are 40 GB
    capacity = PERLMUTTER.world(32).device.memory_bytes
    assert (
        steps.memory_bytes(job, deep, execution)
        <= capacity
        < steps.memory_bytes(job, deep, Execution(1, saves_weights=False))
    )
    assert steps.executions(job, Grid4D(data=32)) == []


def test_misses_are_marked() -> None:
    row = papers.Row("", "a figure", 100, 126, "%", why="for a reason")
    assert row.misses and papers.cells(row)[4] == "1.26 *"
    assert not dataclasses.replace(row, modelled=124).misses
    assert papers.markdown([row]).endswith("| a figure | 100 | 126 | 1.26 * |  |")
