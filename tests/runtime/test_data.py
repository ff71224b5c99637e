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


LAYOUTS = [("grid",), ("fsdp", "megatron", "megatron-sp")]


@pytest.fixture(
    scope="module",
    params=[pytest.param(names, marks=pytest.mark.slow) for names in LAYOUTS],
    ids=", ".join,
)
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
    figures = facts["resumed"]
    assert figures["rest"] == [True, True] and figures["again"] == [True] * 3
    assert figures["after"] == {"epoch": 2, "batch": 3, "seed": 3}
    assert figures["own loader"] == [4] * 5
    assert "seed is 0 on rank 0, 1 on rank 1" in figures["seeds"]
    assert "is of an order with seed 3, this one has 4" in figures["order"]


def test_sequences_are_padded_to_what_the_full_batch_needs(facts: dict[str, Any]) -> None:
    figures = facts["in buckets"]
    assert figures["sizes"] == [[4, 3], [4, 3], [4, 5], [4, 5], [4, 5], [1, 3]]
    assert figures["apart"] < 1e-5
    assert "buckets is [5], pad (0, -100), lengths " in figures["lengths"]


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


def bucketed(rows: Any, **overrides: Any) -> Any:
    """The samples that a loader pads to 4 or 8."""
    options = {"buckets": (4, 8), "lengths": [3, 5], "pad": {"ids": 0}, **overrides}
    loader = alone().loader(rows, 1, collate_fn=lambda samples: samples[0], **options)
    dataset, sampler = loader._loader.dataset, loader.sampler
    return [dataset[row] for (row,) in sampler]


def test_what_is_not_named_is_not_padded() -> None:
    rows = [{"ids": [1] * 3, "number": 7}, {"ids": torch.ones(5), "number": 8}]
    first, second = bucketed(rows)
    assert first["ids"].tolist() == [1, 1, 1, 0] and first["number"] == 7
    assert second["ids"].tolist() == [1.0] * 5 + [0.0] * 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"pad": None}, "padded sequences need pad too: give par.loader"),
        ({"buckets": None, "lengths": None}, "sequences need buckets and lengths too"),
        ({"buckets": (0, 8)}, r"buckets is \(0, 8\): they are lengths"),
        ({"lengths": [3]}, "lengths has 1 entries, the dataset 2 rows"),
        ({"lengths": [3, 9]}, "row 1 holds a sequence of 9, the largest of buckets is 8"),
        ({"lengths": [3, 4]}, r"row 1 holds a tensor of \(5,\) where a sequence of at most 4"),
        ({"pad": {"id": 0}}, r"pad names \['id'\], row 0 has \['ids'\]"),
        ({"pad": {"ids": "0"}}, "pad is '0' for a list in row 0"),
        ({"pad": (0, 0)}, r"pad is \(0, 0\) for a dict in row 0"),
    ],
)
def test_buckets_that_do_not_fit_the_rows(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        bucketed([{"ids": [1] * 3}, {"ids": [1] * 5}], **overrides)


def test_a_tuple_is_padded_place_by_place() -> None:
    rows = [(torch.ones(3), 1), (torch.ones(5), 2)]
    assert [x.shape[0] for x, _ in bucketed(rows, pad=(0, None))] == [4, 8]
    with pytest.raises(InputError, match="pad has 1 entries, row 0 has 2: one for each"):
        bucketed(rows, pad=(0,))
