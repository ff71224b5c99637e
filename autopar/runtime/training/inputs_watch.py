"""Whether the ranks make the same calls with the same inputs.

`InputsWatch` compares the calls of one module. A checksum of all inputs since the last comparison
accumulates on the device. The ranks compare theirs at the first calls, and then so seldom that it
costs next to nothing. They use the store of torch.distributed: that is no collective, so it cannot
come between those of the model, and a rank that never comes keeps the others waiting no longer than
a collective would. module.py, call_graphs.py and dynamo_backend.py call it on every rank.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from autopar.errors import RankError
from autopar.runtime.agreement import digest
from autopar.world import ranks
from autopar.world.store import (
    IN_FORWARD,
    PATIENCE,
    SILENT,
    Pulse,
    came,
    missing,
    positions,
    pulse,
)

FIRST = 3  # calls that are all compared
SHARE = 5e-4  # of the time of all calls that comparing may take
MOST = 10_000  # calls from one comparison to the next, at most
RESEEDED = "a call after torch.manual_seed"
_ODD_FACTOR = 0x2545F4914F6CDD1D


class InputsWatch:
    """Compares the inputs of one module over the ranks. `name` tells modules apart: it is the same
    on all ranks.
    """

    def __init__(self, name: str) -> None:
        self.name, self._calls, self._next = name, 0, 1
        self._sums: dict[torch.device, torch.Tensor] = {}
        self._since = time.perf_counter()
        self._compared = 0  # the call that was compared last
        self._counted = False  # whether `agree` has counted the call that is under way

    def count_call(self, tensors: Sequence[torch.Tensor], error: Exception | None = None) -> None:
        """Count one more call, with these tensors, or one that this rank refused with an error.
        Raises a RankError on every rank where their inputs, in this call or since the last
        comparison, were not the same.
        """
        heartbeat = pulse()
        if heartbeat is None:
            return
        counted, self._counted = self._counted, False
        if not counted:
            self._calls += 1
            heartbeat.step(compared=self._calls == self._next)
        for x in tensors:
            before, added = self._sums.get(x.device), digest(x)
            self._sums[x.device] = added if before is None else before * _ODD_FACTOR + added
        if not counted and self._calls == self._next:
            self._compare(heartbeat, error)

    def agree(self, call: str) -> None:
        """Count a call that is to be planned first, and wait until all ranks make it: `call` says
        of what kind it is. Raises a RankError on every rank where another one makes another call.
        """
        heartbeat = pulse()
        if heartbeat is None:
            return
        heartbeat.step(compared=True)
        self._calls, self._counted = self._calls + 1, True
        self._compare(heartbeat, None, call)

    def _compare(self, beating: Pulse, error: Exception | None, call: str = "") -> None:
        own = [x.item() for x in self._sums.values()]  # waits for the device
        self._sums.clear()
        report = f"error {type(error).__name__}: {error}" if error else f"inputs {own}"
        report = f"{report} {call}" if call else report
        began = time.perf_counter()
        verdict = self._verdict(beating, report, began, call)
        beating.where = IN_FORWARD
        self._next = self._calls + (1 if self._calls < FIRST else verdict["stride"])
        self._since, since = time.perf_counter(), self._compared + 1
        self._compared = self._calls
        if error is None and verdict["odd"]:
            raise RankError(_refusal_text(verdict, since, self._calls))

    def _verdict(self, beating: Pulse, report: str, began: float, call: str) -> dict[str, Any]:
        """Return what the rank that comes last concludes from what all ranks report. That rank also
        deletes the keys of the last comparison, which all ranks have left behind by then.
        """
        store, key = beating.store, f"autopar/inputs/{self.name}/{self._calls}"
        store.set(f"{key}/{beating.rank}", report)
        if store.add(f"{key}/come", 1) < beating.size:
            self._wait(beating, key, call)
            verdict: dict[str, Any] = json.loads(store.get(f"{key}/verdict"))
            return verdict
        everyones = store.multi_get([f"{key}/{number}" for number in range(beating.size)])
        verdict = _judge([report.decode() for report in everyones])
        calls = self._calls - self._compared
        seconds_per_call = max(1e-9, (began - self._since) / calls)
        verdict["stride"] = min(
            MOST, math.ceil((time.perf_counter() - began) / (SHARE * seconds_per_call))
        )
        store.set(f"{key}/verdict", json.dumps(verdict))
        old = f"autopar/inputs/{self.name}/{self._compared}"
        for name in ("come", "verdict", *map(str, range(beating.size))) if self._compared else ():
            store.delete_key(f"{old}/{name}")
        return verdict

    def _wait(self, beating: Pulse, key: str, call: str) -> None:
        """Wait for the verdict: as long as a collective would, less where a rank is gone or makes
        this call without comparing it.
        """
        until = time.monotonic() + beating.timeout.total_seconds()
        while True:
            before, remaining_s = beating.signs(), until - time.monotonic()
            if self._came(beating, key, call, min(PATIENCE, remaining_s)):
                return
            in_time = remaining_s > PATIENCE
            silent = beating.silent_since(before) if in_time else beating.silent()
            if silent or not in_time:
                raise RankError(self._who_stays_away(beating, key, silent))

    def _came(self, beating: Pulse, key: str, call: str, seconds: float) -> bool:
        """Whether the verdict comes in so many seconds. Raises a RankError where a rank gives two
        signs of life from within this call and does not come.
        """
        until, before = time.monotonic() + seconds, set[int]()
        while (remaining_s := until - time.monotonic()) > 0:
            if came(beating, f"{key}/verdict", min(SILENT, remaining_s)):
                return True
            within = {
                number
                for number, sign in enumerate(beating.signs())
                if sign is not None and sign.calls >= beating.calls and sign.where == IN_FORWARD
            }
            if before & within:
                kinds = [(beating.rank, call), (min(before & within), "")]
                verdict = {"error": "", "odd": [], "kinds": kinds}
                raise RankError(_refusal_text(verdict, 0, self._calls))
            before = within
        return False

    def _who_stays_away(self, beating: Pulse, key: str, silent: Sequence[int]) -> str:
        come = [beating.store.check([f"{key}/{number}"]) for number in range(beating.size)]
        away = ranks.names_of([number for number, is_here in enumerate(come) if not is_here])
        where = positions(beating.signs())
        if silent:
            why = missing(silent)
            return f"{away} did not come to call {self._calls}: {why}. Last heard: {where}"
        return (
            f"{away} did not come to call {self._calls} of this model within "
            f"{beating.timeout.total_seconds():g} s. Calls of all models: {where}. Every rank must "
            "make the same calls: look for a loader that gives one of them more batches, or a call "
            "that only one makes"
        )


def _judge(reports: Sequence[str]) -> dict[str, Any]:
    """Return which ranks report something else than most do, and the error of the first rank that
    refused, if one did.
    """
    most_common = max(dict.fromkeys(reports), key=reports.count)
    errors = [(n, report) for n, report in enumerate(reports) if report.startswith("error ")]
    odd = [number for number, report in enumerate(reports) if report != most_common]
    if errors:
        return {"odd": [n for n, _ in errors], "error": errors[0][1].removeprefix("error ")}
    others = [number for number in range(len(reports)) if number not in odd]
    kinds = {number: report.partition("] ")[2] for number, report in enumerate(reports)}
    first = {n: kinds[n] for n in (*odd[:1], *others[:1])} if any(kinds.values()) else {}
    return {"odd": odd, "others": others, "error": "", "kinds": list(first.items())}


def _refusal_text(verdict: dict[str, Any], since: int, until: int) -> str:
    odd = ranks.names_of(verdict["odd"])
    if verdict["error"]:
        return f"{odd} refused call {until}: {verdict['error']}"
    if verdict["kinds"]:
        kinds = "; ".join(
            f"rank {number} makes {kind or 'a call as before'}" for number, kind in verdict["kinds"]
        )
        remedy = (
            "Every rank takes the same global batch, in the same mode: drop the incomplete last "
            "batch on all ranks or on none"
        )
        if RESEEDED in kinds:
            remedy = (
                "Call it on every rank, and draw nothing on one rank alone between it and the call"
            )
        return f"the ranks make different calls, call {until}: {kinds}. {remedy}"
    calls = f"call {until}" if since == until else f"calls {since} to {until}"
    return (
        f"the ranks are called with different inputs: in {calls} {odd} got other numbers than "
        f"{ranks.names_of(verdict['others'])}. Every rank takes the same global batch and cuts out "
        "its own part: take the DistributedSampler out and shuffle with the same seed on all "
        "ranks; or give each rank its own part only, as the DTensors that `par.shard` makes"
    )
