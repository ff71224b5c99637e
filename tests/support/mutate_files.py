"""Broken files: plans and worlds as JSON, changed at random, must be refused with a named error or
be harmless.

    python -m tests.mutate_files --plans 1000 --worlds 1000 --seed 0

exits with 1 where one ends in a raw error, or is accepted and computes something else. Harmless is
a plan whose table prints, that comes back from its own file, and that `apply` refuses or `verify`
proves right; a world on which a small model is planned with finite figures, or refused.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import random
import sys
import tempfile
import traceback
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from typer.testing import CliRunner

import autopar
from autopar.cli import main as cli_main
from autopar.cli import options
from autopar.runtime import apply
from autopar.runtime import apply as applying
from autopar.world import World
from autopar.world.hardware import Attention, Device, KernelTimes, Level, Link, Measured

if __package__:  # python -m tests.mutate_files
    from tests.json_mutations import mutated
else:
    from json_mutations import mutated

Json = Any
BATCH, WIDTH = 8, 16


# -- what is broken --------------------------------------------------------------------------------
class Blocks(nn.Module):
    """Two small blocks, so that something can be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def subject() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return Blocks(), (torch.randn(BATCH, WIDTH),)


def documents_of_plans() -> list[Json]:
    model, inputs = subject()
    requests: tuple[tuple[Any, Any, Any], ...] = (
        (4, "megatron", "none"), (4, autopar.Grid25D(2), "none"), (2, "fsdp", "full"),
        (World.preset("dgx-h100", 4), "auto", "auto"), (star(4), "ddp", "gathers"),
    )  # fmt: skip
    plans = (autopar.plan(model, w, inputs, how, recompute=again) for w, how, again in requests)
    return [json.loads(json.dumps(plan.to_json())) for plan in plans]


def star(ranks: int) -> World:
    device = Device("core", {"float32": 4e10}, 8e9, 1e10)
    return World((), device, "gloo", links=tuple(Link(r, "s", 1e9, 1e-6) for r in range(ranks)))


def calibrated() -> World:
    """A world with every field that calibration fills in."""
    forms = KernelTimes("float32", 8, 16, 32, "NT", 2e-3, 3e-3, 1e-3)
    attention = tuple(
        Attention("float32", True, keys, size, 0.5, 0.25) for keys in (64, 256) for size in (16, 64)
    )
    points = {"float32": ((1e5, 0.1), (1e9, 0.8))}
    device = Device(
        "cpu", {"float32": 4e10}, 8e9, 1e10, points, 5e-6, (forms,), attention, 2e9
    )  # fmt: skip
    measured = tuple(
        Measured(kind, pattern, math.prod(size for size, _ in pattern), 1e-3, 2e-9, **more)
        for kind in ("all_reduce", "all_gather")
        for pattern in (((2, 1),), ((2, 2),), ((4, 1),))
        for more in ({"bends": ((1e4, 3e-8), (1e5, 1e-8))}, {"together": False})
    )
    levels = Level(2, 6e8, 1e-4), Level(2, 5e7, 1e-3, per="rank")
    factors = {"all_reduce": 1.1, "all_gather": 0.9}
    return World(levels, device, "gloo", "own", 3e-4, factors, measured=measured, contention=0.3)


def documents_of_worlds() -> list[Json]:
    named = World.preset("dgx-h100", 4), World.preset("frontier", 8), World.preset("perlmutter", 2)
    return [world.to_json() for world in (calibrated(), star(4), *named)]


# -- what may become of it -------------------------------------------------------------------------
DECISIONS = (
    "mesh", "choices", "stored", "copies", "outputs", "recompute", "regather", "panels", "world",
    "reduce_dtype",
)  # fmt: skip


