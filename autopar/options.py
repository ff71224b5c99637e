"""What the command line's options say in text: layouts, sizes of memory, optimizers."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from autopar.cost.memory import Limit, Optimizer
from autopar.errors import LayoutError, PlanError
from autopar.planner.named_layouts import NAMES, Grid2D, Grid3D, Grid4D, Grid25D, Layouts

GRIDS = {"atp": Grid2D, "3d": Grid3D, "4d": Grid4D, "2.5d": Grid25D}
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


def read_layout(text: str) -> Layouts:
    """A layout's name, or a grid as "4d:x=2,y=2", "atp:4,2". Raises LayoutError.

    >>> read_layout("4d:x=2,data=4")
    Grid4D(x=2, y=1, z=1, data=4)
    """
    name, colon, sizes = text.partition(":")
    if text in NAMES:
        return text
    grid = GRIDS.get(name)
    if not colon or grid is None:
        raise LayoutError(
            f"unknown layout {text!r}; known ones: {', '.join(NAMES)}, and with sizes "
            f"{', '.join(GRIDS)}, as 4d:x=2,y=2"
        )
    fields = [field for field in dataclasses.fields(grid) if field.type in ("int", "str")]
    names = [field.name for field in fields]
    values: dict[str, Any] = {}
    for position, part in enumerate(sizes.split(",")):
        key, equals, value = (piece.strip() for piece in part.rpartition("="))
        if not equals:
            key = names[position] if position < len(names) else value
        if key not in names or key in values:
            raise LayoutError(f"layout {text!r}: {part!r} is no size of {name}{_usage(names)}")
        values[key] = _size(text, part, value) if key != "first" else value
    missing = [f.name for f in fields if f.default is dataclasses.MISSING and f.name not in values]
    if missing:
        raise LayoutError(f"layout {text!r} lacks {', '.join(missing)}{_usage(names)}")
    return grid(**values)


def _usage(names: list[str]) -> str:
    return f"; it takes {', '.join(names)}, by position or as {names[0]}=2"


def _size(text: str, part: str, value: str) -> int:
    if not re.fullmatch("[0-9]+", value) or int(value) < 1:
        raise LayoutError(f"layout {text!r}: {part!r} is no whole number of ranks from 1 on")
    return int(value)
