"""Checks that all ranks do the same: the same request, the same parameters, the same inputs.

- `require_same_request` compares the arguments of `plan` or `parallelize` as text.
- `digest` is a checksum of a tensor's bytes, computed on its device without waiting for it.
- `require_same_tensors` compares the ranks' parameters by digest and sends rank 0's where they
  differ, as DistributedDataParallel does.
- `InputsWatch` compares the inputs of a module's calls. A checksum of all inputs since the last
  comparison accumulates on the device. The ranks compare theirs at the first calls, and then so
  seldom that it costs next to nothing. They use the store of torch.distributed: that is no
  collective, so it cannot come between those of the model, and a rank that never comes keeps the
  others waiting no longer than a collective would.

api.py, apply.py, module.py and dynamo_backend.py call these on every rank.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from autopar._compat import pytree
from autopar.errors import RankError
from autopar.world import World, ranks
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

_MOST_CHARACTERS = 60  # characters of a value that is no tensor
_LITERALS = (bool, int, float, complex, str, type(None))


def require_same_request(world: Any, inputs: Any, **options: Any) -> None:
    """Raise a RankError on every rank unless all make the same request; it says what differs, and
    which ranks ask for what. Collective. `world` None: the running world, as rank 0 describes it.

    Example: require_same_request(World.of(4), (tokens,), layout="ddp", memory="auto")
    """
    request = {name: _text_of(value) for name, value in options.items()}
    request["world"] = _world_text(World.detect() if world is None else World.of(world))
    if inputs is not None:
        request["inputs"] = _shapes_text(inputs)
    ranks.agree_on(request)


def _text_of(value: Any) -> str:
    """Return a value as a user writes it; a function by its name, without its address in memory."""
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _world_text(world: World) -> str:
    """Return a world in words. Nodes may differ in what they detect, such as a few bytes of memory,
    so a detected world is named by its number of ranks alone: rank 0's figures count.
    """
    if world == World.detect():
        return f"the {world.ranks} ranks that run"
    name = hashlib.sha256(repr(world).encode()).hexdigest()[:8]
    return f"{world.name or world.device.name} of {world.ranks} ranks (figures {name})"


def _shapes_text(inputs: Any) -> str:
    """Return the shapes and dtypes of the inputs, in words.

    >>> _shapes_text((torch.ones(2, 3), 0.5))
    '[0]: (2, 3) float32, [1]: 0.5'
    """
    leaves, _ = pytree.tree_flatten_with_path(inputs)
    return ", ".join(f"{pytree.keystr(path)}: {_leaf_text(value)}" for path, value in leaves)


def _leaf_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return repr(value)[:_MOST_CHARACTERS] if isinstance(value, _LITERALS) else type(value).__name__


# Prime, so that rows of a usual length never start at the same column: two rows that change places
# change the number.
_COLUMNS = 8191
_WORD = 8  # bytes


@torch.no_grad()
def digest(x: torch.Tensor) -> torch.Tensor:
    """Return an int64 scalar on x's device: equal for equal bytes, and for others equal by chance
    alone.

    The bytes are read once, as 64-bit words in rows of 8,191; the sums of the columns are weighed
    by odd numbers and added up, all of it modulo 2^64. No more than one row is allocated, unless
    the tensor is not contiguous.
    """
    words, trailing = _words(x)
    weights = _weights(x.device)
    full = words.numel() // _COLUMNS * _COLUMNS
    columns = words[:full].view(-1, _COLUMNS).sum(0) if full else words[:0]
    total = (columns * weights[: columns.numel()]).sum()
    total = total + (words[full:] * weights[: words.numel() - full]).sum()
    return total + (trailing * weights[-trailing.numel() :]).sum() if trailing.numel() else total


def _words(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of x as 64-bit words, and the bytes that are left over."""
    flat = x.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.storage_offset() * flat.element_size() % _WORD:
        flat = flat.clone()  # a view as words must begin at one
    flat_bytes = flat.view(torch.uint8)
    full_words = flat_bytes.numel() // _WORD * _WORD
    return flat_bytes[:full_words].view(torch.int64), flat_bytes[full_words:]


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return odd numbers without a pattern (the finalizer of splitmix64), the same on every
    device.
    """
    x = torch.arange(1, _COLUMNS + 1, device=device) * -0x61C8864680B583EB  # 2^64 over golden ratio
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return (x ^ (x >> 31)) | 1


BUCKET = 25 << 20  # bytes that are sent at once, as in DDP


def require_same_tensors(tensors: Mapping[str, torch.Tensor], synchronise: bool) -> None:
    """Make every rank's parameters and buffers equal to rank 0's. Collective.

    Digests are compared, so ranks that agree send nothing else. Where they differ, rank 0's tensors
    are written into the model's own, as DistributedDataParallel does, and a warning says so;
    `synchronise=False` raises a RankError on every rank instead. Both name the first tensor that
    differs and the ranks on which it does.
    """
    if not ranks.others():
        return
    own = ranks.together("reading the parameters", lambda: _digests(tensors))
    everyones = ranks.all_of(_combine_digests(own))
    if len(set(everyones)) == 1:
        return
    first = ranks.from_rank_0(own)
    odd = ranks.all_of([name for name in tensors if own[name] != first.get(name)])
    different = [name for name in tensors if any(name in of_rank for of_rank in odd)]
    line = _differing_text(different, odd)
    if not synchronise:
        raise RankError(
            f"{line}: call torch.manual_seed before the model is made, load the same checkpoint on "
            "every rank, or leave sync_parameters on, which takes rank 0's"
        )
    ranks.together("taking rank 0's parameters", lambda: _refuse_meta(tensors, different))
    _broadcast([tensors[name] for name in different])
    if ranks.rank() == 0:
        warnings.warn(f"{line}: all take rank 0's (sync_parameters)", stacklevel=3)


def _differing_text(different: Sequence[str], odd: Sequence[Sequence[str]]) -> str:
    first = different[0]
    rank_numbers = [number for number, names in enumerate(odd) if first in names]
    count = f", the first of {len(different)}" if len(different) > 1 else ""
    who = ranks.named(rank_numbers)
    return f"the ranks hold different parameters: {first}{count}, on {who} is not what rank 0 holds"


def _refuse_meta(tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> None:
    meta = [name for name in names if tensors[name].is_meta]
    if meta:
        raise RankError(
            f"{meta[0]} is on the meta device on rank {ranks.rank()}, and not on others: give it "
            "memory on every rank (model.to_empty(device=...)); rank 0's numbers are taken"
        )


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the digest of every tensor; it is 0 for one without numbers, on the meta device."""
    real = {name: x for name, x in tensors.items() if not x.is_meta}
    digests: dict[str, int] = dict.fromkeys(tensors, 0)
    for device in dict.fromkeys(x.device for x in real.values()):
        names = [name for name, x in real.items() if x.device == device]
        numbers = torch.stack([digest(real[name]) for name in names]).tolist()  # one wait a device
        digests.update(zip(names, numbers, strict=True))
    return digests


