"""auto against named layouts: never modelled slower, neither by the sum of its seconds
nor by a step in which communication runs under computation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autopar.errors import LayoutError
from autopar.ir.program import Program
from autopar.planner import solve
from autopar.planner.named_layouts import NAMES
from autopar.planner.planner import fastest_plans
from autopar.planner.request import PlanRequest
from autopar.planner.simulate import simulate_plan
from autopar.world import World
from choices import SUBJECTS, combinations
from traced import annotated

slow = pytest.mark.slow


def slower_than_named(
    seconds: Callable[[Program, World, str], float], *which: Any
) -> dict[str, float]:
    """By how much auto is modelled slower than each named layout that fits."""
    subject, batch, preset, ranks = which
    program, world = annotated(*SUBJECTS[subject](batch)), World.preset(preset, ranks)
    auto, slower = seconds(program, world, "auto"), {}
    for layout in NAMES[1:]:
        try:
            slower[layout] = auto / seconds(program, world, layout) - 1
        except LayoutError:
            continue
    return slower


def summed(program: Program, world: World, layout: str) -> float:
    plan = solve.search_meshes(program, world, PlanRequest(layout)).plan
    assert plan is not None
    return plan.seconds


def by_step(program: Program, world: World, layout: str) -> float:
    """With communication under computation."""
    first = fastest_plans(program, world, PlanRequest(layout, overlap=True))[0]
    return simulate_plan(first.program, world)


@pytest.mark.slow_cells(
    "*('gpt', 16, 'laptop', 4)", "by_step-('mlp', 16, 'dgx-h100', 8)",
    "by_step-('wide', 64, 'pcie-4090', 8)",
)  # fmt: skip
@pytest.mark.parametrize("which", combinations(), ids=str)
@pytest.mark.parametrize("seconds", [summed, by_step])
def test_auto_is_not_modelled_slower_than_a_named_layout(
    seconds: Callable[[Program, World, str], float], which: tuple[str, int, str, int]
) -> None:
    slower_by = slower_than_named(seconds, *which)
    assert slower_by and all(slower <= 1e-3 for slower in slower_by.values()), slower_by
