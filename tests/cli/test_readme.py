"""README's program, word for word, trains as one device does; its commands, word for word, lead
from a model to a report, a proof and a run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import metadata
from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet

import readme
from launch import launched

STEPS = 3
ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_its_program_trains_on_gloo_ranks_as_on_one_device(tmp_path: Path, ranks: int) -> None:
    """Torchrun starts the four. On emulated GPUs it runs in cuda/test_emulated.py."""
    options = () if ranks == 4 else None
    facts = launched(tmp_path, ranks, str(STEPS), script="readme_ranks.py", options=options)
    torch.manual_seed(0)
    model = readme.Model()
    optimizer = torch.optim.AdamW(model.parameters())
    for tokens, targets in readme.batches(STEPS):
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
    for actual in facts["losses"]:
        torch.testing.assert_close(actual, float(loss), rtol=1e-5, atol=0)
    for name, parameter in model.named_parameters():
        if name.endswith("qkv.bias"):
            continue  # that of keys: a gradient of rounding alone, which AdamW scales up
        trained = torch.tensor(facts["weights"][name])
        torch.testing.assert_close(trained, parameter.detach(), rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.slow
def test_its_path_from_a_model_to_a_run_is_walked_as_it_is_printed(tmp_path: Path) -> None:
    """With the model, the program and the commands that it prints, in an empty folder."""
    (tmp_path / "mymodel.py").write_text(readme.block("class Model"))
    (tmp_path / "mine.py").write_text(readme.block("init_process_group"))
    (tmp_path / "look.py").write_text(readme.block("plan.report("))
    commands = readme.commands()
    assert [words[:2] for words in commands] == [
        ["autopar", "plan"], ["autopar", "verify"], ["torchrun", "--standalone"],
    ]  # fmt: skip
    planned, verified, trained = (shell(words, tmp_path) for words in commands)
    looked = shell(["look.py"], tmp_path)
    assert "saved as plan.json" in planned and "rates    assumed" in planned
    assert "4 ranks equal one" in verified
    losses = re.findall(r"^loss (\d+\.\d+)$", trained, re.M)
    assert len(losses) == 8 and float(losses[-1]) < float(losses[0])
    assert "subgraph" in looked and "8 ranks equal one" in looked
    for page in ("report.html", "report8.html"):
        assert "<h2>" in (tmp_path / page).read_text()


@pytest.mark.slow
def test_the_path_of_getting_started_is_walked_as_it_is_printed(tmp_path: Path) -> None:
    page = (readme.README.parent / "docs" / "getting-started.md").read_text()
    fences = re.findall(r"^```(\w+)\n(.*?)^```", page, re.M | re.S)
    model, train, path = (
        next(body for kind, body in fences if kind == wanted and words in body)
        for wanted, words in (("python", "class "), ("text", "init_process"), ("bash", "torchrun"))
    )
    (tmp_path / "classifier.py").write_text(model)
    (tmp_path / "train.py").write_text(train)
    walked = [shlex.split(line, comments=True) for line in path.splitlines()]
    words = [[word for word in line if not re.match("[A-Z_]+=", word)] for line in walked]
    planned, verified, trained = (shell(line, tmp_path) for line in words if line[0] in MODULES)
    assert "saved as plan.json" in planned and "<h2>" in (tmp_path / "report.html").read_text()
    assert "4 ranks equal one" in verified
    losses = [float(loss) for loss in re.findall(r"^step \d: loss (\d+\.\d+)$", trained, re.M)]
    assert len(losses) == 10 and losses == sorted(losses, reverse=True)


MODULES = {"autopar": ["-m", "autopar"], "torchrun": ["-m", "torch.distributed.run"]}


def shell(words: list[str], folder: Path) -> str:
    """What a command prints in a folder."""
    command = [sys.executable, *MODULES.get(words[0], words[:1]), *words[1:]]
    more = {"PYTHONPATH": str(readme.README.parent), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, cwd=folder, env=os.environ | more, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_lock_installs_on_the_oldest_python_that_the_readme_names() -> None:
    """Of packages that are installed as locked: `make` fails where one asks for a newer Python."""
    oldest = re.search(r"Python (\d+\.\d+) or newer", (ROOT / "README.md").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert oldest is not None and project["requires-python"] == f">={oldest[1]}"
    pins = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "requirements.lock").read_text(), re.M)
    installed = [metadata(name) for name, _ in pins]
    as_locked = [
        m for m, (_, version) in zip(installed, pins, strict=True) if m["Version"] == version
    ]
    assert len(as_locked) > len(pins) / 2
    newer = {
        f"{m['Name']} {m['Version']}": m["Requires-Python"]
        for m in as_locked
        if not SpecifierSet(m["Requires-Python"] or "").contains(f"{oldest[1]}.0")
    }
    assert not newer
