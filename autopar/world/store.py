"""Exchange signs of life and plain values between ranks through the store of torch.distributed.

The store is no collective: it needs no device, and no collective's timeout ends it. A thread of
each rank writes a `Sign` into it twice a second: that the rank lives, how many calls it has made,
and where it is. A step pays nothing for that.

Example: positions(pulse().signs()) is "rank 0 has made 4 calls (in the forward), rank 1 has made 3
calls (after it)". From two readings of the signs `all_of` and `done_on_rank_0` tell a rank that is
late from one that is gone. runtime, ops/devices.py, ops/process_groups.py and `autopar doctor` call
this file.
"""

from __future__ import annotations

import atexit
import itertools
import json
import math
import os
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
SILENT = 4 * BEAT  # a rank without a sign of life for so long is gone or stopped

Store = Any  # torch.distributed.Store, whose stubs lack half of its methods


class Sign(NamedTuple):
    """The last sign of life of a rank. `beat` numbers its signs; `where` is "in the forward",
    "after it", "ended", or what it raised.
    """

    beat: int
    calls: int
    where: str


class Pulse:
    """The thread that writes this rank's signs of life, and the reader of those of all ranks."""

    def __init__(self, world: Any) -> None:
        self._world = weakref.ref(world)  # a strong reference would keep the group's port busy
        self.rank, self.size = ranks.rank(), ranks.running()
        self.timeout = _compat.timeout_of(world) or timedelta(minutes=30)  # torch's own
        self.calls, self.where = 0, "before its first call"
        self._beat, self._stopped = 0, threading.Event()
        self._thread = threading.Thread(target=self._beating, name="autopar pulse", daemon=True)
        self._thread.start()

    @property
    def store(self) -> Store:
        """The store of the running group. Nothing may wait in it, or signs of life are held up."""
        return of_this_attempt(_compat.default_store())

    def is_of(self, world: Any) -> bool:
        """Whether this was made for that process group."""
        return self._world() is world

    def step(self, compared: bool = False) -> None:
        """Count one more call of the model, which begins now. `compared`: with a comparison of what
        the ranks pass.
        """
        self.where = COMPARING if compared else IN_FORWARD
        self.calls += 1

    def say(self) -> None:
        """Write a sign of life now."""
        self._beat += 1
        sign = f"{self._beat} {self.calls} {self.where}"
        self.store.set(_key(self.rank), sign)

    def end(self, where: str = "ended") -> None:
        """Write a last sign with this `where`, and stop the thread."""
        self.where = where
        self._stopped.set()
        self._thread.join(SILENT)

    def signs(self) -> list[Sign | None]:
        """Return the last sign of every rank; None for a rank that never wrote one."""
        return [self._sign(number) for number in range(self.size)]

    def silent(self) -> list[int]:
        """Return the ranks that are gone or stopped: no sign of life in SILENT seconds, which this
        takes.
        """
        before = self.signs()
        time.sleep(SILENT)
        return self.silent_since(before)

    def silent_since(self, before: Sequence[Sign | None]) -> list[int]:
        """Return the other ranks that wrote no sign since these were read, and did not say why."""
        after = self.signs()
        pairs = zip(before, after, strict=True)
        unchanged = [number for number, (old, new) in enumerate(pairs) if old == new]
        return [n for n in unchanged if n != self.rank and not _explained_itself(after[n])]

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


def _explained_itself(sign: Sign | None) -> bool:
    """Whether the last sign says that the rank ended or failed with the others."""
    return sign is not None and sign.where in (ENDED, FAILED)


ENDED, FAILED = "ended", "failed with the others"
COMPARING, IN_FORWARD = "comparing its inputs", "in the forward"
_current: Pulse | None = None


def pulse() -> Pulse | None:
    """Return this rank's Pulse, which the first call starts; None where no other ranks run."""
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
    atexit.register(_end_pulse)  # a thread that talks while Python is torn down would abort it


def _end_pulse() -> None:
    if _current is not None:
        _current.end()


