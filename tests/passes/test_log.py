"""AUTOPAR_LOG and AUTOPAR_DUMP: a line and a file a pass, from rank 0 alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch, autopar
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
autopar.plan(model, 4, (torch.ones(8, 8),), "megatron")
par = autopar.parallelize(model, 1, (torch.ones(8, 8),))
par(torch.ones(8, 8)).sum().backward()
"""


def run(status: int = 0, **options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=os.environ | options
    )
    assert done.returncode == status, done.stderr
    return done.stderr


@pytest.mark.slow
def test_a_line_and_a_file_a_pass(tmp_path: Path) -> None:
    said = run(AUTOPAR_LOG="debug", AUTOPAR_DUMP=str(tmp_path / "new"))
    lines = [line for line in said.splitlines() if line.startswith("autopar rank 0: ")]
    names = [line.split()[3].rstrip(":") for line in lines]
    assert names[:5] == ["trace", "draws", "masks", "annotate", "chains"] and "rewrite" in names
    files = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert files[0] == "000-trace.txt" and len(files) <= len(names)
    (rewrite,) = (f for f in files if f.endswith("-rewrite.txt") and f < "010")
    text = (tmp_path / "new" / rewrite).read_text()
    assert ">> " in text and "float32 8×4 of 8×16 tp:S(1)" in text


@pytest.mark.slow
def test_other_ranks_are_silent(tmp_path: Path) -> None:
    said = run(AUTOPAR_LOG="debug", AUTOPAR_DUMP=str(tmp_path / "new"), RANK="1")
    assert "autopar rank" not in said and not (tmp_path / "new").exists()


@pytest.mark.slow
def test_nothing_is_left_where_nothing_is_requested(tmp_path: Path) -> None:
    assert "autopar rank" not in run()


@pytest.mark.slow_cells(
    "AUTOPAR_DUMP-/dev/null/x-AUTOPAR_DUMP=/dev/null/x",
    "AUTOPAR_LOG-loud-AUTOPAR_LOG=loud: it is debug, info, warning or error",
)  # fmt: skip
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("AUTOPAR_LOG", "loud", "AUTOPAR_LOG=loud: it is debug, info, warning or error"),
        ("AUTOPAR_DUMP", "/dev/null/x", "AUTOPAR_DUMP=/dev/null/x"),
    ],
)
def test_mistakes_are_reported(name: str, value: str, message: str) -> None:
    assert message in run(status=1, **{name: value})
