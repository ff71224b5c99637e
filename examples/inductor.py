"""Let inductor compile what each rank runs.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/inductor.py

autopar hands inductor the scheduled forward and backward of the rank; it fuses what lies between
the collectives and keeps their order. It needs a C++ compiler, and half a minute at the first step.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

import autopar
from autopar.tools.decoders import Gpt, small_weights
from compile_backend import SMALL, batches


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Gpt(SMALL).apply(small_weights)
    par = autopar.parallelize(model, inputs=next(batches()), backend="inductor")
    optimizer = torch.optim.AdamW(par.parameters(), lr=1e-3)
    for step, (tokens, targets) in enumerate(batches(), start=1):
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = par(tokens, targets)
        loss.backward()
        optimizer.step()
        seconds = time.perf_counter() - started
        if dist.get_rank() == 0:
            print(f"step {step:2}   loss {float(loss.detach()):.6f}   {seconds:.3f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
