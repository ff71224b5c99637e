"""Custom autograd functions and checkpointed blocks on real gloo ranks, against one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from custom_functions import KINDS
from launch import launched


@pytest.mark.slow
def test_two_functions_on_ranks(tmp_path: Path) -> None:
    facts = launched(tmp_path, 2, "few", script="function_ranks.py")["few"]
    assert len(facts) == 4
    assert max(facts.values()) < 1e-4, facts


@pytest.mark.slow
def test_custom_functions_on_two_ranks_have_their_own_gradients(tmp_path: Path) -> None:
    facts = launched(tmp_path, 2, "functions", script="function_ranks.py", seconds=400)["functions"]
    assert len(facts) == len(KINDS) + 6
    assert {case: error for case, error in facts.items() if not error < 1e-4} == {}


@pytest.mark.slow
def test_a_checkpointed_gpt2_has_every_gradient(tmp_path: Path) -> None:
    facts = launched(tmp_path, 2, "gpt2", script="function_ranks.py")["gpt2"]
    for reentrant in ("True", "False"):
        assert facts[reentrant]["parameters"] == 28
        assert facts[reentrant]["error"] < 1e-4, facts
