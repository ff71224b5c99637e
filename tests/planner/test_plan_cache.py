"""Plans kept on disk: the same search is made once, another one is made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
import models
from autopar import Plan, World
from autopar.planner import planner
from targets import Mlp

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "plans"))
    return tmp_path / "plans"


class Searches:
    """Counts the searches that are made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, search = 0, planner.search_plan

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return search(*args, **kwargs)

        monkeypatch.setattr(planner, "search_plan", counted)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Searches:
    return Searches(monkeypatch)


def planned(world: World | int = 4, rows: int = 16, **options: Any) -> Plan:
    inputs = torch.ones(rows, 64), torch.ones(rows, 64)
    return autopar.plan(Mlp(), world, inputs, smaller=False, **options)


def facts(plan: Plan) -> dict[str, Any]:
    return {**plan.to_json(), "planned": None, "seconds_by_pass": None}


def test_a_search_is_made_once(
    folder: Path, searches: Searches, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = planned(), planned()
    assert searches.count == 1 and facts(first) == facts(second)
    assert not second.edited and second.timeline().seconds == first.timeline().seconds
    (path,) = folder.iterdir()
    assert f"the plan is read from {path}, no search was made" in capsys.readouterr().err


def test_without_a_folder_nothing_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, searches: Searches
) -> None:
    monkeypatch.delenv("AUTOPAR_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)
    assert facts(planned()) == facts(planned())
    assert searches.count == 2 and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_a_plan_depends_on_names_its_file(folder: Path, searches: Searches) -> None:
    planned()
    slower = World.of(4)
    slower = replace(slower, levels=(replace(slower.levels[0], bytes_per_s=1e6),))
    for number, arguments in enumerate(
        (
            {"world": 2}, {"world": slower}, {"rows": 32}, {"layout": "megatron"},
            {"overlap": False}, {"outputs": "sharded"}, {"reduce_dtype": "float32"},
            {"optimizer": "sgd"}, {"memory": 2**30}, {"recompute": "full"},
        ),
        start=2,
    ):  # fmt: skip
        planned(**arguments)  # type: ignore[arg-type]
        assert searches.count == len(list(folder.iterdir())) == number, arguments


@pytest.mark.slow
def test_plans_within_a_memory_are_the_same(folder: Path, searches: Searches) -> None:
    model, args, _ = models.gpt()
    free = autopar.plan(model, 2, args, "ddp", smaller=False).peak_bytes
    first, second = (
        autopar.plan(model, 2, args, "auto", memory=0.8 * free, smaller=False) for _ in range(2)
    )
    assert searches.count == 2 and facts(first) == facts(second)
    assert second.memory == first.memory and second.recompute == first.recompute


@pytest.mark.parametrize("fault", ["cut", "edited", "of another mesh"])
def test_files_that_are_not_as_written_are_passed_over(
    fault: str, folder: Path, searches: Searches
) -> None:
    first = planned(layout="megatron")
    (path,) = folder.iterdir()
    whole = path.read_text()
    data = json.loads(whole)
    if fault == "cut":
        path.write_text(whole[: len(whole) // 2])
    elif fault == "edited":
        name = next(iter(data["stored"]))
        data["stored"][name]["states"] = ["I"]
        path.write_text(json.dumps(data))
    else:
        planned(2, layout="megatron")
        other = next(each for each in folder.iterdir() if each != path)
        path.write_text(other.read_text().replace('"tp2"', '"tp4"'))
    before = searches.count
    assert facts(planned(layout="megatron")) == facts(first)
    assert searches.count == before + 1 and path.read_text() == whole


def test_a_folder_that_cannot_be_written_costs_nothing_but_a_line(
    folder: Path, searches: Searches, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.write_text("a file")
    assert planned().mesh.axes
    assert "the plan cannot be kept in" in capsys.readouterr().err


@pytest.mark.slow
def test_processes_share_a_folder(folder: Path) -> None:
    """Whatever the order of their sets."""
    code = (
        "import autopar, torch; from torch import nn; model = nn.Linear(8, 16);"
        "autopar.plan(model, 4, (torch.ones(4, 8),), smaller=False)"
    )
    said = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said.append("no search was made" in done.stderr)
    assert said == [False, True] and len(list(folder.iterdir())) == 1
