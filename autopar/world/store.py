"""What the ranks tell one another in the store of torch.distributed: that is no collective, so it
needs no device, and no collective's timeout ends it.

What every rank says of itself in the store that torch.distributed keeps: that it lives, how many
calls it has made, and where it is. A thread says it twice a second, so a step pays nothing for it.
"""

from __future__ import annotations

import atexit
import itertools
import json
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from autopar import _compat
from autopar.errors import RankError
from autopar.world import ranks

BEAT = 0.5  # seconds from one sign of life to the next
SILENT = 4 * BEAT  # who says nothing for so long is gone, or stopped

Store = Any  # torch.distributed.Store, whose stubs lack half of its methods


class Sign(NamedTuple):
    """What a rank said last. `where`: "in the forward", "after it", "ended", or what it raised."""

    beat: int
    calls: int
    where: str


class Pulse:
    """The signs of life of this rank, and those of the others."""

    def __init__(self, world: Any) -> None:
        self._world = weakref.ref(world)  # what holds a group or its store keeps a port busy
        self.rank, self.size = ranks.rank(), ranks.running()
        self.timeout = _compat.timeout_of(world) or timedelta(minutes=30)  # torch's own
        self.calls, self.where = 0, "before its first call"
        self._beat, self._stopped = 0, threading.Event()
        self._thread = threading.Thread(target=self._beating, name="autopar pulse", daemon=True)
        self._thread.start()

    @property
    def store(self) -> Store:
        """That of the running group, which must not be waited in: signs of life go through it."""
        return _compat.default_store()

    def is_of(self, world: Any) -> bool:
        return self._world() is world

    def step(self) -> None:
        """One more call begins."""
        self.calls += 1
        self.where = "in the forward"

    def say(self) -> None:
        """A sign of life, now."""
        self._beat += 1
        sign = f"{self._beat} {self.calls} {self.where}"
        self.store.set(_key(self.rank), sign)

    def end(self, where: str = "ended") -> None:
        """Say the last word, and stop."""
        self.where = where
        self._stopped.set()
        self._thread.join(SILENT)

    def signs(self) -> list[Sign | None]:
        """What every rank said last; None of one that never said anything."""
        return [self._sign(number) for number in range(self.size)]

    def silent(self) -> list[int]:
        """The ranks of which nothing is heard: gone, or stopped. Takes SILENT seconds."""
        before = self.signs()
        time.sleep(SILENT)
        return self.silent_since(before)

    def silent_since(self, before: Sequence[Sign | None]) -> list[int]:
        """The ranks of which nothing was heard since these signs were read."""
        after = self.signs()
        both = zip(before, after, strict=True)
        quiet = [number for number, (old, new) in enumerate(both) if old == new]
        return [n for n in quiet if n != self.rank and not _said_why(after[n])]

    def _sign(self, number: int) -> Sign | None:
        if not self.store.check([_key(number)]):
            return None
        beat, calls, where = self.store.get(_key(number)).decode().split(" ", 2)
        return Sign(int(beat), int(calls), where)

    def _beating(self) -> None:
        try:
            while not self._stopped.is_set() and self.is_of(_running_group()):
                self.say()
                self._stopped.wait(BEAT)
            if self.is_of(_running_group()):
                self.say()
        except (RuntimeError, ValueError):  # the store is gone: with its rank, or destroyed here
            return


def _said_why(sign: Sign | None) -> bool:
    """Whether a rank that beats no more said so itself."""
    return sign is not None and sign.where in (ENDED, FAILED)


ENDED, FAILED = "ended", "failed with the others"
_current: Pulse | None = None


def pulse() -> Pulse | None:
    """This rank's, which beats from the first call on; None where no others run."""
    global _current
    world = _running_group()
    if _current is not None and world is not None and _current.is_of(world):
        return _current
    if world is None or not ranks.others():
        return None
    if _current is not None:
        _current.end()
    _current = Pulse(world)
    _end_at_exit()
    return _current


def _running_group() -> Any:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


@cache
def _end_at_exit() -> None:
    atexit.register(_end)  # a thread that talks while Python is torn down would abort it


def _end() -> None:
    if _current is not None:
        _current.end()


def _key(rank: int) -> str:
    return f"autopar/pulse/{rank}"


def missing(gone: Sequence[int]) -> str:
    """Of ranks that are silent."""
    return (
        f"nothing is heard of {ranks.named(gone)} any more (killed, crashed or stopped: see what "
        "was written there last)"
    )


def positions(signs: Sequence[Sign | None]) -> str:
    """Which rank is where, those that are alike together.

    >>> positions([Sign(9, 4, "in the forward"), Sign(8, 3, "after it"), None])
    'rank 0 has made 4 calls (in the forward), rank 1 has made 3 calls (after it)'
    """
    alike: dict[tuple[int, str], list[int]] = {}
    for number, sign in enumerate(signs):
        if sign is not None:
            alike.setdefault((sign.calls, sign.where), []).append(number)
    return ", ".join(
        f"{ranks.named(who)} {'has' if len(who) == 1 else 'have'} made {calls} "
        f"call{'s' if calls != 1 else ''} ({where})"
        for (calls, where), who in alike.items()
    )


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
