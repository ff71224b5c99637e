"""Which attributes of which modules a forward reads.

    with AttributeReads(model) as reads:
        model(x)
    reads.attributes    # {("", "tau"), ("blocks.0", "disabled"), ("blocks.0.drop", "p"), …}

A trace is right for as long as these have the values that they had: a parallel module compares them
at every call (runtime/training/module_state.py). What the forward does not read, such as a counter
of steps for a log, may change as it likes. `trace` records the reads and keeps them in the
signature.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

ALL = "__dict__"  # the read of all attributes of a module
_TORCH = str(Path(torch.__file__).parent / "nn")
_AUTOPAR = str(Path(__file__).parents[2])
# What nn.Module itself keeps in every module, but for the mode.
INTERNAL = frozenset(vars(nn.Module())) - {"training"}


class AttributeReads:
    """Records, within its context, the attributes that code reads of a model's modules: `found` has
    (name of the module, name of the attribute). Parameters, buffers and submodules are among them,
    and methods; what nn.Module keeps for itself is not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.attributes: set[tuple[str, str]] = set()
        self._names = {id(module): name for name, module in model.named_modules()}

    def __enter__(self) -> AttributeReads:
        names, attributes = self._names, self.attributes

        def read(module: Any, name: str) -> Any:
            where = names.get(id(module))
            if where is not None and name not in INTERNAL:
                if name[:2] != "__":
                    attributes.add((where, name))
                elif name == ALL and not _is_own(sys._getframe(1).f_code.co_filename):
                    attributes.add((where, ALL))
            return object.__getattribute__(module, name)

        nn.Module.__getattribute__ = read  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: Any) -> None:
        del nn.Module.__getattribute__


def _is_own(filename: str) -> bool:
    """Whether a file is of torch.nn, whose modules look into their own dicts, or of autopar."""
    return filename.startswith((_TORCH, _AUTOPAR))
