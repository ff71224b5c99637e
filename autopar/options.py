"""What the command line's options say in text: sizes of memory, optimizers."""

from __future__ import annotations

import re

from .cost.memory import Limit, Optimizer
from .errors import PlanError

_UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def read_memory(text: str) -> Limit:
    """Bytes from a size with its unit, or "auto". Raises PlanError.

    >>> read_memory("80GiB")
    85899345920.0
    """
    found = re.fullmatch(r"([0-9.]+) ?([KMGT]?i?B?)", text)
    if text == "auto":
        return "auto"
    if found is None or found[2] not in _UNITS or found[1].count(".") > 1 or found[1] == ".":
        raise PlanError(f"--memory {text}: it is auto, or a size such as 80GiB or 40GB")
    return float(found[1]) * _UNITS[found[2]]


def read_optimizer(text: str) -> Optimizer:
    """A name, or bytes of state for every trained number."""
    return float(text) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) else text
