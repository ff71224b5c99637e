"""A number that stands for a tensor's bytes, worked out on the tensor's own device without waiting
for it.
"""

from __future__ import annotations

from functools import cache

import torch

# Prime, so that rows of a usual length never start at the same column: two rows that change places
# change the number.
_COLUMNS = 8191
_WORD = 8  # bytes


@torch.no_grad()
def digest(x: torch.Tensor) -> torch.Tensor:
    """An int64 scalar on x's device: equal for equal bytes, and for others equal by chance alone.

    The bytes are read once, as 64-bit words in rows of 8,191; the sums of the columns are weighed
    by odd numbers and added up, all of it modulo 2^64. No more than one row is allocated, unless
    the tensor is not contiguous.
    """
    words, rest = _words(x)
    weights = _weights(x.device)
    full = words.numel() // _COLUMNS * _COLUMNS
    columns = words[:full].view(-1, _COLUMNS).sum(0) if full else words[:0]
    found = (columns * weights[: columns.numel()]).sum()
    found = found + (words[full:] * weights[: words.numel() - full]).sum()
    return found + (rest * weights[-rest.numel() :]).sum() if rest.numel() else found


def _words(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of x as 64-bit words, and those that are left over."""
    flat = x.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.storage_offset() * flat.element_size() % _WORD:
        flat = flat.clone()  # a view as words must begin at one
    octets = flat.view(torch.uint8)
    whole = octets.numel() // _WORD * _WORD
    return octets[:whole].view(torch.int64), octets[whole:]


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Odd numbers without a pattern (the finalizer of splitmix64), the same on every device."""
    x = torch.arange(1, _COLUMNS + 1, device=device) * -0x61C8864680B583EB  # 2^64 over golden ratio
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return (x ^ (x >> 31)) | 1
