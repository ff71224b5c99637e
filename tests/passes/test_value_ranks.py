"""On four gloo ranks: what value_ranks.py trains is what one device trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import launched


@pytest.mark.slow
def test_modules_that_look_at_values_train_as_on_one_device(tmp_path: Path) -> None:
    tasks = ("table", "norm", "clipped", "masked")
    facts = launched(tmp_path, 4, *tasks, script="value_ranks.py")
    for name in tasks:
        for layout, error in facts[name].items():
            assert error < 1e-5, (name, layout, error)


@pytest.mark.slow
def test_a_model_without_inputs_trains_as_on_one_device(tmp_path: Path) -> None:
    errors = launched(tmp_path, 2, "alone", script="value_ranks.py")["alone"]
    assert errors.keys() == {"auto", "ddp", "fsdp", "megatron"}
    assert all(error < 1e-5 for error in errors.values()), errors
