"""`par.no_sync()`: gradients of several backwards are what one device adds up, in one sum."""

from __future__ import annotations

from typing import Any

import pytest

from autopar import _compat
from launch import launched

LAUNCHES = [
    (2, ("fsdp",)),
    pytest.param((4, ("fsdp", "4d", "ddp", "2.5d")), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=LAUNCHES, ids=str)
def facts(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("deferred")
    ranks, layouts = request.param
    everyone = launched(folder, ranks, *layouts, script="hold_ranks.py")
    assert all(of_rank.keys() == set(layouts) for of_rank in everyone)
    return everyone


def test_habits_of_accumulation_compute_what_one_device_does(facts: Any) -> None:
    for of_rank in facts:
        for of_layout in of_rank.values():
            apart = of_layout["apart"]
            assert len(apart) == 6
            assert {n: d for n, d in apart.items() if isinstance(d, str) or d >= 1e-9} == {}


def test_three_backwards_are_deferred_and_the_fourth_sums(facts: Any) -> None:
    forms = ["deferred", "deferred", "deferred", "final"]
    if not _compat.scales_partial_gradients():
        forms = ["reduced"] * 4
    for of_rank in facts:
        for of_layout in of_rank.values():
            assert of_layout["forms"] == forms * 3
