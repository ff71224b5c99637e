"""The parts of parameters that a parallel module hands to autograd, once for all its calls: what a
script does between calls gives what it gives on one device (rank_scripts/local_parts_ranks.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from launch import launched

TASKS = ("two calls", "hooks", "trained", "others", "a weight is returned", "a view is returned")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("parts")
    return launched(folder, 2, *TASKS, "node", script="local_parts_ranks.py")


@pytest.mark.parametrize("task", TASKS)
def test_what_a_script_does_between_calls_gives_what_one_device_gives(
    task: str, facts: dict[str, Any]
) -> None:
    parallel, plain = facts[task]["pair"]
    assert numbers(parallel).numel() > 100
    torch.testing.assert_close(numbers(parallel), numbers(plain), rtol=1e-5, atol=1e-7)


def numbers(value: Any) -> torch.Tensor:
    """All numbers of nested lists; -1 for each None."""
    if isinstance(value, list):
        return torch.cat([numbers(x) for x in value] or [torch.zeros(0)])
    return torch.tensor([-1.0 if value is None else value])


def test_one_node_serves_all_calls_and_memory_comes_back(facts: dict[str, Any]) -> None:
    assert facts["node"] == {"nodes": 1, "alive": 0}