class Trial:
    """Files are tried one by one in a folder; `counts` says what became of them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "given.json"
        self.model, self.inputs = subject()
        self.counts: collections.Counter[str] = collections.Counter()
        self.proven: set[int] = set()
        self.worlds: set[World] = set()

    def plan(self, data: bytes) -> str:
        self.path.write_bytes(data)
        shown = CliRunner().invoke(cli_main.app, ["show", str(self.path)])
        clean = shown.exception is None or isinstance(shown.exception, SystemExit)
        if not clean:
            assert shown.exception is not None
            raise shown.exception
        try:
            plan = autopar.Plan.load(self.path)
        except autopar.AutoparError as error:
            assert shown.exit_code == 2, "show prints what load refuses"
            return refusal(error, str(self.path))
        assert shown.exit_code == 0, "show refuses what load takes"
        assert autopar.Plan.from_json(plan.to_json()) == plan
        try:
            renewed = apply.renew_plan(self.model, plan, self.inputs)
        except autopar.AutoparError as error:
            return refusal(error)
        _assert_finite(renewed.seconds, renewed.comm_bytes, renewed.peak_bytes)
        return self._proven(plan)

    def _proven(self, plan: autopar.Plan) -> str:
        decided = hash(repr([getattr(plan, name) for name in DECISIONS]))
        if decided in self.proven:
            return "accepted, as one proven right"
        autopar.verify(self.model, None, self.inputs, layout=plan)  # raises where it is wrong
        self.proven.add(decided)
        return "accepted and proven right"

    def world(self, data: bytes) -> str:
        self.path.write_bytes(data)
        try:
            world = options.read_world(str(self.path), None)
        except autopar.AutoparError as error:
            return refusal(error, str(self.path))
        world.save(self.path)
        again = World.load(self.path)
        assert again == world and hash(again) == hash(world) and str(again) == str(world)
        return self._planned(world)

    def _planned(self, world: World) -> str:
        """By a search of all meshes, and as a step in time, each where that takes a moment only."""
        if world in self.worlds:
            return "accepted, as one planned on"
        self.worlds.add(world)
        for layout, overlap in (("auto", False), ("fsdp", True)):
            try:
                layout = layout if world.ranks <= 8 else "ddp"
                planned = autopar.plan(
                    self.model, world, self.inputs, layout, overlap=overlap, smaller=False
                )
            except autopar.AutoparError as error:
                return refusal(error)
            step = planned.seconds, planned.overlapped or 0.0, planned.bound
            _assert_finite(*step, planned.comm_bytes, planned.peak_bytes)
        return "accepted, and planned on"


def _assert_finite(*figures: float) -> None:
    assert all(math.isfinite(figure) and figure >= 0 for figure in figures), figures


def refusal(error: autopar.AutoparError, where: str = "") -> str:
    assert where in str(error) and len(str(error)) > len(where) + 10, f"says too little: {error}"
    assert len(str(error)) < 5000, "says too much"
    return "refused when it is used" if not where else "refused when it is read"


def tried(
    kind: str, documents: list[Json], cases: Iterable[int], seed: int, trial: Trial
) -> list[str]:
    """What was neither harmless nor refused, with the traceback."""
    failed = []
    attempt = trial.plan if kind == "plan" else trial.world
    for index in cases:
        draw = random.Random(f"{kind} {seed} {index}")
        data, done = mutated(draw.choice(documents), draw)
        try:
            trial.counts[f"{kind}: {attempt(data)}"] += 1
        except Exception:
            trial.counts[f"{kind}: RAW"] += 1
            failed.append(f"{kind} {index} of seed {seed}, {done}:\n{traceback.format_exc()}")
    return failed


def run(plans: int, worlds: int, seed: int) -> tuple[list[str], dict[str, int]]:
    """Failures, and how often what became of a file."""
    with tempfile.TemporaryDirectory() as folder, traced_once():
        trial = Trial(Path(folder))
        failed = tried("plan", documents_of_plans(), range(plans), seed, trial) if plans else []
        failed += (
            tried("world", documents_of_worlds(), range(worlds), seed, trial) if worlds else []
        )
        return failed, dict(sorted(trial.counts.items()))


def traced_once() -> Any:
    """Tracing takes most of the time, and gives the same each time."""
    known: dict[bool, Any] = {}
    trace = applying.trace_step

    def traced(model: nn.Module, inputs: Any, count: int, pipeline: Any = None) -> Any:
        if count > 1:
            return trace(model, inputs, count)
        if not known:
            known[True], _ = trace(model, inputs, 1)
        return replace(known[True]), None

    return mock.patch.object(applying, "trace_step", traced)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("plans", "worlds", "seed"):
        parser.add_argument(f"--{name}", type=int, default=0 if name == "seed" else 1000)
    arguments = parser.parse_args()
    failed, counts = run(arguments.plans, arguments.worlds, arguments.seed)
    print(*failed, sep="\n", end="\n" if failed else "")
    print(*(f"{count:6} {name}" for name, count in counts.items()), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
