"""Bags of one length are split over the batch; others stay whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar


class Bags(nn.Module):
    def __init__(self, weighted: bool, ragged: bool, **options: Any) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(40, 8, **options), nn.Linear(8, 4)
        self.weighted, self.ragged = weighted, ragged

    def forward(self, ids: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        if self.ragged:
            return self.head(self.bag(ids.flatten(), offsets)).square().mean()
        per_sample = weights if self.weighted else None
        return self.head(self.bag(ids, per_sample_weights=per_sample)).square().mean()


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Bags of unequal numbers of padded entries, and offsets of bags of unequal lengths."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 40, (12, 5), generator=generator)
    ids[2:5, 1:3] = 3
    offsets = torch.tensor([0, 1, 8, 9, 15, 22, 30, 31, 38, 44, 50, 59])
    return ids, torch.rand(12, 5, generator=generator), offsets


CASES: list[tuple[str, dict[str, Any], bool, bool, bool]] = [
    ("mean", {}, False, False, True),
    ("sum", {}, False, False, True),
    ("sum", {}, True, False, True),
    ("mean", {"padding_idx": 3}, False, False, True),
    ("mean", {"scale_grad_by_freq": True}, False, False, False),
    ("max", {}, False, False, True),
    ("max", {"padding_idx": 3}, False, False, True),
    ("mean", {}, False, True, False),
]


@pytest.mark.slow_cells("3-sum-options1-False-False-True")
@pytest.mark.parametrize(("mode", "options", "weighted", "ragged", "splits"), CASES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_bags_of_one_length_are_split_over_the_batch(
    mode: str, options: dict[str, Any], weighted: bool, ragged: bool, splits: bool, ranks: int
) -> None:
    model = Bags(weighted, ragged, mode=mode, **options)
    plan = autopar.plan(model, ranks, inputs(), layout="ddp", smaller=False)
    (bag,) = (choice for name, choice in plan.choices.items() if "bag" in name)
    assert (bag.splits == ("b",)) == splits
    autopar.verify(model, ranks, inputs(), layout="ddp")
