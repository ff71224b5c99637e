"""Garbage collection, paused where many objects are created and hardly any cycle is dropped.

Example: `api.plan` runs `without_collection`, and so do the searches that others call.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Run without garbage collection: planning and importing torch create objects by the hundred
    thousand, and searching them for cycles again and again takes a sixth of the seconds.

    >>> with without_collection():
    ...     gc.isenabled()
    False
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # what is new counts as old: it is not searched at once
                gc.freeze()
                gc.unfreeze()
            gc.enable()
