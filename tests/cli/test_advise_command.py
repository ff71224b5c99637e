"""`autopar advise`: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from commands import refused, run

SMALL = ("advise", "targets:tiny", "--world", "dgx-h100", "--ranks", "2")


def test_the_options_are_written_and_said(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    facts = json.loads(
        run(*SMALL, "--for", "torchtitan", "--no-compare", "--out", str(path), "--json").stdout
    )
    sizes = tomllib.loads(path.read_text())["parallelism"]
    assert facts["options"] == path.read_text()
    assert facts["tool"] == "torchtitan" and facts["own"] is None
    assert sizes["tensor_parallel_degree"] == facts["degrees"]["tensor"]
    assert facts["plan"]["overlapped"] == min(t["overlapped"] for t in facts["tried"])


def test_people_read_the_degrees_and_the_gain() -> None:
    text = run(*SMALL, "--for", "deepspeed").stdout
    assert "degrees  replicate" in text and "autopar  its own plan takes" in text
    assert '"zero_optimization"' in text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--for", "alpa"), "no exporter for 'alpa'"),
        (("--for", "megatron", "--out", "none/x.sh"), "there is no folder none"),
    ],
)
def test_mistakes_are_reported(more: tuple[str, ...], message: str) -> None:
    assert message in refused(*SMALL, *more)
