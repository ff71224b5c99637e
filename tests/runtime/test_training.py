"""Real gloo processes in float32 against one device: limits for what train_ranks.py saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch import launched
from training_facts import LIMIT, check_layout, check_training

ON_TWO = {"gpt": ["fsdp"], "llama": ["auto", "fsdp"]}
LAYOUTS = ["auto", "ddp", "fsdp", "megatron"]
CONTEXTS = ["strided", "contiguous", "sharded", "heads", "contiguous alone", "x of 4d"]


@pytest.mark.slow_cells("*-llama")
@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_training_equals_one_device(tmp_path: Path, ranks: int, name: str) -> None:
    facts = launched(tmp_path, ranks, name)[name]
    assert facts["model untouched"]
    several = ["4d", "2.5d", "cp"] if ranks == 4 and name == "gpt" else []
    for layout in ON_TWO[name] if ranks == 2 else [*LAYOUTS, *several]:
        check_layout(facts[layout], f"{name} {layout} on {ranks} ranks: ")


@pytest.mark.slow_cells("*")
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2", "gemma3", "t5"])
def test_context_parallelism_equals_one_device(tmp_path: Path, name: str) -> None:
    """Grouped queries, padding, a tied head, windows, and attention to another sequence."""
    tasks = [f"{name} {how}" for how in CONTEXTS]
    facts = launched(tmp_path, 4, *tasks, seconds=900)
    for task in tasks:
        check_layout(facts[task], f"{task}: ")


@pytest.mark.slow
def test_compiled_gradients_equal_one_device(tmp_path: Path) -> None:
    compiled(launched(tmp_path, 2, "aot_eager")["aot_eager"])


@pytest.mark.slow
def test_weights_gathered_again_equal_one_device(tmp_path: Path) -> None:
    """The graphs that a compiler derives gather what the plan says, forward and backward."""
    facts = launched(tmp_path, 2, "regathered", "gathers of graphs")
    check_training(facts["regathered"])
    assert facts["regathered"]["regather"] == ["blocks.0", "blocks.1"]
    saving, again = facts["gathers of graphs"]["none"], facts["gathers of graphs"]["gathers"]
    assert saving["graphs"] == saving["planned"] and again["graphs"] == again["planned"]
    assert again["planned"][1] - saving["planned"][1] == 8  # four products in each of two blocks


@pytest.mark.slow
def test_compiled_weights_gathered_again(tmp_path: Path) -> None:
    names = ["regathered by aot_eager", "regathered by inductor"]
    facts = launched(tmp_path, 2, *names)
    for name in names:
        check_training(facts[name])


@pytest.mark.slow
def test_inductor_gradients_equal_one_device(tmp_path: Path) -> None:
    compiled(launched(tmp_path, 2, "inductor")["inductor"])


def compiled(facts: dict[str, Any]) -> None:
    for layout in ("fsdp", "megatron"):
        check_training(facts[layout])


@pytest.mark.slow
def test_scheduled_graphs_equal_unscheduled_ones_to_the_bit(tmp_path: Path) -> None:
    facts = launched(tmp_path, 4, "scheduled")["scheduled"]
    for layout in ("fsdp", "4d"):
        assert facts[layout]["equal"] and facts[layout]["without gradients"], layout
        assert facts[layout]["joined"] < 1e-5, layout  # buckets may add in another order
    start = "RankError: the ranks hold different collective orders: rank 0"
    assert all(text.startswith(start) for text in facts["orders differ"]), facts["orders differ"]


@pytest.mark.slow
def test_planned_at_the_first_call(tmp_path: Path) -> None:
    first = launched(tmp_path, 2, "deferred")["deferred"]
    assert first["early"].startswith("InputError: the parameters are known after the first call")
    assert first["loss"] < LIMIT and first["gradients"]
    assert first["count"][0] == first["count"][1]


@pytest.mark.slow
def test_plans_from_files_and_dropout(tmp_path: Path) -> None:
    facts = launched(tmp_path, 4, "from_file", "dropout")
    file = facts["from_file"]
    assert file["loss"] < LIMIT
    assert file["without inputs"].startswith("InputError: a plan from a file holds no graph")
    assert file["another model"].startswith("PlanError: the plan is for the graph")
    losses = [facts["dropout"][layout] for layout in LAYOUTS]
    for first, second in losses:
        assert first == pytest.approx(losses[0][0], rel=1e-5)
        assert second == pytest.approx(losses[0][1], rel=1e-5)
        assert abs(first - second) > 1e-4
    assert all(facts["dropout"][f"{layout} agrees"] for layout in LAYOUTS)


@pytest.mark.slow
def test_a_rank_that_fails_is_named_by_all(tmp_path: Path) -> None:
    facts = launched(tmp_path, 2, "failing")["failing"]
    alike = {  # what every rank raises, the same on each
        "another model": "RankError: the ranks hold different models: rank 0",
        "a broken forward": "RankError: rank 1 of 2 failed while tracing: TraceError",
        "other inputs": "RankError: the ranks ask for different things: inputs is [0]: (",
        "a resized parameter": "RankError: rank 1 of 2 failed while taking the parameters: Plan",
        "another plan": "RankError: the ranks hold different plans: rank 0",
        "broken on all": "TraceError",
        "an unknown layout": "LayoutError: unknown layout",
        "a larger world": "WorldError",
        "a larger plan": "WorldError: the plan is for 4 ranks (mesh",
    }
    for what, start in alike.items():
        seen = facts[what]["seen"]
        assert all(text.startswith(start) for text in seen), (what, seen)
        assert facts[what]["seconds"] < 20, what
    assert "rank 1 cannot" in facts["a broken forward"]["seen"][0]
    assert "2 are running" in facts["a larger plan"]["seen"][0]
    assert facts["afterwards"] < LIMIT
