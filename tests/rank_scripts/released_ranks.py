"""What is left of a model once it is on the ranks, and it and its inputs are let go: started by
test_released.py (see on_ranks.py).
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

import autopar
import models
from on_ranks import Facts, run_tasks

LAYOUTS = ("auto", "ddp", "fsdp", "megatron", "megatron-sp", "atp", "4d")


def left(layout: str | autopar.Stages, planned: bool, **options: Any) -> list[str]:
    """The parameters and buffers whose memory somebody still holds after a step."""
    model, args, _ = models.gpt(dropout=0.1)
    model.register_buffer("table", torch.ones(64, 64))
    if planned:
        plan = autopar.plan(model, 2, args, layout=layout, **options)
        par: Any = autopar.apply(model, plan)
        del plan
    else:
        par = autopar.parallelize(model, inputs=args, layout=layout, **options)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    storages = {name: StorageWeakRef(x.untyped_storage()) for name, x in tensors}
    results = torch.utils._pytree.tree_leaves(par(*args))
    next(x for x in results if x is not None and not x.dim()).backward()
    del model, tensors
    gc.collect()
    return [name for name, storage in storages.items() if not storage.expired()]


def released() -> Facts:
    left_over: Facts = {}
    for layout in LAYOUTS:
        left_over[layout] = left(layout, planned=False)
    left_over["planned"] = left("fsdp", planned=True)
    left_over["recomputed"] = left("fsdp", planned=False, recompute="full")
    left_over["in micro-batches"] = left("fsdp", planned=False, microbatches=2)
    left_over["in stages"] = left(autopar.Stages(2, "ddp"), planned=False, microbatches=2)
    return left_over


if __name__ == "__main__":
    run_tasks({"released": released})
