"""A process that ends while gloo's threads still have something to let go of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launch import RANK_SCRIPTS, environment

SECONDS = 200  # a quiet machine needs six


@pytest.mark.parametrize("end", ["destroyed", "running"])
def test_no_thread_is_left_when_python_ends(tmp_path: Path, end: str) -> None:
    script = str(RANK_SCRIPTS / "exit_ranks.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(tmp_path / "store"), end],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], said
