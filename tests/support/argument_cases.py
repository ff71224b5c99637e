"""Calls with other arguments than the default, for rule_cases.py: what a rule does not look at may
change what is right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shards import Case, call, flags, integers, real

aten = torch.ops.aten


def bag(mode: int, *rest: Any, note: str) -> Case:
    """Three bags of a table's rows, some rows more than once."""
    indices, offsets = integers(4, 9), torch.tensor([0, 2, 6])
    return call(aten.embedding_bag.padding_idx, real(12, 6), indices, offsets,
                *_bag(mode, *rest), note=note, reference=_first(mode, *rest))  # fmt: skip


def _bag(mode: int, scaled: bool = False, last: bool = False, padding: int | None = None) -> Any:
    return scaled, mode, False, None, last, padding


def _first(*options: Any) -> Any:
    """The bags; the other results are for the backward, and empty in some modes."""

    def reference(weight: Tensor, indices: Tensor, offsets: Tensor) -> Any:
        return aten.embedding_bag.padding_idx(weight, indices, offsets, *_bag(*options))

    return reference


ARGUMENTS = [
    call(aten.embedding.default, real(12, 6), integers(3, 4, 6), 2, True, note="by frequency"),
    bag(0, note="sum"),
    bag(1, True, note="mean by frequency"),
    bag(0, False, False, 2, note="padding"),
    bag(0, False, True, note="last offset"),
    bag(2, note="max"),
    call(aten.cross_entropy_loss.default, real(6, 12), integers(3, 6), None, 1, 2,
         note="class ignored"),
    *(call(f, real(6, 12), dtype=torch.float32, note="float32")
      for f in (aten.ones_like.default, aten.zeros_like.default)),
    call(aten.full_like.default, real(6, 12), 3, dtype=torch.int64, note="integers"),
    call(aten.gelu.default, real(6, 12), approximate="tanh", note="tanh"),
    call(aten.softplus.default, real(6, 12), 2, 0.5, note="sharp"),
    call(aten.hardtanh.default, real(6, 12), -0.2, 0.3, note="narrow"),
    call(aten.leaky_relu.default, real(6, 12), 0.3, note="steep"),
    call(aten.elu.default, real(6, 12), 0.5, 2.0, 3.0, note="scaled"),
    *(call(f, real(6, 12), 3, 2, note="twice") for f in (aten.add.Scalar, aten.sub.Scalar)),
    *(call(f, real(6, 12), real(6, 12).flip(0).detach(), 1, 0.2, note="narrow")
      for f in (aten.smooth_l1_loss.default, aten.huber_loss.default)),
    call(aten.unbind.int, real(6, 3, 12), 1, note="inner"),
    call(aten.cumsum.default, real(6, 12), 0, dtype=torch.float32, note="float32"),
    call(aten.cumsum.default, real(6, 12).detach(), 0, dtype=torch.int64, note="integers"),
    call(aten.diff.default, real(12, 6), 2, 0, note="twice"),
    call(aten.sort.default, real(6, 12), 0, True, note="descending"),
    call(aten.topk.default, real(6, 12), 2, 0, False, False, note="smallest"),
    call(aten.conv1d.default, real(6, 4, 9), real(6, 4, 3), real(6), [2], [1], [2], note="dilated"),
    call(aten.conv2d.default, real(4, 4, 7, 7), real(6, 2, 3, 3), real(6), [2, 1], [1, 1], [2, 1],
         2, note="dilated"),
    call(aten.conv3d.default, real(2, 4, 5, 5, 5), real(6, 2, 2, 2, 2), real(6), [2, 1, 1],
         [1, 0, 1], [1, 2, 1], 2, note="dilated"),
    call(aten.conv1d.padding, real(6, 4, 9), real(6, 2, 3), real(6), [2], "valid", [2], 2,
         note="dilated"),
    call(aten.conv2d.padding, real(4, 4, 7, 7), real(6, 2, 3, 3), real(6), [2, 1], "valid", [2, 1],
         2, note="dilated"),
    call(aten.conv3d.padding, real(2, 4, 3, 5, 3), real(6, 2, 2, 2, 2), real(6), [1, 2, 1],
         "valid", [1, 2, 1], 2, note="dilated"),
    call(aten.conv3d.padding, real(2, 4, 3, 3, 3), real(6, 4, 3, 3, 3), None, [1, 1, 1], "same",
         note="same"),
    call(aten.sum.dim_IntList, real(6, 12), [1], dtype=torch.float32, note="float32"),
    call(aten.sum.dim_IntList, real(6, 12).detach(), [1], dtype=torch.int64, note="of integers"),
    *(call(f, real(6, 12), dtype=torch.float32, note="float32")
      for f in (aten.sum.default, aten.mean.default)),
    call(aten.sum.default, real(6, 12).detach(), dtype=torch.int64, note="integers"),
    *(call(f, real(6, 12, 4), [1], True, note="keep")
      for f in (aten.amax.default, aten.amin.default, aten.logsumexp.default)),
    call(aten.var.dim, real(6, 12), [1], False, True, note="keep"),
    call(aten.argmax.default, real(6, 12), 1, True, note="keep"),
    *(call(f, flags(6, 12), 1, True, note="keep") for f in (aten.any.dim, aten.all.dim)),
    call(aten.layer_norm.default, real(4, 12), [12], real(12), real(12), 0.5, note="eps"),
    call(aten.rms_norm.default, real(4, 12), [12], real(12), 0.5, note="eps"),
    call(aten.log_softmax.int, real(4, 12), 0, torch.float32, note="float32"),
    call(aten.flatten.using_ints, real(4, 6, 12), 0, 1, note="outer"),
]  # fmt: skip

CREATED_LIKE = [
    call(aten.arange.default, 12, dtype=torch.float64, note="float64"),
    call(aten.arange.start, 3, 15, dtype=torch.float64, note="float64"),
    call(aten.arange.start_step, 3, 27, 2, dtype=torch.float64, note="float64"),
    call(aten.scalar_tensor.default, 3.0, dtype=torch.float64, note="float64"),
    call(aten.empty.memory_format, [6, 0], dtype=torch.float64, note="float64"),
    call(aten.eye.default, 6, dtype=torch.float64, note="float64"),
    call(aten.new_full.default, real(3), [6, 12], 7.0, dtype=torch.int64, note="integers"),
]
