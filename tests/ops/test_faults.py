"""Ranks that are killed, stopped or one call ahead: the others say which, where, and soon."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fault_ranks import PATIENCE, TASKS, TIMEOUT
from launch import RANK_SCRIPTS, environment

KILLED = ("forward", "backward", "emitted forward", "emitted backward")
LATE = tuple(name for name in TASKS if name not in KILLED)


def outcomes(folder: Path, *names: str) -> dict[str, list[Any]]:
    script = str(RANK_SCRIPTS / "fault_ranks.py")
    command = [sys.executable, script, str(folder / "facts.json"), *names]
    done = subprocess.run(
        command, env=environment(), timeout=PATIENCE + 60, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[Any]] = json.loads((folder / "facts.json").read_text())
    return found


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return outcomes(tmp_path_factory.mktemp("killed"), *KILLED)


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return outcomes(tmp_path_factory.mktemp("late"), *LATE)


COLLECTIVE = {  # of a node, over an axis, of a module
    "forward": r"all_gather_into_tensor\w* \(all_gather_into_tensor over data\) of up",
    "backward": r"\w+ \((all_to_all_single|all_gather_into_tensor) over data\) of (up|down)",
    "emitted forward": r"all-gather over data in all_gather\w* of up",
    "emitted backward": r"(all-to-all|all-gather|all-reduce) over data",
}


@pytest.mark.parametrize("name", KILLED)
def test_a_killed_rank_is_named(killed: dict[str, list[Any]], name: str) -> None:
    ranks = killed[name]
    assert ranks[1] is None
    for rank in (ranks[0], *ranks[2:]):
        says = rf"RankError: {COLLECTIVE[name]} failed in call 4: nothing is heard of rank 1 any"
        assert re.match(says, rank["seen"]), rank
        assert "rank 0 has made 4 calls" in rank["seen"]
        assert re.search(r"\[(Connection|Read error).*\]$", rank["seen"]), "gloo's own words"


def test_a_stopped_rank_is_named_within_the_timeout(late: dict[str, list[Any]]) -> None:
    """Groups of a grid have the default group's timeout."""
    *others, stopped = late["stopped"]
    assert stopped is None
    for rank in others:
        assert "nothing is heard of rank 3 any more" in rank["seen"], rank
        assert re.search(r"over [xy]\b.* failed in call 4", rank["seen"]), rank
        assert rank["seconds"] < TIMEOUT + 15, rank


def test_a_rank_that_was_killed_before_inputs_are_compared_is_named(late: Any) -> None:
    first, other = late["killed, compared"]
    says = "RankError: rank 1 did not come to call 2: nothing is heard of rank 1 any more"
    assert first["seen"].startswith(says) and other is None, first
    assert first["seconds"] < TIMEOUT + 15, first


@pytest.mark.parametrize("name", ["a call more", "a call more, compared"])
def test_the_rank_that_is_a_call_ahead_is_named(late: dict[str, list[Any]], name: str) -> None:
    first, other = late[name]
    made = TASKS[name][2].keywords["calls"]  # type: ignore[attr-defined]
    calls = "1 call" if made == 1 else f"{made} calls"
    assert first["seen"].startswith("RankError: ") and other is None, late
    assert f"rank 0 has made {made + 1} calls (in the forward)" in first["seen"], first
    assert f"rank 1 has made {calls} (after the backward)" in first["seen"], first
    assert first["seconds"] < TIMEOUT + 15, first
