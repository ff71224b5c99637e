"""`torch.autograd.detect_anomaly` finds the op of a nan in a step of a parallel model."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import launched


@pytest.mark.slow
def test_a_search_for_nan_finds_it_and_alarms_of_nothing_else(tmp_path: Path) -> None:
    facts = launched(tmp_path, 2, "ddp", "fsdp", "megatron", script="anomaly_ranks.py")
    assert facts["fsdp"].keys() == {"plain", "no_sync", "microbatches", "eager"}
    for layout, by_options in facts.items():
        for name, figures in by_options.items():
            assert figures["error"] < 1e-6, (layout, name)
            for said in figures["said"]:
                assert said.startswith("Function 'SqrtBackward0' returned nan"), (layout, name)
                assert "rows * self.scale.sqrt()  # the line that a user looks for" in said
                assert "anomaly_ranks.py" in said and "which is sqrt" in said
