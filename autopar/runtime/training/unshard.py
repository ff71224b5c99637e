"""An ordinary module of what a parallel module has learned.

    model = par.unshard()          # of the user's class, with whole tensors, on every rank
    model = par.unshard(rank=0)    # on rank 0; None on the others
    model.generate(prompt)

The parts of one tensor after the other are gathered, so a rank that gets no model holds one whole
tensor at a time. runtime/module.py calls `unsharded`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import InputError
from autopar.runtime.training.module_tree import OriginalRoot, copied_tree
from autopar.world import ranks


def unsharded(
    module: nn.Module, root: OriginalRoot, rank: int | None, device: torch.device
) -> nn.Module | None:
    """Return a copy of a parallel module that is the user's model, with whole tensors on `device`;
    None on other ranks than `rank`, where one is given. Collective.

    Raises InputError for a rank that is not there.
    """
    if rank is not None and not 0 <= rank < ranks.running():
        raise InputError(
            f"unshard(rank={rank}): the ranks are 0 to {ranks.running() - 1}; leave rank out for a "
            "model on each of them"
        )
    keeps = rank is None or rank == ranks.rank()
    own: dict[int, torch.Tensor] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        value = tensor.detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if keeps:
            value = value.to(device, copy=True)  # of a replicated DTensor it is the rank's own
            if isinstance(tensor, nn.Parameter):
                value = nn.Parameter(value, requires_grad=tensor.requires_grad)
            own[id(tensor)] = value
    if not keeps:
        return None
    with root.restored(module) as model:
        return copied_tree(model, own)
