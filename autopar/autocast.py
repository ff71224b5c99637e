"""The autocast that a model was traced under: its casts are nodes of the graph, so a plan is for
that autocast and no other, and the graph runs without one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

Autocast = tuple[tuple[str, torch.dtype], ...]  # device types with the dtype that is cast to


def under_autocast(device_types: Iterable[str]) -> Autocast:
    """What autocast is on, for these types of devices.

    >>> with torch.autocast("cpu", torch.bfloat16): around(["cpu"])
    (('cpu', torch.bfloat16),)
    """
    kinds = sorted(set(device_types) - {"meta"})
    enabled = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in enabled)


def autocast_text(found: Autocast) -> str:
    return " and ".join(f"torch.autocast({k!r}, {dtype})" for k, dtype in found) or "no autocast"


@contextmanager
def without_autocast(found: Autocast) -> Iterator[None]:
    """Autocast is off for those device types."""
    with ExitStack() as stack:
        for kind, _ in found:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
