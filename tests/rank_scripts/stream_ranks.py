"""Training as NCCL would do it, on gloo ranks: started by test_streams.py (see on_ranks.py)."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import Tensor

import autopar
import models
from autopar._compat import pytree
from on_ranks import Facts, run_tasks
from streams import Streams, as_nccl

LAYOUTS = ("auto", "ddp", "fsdp", "megatron", "megatron-sp", "atp", "3d", "4d", "2.5d")


def loss_of(results: Any) -> Tensor:
    return next(x for x in pytree.tree_leaves(results) if isinstance(x, Tensor) and not x.dim())


def one_layout(layout: str, **options: Any) -> Facts:
    """How far the loss and every gradient are from one device's, and what was sent."""
    streams: Streams = STREAMS
    model, args, _ = models.gpt()
    single = copy.deepcopy(model).double()  # its rounding is none of ours
    expected = loss_of(single(*args))
    expected.backward()
    par = autopar.parallelize(model, inputs=args, layout=layout, **options)
    for _ in range(2):
        par.zero_grad()
        streams.issued.clear()
        loss = loss_of(par(*args))
        loss.backward()
    wanted = dict(single.named_parameters())
    most = max(float(p.grad.norm()) for p in wanted.values())
    errors = {
        name: float((p.grad.full_tensor().double() - wanted[name].grad).norm())
        / max(float(wanted[name].grad.norm()), 0.1 * most)  # less is what sums that cancel round
        for name, p in par.named_parameters()
    }
    return {
        "loss": abs(float(loss.detach()) / float(expected.detach()) - 1),
        "gradient": max(errors.values(), key=lambda e: float("inf") if e != e else e),
        "sent": dict(streams.issued),
        "worst": max(errors, key=lambda name: errors[name]),
    }


def layouts() -> Facts:
    wanted = os.environ.get("LAYOUTS", ",".join(LAYOUTS)).split(",")
    return {name: one_layout(name) for name in wanted}


def recompute() -> Facts:
    return {"fsdp": one_layout("fsdp", recompute="gathers")}


def forgotten() -> Facts:
    """With waits left out, which must show."""
    STREAMS.forgotten = 9
    facts = {"fsdp": one_layout("fsdp")}
    STREAMS.forgotten = 0
    STREAMS.queues.clear()
    return facts


STREAMS = Streams("late" if os.environ.get("WHEN") == "late" else "early")

if __name__ == "__main__":
    torch.set_num_threads(1)
    STREAMS.install()
    as_nccl()
    run_tasks({"layouts": layouts, "recomputed": recompute, "forgotten": forgotten})
