"""What people wait for is measured whole: the cells are commands that run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.planning import face


@pytest.mark.slow
def test_a_cell_is_a_command_in_a_fresh_process(tmp_path: Path) -> None:
    by_name = {cell.name: cell for cell in face.cells(tmp_path)}
    assert [name for name in by_name if name.startswith("gpt2")] == ["gpt2 on 8"]
    small = face.Cell("help", ("-m", "autopar", "plan", "--help"), 1)
    row = face.measure(small)
    assert float(row["cpu_seconds"]) > 0 and float(row["peak_gib"]) > 0.05
    wrong = face.measure(face.Cell("wrong", ("-m", "autopar", "plan", "nothing"), 1))
    assert "a function that returns (model, inputs)" in str(wrong["error"])
    assert len(face.table([row, wrong]).rows) == 2
    refused = face.measure(face.Cell("wrong", ("-m", "autopar", "plan", "nothing"), 1, status=2))
    assert float(refused["cpu_seconds"]) > 0


def test_the_decoder_is_a_target(tmp_path: Path) -> None:
    from autopar.tools.targets import Batch, resolve

    (cell,) = (c for c in face.cells(tmp_path) if c.name.startswith("decoder"))
    target = resolve(cell.command[3], Batch(512, 8), 8)
    assert 30e9 < target.parameters < 40e9
