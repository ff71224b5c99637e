"""The ranks' copies of a model: compared, and made equal to rank 0's."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from autopar.digest import digest
from autopar.errors import RankError
from autopar.world import ranks

BUCKET = 25 << 20  # bytes that are sent at once: what DDP takes


def same(tensors: Mapping[str, torch.Tensor], synchronise: bool) -> None:
    """Make every rank's parameters and buffers rank 0's. Collective.

    Digests are compared, so ranks that agree send nothing else. Where they differ, rank 0's tensors
    are written into the model's own, as DistributedDataParallel does, and a warning says so;
    `synchronise=False` raises a RankError on every rank instead. Both name the first that differs
    and the ranks that hold it otherwise.
    """
    if not ranks.others():
        return
    own = ranks.together("reading the parameters", lambda: _digests(tensors))
    everyones = ranks.all_of(_joint(own))
    if len(set(everyones)) == 1:
        return
    first = ranks.from_rank_0(own)
    odd = ranks.all_of([name for name in tensors if own[name] != first.get(name)])
    different = [name for name in tensors if any(name in of_rank for of_rank in odd)]
    line = _told(different, odd)
    if not synchronise:
        raise RankError(
            f"{line}: call torch.manual_seed before the model is made, load the same checkpoint on "
            "every rank, or leave sync_parameters on, which takes rank 0's"
        )
    ranks.together("taking rank 0's parameters", lambda: _refuse_meta(tensors, different))
    _broadcast([tensors[name] for name in different])
    if ranks.rank() == 0:
        warnings.warn(f"{line}: all take rank 0's (sync_parameters)", stacklevel=3)


def _told(different: Sequence[str], odd: Sequence[Sequence[str]]) -> str:
    first = different[0]
    which = [number for number, names in enumerate(odd) if first in names]
    more = f", the first of {len(different)}" if len(different) > 1 else ""
    who = ranks.named(which)
    return f"the ranks hold different parameters: {first}{more}, on {who} is not what rank 0 holds"


def _refuse_meta(tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> None:
    meta = [name for name in names if tensors[name].is_meta]
    if meta:
        raise RankError(
            f"{meta[0]} is on the meta device on rank {ranks.rank()}, and not on others: give it "
            "memory on every rank (model.to_empty(device=...)); rank 0's numbers are taken"
        )


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The digest of every tensor; of one without numbers, on the meta device, it is 0."""
    real = {name: x for name, x in tensors.items() if not x.is_meta}
    found: dict[str, int] = dict.fromkeys(tensors, 0)
    for device in dict.fromkeys(x.device for x in real.values()):
        names = [name for name, x in real.items() if x.device == device]
        numbers = torch.stack([digest(real[name]) for name in names]).tolist()  # one wait a device
        found.update(zip(names, numbers, strict=True))
    return found


def _joint(digests: Mapping[str, int]) -> str:
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
    """The bytes of x, in its own memory where that is contiguous."""
    return x.detach().contiguous().view(-1).view(torch.uint8)


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours on one device, together no more than a bucket; what is larger goes by itself."""
    bucket: list[torch.Tensor] = []
    for x in tensors:
        full = sum(y.nbytes for y in bucket) + x.nbytes > BUCKET
        if bucket and (full or x.device != bucket[0].device):
            yield bucket
            bucket = []
        bucket.append(x)
    if bucket:
        yield bucket
