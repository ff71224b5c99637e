"""Complex parameters on gloo ranks: torch's gather there knows no complex numbers in the form that
is given its result, which is the one that autopar uses (`_compat.safe_gathers`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import launched


@pytest.mark.slow
def test_complex_parameters_train_and_come_back(tmp_path: Path) -> None:
    facts = launched(tmp_path, 2, "training", "states", script="complex_ranks.py")
    assert facts["training"].keys() == {"ddp", "fsdp", "megatron"}
    assert all(error < 1e-5 for error in facts["training"].values()), facts["training"]
    assert len(facts["states"]) == 4 and not any(facts["states"].values()), facts["states"]
