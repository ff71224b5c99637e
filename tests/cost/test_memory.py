"""The modelled peak of memory against the measured one, and plans that must fit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

import autopar
import models
from autopar import PlanError
from autopar.cost.memory import (
    RESERVE,
    STATES,
    Budget,
    limit_text,
    step_bytes,
    with_flight,
    with_reserve,
)
from autopar.cost.peak import LifetimeRecorder, highest
from autopar.errors import LayoutError
from autopar.ir.plan_table import Memory
from autopar.planner.named_layouts import NAMES
from autopar.world import World
from benchmarks.model.memory import CASES, Case, counted, is_good

QUICK = ("vit",)  # on two ranks, within a limit


def _checked(cases: Iterable[Case]) -> None:
    rows = list(counted(cases))
    assert [row for row in rows if not is_good(row)] == [], [row.ratio for row in rows]
    for row in rows:
        assert sum(row.parts[name] for name in PARTS) == pytest.approx(row.parts["peak"])
        assert row.steady == pytest.approx(row.state_bytes, rel=0.02)
        assert row.start < 1.05 * row.parts["parameters"] + row.largest


@pytest.mark.slow
def test_what_is_planned_is_in_memory() -> None:
    """An allocator's count on real ranks, within a tenth and below the limit."""
    _checked(case for case in CASES if case.ranks == 2 and case.model in QUICK)


@pytest.mark.slow
def test_rank_0_alone_holds_what_is_planned() -> None:
    """In a group that moves nothing, as on one GPU."""
    (row,) = counted([Case("vit", 2, "fsdp", limit=0.8)], alone=True)
    assert is_good(row), row


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "model"), sorted({(c.ranks, c.model) for c in CASES}))
def test_so_it_is_of_every_case(ranks: int, model: str) -> None:
    _checked(case for case in CASES if (case.ranks, case.model) == (ranks, model))


def test_communication_in_flight_takes_a_twentieth_within_the_limit() -> None:
    """A twentieth of what is held, as far as the limit leaves it."""
    memory = Memory(10.0, 10.0, 20.0, 40.0, 20.0, 100.0)
    assert with_flight(memory, None).peak == 105.0
    within = with_flight(with_flight(memory, None), 102.0)
    assert (within.peak, within.in_flight, within.waiting) == (102.0, 2.0, 100.0)
    assert with_flight(memory, 90.0).peak == 100.0  # nothing fits: that is refused elsewhere


PARTS = ("parameters", "gradients", "optimizer", "activations", "transient", "in_flight")


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("name", STATES)
def test_a_step_makes_what_is_said(name: str, at_once: bool) -> None:
    """Beyond its states."""
    optimizers = {
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.Adam,
        "rmsprop": torch.optim.RMSprop,
        "adagrad": torch.optim.Adagrad,
        "sgd-momentum": lambda p, **how: torch.optim.SGD(p, momentum=0.9, **how),
        "sgd": torch.optim.SGD,
    }[name]
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (1000, 500)]
    optimizer = optimizers(parameters, foreach=at_once)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        with LifetimeRecorder() as lives:
            optimizer.step()
    states = [
        x for s in optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor)
    ]
    assert sum(x.nbytes for x in states if x.dim()) == STATES[name] * 4 * 1500
    known = {id(t.untyped_storage()) for t in (*states, *parameters)}
    own = [life for key, life in lives.current.items() if key in known]
    rest = [life for life in lives.lifetimes if life not in own]
    assert highest(rest)[1] == pytest.approx(step_bytes([4000.0, 2000.0], name, at_once), abs=100)


@pytest.mark.slow
def test_as_few_blocks_as_it_takes() -> None:
    model, args, _ = models.gpt()
    cheap = autopar.plan(model, 2, args, "megatron", recompute="selective")
    full = autopar.plan(model, 2, args, "megatron", recompute="full")
    between = (cheap.peak_bytes + full.peak_bytes) / 2
    plan = autopar.plan(model, 2, args, "megatron", memory=between)
    assert plan.recompute == ("blocks.0",) and plan.peak_bytes <= between
    assert plan.regather == ()
    assert cheap.seconds < plan.seconds < full.seconds
    assert plan.memory is not None and plan.memory.peak == plan.peak_bytes
    assert autopar.plan(model, 2, args, "ddp").recompute == ()  # a CPU has no limit


@pytest.mark.slow
def test_cheap_ops_and_gathers_before_blocks() -> None:
    """Each limit is met by what takes the least: cheap ops, of one block or of both; then weights
    are gathered again, too, and at last blocks are recomputed.
    """
    model, args, _ = models.gpt()

    def planned(**how: Any) -> autopar.Plan:
        return autopar.plan(model, 4, args, "fsdp", smaller=False, **how)

    modes = ("none", "selective", "gathers", "full")
    free, cheap, gathers, full = (planned(recompute=how) for how in modes)
    assert free.seconds < cheap.seconds < gathers.seconds < full.seconds
    most, less = (plan.memory.waiting for plan in (free, cheap) if plan.memory is not None)

    def within(limit: float) -> autopar.Plan:
        plan = planned(memory=with_reserve(limit + 0.1, World.of(4)))
        assert plan.memory is not None and plan.memory.waiting <= limit + 0.1
        return plan

    nothing, half, every = within(most), within((most + less) / 2), within(less)
    assert nothing.choices == free.choices and nothing.seconds == free.seconds
    assert not any((nothing.recompute, nothing.regather, nothing.rerun))
    assert (half.rerun, half.regather, half.recompute) == (("blocks.0",), (), ())
    assert (every.rerun, every.regather, every.recompute) == (("blocks.0", "blocks.1"), (), ())
    both = within(less - 1)
    assert (both.rerun, both.regather) == (("blocks.0", "blocks.1"), ("blocks.0",))
    assert free.seconds < half.seconds < every.seconds == cheap.seconds < both.seconds
    assert both.seconds < full.seconds


