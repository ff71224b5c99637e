"""Nothing of the whole model stays on a rank that holds its parts."""

from __future__ import annotations

from pathlib import Path

from launch import launched
from released_ranks import LAYOUTS


def test_the_model_that_was_given_can_be_freed(tmp_path: Path) -> None:
    found = launched(tmp_path, 2, "released", script="released_ranks.py")["released"]
    assert set(found) == {*LAYOUTS, "planned", "recomputed"}
    assert not any(found.values()), found
