"""What test_moe.py starts, as on_ranks.py says: trains a mixture of experts on real gloo ranks and
compares with the module itself on one device.
"""

from __future__ import annotations

import copy
import functools

import autopar
from moe_models import MOE
from on_ranks import Facts, everywhere, run_tasks
from train_ranks import compared, joined, trained

LAYOUTS = ("auto", "ep", "fsdp", "megatron")


def parity(name: str) -> Facts:
    model, _, inputs = MOE[name]()
    single = trained(copy.deepcopy(model), inputs, lambda _, t: t.clone())
    facts: Facts = {}
    for layout in LAYOUTS:
        par = autopar.parallelize(model, None, inputs, layout=layout)
        actual = trained(par, inputs, lambda n, t, par=par: joined(t, par.layout(n)))
        facts[layout] = compared(single, actual)
        facts[layout]["losses agree"] = len(set(everywhere(float(actual[0])))) == 1
    return facts


if __name__ == "__main__":
    run_tasks({name: functools.partial(parity, name) for name in ("mixtral", "gpt_oss")})
