"""Results beside the loss: their gradients are right when asked for, and cost nothing when not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import autopar
import models
from autopar.passes.overlap.assumptions import aux_output_places
from launch import launched


def test_logits_that_a_loss_comes_with_are_an_auxiliary_output() -> None:
    model, args, _ = models.gpt()  # returns logits and the loss
    program = autopar.plan(model, 2, args, layout="ddp", smaller=False).context.program
    assert aux_output_places(program) == {0}


def on_two_ranks(folder: Path, task: str) -> dict[str, Any]:
    return launched(folder, 2, task, script="auxiliary_outputs_ranks.py")[task]


@pytest.mark.slow
def test_a_gradient_of_an_auxiliary_output_is_right(tmp_path: Path) -> None:
    """Where it is asked for first the graph runs once more; then it is part of the backward."""
    facts = on_two_ranks(tmp_path, "auxiliary")
    assert max(facts["errors"]) < 1e-4, facts["errors"]
    assert (facts["derived"], facts["again"]) == (2, 1)


def test_a_scalar_need_not_be_the_loss(tmp_path: Path) -> None:
    facts = on_two_ranks(tmp_path, "no loss")
    assert max(facts["errors"]) < 1e-4, facts["errors"]
    assert (facts["derived"], facts["again"]) == (2, 0)  # the first without any gradient
