"""Layouts in the words of DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ._compat import from_part, local_of, placing_of
from .layout import Layout


def placements(layout: Layout) -> tuple[Placement, ...]:
    """One placement per mesh axis, of a plain layout: DTensor cuts axis by axis, outer first, and
    is right for nothing else. (With two strided shards torch's own cut and join are no inverses.)
    """
    assert layout.is_plain, f"{layout} of {layout.shape} is no layout that DTensor can hold"
    kinds = {"I": Replicate(), "R": Replicate(), "P": Partial()}
    found: list[Placement] = [
        Shard(state.dim) if state.kind == "S" else kinds[state.kind] for state in layout.states
    ]
    return tuple(found) or (Replicate(),)


def local_parts(xs: Sequence[DTensor]) -> list[torch.Tensor]:
    """What `to_local` of each gives, with a DTensor like it for gradient; in one autograd function,
    as one for each takes as long as a small op. The gradients arrive together, at the end.
    """
    if torch.compiler.is_compiling():
        return [x.to_local(grad_placements=x.placements) for x in xs]
    trained = [x for x in xs if x.requires_grad]
    parts = iter(_LocalParts.apply(*trained)) if trained else iter(())
    return [next(parts) if x.requires_grad else local_of(x) for x in xs]


class _LocalParts(Function):
    @staticmethod
    def forward(ctx: Any, *xs: DTensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.placings = [placing_of(x) for x in xs]
        parts = [local_of(x) for x in xs]
        return tuple(part.view_as(part) for part in parts)  # autograd marks what it is given

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[DTensor | None, ...]:
        return tuple(
            None if grad is None else from_part(grad.contiguous(), placing)
            for grad, placing in zip(grads, ctx.placings, strict=True)
        )
