"""A part of a graph whose values are not kept for the backward but computed again there."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.utils.checkpoint import checkpoint


def recomputed(block: fx.GraphModule, draws: bool, *inputs: Any) -> Any:
    """What `block` gives for these inputs, its collectives included; the backward runs it again.

    `draws`: it draws random numbers from torch's generators, which must be the same again. Our own
    dropout (autopar/sharded/dropout.py) does not.
    """
    return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=draws)
