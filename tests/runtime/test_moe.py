"""Mixtures of experts from transformers: right in every node, and trained on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_training import LIMIT, right

import autopar
from launch import launched
from moe_models import MOE

LAYOUTS = ("auto", "fsdp", "megatron")
FAST = {("mixtral", "fsdp"), ("deepseek_v3", "megatron")}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(n, layout, marks=() if (n, layout) in FAST else pytest.mark.slow)
        for n in MOE
        for layout in LAYOUTS
    ],
)
def test_a_mixture_of_experts_is_right_on_four_ranks(name: str, layout: str) -> None:
    model, _, inputs = MOE[name]()
    assert autopar.verify(model, 4, inputs, layout=layout).grad_error < 1e-11


def test_memory_of_recomputed_blocks_is_filled_too() -> None:
    model, _, inputs = MOE["mixtral"]()
    autopar.verify(model, 2, inputs, layout="fsdp", recompute="full")


@pytest.mark.slow
@pytest.mark.parametrize("name", MOE)
def test_a_mixture_of_experts_trains_as_on_one_device(tmp_path: Path, name: str) -> None:
    facts = launched(tmp_path, 4, name, script="moe_ranks.py", seconds=600)[name]
    for layout in LAYOUTS:
        right(facts[layout])
        assert facts[layout]["losses agree"]
        assert facts[layout]["all parameters"] < LIMIT
