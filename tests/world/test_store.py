"""What ranks write into the store is read by ranks of the same attempt."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from autopar.world.store import of_this_attempt


def test_ranks_that_are_started_again_read_nothing_of_those_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.HashStore()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert of_this_attempt(store).add("come", 1) == 1
    assert of_this_attempt(store).add("come", 1) == 2
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert of_this_attempt(store).add("come", 1) == 1
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")  # each attempt has its own
    assert of_this_attempt(store) is store
