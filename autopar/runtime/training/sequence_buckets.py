"""Sequences are padded to one of a few lengths, so that few graphs serve all of them.

    loader = par.loader(rows, buckets=(512, 1024), lengths=lengths, pad=(0, -100))

Every rank knows the lengths of all rows of a batch, so all choose the same bucket without asking
one another. The rows of a RowSampler enter with the bucket of their batch, padded samples leave.
runtime/training/data.py makes these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.utils.data import Dataset

from autopar.errors import InputError

USAGE = (
    "give par.loader(…, buckets=(512, 1024), lengths=[len(row) for row in dataset], pad=(0, -100))"
)


class Buckets:
    """The lengths that sequences are padded to, and what with."""

    def __init__(self, sizes: Sequence[int], lengths: Sequence[int], pad: Any, rows: int) -> None:
        self.sizes, self.lengths, self.pad = sorted(sizes), lengths, pad
        if not sizes or any(not isinstance(size, int) or size < 1 for size in sizes):
            raise InputError(f"buckets is {sizes!r}: they are lengths of sequences, 1 or more")
        if len(lengths) != rows:
            raise InputError(
                f"lengths has {len(lengths)} entries, the dataset {rows} rows: it is the length of "
                "the sequence in every row, in their order"
            )
        longest = max(range(rows), key=lambda row: lengths[row], default=0)
        if rows and lengths[longest] > self.sizes[-1]:
            raise InputError(
                f"row {longest} holds a sequence of {lengths[longest]}, the largest of buckets is "
                f"{self.sizes[-1]}: add a bucket, or cut the sequence in the dataset"
            )

    def of(self, rows: Sequence[int]) -> int:
        """Return the smallest bucket that holds every sequence of these rows."""
        longest = max(self.lengths[row] for row in rows)
        return next(size for size in self.sizes if size >= longest)

    def padded(self, sample: Any, row: int, size: int) -> Any:
        """Return a sample with its sequences as long as `size`. Raises InputError where a sequence
        is longer, or `pad` names what the sample has not.
        """
        return _padded(sample, self.pad, row, size)

    def described(self) -> str:
        """Return what ranks compare: two that differ in it pad their rows otherwise."""
        lengths = hashlib.sha256(repr(list(self.lengths)).encode()).hexdigest()[:12]
        return f"{self.sizes}, pad {self.pad}, lengths {lengths}"


def buckets_of(
    sizes: Sequence[int] | None, lengths: Sequence[int] | None, pad: Any, rows: int
) -> Buckets | None:
    """Return the buckets of a dataset of `rows` rows; None where none are asked for. Raises
    InputError where one of the three arguments is missing.
    """
    arguments = {"buckets": sizes, "lengths": lengths, "pad": pad}
    missing = [name for name, value in arguments.items() if value is None]
    if len(missing) == len(arguments):
        return None
    if missing:
        raise InputError(f"padded sequences need {' and '.join(missing)} too: {USAGE}")
    return Buckets(cast(Sequence[int], sizes), cast(Sequence[int], lengths), pad, rows)


class PaddedRows(Dataset[Any]):
    """A dataset that is asked for (row, length) and pads the row's sequences to that length."""

    def __init__(self, dataset: Dataset[Any], buckets: Buckets) -> None:
        self._dataset, self._buckets = dataset, buckets

    def __getitem__(self, request: tuple[int, int]) -> Any:
        row, size = request
        return self._buckets.padded(self._dataset[row], row, size)


def _padded(sample: Any, pad: Any, row: int, size: int) -> Any:
    """Return a sample, or a part of one, padded with what `pad` has in the same place."""
    if pad is None:
        return sample
    if isinstance(sample, Mapping) and isinstance(pad, Mapping):
        if unknown := sorted(set(pad) - set(sample)):
            raise InputError(f"pad names {unknown}, row {row} has {sorted(sample)}")
        return {name: _padded(value, pad.get(name), row, size) for name, value in sample.items()}
    if isinstance(sample, tuple) and isinstance(pad, Sequence):
        if len(sample) != len(pad):
            raise InputError(
                f"pad has {len(pad)} entries, row {row} has {len(sample)}: one for each, None for "
                "what is not padded"
            )
        return tuple(_padded(x, fill, row, size) for x, fill in zip(sample, pad, strict=True))
    if not isinstance(pad, int | float):
        raise InputError(
            f"pad is {pad!r} for a {type(sample).__name__} in row {row}: it has a number in the "
            "place of every sequence, as {'input_ids': 0, 'labels': -100} or (0, -100)"
        )
    return _filled(torch.as_tensor(sample), pad, row, size)


def _filled(sequence: torch.Tensor, pad: float, row: int, size: int) -> torch.Tensor:
    if sequence.dim() == 0 or sequence.shape[0] > size:
        raise InputError(
            f"row {row} holds a tensor of {tuple(sequence.shape)} where a sequence of at most "
            f"{size} is expected: `lengths` says how long its sequences are, along dim 0"
        )
    filled = sequence.new_full((size, *sequence.shape[1:]), pad)
    filled[: sequence.shape[0]] = sequence
    return filled
