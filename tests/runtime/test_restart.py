"""A run whose rank was killed goes on from its last checkpoint, on as many ranks or on fewer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launch import ROOT, environment, launched

EXAMPLE = ROOT / "examples" / "train_on_nodes.py"
pytestmark = pytest.mark.slow
SCRIPT, FATAL, SAVED = "restart_ranks.py", 4, 2  # killed before step 4, saved after step 2


def test_torchrun_starts_the_ranks_again_and_losses_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torchrun's own store still has the addresses of the ranks that are gone (pytorch 135712)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    folder = str(tmp_path / "checkpoints")
    again = ("--max-restarts", "1")
    facts = launched(tmp_path, 2, folder, str(FATAL), script=SCRIPT, options=again)
    assert (facts["ranks"], facts["restarts"], facts["start"]) == (2, 1, SAVED)
    assert facts["losses"] == facts["undisturbed"][SAVED:]  # to the bit


def test_fewer_ranks_go_on_as_if_they_had_run_all_along(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    with pytest.raises(AssertionError, match="SIGKILL"):
        launched(tmp_path, 4, folder, str(FATAL), script=SCRIPT, options=())
    facts = launched(tmp_path, 2, folder, str(FATAL), script=SCRIPT)
    assert (facts["ranks"], facts["restarts"], facts["start"]) == (2, 0, SAVED)
    assert facts["losses"] == pytest.approx(facts["undisturbed"][SAVED:], abs=1e-5)


def test_the_example_goes_on_where_it_was(tmp_path: Path) -> None:
    for steps in (2, 3):
        options = ["--checkpoints", str(tmp_path / "runs"), "--every", "1", "--steps", str(steps)]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(EXAMPLE)]
        run = subprocess.run(
            [*command, *options], env=environment(), capture_output=True, text=True, timeout=120
        )
        assert run.returncode == 0, run.stderr[-4000:]
    (line,) = run.stdout.splitlines()
    assert line.startswith("step 3 on 1 ranks: loss ")
