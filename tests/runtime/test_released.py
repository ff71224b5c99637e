"""Nothing of the whole model stays on a rank that holds its parts."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from launch import launched
from released_ranks import LAYOUTS


class Sum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


@pytest.mark.slow_cells("2")
@pytest.mark.slow_cells("1")
@pytest.mark.parametrize("count", [1, 2])
def test_one_rank_releases_the_original_model(count: int) -> None:
    norm: type[nn.Module] = nn.BatchNorm1d if count == 1 else nn.LayerNorm
    model, x = nn.Sequential(nn.Linear(8, 16), norm(16), nn.Linear(16, 8), Sum()), torch.ones(4, 8)
    storages = [weakref.ref(t.untyped_storage()) for t in (*model.parameters(), *model.buffers())]
    par = autopar.parallelize(model, 1, (x,), microbatches=count)
    assert all(ref() is not None for ref in storages)
    del model
    gc.collect()
    assert [ref() for ref in storages] == [None] * len(storages)
    par(x).backward()


@pytest.mark.slow
def test_the_model_that_was_given_can_be_freed(tmp_path: Path) -> None:
    left = launched(tmp_path, 2, "released", script="released_ranks.py")["released"]
    assert set(left) == {*LAYOUTS, "planned", "recomputed", "in micro-batches", "in stages"}
    assert not any(left.values()), left
