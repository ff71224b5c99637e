"""The graphs that NCCL would be given, under the contract of its streams, on gloo ranks: a missing
wait, or an operand that is written over too soon, makes the loss or a gradient wrong.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from launch import launched
from stream_ranks import LAYOUTS

LIMIT = 1e-6
SCRIPT = "stream_ranks.py"


def right(facts: dict[str, Any], where: str) -> None:
    assert facts["loss"] < LIMIT, where
    assert facts["gradient"] < LIMIT, (where, facts["gradient"])


@pytest.mark.slow_cells("late")
@pytest.mark.parametrize("when", ["late", pytest.param("early", marks=pytest.mark.slow)])
def test_steps_are_those_of_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setenv("WHEN", when)
    monkeypatch.setenv("LAYOUTS", "fsdp")
    by_task = launched(tmp_path, 4, "layouts", "forgotten", script=SCRIPT)
    for name, facts in by_task["layouts"].items():
        right(facts, f"{name}, operands read {when}")
    fsdp = by_task["layouts"]["fsdp"]["sent"]
    assert fsdp["reduce_scatter of several"] == 1 and "reduce_scatter" not in fsdp
    wrong = by_task["forgotten"]["fsdp"]
    assert math.isnan(wrong["loss"]) or math.isnan(wrong["gradient"])


@pytest.mark.slow
@pytest.mark.parametrize("when", ["late", "early"])
def test_steps_of_every_layout_are_those_of_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setenv("WHEN", when)
    by_task = launched(tmp_path, 4, "layouts", "recomputed", script=SCRIPT, seconds=600)
    assert set(by_task["layouts"]) == set(LAYOUTS)
    for name, facts in (*by_task["layouts"].items(), ("recomputed", by_task["recomputed"]["fsdp"])):
        right(facts, f"{name}, operands read {when}")
