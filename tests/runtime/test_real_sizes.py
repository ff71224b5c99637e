"""Models at the widths of their papers train three steps on four gloo ranks as on one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import launched

LIMIT = 1e-7  # relative, in L2; float64
SECONDS = 1800
CASES = [
    ("resnet_10_at_64", "fsdp"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("resnet_50", "fsdp"),
            ("vit_b", "megatron"),
            ("convnext_t", "fsdp"),
            ("bert_base", "auto"),
            ("gpt2_small", "fsdp"),
        )
    ),
]


@pytest.mark.slow_cells("resnet_10_at_64-fsdp")
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_real_sizes_train_on_ranks_as_on_one(tmp_path: Path, model: str, layout: str) -> None:
    task = f"{model} {layout}"
    facts = launched(tmp_path, 4, task, script="real_size_ranks.py", seconds=SECONDS)[task]
    assert facts["losses agree"] and facts["unsplit"] == []
    assert facts["loss"] < LIMIT and facts["logits"] < LIMIT, facts
    assert facts["all gradients"] < LIMIT and facts["all parameters"] < LIMIT, facts
    assert facts["gradients"][0] < LIMIT and facts["parameters"][0] < LIMIT, facts
    assert facts["buffers"] < LIMIT, facts
