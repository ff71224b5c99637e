"""What test_real_sizes.py starts, as on_ranks.py says: a task "MODEL LAYOUT" trains a model of
real_size_models.py on all ranks and, on rank 0 alone, on one device, and compares.
"""

from __future__ import annotations

import copy
import gc
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from on_ranks import Facts, everywhere, run_tasks
from one_device import compared, error, joined, trained
from real_size_models import example

# AdamW's first step has full length whatever the gradient's size, so a rounding error of a small
# gradient moves its parameter as far as a large one does.
OPTIMIZER = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


def against_one_device(task: str) -> Facts:
    """Relative errors of three steps in a layout; {} on all ranks but the first, which alone has
    room for a second model, and that one only until it is trained.
    """
    name, layout = task.split()
    first = dist.get_rank() == 0
    model, inputs = example(name)
    unsharded_model = copy.deepcopy(model) if first else None
    single = (
        None
        if unsharded_model is None
        else trained(unsharded_model, inputs, lambda _, t: t.clone(), OPTIMIZER)
    )
    buffers = {} if unsharded_model is None else dict(unsharded_model.named_buffers())
    del unsharded_model
    gc.collect()
    dist.barrier()
    par = autopar.parallelize(model, None, inputs, layout=layout)
    del model
    planned = par.plan

    def gather(name: str, value: Tensor) -> Tensor:
        value = joined(value, par.layout(name))
        return value if first else torch.empty(0)

    actual = trained(par, inputs, gather, OPTIMIZER)
    losses = everywhere(float(actual[0]))
    if single is None:
        return {}
    return {
        "mesh": str(planned.mesh),
        "unsplit": list(planned.unsplit),
        "losses agree": len(set(losses)) == 1,
        "logits": error(actual[1], single[1]),
        **compared(single, actual),
        "buffers": _worst_buffer(par, buffers),
    }


def _worst_buffer(par: Any, buffers: dict[str, Tensor]) -> float:
    expected = {n: b for n, b in buffers.items() if b.is_floating_point()}
    computed = {n: b for n, b in par.named_buffers() if n in expected}
    return max((error(computed[n], expected[n]) for n in expected), default=0.0)


if __name__ == "__main__":
    run_tasks({task: partial(against_one_device, task) for task in sys.argv[2:]})
