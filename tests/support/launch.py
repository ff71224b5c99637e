"""Where the tests' scripts lie, and how a test starts one on gloo ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent.parent
ROOT = TESTS.parent
RANK_SCRIPTS = TESTS / "rank_scripts"
SECONDS = 180  # a launch that hangs is stopped after so many


def python_path() -> str:
    """PYTHONPATH for a script that tests start: what pyproject.toml gives pytest."""
    folders = sorted(path for path in TESTS.iterdir() if path.is_dir())
    return os.pathsep.join(map(str, (ROOT, ROOT / "examples", TESTS, *folders)))


def environment(**more: str) -> dict[str, str]:
    """The environment of a script on gloo ranks: one thread each, loopback, no network."""
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return {**os.environ, **own, "PYTHONPATH": python_path(), **more}


def launched(
    folder: Path,
    ranks: int,
    *tasks: str,
    script: str = "train_ranks.py",
    seconds: int = SECONDS,
    options: Sequence[str] = (),
) -> dict[str, Any]:
    """What `ranks` processes of a script of rank_scripts/ saw in these tasks; `options` are
    torchrun's.
    """
    out = folder / "facts.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options]
    process = subprocess.Popen(
        [*torchrun, "--nproc-per-node", str(ranks), str(RANK_SCRIPTS / script), str(out), *tasks],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # torchrun then ends its ranks
        output, _ = process.communicate(timeout=60)
        pytest.fail(f"{ranks} ranks did not end within {seconds} s:\n{output[-4000:]}")
    assert process.returncode == 0, output[-6000:]
    return json.loads(out.read_text())
