"""What the ranks tell one another in the store of torch.distributed: that is no collective, so it
needs no device, and no collective's timeout ends it.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

from . import ranks
from .errors import RankError
from .pulse import SILENT, missing, pulse

T = TypeVar("T")
_ROUNDS = itertools.count()  # the same on all ranks, as each makes the same calls
_PAUSE = 0.02  # seconds between two looks: a wait in the store would hold up the signs of life


def all_of(value: Any) -> list[Any]:
    """What every rank tells, in their order, on every rank; `value` is plain (JSON). Raises a
    RankError where one is gone or does not come within the time that a collective has.
    """
    beating = pulse()
    if beating is None:
        return [value] * ranks.running()
    store, key = beating.store, f"autopar/told/{next(_ROUNDS)}"
    store.set(f"{key}/{beating.rank}", json.dumps(value))
    if store.add(f"{key}/come", 1) == beating.size:
        each = store.multi_get([f"{key}/{number}" for number in range(beating.size)])
        store.set(f"{key}/all", json.dumps([json.loads(one) for one in each]))
    _wait(f"{key}/all", range(beating.size), beating.timeout.total_seconds())
    found: list[Any] = json.loads(store.get(f"{key}/all"))
    return found


def done_on_rank_0(work: Callable[[], T]) -> T | None:
    """Rank 0's result, on rank 0 alone; the others come back when it has finished or failed,
    however long that takes. Raises a RankError there if rank 0 is gone.

    >>> done_on_rank_0(lambda: "a plan")
    'a plan'
    """
    beating = pulse()
    if beating is None:
        return work()
    key = f"autopar/done/{next(_ROUNDS)}"
    if beating.rank > 0:
        _wait(key, (0,), None)
        return None
    try:
        return work()
    finally:
        beating.store.set(key, "done")


def _wait(key: str, whom: Any, seconds: float | None) -> None:
    """Until somebody writes `key`; raises where one of those that are waited for is gone."""
    beating = pulse()
    assert beating is not None
    until = None if seconds is None else time.monotonic() + seconds
    before, looked = beating.signs(), time.monotonic()
    while not beating.store.check([key]):
        time.sleep(_PAUSE)
        if until is not None and time.monotonic() > until:
            raise RankError(f"not all of {ranks.running()} ranks came within {seconds:g} s")
        if time.monotonic() - looked > 5 * SILENT:
            gone = [number for number in beating.silent_since(before) if number in whom]
            if gone:
                raise RankError(missing(gone))
            before, looked = beating.signs(), time.monotonic()
