"""Checks that all ranks start alike: with the same request, the same parameters.

- `require_same_request` compares the arguments of `plan` or `parallelize` as text.
- `digest` is a checksum of a tensor's bytes, computed on its device without waiting for it.
- `require_same_tensors` compares the ranks' parameters by digest and sends rank 0's where they
  differ, as DistributedDataParallel does.

api.py and apply.py call these on every rank; training/inputs_watch.py takes `digest`.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from autopar._compat import pytree
from autopar.errors import RankError
from autopar.ops.rules.user_rules import entered_rules
from autopar.world import World, ranks

_MOST_CHARACTERS = 60  # characters of a value that is no tensor
_LITERALS = (bool, int, float, complex, str, type(None))


def require_same_request(world: Any, inputs: Any, **options: Any) -> None:
    """Raise a RankError on every rank unless all make the same request; it says what differs, and
    which ranks ask for what. Collective. `world` None: the running world, as rank 0 describes it.

    Example: require_same_request(World.of(4), (tokens,), layout="ddp", memory="auto")
    """
    request = {name: _text_of(value) for name, value in options.items()}
    request["world"] = _world_text(World.detect() if world is None else World.of(world))
    request["rules of your own"] = entered_rules()
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
    total = (words[full:] * weights[: words.numel() - full]).sum()
    if full:
        total = total + (words[:full].view(-1, _COLUMNS).sum(0) * weights).sum()
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
    who = ranks.names_of(rank_numbers)
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
        flat = [_octets(x).to(device) for x in bucket]
        sent = flat[0] if len(flat) == 1 else torch.cat(flat)
        dist.broadcast(sent, src=0)
        for x, own in zip(bucket, sent.split([own.numel() for own in flat]), strict=True):
            if own.data_ptr() != x.data_ptr():  # a clone, as a view as numbers must begin at one
                x.copy_(own.clone().view(x.dtype).view(x.shape))


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
