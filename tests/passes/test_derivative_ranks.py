"""On two gloo ranks: what derivative_ranks.py trains is what one device trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from derivative_models import MODELS
from launch import launched

QUICK = ("forces fsdp", "vmap of grad megatron")


def check(tmp_path: Path, *tasks: str) -> None:
    facts = launched(tmp_path, 2, *tasks, script="derivative_ranks.py")
    for task in tasks:
        assert facts[task]["moved"] > 1e-4, task
        assert facts[task]["error"] < 1e-5, (task, facts[task])


def test_losses_with_derivatives_train_as_on_one_device(tmp_path: Path) -> None:
    check(tmp_path, *QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_loss_with_derivatives_trains_as_on_one_device(tmp_path: Path, name: str) -> None:
    check(tmp_path, f"{name} fsdp", f"{name} megatron")
