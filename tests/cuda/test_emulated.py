"""On CUDA devices that are emulated: what would stop the first run on GPUs stops here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from launch import environment

HERE = Path(__file__).parent
TORCH = Path(torch.__file__).parent
LAYOUTS = ("auto", "ddp", "fsdp", "megatron", "megatron-sp", "atp", "3d", "4d", "2.5d")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ for guard.cpp")


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The emulated devices, compiled."""
    library = tmp_path_factory.mktemp("cuda") / "guard.so"
    flags = ["-shared", "-fPIC", "-std=c++20", f"-I{TORCH / 'include'}", f"-L{TORCH / 'lib'}"]
    command = ["g++", *flags, str(HERE / "guard.cpp"), "-lc10", "-ltorch_cpu", "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return library


def emulated(guard: Path, rank: int, *tasks: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-W", "ignore", str(HERE / "emulated.py"), str(guard), str(rank)]
    done = subprocess.run(
        [*command, *tasks],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    return [answers[task] for task in tasks]


def on_its_device(facts: dict[str, Any], rank: int) -> None:
    assert "error" not in facts, facts["error"]
    here = f"cuda:{rank}"
    assert facts["loss"] == here
    assert facts["parameters"] == facts["gradients"] == [here]
    assert facts["without"] == 0
    assert set(facts.get("named", [])) <= {here}


@pytest.mark.slow
def test_a_step_stays_on_the_device_of_the_rank(guard: Path) -> None:
    (facts,) = emulated(guard, 5, "layout:4d,dropout,recompute")
    on_its_device(facts, 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_so_does_a_step_of_every_layout(guard: Path, name: str) -> None:
    tasks = [f"layout:{name}", f"layout:{name},dropout,recompute", f"layout:{name},reduce"]
    for facts in emulated(guard, 5, *tasks):
        on_its_device(facts, 5)


@pytest.mark.slow
def test_readme_s_program_runs_where_the_backend_is(guard: Path) -> None:
    (facts,) = emulated(guard, 3, "readme")
    on_its_device(facts, 3)


@pytest.mark.slow
def test_ranks_on_different_devices_hold_one_fingerprint(guard: Path) -> None:
    both = [emulated(guard, rank, "fingerprints")[0] for rank in (0, 6)]
    assert len({name for facts in both for name in facts.values()}) == 1, both


@pytest.mark.slow
def test_a_mix_of_devices_is_refused(guard: Path) -> None:
    (facts,) = emulated(guard, 2, "mixed")
    assert facts["error"].startswith("TraceError"), facts
    assert "cuda:2" in facts["error"] and "cpu" in facts["error"]


@pytest.mark.slow
def test_inputs_may_be_on_another_device_than_the_model(guard: Path) -> None:
    for facts in emulated(guard, 6, "apart:cpu,cuda", "apart:cuda,cpu"):
        on_its_device(facts, 6)


@pytest.mark.slow
def test_a_loss_under_autocast_is_in_float32_as_on_a_gpu(guard: Path) -> None:
    (facts,) = emulated(guard, 0, "autocast")
    assert facts == {"logits": "torch.float32", "loss": "torch.float32"}


@pytest.mark.slow
def test_a_timeline_of_streams_is_refused(guard: Path) -> None:
    (facts,) = emulated(guard, 4, "timeline")
    assert facts["error"].startswith("PlanError: a timeline is read off what the CPU does"), facts


@pytest.mark.parametrize("name", ["4d", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_step_never_waits_for_the_device(guard: Path, name: str) -> None:
    (facts,) = emulated(guard, 1, f"steps:{name}")
    assert "error" not in facts, facts["error"]
    assert facts["waits"] == {}