SLOW = pytest.mark.slow


@pytest.mark.slow_cells("mlp-2-0.0")
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
    """By the sum of all seconds, also where only the most frugal of them fits: between its least
    peak and what auto takes. (tests/planner/test_overlap_search.py compares by overlapped steps.)
    """
    model, args, kwargs = getattr(models, name)()
    inputs = kwargs or args

    def planned(layout: str, **how: Any) -> autopar.Plan | None:
        try:
            return autopar.plan(model, ranks, inputs, layout, smaller=False, overlap=False, **how)
        except (LayoutError, PlanError):
            return None

    full = [plan for layout in NAMES[1:] if (plan := planned(layout, recompute="full"))]
    least = min(plan.peak_bytes for plan in full)
    free = planned("auto")
    assert free is not None
    limit = least + part * max(0.0, free.peak_bytes - least) + 0.1
    memory = with_reserve(limit, World.of(ranks))
    auto = planned("auto", memory=memory)
    assert auto is not None and auto.peak_bytes <= limit
    assert auto.bound <= auto.seconds * (1 + 1e-9)
    for layout in NAMES[1:]:
        plan = planned(layout, memory=memory)
        assert plan is None or auto.seconds <= plan.seconds * (1 + 1e-9), layout


@pytest.mark.slow
def test_what_does_not_fit_is_refused() -> None:
    model, args, _ = models.gpt()
    with pytest.raises(PlanError, match="no plan fits") as caught:
        autopar.plan(model, 2, args, "ddp", memory=8e5)
    said = str(caught.value)
    assert "0.75 MiB (0.76 MiB less 15.62 KiB for kernels) on each of 2 devices" in said
    assert "layout 'ddp', every block recomputed, needs" in said and "MiB (parameters 0." in said
    assert said.endswith("Try more devices, a smaller batch or another layout")
    with pytest.raises(PlanError, match=r"'auto'.*Try more devices or a smaller batch$"):
        autopar.plan(model, 2, args, "auto", memory=8e5)  # a named layout came nearest
    with pytest.raises(PlanError, match=r"'auto' needs .*, recompute=.auto. or a smaller"):
        autopar.plan(model, 1, args, memory=1.4e6, recompute="none")


def test_micro_batches_are_advised_where_they_fit() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.down(self.up(x).relu())
            return hidden.square().mean()

    arguments: Any = Net(), 2, (torch.randn(4096, 64),), "ddp"
    with pytest.raises(PlanError, match=r'recompute="auto", microbatches="auto", a smaller'):
        autopar.plan(*arguments, memory=1e6, recompute="none")
    plan = autopar.plan(*arguments, memory=1e6, recompute="none", microbatches="auto")
    assert plan.peak_bytes <= 1e6 and plan.microbatches > 1
    with pytest.raises(PlanError, match=r'recompute="auto", a smaller'):  # as weights do not fit
        autopar.plan(*arguments, memory=6e5, recompute="none")
    with pytest.raises(PlanError, match=r'recompute="auto", a smaller'):  # as they were tried
        autopar.plan(*arguments, memory=6e5, recompute="none", microbatches="auto")


def test_the_limit_of_a_world() -> None:
    world = World.preset("dgx-h100", ranks=8)
    budget = Budget.of(world, "auto", "adamw", "auto")
    assert budget.memory_bytes == (1 - RESERVE) * world.device.memory_bytes
    assert Budget.of(World.of(2), "auto", 12, "none").memory_bytes is None
    assert Budget.of(world, 2**30, "sgd", "full").memory_bytes == (1 - RESERVE) * 2**30
    assert Budget.of(World.of(2), 2**30, "sgd", "full").memory_bytes == 2**30 - 2**20
    assert Budget.of(World.of(2), 1000, "sgd", "full").memory_bytes == 980
    for on in (world, World.of(2)):
        for limit in (1e5, 2**30):
            assert Budget.of(on, with_reserve(limit, on), 12, "none").memory_bytes == (
                pytest.approx(limit)
            )
    assert limit_text(0.92 * 2**30, world) == (
        "0.92 GiB (1.00 GiB less 81.92 MiB for the driver and the allocator's gaps)"
    )
    for wrong in ({"memory": 0}, {"memory": "80"}, {"optimizer": "lion"}, {"recompute": "some"}):
        options = {"memory": "auto", "optimizer": "adamw", "recompute": "auto", **wrong}
        with pytest.raises(PlanError, match=str(next(iter(wrong.values())))):
            Budget.of(world, **options)  # type: ignore[arg-type]


def test_states_are_counted_by_optimizer() -> None:
    model, args, _ = models.gpt()
    sizes = [autopar.plan(model, 1, args, optimizer=o).memory for o in ("sgd", "adamw", 12)]
    sizes_of_states = [m.optimizer for m in sizes if m is not None]
    assert sizes_of_states[0] == 0 and sizes_of_states[1] == 2 * sizes[1].parameters  # type: ignore[union-attr]
    assert sizes_of_states[2] == pytest.approx(1.5 * sizes_of_states[1])
