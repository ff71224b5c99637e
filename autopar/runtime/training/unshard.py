"""An ordinary module of what a parallel module has learned.

    model = par.unshard()          # of the user's class, with whole tensors, on every rank
    model = par.unshard(rank=0)    # on rank 0; None on the others
    model.generate(prompt)

The parts of one tensor after the other are gathered, so a rank that gets no model holds one whole
tensor at a time. runtime/module.py calls `unshard`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from autopar.errors import InputError
from autopar.runtime.training.module_tree import OriginalRoot, copied_tree
from autopar.world import ranks


def unshard(
    module: nn.Module,
    root: OriginalRoot,
    gather: Callable[[str, torch.Tensor], torch.Tensor],
    rank: int | None,
    device: torch.device,
) -> nn.Module | None:
    """Return a copy of a parallel module that is the user's model, with whole tensors on `device`;
    None on other ranks than `rank`, where one is given. Collective. `gather`: gives the global
    tensor of a name and what the rank has of it, on all ranks together.

    Raises InputError for a rank that is not there.
    """
    if rank is not None and not 0 <= rank < ranks.running():
        raise InputError(
            f"unshard(rank={rank}): the ranks are 0 to {ranks.running() - 1}; leave rank out for a "
            "model on each of them"
        )
    keeps = rank is None or rank == ranks.rank()
    own: dict[int, torch.Tensor] = {}
    with root.restored(module) as model:  # with the parameters of other stages, too
        named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        value = gather(name, tensor)
        if keeps:
            value = value.to(device, copy=True)  # of a replicated DTensor it is the rank's own
            if isinstance(tensor, nn.Parameter):
                value = nn.Parameter(value, requires_grad=tensor.requires_grad)
            own[id(tensor)] = value
    if not keeps:
        return None
    with root.restored(module) as model:
        return copied_tree(model, own)
