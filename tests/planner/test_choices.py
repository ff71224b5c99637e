"""The comparison of chosen plans with those of another version."""

from __future__ import annotations

from typing import Any

import pytest

import choices


def rows(**steps: float) -> dict[str, dict[str, Any]]:
    other = {"layout": "auto", "mesh": "x2", "sum": 1.0, "gap": 0.0, "cpu": 1.0}
    return {name: {"name": name, "step": step, **other} for name, step in steps.items()}


def test_steps_that_are_longer_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    before = rows(same=1.0, longer=1.0, a_little=1.0, shorter=1.0)
    now = rows(same=1.0, longer=1.004, a_little=1.002, shorter=0.9, new=1.0)
    assert choices.compare(now, before) == 1
    said = capsys.readouterr().out
    assert "longer" in said and "same" not in said and "4 plans: steps at most +0.40%" in said


def test_calls_have_names_of_their_own() -> None:
    names = [call.name for call in choices.calls()]
    assert len(names) == len(set(names)) == 92
