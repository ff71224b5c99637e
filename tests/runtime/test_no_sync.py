"""`par.no_sync()`: gradients of several backwards are what one device adds up, in one sum."""

from __future__ import annotations

from typing import Any

import pytest

from launch import launched

LAYOUTS = ["ddp", "fsdp", "4d", "2.5d"]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return launched(tmp_path_factory.mktemp("deferred"), 4, *LAYOUTS, script="hold_ranks.py")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_habits_of_accumulation_compute_what_one_device_does(facts: Any, layout: str) -> None:
    for found in facts:
        apart = found[layout]["apart"]
        assert len(apart) == 6
        assert {n: d for n, d in apart.items() if isinstance(d, str) or d >= 1e-9} == {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_backwards_are_held_and_the_fourth_sums(facts: Any, layout: str) -> None:
    for found in facts:
        assert found[layout]["forms"] == ["deferred", "deferred", "deferred", "final"] * 3
