"""What every rank must ask for alike, in words that can be compared over ranks and shown."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch

from autopar._compat import pytree
from autopar.world import World, ranks

_SHORT = 60  # characters of a value that is no tensor
_PLAIN = (bool, int, float, complex, str, type(None))


def same_request(world: Any, inputs: Any, **options: Any) -> None:
    """Raise a RankError on every rank unless all ask for the same: it says what differs, and which
    ranks ask for what. Collective. `world` None: what runs, which rank 0 says.

    Example: same_request(World.of(4), (tokens,), layout="ddp", memory="auto")
    """
    asked = {name: _text_of(value) for name, value in options.items()}
    asked["world"] = _world(World.detect() if world is None else World.of(world))
    if inputs is not None:
        asked["inputs"] = _shapes(inputs)
    ranks.agree_on(asked)


def _text_of(value: Any) -> str:
    """A value as a user writes it; a function by its name, without its address in memory."""
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _world(world: World) -> str:
    """Nodes may differ in what they detect, such as a few bytes of memory: rank 0's counts."""
    if world == World.detect():
        return f"the {world.ranks} ranks that run"
    name = hashlib.sha256(repr(world).encode()).hexdigest()[:8]
    return f"{world.name or world.device.name} of {world.ranks} ranks (figures {name})"


def _shapes(inputs: Any) -> str:
    """
    >>> _shapes((torch.ones(2, 3), 0.5))
    '[0]: (2, 3) float32, [1]: 0.5'
    """
    leaves, _ = pytree.tree_flatten_with_path(inputs)
    return ", ".join(f"{pytree.keystr(path)}: {_leaf(value)}" for path, value in leaves)


def _leaf(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return repr(value)[:_SHORT] if isinstance(value, _PLAIN) else type(value).__name__
