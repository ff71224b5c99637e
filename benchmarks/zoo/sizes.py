"""The sizes of the tiny models, and the inputs that many of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

BATCH, SEQUENCE, VOCABULARY, HIDDEN, HEADS, LAYERS, CLASSES = 8, 8, 64, 32, 4, 2, 8

Example = tuple[nn.Module, Any]  # a model and its inputs, by position or by name
Factory = Callable[[], Example]


def token_ids(length: int = SEQUENCE, first: int = 3) -> Tensor:
    """Return random token ids of (BATCH, length), none of them below `first`."""
    return torch.randint(first, VOCABULARY, (BATCH, length))


def labeled_tokens() -> dict[str, Tensor]:
    """Return token ids with the ids as labels, some of which are ignored."""
    ids = token_ids()
    labels = ids.clone()
    labels[::2, :2] = -100
    return {"input_ids": ids, "labels": labels}


def padded_tokens() -> dict[str, Tensor]:
    """Return labeled tokens with a mask that pads the end of every second row."""
    mask = torch.ones(BATCH, SEQUENCE, dtype=torch.int64)
    mask[1::2, -3:] = 0
    return {**labeled_tokens(), "attention_mask": mask}


def class_labels() -> Tensor:
    """Return a class for every row of the batch."""
    return torch.randint(0, CLASSES, (BATCH,))
