"""Gathers on gloo, many under way at once: torch's own corrupt memory (`_compat.safe_gathers`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_two_gathers_that_end_at_once_do_no_harm(tmp_path: Path) -> None:
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": str(here.parent), "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run(
        [sys.executable, str(here / "gathers.py"), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
    )
    assert ran.returncode == 0 and "done" in ran.stdout, ran.stdout + ran.stderr