def _combine_digests(digests: Mapping[str, int]) -> str:
    return hashlib.sha256(repr(list(digests.items())).encode()).hexdigest()


@torch.no_grad()
def _broadcast(tensors: Sequence[torch.Tensor]) -> None:
    """Write rank 0's numbers into these tensors, a bucket of them at a time."""
    for bucket in _buckets(tensors):
        device = ranks.device_of_collectives(bucket[0].device)
        parts = [_octets(x).to(device) for x in bucket]
        sent = parts[0] if len(parts) == 1 else torch.cat(parts)
        dist.broadcast(sent, src=0)
        for x, part in zip(bucket, sent.split([part.numel() for part in parts]), strict=True):
            if part.data_ptr() != x.data_ptr():  # a clone, as a view as numbers must begin at one
                x.copy_(part.clone().view(x.dtype).view(x.shape))


def _octets(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of x, in its own memory where that is contiguous."""
    return x.detach().contiguous().view(-1).view(torch.uint8)


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield neighbouring tensors of one device, together no more than BUCKET bytes; a larger tensor
    goes by itself.
    """
    bucket: list[torch.Tensor] = []
    for x in tensors:
        full = sum(y.nbytes for y in bucket) + x.nbytes > BUCKET
        if bucket and (full or x.device != bucket[0].device):
            yield bucket
            bucket = []
        bucket.append(x)
    if bucket:
        yield bucket


FIRST = 3  # calls that are all compared
SHARE = 5e-4  # of the time of all calls that comparing may take
MOST = 10_000  # calls from one comparison to the next, at most
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
        away = ranks.named([number for number, is_here in enumerate(come) if not is_here])
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
    odd = ranks.named(verdict["odd"])
    if verdict["error"]:
        return f"{odd} refused call {until}: {verdict['error']}"
    if verdict["kinds"]:
        kinds = "; ".join(
            f"rank {number} makes {kind or 'a call as before'}" for number, kind in verdict["kinds"]
        )
        return (
            f"the ranks make different calls, call {until}: {kinds}. Every rank takes the same "
            "global batch, in the same mode: drop the incomplete last batch on all ranks or on none"
        )
    calls = f"call {until}" if since == until else f"calls {since} to {until}"
    return (
        f"the ranks are called with different inputs: in {calls} {odd} got other numbers than "
        f"{ranks.named(verdict['others'])}. Every rank takes the same global batch and cuts out "
        "its own part: take the DistributedSampler out and shuffle with the same seed on all "
        "ranks; or give each rank its own part only, as the DTensors that `par.shard` makes"
    )
