"""Where the tests' scripts lie, and how a test starts one on gloo ranks."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rank_server import Request

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
    options: Sequence[str] | None = None,
) -> dict[str, Any]:
    """What `ranks` processes of a script of rank_scripts/ saw in these tasks. With `options`, which
    are torchrun's, it starts them; without, the rank server does (see rank_server.py).
    """
    out = folder / "facts.json"
    command = [str(RANK_SCRIPTS / script), str(out), *tasks]
    if options is None:
        status, output = _served(folder, ranks, command, seconds)
    else:
        status, output = _torchrun(ranks, [*options, *command], seconds)
    if status is None:
        pytest.fail(f"{ranks} ranks did not end within {seconds} s:\n{output[-4000:]}")
    assert status == 0, output[-6000:]
    return json.loads(out.read_text())


def _torchrun(ranks: int, command: Sequence[str], seconds: int) -> tuple[int | None, str]:
    """The status, None where it was stopped, and what was printed."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    process = subprocess.Popen(
        [*torchrun, "--nproc-per-node", str(ranks), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # torchrun then ends its ranks
        return None, process.communicate(timeout=60)[0]
    return process.returncode, output


def _served(
    folder: Path, ranks: int, command: Sequence[str], seconds: int
) -> tuple[int | None, str]:
    """As `_torchrun`."""
    server, printed = _server(), folder / f"printed.{uuid.uuid4().hex}"
    request = Request(
        ranks=ranks, command=[*command], environment=environment(), output=str(printed)
    )
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    group = int(server.stdout.readline())
    stopped = threading.Event()

    def stop() -> None:
        stopped.set()
        os.killpg(group, signal.SIGKILL)

    timer = threading.Timer(seconds, stop)
    timer.start()
    status = int(server.stdout.readline())
    timer.cancel()
    return None if stopped.is_set() else status, printed.read_text()


@functools.cache
def _server() -> subprocess.Popen[str]:
    """This process's server; it ends when its input does, with this process."""
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("rank_server.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
