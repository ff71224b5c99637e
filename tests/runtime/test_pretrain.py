"""examples/pretrain.py: its losses are those of one device, also after a kill, on half the ranks
and under another layout.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset
from transformers import LlamaForCausalLM

from examples import pretrain
from launch import ROOT, environment

pytestmark = pytest.mark.slow
FILES = [ROOT / "LICENSE"]  # a text that stays as it is
Losses = dict[tuple[int, str], float]  # by step and kind


def losses_in(lines: list[str]) -> Losses:
    matches = (re.fullmatch(r"step (\d+) (loss|validation) (\S+)", line.strip()) for line in lines)
    return {(int(m[1]), m[2]): float(m[3]) for m in matches if m}


def run(folder: Path, ranks: int, *options: str, kill_at: int | None = None) -> Losses:
    """What a run under torchrun reports, or until it is killed after a step."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = ["--nproc-per-node", str(ranks), str(ROOT / "examples" / "pretrain.py")]
    process = subprocess.Popen(
        [*torchrun, *script, *map(str, FILES), "--folder", str(folder), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if kill_at is not None and line.startswith(f"step {kill_at} "):
            os.killpg(process.pid, signal.SIGKILL)
            for pid in ranks_of(folder):
                os.kill(pid, signal.SIGKILL)
            break
    status = process.wait(timeout=300)
    assert kill_at is not None or status == 0, lines
    return losses_in(lines)


def ranks_of(folder: Path) -> Iterator[int]:
    """The ranks of a run, which are in groups of their own."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in command:
                yield int(entry.name)


class Shuffled:
    """The batches of par.loader(rows, shuffle=True, drop_last=True), on one device."""

    def __init__(self, rows: Subset[Any]) -> None:
        self.rows, self.epoch = rows, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.epoch))
        self.epoch += 1
        for batch in order.split(pretrain.ROWS)[: len(order) // pretrain.ROWS]:
            yield torch.stack([self.rows[int(row)] for row in batch])


def on_one_device(steps: int, bfloat16: bool) -> Losses:
    """The same loop on the model itself."""
    training, validation = pretrain.split(pretrain.Text(FILES))
    torch.manual_seed(0)
    model = LlamaForCausalLM(pretrain.CONFIG)
    batches = Shuffled(training), DataLoader(validation, pretrain.ROWS)
    lines: list[str] = []
    pretrain.train(model, *batches, steps, bfloat16, report=lines.append)
    return losses_in(lines)


def apart(losses: Losses, others: Losses) -> float:
    """The largest difference of a loss that both have."""
    common = losses.keys() & others.keys()
    assert common
    return max(abs(losses[key] - others[key]) for key in common)


def test_losses_are_those_of_one_device_after_a_kill_too(tmp_path: Path) -> None:
    single = on_one_device(60, bfloat16=False)
    first = run(tmp_path / "run", 4, kill_at=47)
    second = run(tmp_path / "run", 2, "--layout", "megatron")
    assert min(second)[0] == 41  # from the last checkpoint on
    assert first.keys() | second.keys() == single.keys() and len(single) == 63
    assert apart(first, single) < 1e-5 and apart(second, single) < 1e-5


def test_in_bfloat16_as_well(tmp_path: Path) -> None:
    """Rounding makes runs of bfloat16 drift apart, so the resumed run is held against the one that
    goes on from the same step on that layout, without a kill.
    """
    single = on_one_device(20, bfloat16=True)
    killed = run(tmp_path / "killed", 4, "--bfloat16", kill_at=47)
    assert apart({k: x for k, x in killed.items() if k[0] <= 20}, single) < 2e-3
    calm = run(tmp_path / "calm", 4, "--bfloat16", "--steps", "40")
    assert max(calm)[0] == 40
    on_two = ("--layout", "megatron", "--bfloat16")
    resumed, other = (run(tmp_path / name, 2, *on_two) for name in ("killed", "calm"))
    assert resumed.keys() == other.keys() and min(resumed)[0] == 41 and max(resumed)[0] == 60
    assert apart(resumed, other) < 2e-3
    assert apart(resumed, killed) < 2e-3  # the 4 ranks, up to where they were killed
