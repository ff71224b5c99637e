"""Layouts in the words of DTensor."""

from __future__ import annotations

import math

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from ._compat import StridedShard
from .layout import Layout


def placements(layout: Layout) -> tuple[Placement, ...]:
    """One placement per mesh axis. DTensor cuts axis by axis, outer first, so a digit with others
    outside it is a strided shard.
    """
    found: list[Placement] = []
    for index, (axis, state) in enumerate(zip(layout.mesh.axes, layout.states, strict=True)):
        if state.kind == "P":
            found.append(Partial())
        elif state.kind != "S":
            found.append(Replicate())
        else:
            earlier = {a.name for a in layout.mesh.axes[:index]}
            before = [d for d in layout.digits(state.dim) if d.axis in earlier]
            inner = state.stride // math.prod(d.size for d in before if d.stride < state.stride)
            blocks = (
                layout.shape[state.dim] // math.prod(d.size for d in before) // (axis.size * inner)
            )
            found.append(
                Shard(state.dim) if blocks == 1 else StridedShard(state.dim, split_factor=blocks)
            )
    return tuple(found) or (Replicate(),)
