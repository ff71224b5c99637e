"""On two gloo ranks: what derivative_ranks.py trains is what one device trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from derivative_models import MODELS
from launch import launched

QUICK = ("forces", "vmap of grad")


def check(tmp_path: Path, *names: str) -> None:
    facts = launched(tmp_path, 2, *names, script="derivative_ranks.py")
    for name in names:
        assert facts[name].pop("moved") > 1e-4, name
        assert facts[name].keys() == {"fsdp", "megatron"}
        assert all(error < 1e-5 for error in facts[name].values()), (name, facts[name])


def test_losses_with_derivatives_train_as_on_one_device(tmp_path: Path) -> None:
    check(tmp_path, *QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in QUICK])
def test_every_loss_with_derivatives_trains_as_on_one_device(tmp_path: Path, name: str) -> None:
    check(tmp_path, name)
