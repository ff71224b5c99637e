"""Whether all ranks call a model with the same inputs.

A checksum of all that a rank was given since they compared last goes along on its device. At the
first calls, and then so seldom that it costs next to nothing, the ranks compare theirs in the store
of torch.distributed: that is no collective, so it cannot come between those of the model, and a
rank that never comes leaves nobody waiting for longer than a collective would.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from autopar.digest import digest
from autopar.errors import RankError
from autopar.world import ranks
from autopar.world.store import PATIENCE, Pulse, came, missing, positions, pulse

FIRST = 3  # calls that are all compared
SHARE = 5e-4  # of the time of all calls that comparing may take
MOST = 10_000  # calls from one comparison to the next
_ODD = 0x2545F4914F6CDD1D


class Watch:
    """The inputs of one module. `number` tells modules apart: the same on all ranks."""

    def __init__(self, number: int) -> None:
        self._number, self._calls, self._next = number, 0, 1
        self._sums: dict[torch.device, torch.Tensor] = {}
        self._since = time.perf_counter()
        self._compared = 0  # the call that was compared last

    def called(self, tensors: Sequence[torch.Tensor], error: Exception | None = None) -> None:
        """One more call, with these tensors; or one that this rank refused with an error. Raises a
        RankError on every rank where their inputs, this time or before, were not the same.
        """
        beating = pulse()
        if beating is None:
            return
        beating.step()
        self._calls += 1
        for x in tensors:
            before, added = self._sums.get(x.device), digest(x)
            self._sums[x.device] = added if before is None else before * _ODD + added
        if self._calls == self._next:
            self._compare(beating, error)

    def _compare(self, beating: Pulse, error: Exception | None) -> None:
        own = [x.item() for x in self._sums.values()]  # waits for the device
        self._sums.clear()
        told = f"error {type(error).__name__}: {error}" if error else f"inputs {own}"
        began = time.perf_counter()
        verdict = self._verdict(beating, told, began)
        self._next = self._calls + (1 if self._calls < FIRST else verdict["stride"])
        self._since, since = time.perf_counter(), self._compared + 1
        self._compared = self._calls
        if error is None and verdict["odd"]:
            raise RankError(_refusal(verdict, since, self._calls))

    def _verdict(self, beating: Pulse, told: str, began: float) -> dict[str, Any]:
        """What the rank that comes last finds in what all have told. It deletes what the ranks have
        written before, which all of them have left behind by then.
        """
        store, key = beating.store, f"autopar/inputs/{self._number}/{self._calls}"
        store.set(f"{key}/{beating.rank}", told)
        if store.add(f"{key}/come", 1) < beating.size:
            self._wait(beating, key)
            found: dict[str, Any] = json.loads(store.get(f"{key}/verdict"))
            return found
        everyones = store.multi_get([f"{key}/{number}" for number in range(beating.size)])
        found = _judged([one.decode() for one in everyones])
        calls = self._calls - self._compared
        each = max(1e-9, (began - self._since) / calls)
        found["stride"] = min(MOST, math.ceil((time.perf_counter() - began) / (SHARE * each)))
        store.set(f"{key}/verdict", json.dumps(found))
        old = f"autopar/inputs/{self._number}/{self._compared}"
        for name in ("come", "verdict", *map(str, range(beating.size))) if self._compared else ():
            store.delete_key(f"{old}/{name}")
        return found

    def _wait(self, beating: Pulse, key: str) -> None:
        """For the verdict: as long as a collective would, less where a rank is gone."""
        until = time.monotonic() + beating.timeout.total_seconds()
        while True:
            before, left = beating.signs(), until - time.monotonic()
            if came(beating, f"{key}/verdict", min(PATIENCE, left)):
                return
            gone = beating.silent_since(before) if left > PATIENCE else beating.silent()
            if gone or left <= PATIENCE:
                raise RankError(self._who_stays_away(beating, key, gone))

    def _who_stays_away(self, beating: Pulse, key: str, gone: Sequence[int]) -> str:
        come = [beating.store.check([f"{key}/{number}"]) for number in range(beating.size)]
        away = ranks.named([number for number, is_here in enumerate(come) if not is_here])
        where = positions(beating.signs())
        if gone:
            return (
                f"{away} did not come to call {self._calls}: {missing(gone)}. Last heard: {where}"
            )
        return (
            f"{away} did not come to call {self._calls} of this model within "
            f"{beating.timeout.total_seconds():g} s. Calls of all models: {where}. Every rank must "
            "make the same calls: look for a loader that gives one of them more batches, or a call "
            "that only one makes"
        )


def _judged(told: Sequence[str]) -> dict[str, Any]:
    """Which ranks told something else than most did; and what the first refused, if one did."""
    usual = max(dict.fromkeys(told), key=told.count)
    errors = [(number, one) for number, one in enumerate(told) if one.startswith("error ")]
    odd = [number for number, one in enumerate(told) if one != usual]
    if errors:
        return {"odd": [n for n, _ in errors], "error": errors[0][1].removeprefix("error ")}
    return {"odd": odd, "others": [n for n in range(len(told)) if n not in odd], "error": ""}


def _refusal(verdict: dict[str, Any], since: int, until: int) -> str:
    odd = ranks.named(verdict["odd"])
    if verdict["error"]:
        return f"{odd} refused call {until}: {verdict['error']}"
    calls = f"call {until}" if since == until else f"calls {since} to {until}"
    return (
        f"the ranks are called with different inputs: in {calls} {odd} got other numbers than "
        f"{ranks.named(verdict['others'])}. Every rank takes the same global batch and cuts out "
        "its own part: take the DistributedSampler out and shuffle with the same seed on all "
        "ranks; or give each rank its own part only, as the DTensors that `par.shard` makes"
    )
