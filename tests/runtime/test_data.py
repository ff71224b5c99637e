"""Each rank reads its own rows of a dataset: `par.loader`, `par.sampler`, `par.rows`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import autopar
from autopar.errors import InputError
from launch import launched

SPLIT_IN = {"fsdp": 4, "megatron": 1, "megatron-sp": 1, "grid": 2}  # parts of a batch's rows


LAYOUTS = [("grid",), pytest.param(("fsdp", "megatron", "megatron-sp"), marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=LAYOUTS, ids=", ".join)
def facts(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return launched(tmp_path_factory.mktemp("data"), 4, *request.param, script="data_ranks.py")


def test_training_on_own_rows_is_training_on_all(facts: dict[str, Any]) -> None:
    for layout in facts["read"]:
        assert facts[layout]["apart"] < 1e-5, layout
        assert facts[layout]["batches"] == 3, layout


def test_a_rank_reads_its_own_rows_alone(facts: dict[str, Any]) -> None:
    last = 5  # of 21 rows in batches of 8: no number of ranks divides it
    for layout, read in facts["read"].items():
        own = 8 // SPLIT_IN[layout]
        assert read == [[own, own, last] * 2] * 4, layout


def test_an_epoch_that_was_cut_off_goes_on_where_it_was(facts: dict[str, Any]) -> None:
    found = facts["resumed"]
    assert found["rest"] == [True, True] and found["again"] == [True] * 3
    assert found["after"] == {"epoch": 2, "batch": 3, "seed": 3}
    assert found["own loader"] == [4] * 5
    assert "seed is 0 on rank 0, 1 on rank 1" in found["seeds"]
    assert "is of an order with seed 3, this one has 4" in found["order"]


def alone() -> Any:
    return autopar.parallelize(nn.Linear(8, 16), 1, (torch.ones(4, 8),))


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield torch.ones(8)


def test_what_has_no_rows_is_refused() -> None:
    par, rows = alone(), TensorDataset(torch.ones(10, 8))
    with pytest.raises(InputError, match="a dataset without a length"):
        par.loader(Endless())
    with pytest.raises(InputError, match="batch_size is 0: it is a number of rows"):
        par.loader(rows, 0)
    with pytest.raises(InputError, match="no batch under way"):
        par.sampler(rows).placed(torch.ones(4, 8))
    loader = par.loader(rows, collate_fn=lambda batch: torch.ones(3, 8))
    with pytest.raises(InputError, match="among the rows of this rank, which are 4 of a batch"):
        next(iter(loader))


def test_a_loop_that_is_left_starts_anew() -> None:
    loader = alone().loader(TensorDataset(torch.arange(10.0)[:, None].expand(10, 8)))
    next(iter(loader))
    assert [x[0, 0].item() for (x,) in loader] == [0, 4, 8]
    assert loader.state_dict() == {"epoch": 1, "batch": 3, "seed": 0}