def of_this_attempt(store: Store) -> Store:
    """Return a store without what the ranks of an earlier attempt wrote. torchrun keeps one store
    for all attempts, unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE is 1: the ranks that it starts again
    would find the values of those that are gone.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt {attempt}", store)


def _key(rank: int) -> str:
    return f"autopar/pulse/{rank}"


def missing(gone: Sequence[int]) -> str:
    """Return the message about ranks that are silent."""
    return (
        f"nothing is heard of {ranks.names_of(gone)} any more (killed, crashed or stopped: see "
        "what was written there last)"
    )


def positions(signs: Sequence[Sign | None]) -> str:
    """Return in words how many calls each rank has made and where it is, equal ranks together.

    >>> positions([Sign(9, 4, "in the forward"), Sign(8, 3, "after it"), None])
    'rank 0 has made 4 calls (in the forward), rank 1 has made 3 calls (after it)'
    """
    by_position: dict[tuple[int, str], list[int]] = {}
    for number, sign in enumerate(signs):
        if sign is not None:
            by_position.setdefault((sign.calls, sign.where), []).append(number)
    return ", ".join(
        f"{ranks.names_of(members)} {'has' if len(members) == 1 else 'have'} made {calls} "
        f"call{'s' if calls != 1 else ''} ({where})"
        for (calls, where), members in by_position.items()
    )


T = TypeVar("T")
_ROUND_NUMBERS = itertools.count()  # the same on all ranks, as each makes the same calls
PATIENCE = 15.0  # seconds: a rank that is late and gives no sign for so long is gone


def all_of(value: Any, seconds: float | None = None) -> list[Any]:
    """Return the values of all ranks in the order of the ranks, on every rank; `value` is plain
    (JSON). Raises a RankError where a rank is gone or does not come within so many `seconds`
    (None: the timeout of a collective).
    """
    beating = pulse()
    if beating is None:
        return [value] * ranks.running()
    store, key = beating.store, f"autopar/told/{next(_ROUND_NUMBERS)}"
    store.set(f"{key}/{beating.rank}", json.dumps(value))
    if store.add(f"{key}/come", 1) == beating.size:
        texts = store.multi_get([f"{key}/{number}" for number in range(beating.size)])
        store.set(f"{key}/all", json.dumps([json.loads(text) for text in texts]))
    timeout_s = beating.timeout.total_seconds() if seconds is None else seconds
    _wait_for_key(beating, f"{key}/all", range(beating.size), timeout_s)
    values: list[Any] = json.loads(store.get(f"{key}/all"))
    return values


def done_on_rank_0(work: Callable[[], T]) -> T | None:
    """Do the work on rank 0 and return its result there. The other ranks return None when it has
    finished or failed, however long that takes; they raise a RankError if rank 0 is gone.

    >>> done_on_rank_0(lambda: "a plan")
    'a plan'
    """
    beating = pulse()
    if beating is None:
        return work()
    key = f"autopar/done/{next(_ROUND_NUMBERS)}"
    if beating.rank > 0:
        _wait_for_key(beating, key, (0,), math.inf)
        return None
    try:
        return work()
    finally:
        beating.store.set(key, "done")


def came(beating: Pulse, key: str, seconds: float) -> bool:
    """Whether a rank writes `key` within so many `seconds`. Polls, as a wait in the store would
    hold up the signs of life.
    """
    until, pause = time.monotonic() + seconds, 1e-4
    while not beating.store.check([key]):
        if time.monotonic() > until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    return True


def _wait_for_key(beating: Pulse, key: str, whom: Sequence[int], seconds: float) -> None:
    """Wait until a rank writes `key`. Raises a RankError if a rank of `whom` is gone first."""
    until = time.monotonic() + seconds
    while True:
        before, seconds_left = beating.signs(), until - time.monotonic()
        if came(beating, key, min(PATIENCE, seconds_left)):
            return
        silent = beating.silent_since(before) if seconds_left > PATIENCE else beating.silent()
        gone = [number for number in silent if number in whom]
        if gone:
            raise RankError(missing(gone))
        if seconds_left <= PATIENCE:
            raise RankError(f"not all of {beating.size} ranks came within {seconds:g} s")
