"""What the ranks tell one another in the store of torch.distributed: that is no collective, so it
needs no device, and no collective's timeout ends it.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from . import ranks
from .errors import RankError
from .pulse import Pulse, missing, pulse

T = TypeVar("T")
_ROUNDS = itertools.count()  # the same on all ranks, as each makes the same calls
PATIENCE = 15.0  # seconds: a rank that is late and says nothing for so long is gone


def all_of(value: Any, seconds: float | None = None) -> list[Any]:
    """What every rank tells, in their order, on every rank; `value` is plain (JSON). Raises a
    RankError where one is gone or does not come within so many `seconds`: None for the time that a
    collective has.
    """
    beating = pulse()
    if beating is None:
        return [value] * ranks.running()
    store, key = beating.store, f"autopar/told/{next(_ROUNDS)}"
    store.set(f"{key}/{beating.rank}", json.dumps(value))
    if store.add(f"{key}/come", 1) == beating.size:
        each = store.multi_get([f"{key}/{number}" for number in range(beating.size)])
        store.set(f"{key}/all", json.dumps([json.loads(one) for one in each]))
    patience = beating.timeout.total_seconds() if seconds is None else seconds
    _wait(beating, f"{key}/all", range(beating.size), patience)
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
        _wait(beating, key, (0,), math.inf)
        return None
    try:
        return work()
    finally:
        beating.store.set(key, "done")


def came(beating: Pulse, key: str, seconds: float) -> bool:
    """Whether somebody writes `key` in time. Asks again and again: a wait in the store would hold
    up the signs of life.
    """
    until, pause = time.monotonic() + seconds, 1e-4
    while not beating.store.check([key]):
        if time.monotonic() > until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    return True


def _wait(beating: Pulse, key: str, whom: Sequence[int], seconds: float) -> None:
    """Until somebody writes `key`; raises where one of those that are waited for is gone."""
    until = time.monotonic() + seconds
    while True:
        before, left = beating.signs(), until - time.monotonic()
        if came(beating, key, min(PATIENCE, left)):
            return
        silent = beating.silent_since(before) if left > PATIENCE else beating.silent()
        gone = [number for number in silent if number in whom]
        if gone:
            raise RankError(missing(gone))
        if left <= PATIENCE:
            raise RankError(f"not all of {beating.size} ranks came within {seconds:g} s")
