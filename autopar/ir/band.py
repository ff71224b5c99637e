"""Bands: the keys that a query of attention may see by the distance of their positions alone, and
the blocks of queries and keys that a band leaves to compute.

Example: Band(after=0) is a causal mask, Band(before=4095, after=0) one with a window of 4096.
Queries may be split: `digits` says which digits of their positions lie on mesh axes. Blocks and
shares are the same on every rank, as they allow for every place of a rank on these axes: those of
a strided split (stride 1) are as small as the whole attention's, those of a contiguous one larger.

ops/sharded/masked_attention.py computes the blocks, rules and costs count them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

LONG = 2048  # tokens: attention to shorter sequences is a small part of a step

# Fewer queries a block compute fewer hidden keys, and start more kernels.
_BLOCKS, _FEWEST = 16, 128
_MOST_PAIRS = 1 << 25  # of one block, for each row of a batch: the mask of a block is a tensor


class Place(NamedTuple):
    """A digit of the position of a query that lies on a mesh axis: (position // stride) % size."""

    stride: int
    size: int


Places = tuple[Place, ...]


class Band(NamedTuple):
    """Query i sees key j where i - before <= j <= i + after; None: no bound on this side.

    >>> Band(after=0).sees(5, 5), Band(after=0).sees(5, 6), Band(1, 0).sees(5, 3)
    (True, False, False)
    """

    before: int | None = None
    after: int | None = None

    @property
    def is_causal(self) -> bool:
        """Whether this is what `is_causal` of torch's attention says."""
        return self.before is None and self.after == 0

    def sees(self, query: int, key: int) -> bool:
        """Whether a query sees a key, by their global positions."""
        return (self.before is None or key >= query - self.before) and (
            self.after is None or key <= query + self.after
        )

    def meet(self, other: Band) -> Band:
        """Return the band of the keys that both see.

        >>> Band(7, None).meet(Band(None, 0))
        Band(before=7, after=0)
        """
        befores = [b.before for b in (self, other) if b.before is not None]
        afters = [b.after for b in (self, other) if b.after is not None]
        return Band(min(befores, default=None), min(afters, default=None))

    def within(self, queries: int, keys: int) -> Band:
        """Return the band without the bounds that hide nothing of so many queries and keys.

        >>> Band(4096, 0).within(128, 128)
        Band(before=None, after=0)
        """
        before = None if self.before is None or self.before >= queries - 1 else self.before
        after = None if self.after is None or self.after >= keys - 1 else self.after
        return Band(before, after)

    def blocks(
        self, queries: int, keys: int, places: Places = (), batch: int = 1
    ) -> list[tuple[range, range]]:
        """Return for every block of a rank's `queries` the keys that one of them may see, on some
        rank. `batch`: the rows of the batch that have a mask of their own.

        >>> Band(after=0).blocks(256, 256)
        [(range(0, 128), range(0, 128)), (range(128, 256), range(0, 256))]
        """
        step = max(_FEWEST, -(-queries // _BLOCKS))
        if self.before is None and self.after is None:
            step = max(1, queries)
        elif self.before is not None and self.after is not None:
            step = min(step, max(_FEWEST, self.before + self.after))
        step = max(1, min(step, _MOST_PAIRS // max(1, keys * batch)))
        return list(self._blocks_of(queries, keys, places, step))

    def _blocks_of(
        self, queries: int, keys: int, places: Places, step: int
    ) -> Iterator[tuple[range, range]]:
        for first in range(0, queries, step):
            rows = range(first, min(first + step, queries))
            low, high = farthest(rows, places)
            start = 0 if self.before is None else min(keys, max(0, low - self.before))
            stop = keys if self.after is None else max(start, min(keys, high + self.after + 1))
            yield rows, range(start, stop)

    def hides(self, rows: range, columns: range, places: Places) -> bool:
        """Whether the band hides any key of a block, on any rank."""
        low, high = farthest(rows, places)
        before = self.before is not None and columns.start < high - self.before
        return before or (self.after is not None and columns.stop - 1 > low + self.after)

    def share(self, queries: int, keys: int, places: Places = ()) -> float:
        """Return the share of all pairs of a rank's queries and all keys that are computed.

        >>> Band(after=0).share(4096, 4096)
        0.53125
        """
        return _share(self, queries, keys, places)


@lru_cache(maxsize=1 << 10)
def _share(band: Band, queries: int, keys: int, places: Places) -> float:
    blocks = band.blocks(queries, keys, places)
    computed = sum(len(rows) * len(columns) for rows, columns in blocks)
    return computed / max(1, queries * keys)


def farthest(rows: range, places: Places) -> tuple[int, int]:
    """Return the lowest and the highest global position that local rows have on any rank.

    >>> farthest(range(0, 2), (Place(1, 4),)), farthest(range(0, 2), (Place(8, 4),))
    ((0, 7), (0, 25))
    """
    last = tuple(size - 1 for _, size in places)
    return position(rows.start, places, (0,) * len(places)), position(rows.stop - 1, places, last)


def position(local: int, places: Places, coordinates: Sequence[int]) -> int:
    """Return the global position of a local one on the rank with these coordinates.

    >>> position(3, (Place(1, 4),), (2,)), position(3, (Place(8, 4),), (2,))
    (14, 19)
    """
    for coordinate, (stride, size) in sorted(
        zip(coordinates, places, strict=True), key=lambda entry: entry[1].stride
    ):
        local = local // stride * (stride * size) + coordinate * stride + local % stride
    return local
