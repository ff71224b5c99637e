"""What people do in a training loop: each habit runs on a parallel model as on one device."""

from __future__ import annotations

from typing import Any

import pytest

from launch import launched

# bfloat16 has 8 bits of precision and float16 has 11; ranks add in another order than one device.
COARSE = {
    "autocast_around_the_forward": 1e-2,
    "autocast_around_forward_and_loss": 1e-2,
    "parameters_in_bfloat16": 1e-2,
    "a_scaler_of_gradients": 1e-3,
}


@pytest.fixture(scope="module", params=["megatron", pytest.param("fsdp", marks=pytest.mark.slow)])
def facts(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("loop")
    return launched(folder, 2, request.param, script="loop_ranks.py")


def test_every_habit_computes_what_one_device_does(facts: Any) -> None:
    for apart, _ in facts:
        assert len(apart) == 17
        wrong = {n: d for n, d in apart.items() if isinstance(d, str) or d >= COARSE.get(n, 1e-5)}
        assert wrong == {}


def test_what_is_refused_says_what_to_do(facts: Any) -> None:
    for _, said in facts:
        assert said["pickle"].startswith("InputError: a ParallelModule cannot be pickled")
        assert (
            "par.state_dict(), par.save_pretrained(folder) or autopar.Checkpoints"
            in (said["pickle"])
        )
        for what in ("create_graph", "penalty"):
            assert said[what].startswith("InputError: a gradient of a gradient was asked for")
