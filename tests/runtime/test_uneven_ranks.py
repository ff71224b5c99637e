"""Sizes that no axis divides, trained on four gloo ranks in float64, in each layout: three steps of
AdamW and a call in eval, held against one device. padding_ranks.py has the cases.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import launched

LIMIT = 1e-9  # of losses, and of gradients and parameters relative to their largest entries
LAYOUTS = ("auto", "ddp", "fsdp", "megatron", "megatron-sp", "4d", "2.5d", "cp")
OF_EXPERTS = ("ep", "ep x megatron")
OF_ROWS = ("fsdp x megatron", "rows x 4d", "cp x fsdp")  # tensor, inner or context, and 2 on rows
WORDS, HEADS, EXPERTS, ROWS, TOKENS = [515, 516], [6, 8], [3, 4], [7, 8], [7, 8]

Padded = dict[str, list[list[int]]]  # by layout; one that may choose another mesh is not named
SPLIT_ROWS: Padded = {name: [ROWS] for name in ("ddp", "fsdp", "2.5d", *OF_ROWS)}
CASES: dict[str, tuple[tuple[str, ...], Padded]] = {
    "words and heads": (
        LAYOUTS,
        {
            "fsdp": [],
            "megatron": [WORDS, HEADS, HEADS],
            "megatron-sp": [WORDS, HEADS, HEADS],
            "2.5d": [WORDS],
        },
    ),
    "25 heads": (LAYOUTS, {"megatron": [WORDS, [25, 28], [25, 28]]}),
    "three experts": (
        (*LAYOUTS, *OF_EXPERTS),
        {"fsdp": [], "ep": [EXPERTS], "ep x megatron": [EXPERTS]},
    ),
    "last batch": ((*LAYOUTS, *OF_ROWS), {**SPLIT_ROWS, "megatron": []}),
    "seven rows": ((*LAYOUTS, *OF_ROWS), {**SPLIT_ROWS, "megatron": []}),
    "seven tokens": ((*LAYOUTS, "cp x fsdp"), {"fsdp": [], "cp": [TOKENS], "cp x fsdp": [TOKENS]}),
    "seven tokens of experts": (("cp", "cp x fsdp"), {"cp": [TOKENS], "cp x fsdp": [TOKENS]}),
    "everything": (
        (*LAYOUTS, *OF_ROWS[:2]),
        {
            "fsdp": [ROWS],
            "megatron": [WORDS, HEADS, HEADS],
            "2.5d": [WORDS, ROWS],
            "cp": [TOKENS],
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_four_ranks_train_as_one_device(tmp_path: Path, case: str) -> None:
    layouts, padded = CASES[case]
    tasks = {layout: f"{case}:{layout}" for layout in layouts}
    facts = launched(tmp_path, 4, *tasks.values(), script="padding_ranks.py", seconds=1200)
    for layout, task in tasks.items():
        seen = facts[task]
        *_, of_training, of_eval = seen["padding"]
        assert of_training == of_eval == padded.get(layout, of_training), task
        assert max(seen["losses"]) < LIMIT, task
        assert max(seen["gradients"]) < LIMIT, task
        assert seen["parameters"] < LIMIT and seen["losses agree"], task
