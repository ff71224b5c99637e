"""What test_moe.py starts, as on_ranks.py says: trains a mixture of experts on real gloo ranks and
compares with the module itself on one device.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import autopar
from moe_models import MOE
from on_ranks import Facts, everywhere, run_tasks
from one_device import compared, joined, trained

LAYOUTS: dict[str, dict[str, Any]] = {
    "auto": {"layout": "auto"},
    "ep": {"layout": "ep"},
    "ep x megatron": {"layout": autopar.GridEP(expert=2, tensor=2)},
    "fsdp": {"layout": "fsdp"},
    "megatron": {"layout": "megatron"},
    "ep in micro-batches": {"layout": "ep", "microbatches": 2},
}


def parity(name: str) -> Facts:
    model, args, kwargs = MOE[name]()
    inputs = args or kwargs
    single = trained(copy.deepcopy(model), inputs, lambda _, t: t.clone())
    facts: Facts = {}
    for how, options in LAYOUTS.items():
        if name == "olmoe" and "microbatches" in options:
            continue  # its auxiliary loss is no sum over micro-batches
        par = autopar.parallelize(model, None, inputs, **options)
        actual = trained(par, inputs, lambda n, t, par=par: joined(t, par.layout(n)))
        facts[how] = compared(single, actual)
        facts[how]["losses agree"] = len(set(everywhere(float(actual[0])))) == 1
    return facts


if __name__ == "__main__":
    run_tasks({name: functools.partial(parity, name) for name in MOE})
