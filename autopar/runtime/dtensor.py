"""Layouts in the words of DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from autopar._compat import changes_in_place, from_part, local_of, placing_of
from autopar.ir.layout import Layout


def placements(layout: Layout) -> tuple[Placement, ...]:
    """One placement per mesh axis in storage order, of a plain layout: DTensor cuts axis by axis,
    outer first, and is right for nothing else. (With two strided shards torch's own cut and join
    are no inverses.)
    """
    assert layout.is_plain, f"{layout} of {layout.shape} is no layout that DTensor can hold"
    kinds = {"I": Replicate(), "R": Replicate(), "P": Partial()}
    found: list[Placement] = [
        Shard(state.dim) if state.kind == "S" else kinds[state.kind]
        for state in (layout.states[place] for place in layout.mesh.storage_order)
    ]
    return tuple(found) or (Replicate(),)


def local_parts(xs: Sequence[DTensor]) -> list[torch.Tensor]:
    """What `to_local` of each gives, with a DTensor like it for gradient; in one autograd function,
    as one for each takes as long as a small op. The gradients arrive together, at the end. The
    backward raises RuntimeError where one of xs was changed in place since, as autograd does: a
    DTensor counts such changes, its own part does not.
    """
    if torch.compiler.is_compiling():
        return [x.to_local(grad_placements=x.placements) for x in xs]
    trained = [x for x in xs if x.requires_grad]
    parts = iter(_LocalParts.apply(xs, *trained)) if trained else iter(())
    return [next(parts) if x.requires_grad else local_of(x) for x in xs]


class _LocalParts(Function):
    @staticmethod
    def forward(ctx: Any, held: Sequence[DTensor], *xs: DTensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.held = [(x, changes_in_place(x)) for x in held]
        ctx.placings = [placing_of(x) for x in xs]
        parts = [local_of(x) for x in xs]
        return tuple(part.view_as(part) for part in parts)  # autograd marks what it is given

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[DTensor | None, ...]:
        for x, before in ctx.held:
            if changes_in_place(x) != before:
                raise _changed(x)
        found = (
            None if grad is None else from_part(grad.contiguous(), placing)
            for grad, placing in zip(grads, ctx.placings, strict=True)
        )
        return (None, *found)


def _changed(x: DTensor) -> RuntimeError:
    what = "a parameter" if isinstance(x, torch.nn.Parameter) else "an input"
    return RuntimeError(
        f"{what} of shape {tuple(x.shape)} has been modified by an inplace operation between the "
        "forward and the backward of the parallel model, which computes with its new values: take "
        "the optimizer's step after backward(), or change a clone of it"
    )
