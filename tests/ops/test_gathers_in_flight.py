"""Gathers on gloo, many under way at once: torch's own corrupt memory (`_compat.safe_gathers`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launch import RANK_SCRIPTS, environment


@pytest.mark.slow
def test_two_gathers_that_end_at_once_do_no_harm(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(RANK_SCRIPTS / "gathers.py"), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=200,
    )
    assert ran.returncode == 0 and "done" in ran.stdout, ran.stdout + ran.stderr
