"""Ranks that hold, ask for or are given something else than the others: made alike, or refused by
all of them, with the ranks that differ named.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from alike_ranks import TASKS
from autopar.runtime.agreement import digest
from launch import launched

SCRIPT = "alike_ranks.py"
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.complex64]


# -- digests ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (7, 3), (300, 501), (70000, 5)])
def test_a_digest_sees_every_number_and_its_place(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 20).abs().to(dtype)
    assert digest(x).shape == () and digest(x).dtype == torch.int64
    assert digest(x) == digest(x.clone())
    for place in {0, x.numel() // 2, x.numel() - 1}:
        other = x.clone()
        other.view(-1)[place] += 1
        assert digest(other) != digest(x), place
    if x.dim():
        assert digest(x.flip(0)) != digest(x)
        assert digest(x[1:]) == digest(x[1:].clone())  # that begins within a word


def test_a_digest_sees_rows_that_change_places() -> None:
    ids = torch.arange(128 * 1024).view(128, 1024)
    swapped = ids.clone()
    swapped[[3, 67]] = swapped[[67, 3]]
    assert digest(swapped) != digest(ids)


# -- parameters ------------------------------------------------------------------------------------
@pytest.fixture(scope="module", params=[pytest.param(SCRIPT, marks=pytest.mark.slow)])
def facts(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What three ranks saw in all tasks."""
    return launched(tmp_path_factory.mktemp("alike"), 3, *TASKS, script=request.param)


def test_parameters_become_those_of_rank_0(facts: dict[str, Any]) -> None:
    for layout in ("ddp", "fsdp", "megatron"):
        figures = facts["seeds"][layout]
        assert all(figures["right"]) and max(figures["loss"]) < 1e-5, layout
        first, *others = figures["said"]
        assert len(first) == 1 and others == [[], []]
        assert "first of 5, on ranks 1, 2 is not what rank 0 holds" in first[0]
    assert facts["seeds"]["said of equal ones"] == [[], [], []]
    refused(facts["unsynchronised"])
    for bucket, figures in facts["kinds"].items():
        assert figures["alike"] and figures["scalar"] == [0, 0, 0], bucket
        (said,) = figures["said"]
        assert "matrix, the first of 7, on ranks 1, 2" in said, bucket


def refused(facts: dict[str, Any]) -> None:
    says = "RankError: the ranks hold different parameters: down.weight, on rank 1 is not what rank"
    assert all(seen.startswith(says) for seen in facts["seen"]), facts["seen"]
    assert all("sync_parameters" in seen for seen in facts["seen"])
    assert all(facts["untouched"]) and len(set(facts["afterwards"])) == 1


# -- what is asked for -----------------------------------------------------------------------------
def test_what_is_requested_is_compared(facts: dict[str, Any]) -> None:
    facts = facts["requests"]
    assert len(set(facts["alike"])) == 1
    for name, seen in facts.items():
        if name == "alike":
            continue
        what = name.removesuffix(" of apply")
        start = f"RankError: the ranks ask for different things: {what} is "
        assert len(set(seen)) == 1 and seen[0].startswith(start), (name, seen)
        assert "on ranks 0, 2, " in seen[0] and " on rank 1. Make the same call" in seen[0], seen[0]
    assert "layout is 'ddp' on ranks 0, 2, 'fsdp' on rank 1" in facts["layout"][0]
    assert "[0]: (12, 12) float32 on ranks 0, 2, [0]: (24, 12) float32" in facts["inputs"][0]


# -- inputs ----------------------------------------------------------------------------------------
def test_other_batches_on_each_rank_are_refused_by_all(facts: dict[str, Any]) -> None:
    facts = facts["inputs"]
    start = "RankError: the ranks are called with different inputs: in "
    for layout in ("ddp", "fsdp", "megatron"):
        seen = facts[f"sampled {layout}"]
        assert len(set(seen)) == 1, seen
        assert seen[0].startswith(start + "call 1 ranks 1, 2 got other numbers than rank 0."), seen
        assert "DistributedSampler" in seen[0] and "par.shard" in seen[0]
    assert facts["parts"] == ["", "", ""]
    (seen, call), *others = facts["once"]  # in one call alone, long before it is found
    assert others == [[seen, call]] * 2 and 2 <= call < 3000
    assert seen.startswith(start + (f"calls 2 to {call} " if call > 2 else "call 2 ")), seen
    says = "RankError: the ranks make different calls, call 1: rank 1 makes a call in train mode"
    for text in facts["refused"]:
        assert text.startswith(f"{says}, inputs (24, 12) float32; rank 0 makes a call as before")
    assert len(set(facts["after that"])) == 1


# -- one attempt after another ---------------------------------------------------------------------
def test_after_a_failed_attempt_the_next_one_works(facts: dict[str, Any]) -> None:
    facts = facts["again"]
    assert facts["on all"] == ["WorldError: a network that fails"] * 3
    says = "RankError: rank 1 of 3 failed while opening process groups: WorldError: a network"
    assert all(seen.startswith(says) for seen in facts["on one"]), facts["on one"]
    for what in ("after on all", "after on one", "after meta"):
        assert facts[what] == pytest.approx(facts["first"], rel=1e-5), what
