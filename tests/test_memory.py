"""The modelled peak of memory against the measured one, and plans that must fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
import models
from autopar import PlanError
from autopar.cost.memory import RESERVE, STATES, Budget, step_bytes
from autopar.cost.peak import Lives, highest
from autopar.errors import LayoutError
from autopar.layouts import NAMES
from autopar.world import World
from benchmarks.memory import CASES, Case, row

QUICK = ("gpt 2 ddp", "gpt2 2 fsdp full", "llama 4 2.5d")


def _name(case: Case) -> str:
    again = f" {case.recompute}" if case.recompute != "none" else ""
    return f"{case.model} {case.ranks} {case.layout}{again}"


def _case(case: Case) -> object:
    marks = () if _name(case) in QUICK else pytest.mark.slow
    return pytest.param(case, id=_name(case), marks=marks)


@pytest.mark.parametrize("case", [_case(case) for case in CASES])
def test_the_model_is_within_a_tenth(case: Case) -> None:
    found = row(case)
    assert abs(found.error) < 0.1, found
    memory = found.memory
    parts = memory.parameters + memory.gradients + memory.optimizer + memory.activations
    assert parts + memory.transient == pytest.approx(memory.peak)


@pytest.mark.parametrize("name", STATES)
def test_a_step_makes_what_is_said(name: str) -> None:
    """Beyond its states."""
    made = {
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.Adam,
        "rmsprop": torch.optim.RMSprop,
        "adagrad": torch.optim.Adagrad,
        "sgd-momentum": lambda p: torch.optim.SGD(p, momentum=0.9),
        "sgd": torch.optim.SGD,
    }[name]
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (1000, 500)]
    optimizer = made(parameters)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        with Lives() as lives:
            optimizer.step()
    states = [
        x for s in optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor)
    ]
    assert sum(x.nbytes for x in states if x.dim()) == STATES[name] * 4 * 1500
    known = {id(t.untyped_storage()) for t in (*states, *parameters)}
    own = [life for key, life in lives.known.items() if key in known]
    rest = [life for life in lives.lives if life not in own]
    assert highest(rest)[1] == pytest.approx(step_bytes([4000.0, 2000.0], name), abs=100)


def test_as_few_blocks_as_it_takes() -> None:
    model, args, _ = models.gpt()
    free = autopar.plan(model, 2, args, "ddp", recompute="none")
    full = autopar.plan(model, 2, args, "ddp", recompute="full")
    between = (free.peak_bytes + full.peak_bytes) / 2
    made = autopar.plan(model, 2, args, "ddp", memory=between)
    assert made.recompute == ("blocks.0",) and full.peak_bytes <= made.peak_bytes <= between
    assert made.regather == ()
    assert made.memory is not None and made.memory.peak == made.peak_bytes
    assert autopar.plan(model, 2, args, "ddp").recompute == ()  # a CPU has no limit


def test_gathers_before_blocks() -> None:
    """Where gathered weights are enough, nothing else is dropped; then some blocks, too."""
    model, args, _ = models.gpt()

    def planned(**how: Any) -> autopar.Plan:
        return autopar.plan(model, 4, args, "fsdp", smaller=False, **how)

    free, gathers, full = (planned(recompute=how) for how in ("none", "gathers", "full"))
    assert full.peak_bytes < gathers.peak_bytes < 0.9 * free.peak_bytes
    assert free.seconds < gathers.seconds < full.seconds
    half = planned(memory=(free.peak_bytes + gathers.peak_bytes) / 2)
    assert half.recompute == () and half.regather == ("blocks.0",)
    assert planned(memory=gathers.peak_bytes).regather == ("blocks.0", "blocks.1")
    both = planned(memory=gathers.peak_bytes - 1)
    assert both.recompute == ("blocks.0",) and both.regather == ("blocks.1",)
    assert gathers.seconds < both.seconds < full.seconds


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "ranks", "part"),
    [
        ("mlp", 2, 0.0),
        pytest.param("gpt", 2, 0.0, marks=SLOW),
        *(
            pytest.param(name, ranks, part, marks=SLOW)
            for name, ranks in (("gpt", 4), ("llama", 4), ("t5", 2), ("gpt2", 4))
            for part in (0.0, 0.3, 0.7)
        ),
    ],
)
def test_auto_is_as_fast_as_any_named_layout_that_fits(name: str, ranks: int, part: float) -> None:
    """Also where only the most frugal of them does: between its least peak and what auto takes."""
    model, args, kwargs = getattr(models, name)()
    inputs = kwargs or args

    def planned(layout: str, **how: Any) -> autopar.Plan | None:
        try:
            return autopar.plan(model, ranks, inputs, layout, smaller=False, **how)
        except (LayoutError, PlanError):
            return None

    full = [plan for layout in NAMES[1:] if (plan := planned(layout, recompute="full"))]
    least = min(plan.peak_bytes for plan in full)
    free = planned("auto")
    assert free is not None
    limit = least + part * max(0.0, free.peak_bytes - least)
    found = planned("auto", memory=limit)
    assert found is not None and found.peak_bytes <= limit
    assert found.bound <= found.seconds * (1 + 1e-9)
    for layout in NAMES[1:]:
        plan = planned(layout, memory=limit)
        assert plan is None or found.seconds <= plan.seconds * (1 + 1e-9), layout


def test_what_does_not_fit_is_refused() -> None:
    model, args, _ = models.gpt()
    with pytest.raises(PlanError, match="no plan fits") as caught:
        autopar.plan(model, 2, args, "ddp", memory=8e5)
    said = str(caught.value)
    assert "781.25 KiB" in said or "0.76 MiB on each of 2 devices" in said
    assert "layout 'ddp', every block recomputed, needs" in said and "MiB (parameters 0." in said
    assert said.endswith("Try more devices, a smaller batch or another layout")
    with pytest.raises(PlanError, match=r"'auto' needs .*, recompute=.auto. or a smaller"):
        autopar.plan(model, 1, args, memory=1.4e6, recompute="none")


def test_the_limit_of_a_world() -> None:
    world = World.preset("dgx-h100", ranks=8)
    found = Budget.of(world, "auto", "adamw", "auto")
    assert found.memory_bytes == (1 - RESERVE) * world.device.memory_bytes
    assert Budget.of(World.of(2), "auto", 12, "none").memory_bytes is None
    assert Budget.of(world, 2**30, "sgd", "full").memory_bytes == 2**30
    for wrong in ({"memory": 0}, {"memory": "80"}, {"optimizer": "lion"}, {"recompute": "some"}):
        given = {"memory": "auto", "optimizer": "adamw", "recompute": "auto", **wrong}
        with pytest.raises(PlanError, match=str(next(iter(wrong.values())))):
            Budget.of(world, **given)  # type: ignore[arg-type]


def test_states_are_counted_by_optimizer() -> None:
    model, args, _ = models.gpt()
    sizes = [autopar.plan(model, 1, args, optimizer=o).memory for o in ("sgd", "adamw", 12)]
    found = [m.optimizer for m in sizes if m is not None]
    assert found[0] == 0 and found[1] == 2 * sizes[1].parameters  # type: ignore[union-attr]
    assert found[2] == pytest.approx(1.5 * found[1])
