"""Models that draw random numbers in forward train as one rank trains them, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from draw_ranks import ROWS, STEPS, example, run, trained
from launch import launched


def same(actual: dict[str, list[float]], alone: list[float]) -> None:
    for layout, numbers in actual.items():
        assert numbers == pytest.approx(alone, rel=1e-9, abs=1e-9), layout
    assert actual and len(set(alone[:STEPS])) == STEPS  # every step draws anew


@pytest.mark.slow
def test_two_ranks_train_as_one_does(tmp_path: Path) -> None:
    same(launched(tmp_path, 2, "vae", script="draw_ranks.py")["vae"], run("vae", 1))


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tasks = ("diffusion", "microbatches", "recomputed", "resumed")
    return launched(tmp_path_factory.mktemp("draws"), 2, *tasks, script="draw_ranks.py")


@pytest.mark.slow_cells("*")
@pytest.mark.parametrize("task", ["diffusion", "microbatches", "recomputed"])
def test_so_they_do_in_microbatches_and_with_blocks_that_run_again(facts: Any, task: str) -> None:
    same(facts[task], run("diffusion", 1, microbatches=2 if task == "microbatches" else 1))


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_the_same_draws(facts: Any) -> None:
    figures = facts["resumed"]
    assert figures["again"] == pytest.approx(figures["later"], rel=1e-9, abs=1e-9)


@pytest.mark.slow
def test_so_does_one_rank(facts: Any) -> None:
    """From the checkpoint of two."""
    model, inputs = example("diffusion")
    par = autopar.parallelize(model, 1, inputs)
    autopar.Checkpoints(facts["resumed"]["folder"], model=par).load()
    later = facts["resumed"]["later"]
    assert trained(par, inputs) == pytest.approx(later, rel=1e-9, abs=1e-9)


def test_torch_s_seed_starts_the_draws_anew() -> None:
    model, inputs = example("diffusion")
    par: Any = autopar.parallelize(model, 1, inputs)

    def losses(seed: int) -> list[float]:
        torch.manual_seed(seed)
        return [float(par(*inputs).detach()) for _ in range(2)]

    first, other, again = losses(3), losses(4), losses(3)
    assert first == again and len({*first, *other}) == 4


def test_microbatches_draw_other_numbers() -> None:
    model, inputs = example("diffusion")
    whole: Any = autopar.parallelize(model, 1, inputs)
    model, _ = example("diffusion")
    divided: Any = autopar.parallelize(model, 1, inputs, microbatches=2)
    half, _ = example("diffusion")
    rows = inputs[0][: ROWS // 2]
    alone: Any = autopar.parallelize(half, 1, (rows,))
    for par in (whole, divided, alone):
        par.seed = 5
    calls = (divided, *inputs), (whole, *inputs), (alone, rows)
    own, *others = (float(par(x).detach()) for par, x in calls)
    assert all(own != pytest.approx(other) for other in others)
