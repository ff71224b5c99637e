"""The small examples run as their docstrings say, at small size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(*arguments: str, folder: Path) -> str:
    options = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True,
        env=os.environ | options, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow_cells("auto")
@pytest.mark.parametrize("layout", ["auto", pytest.param("megatron", marks=pytest.mark.slow)])
def test_a_vit_trains_on_two_ranks(layout: str, tmp_path: Path) -> None:
    """ "auto" may take a layout that has a name of its own."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    said = run(*torchrun, str(EXAMPLES / "vit.py"), "--layout", layout, folder=tmp_path)
    taken = "layout  " if layout == "auto" else f"layout  {layout}"
    assert "first loss" in said and taken in said


@pytest.mark.slow
def test_a_plan_for_many_gpus_needs_none(tmp_path: Path) -> None:
    said = run(str(EXAMPLES / "plan_1024.py"), "--small", folder=tmp_path)
    assert "16 ranks of H100" in said
    names = {path.name for path in (tmp_path / "out/plan").iterdir()}
    assert names == {"plan.json", "report.html"}


@pytest.mark.slow
def test_grids_are_proved_and_shown(tmp_path: Path) -> None:
    said = run(str(EXAMPLES / "grids.py"), folder=tmp_path)
    assert said.count("8 ranks equal one") == 2 and "# blocks.1" in said
    assert "<svg" in (tmp_path / "out/grids/2.5d.html").read_text()


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "one_block.ipynb").read_text())
    names: dict[str, object] = {"__name__": "notebook"}
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    for number, source in enumerate(cells):
        exec(compile(source, f"cell {number}", "exec"), names)
    assert len(cells) >= 6
    graph = eval("graphs['rewrite']", names)
    assert "blocks.2 as blocks.1" in graph._repr_html_()
