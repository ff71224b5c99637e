"""What `autopar doctor` does under torchrun, in the open: every check, one by one.

    torchrun --standalone --nproc-per-node 4 examples/first_gpu_run.py

Start as many ranks as there are GPUs; on a machine without any it runs the same on gloo. It takes
three minutes at most, prints a table, and leaves doctor.json and doctor.html in out/doctor: attach
both to a report. The exit status is 1 where a check failed. Take out what you do not want, or add a
check of your own: a function of the Session that returns a Finding, as `memory_is_free` here.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

from autopar.tools.doctor import Finding, Session, exchanges, kernels, training
from autopar.tools.doctor.examination import Examination

LEAST_FREE = 0.5  # of a GPU's memory


def memory_is_free(session: Session) -> Finding:
    """Whether nobody else holds most of this rank's GPU; a CPU is not looked at."""
    if not session.cuda:
        return Finding(absent="this looks at GPUs alone")
    free, total = torch.cuda.mem_get_info(session.device)
    share = free / total
    fault = "" if share > LEAST_FREE else f"only {share:.0%} of {session.device} is free"
    return Finding(f"{share:.0%} free", {"free_bytes": free, "total_bytes": total}, fault)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/doctor"), help="where files go")
    examination = Examination(parser.parse_args().out)
    check = examination.check

    # 1. Each rank alone: every kernel of attention, in float32 and in bfloat16, against float64.
    check("memory", memory_is_free)
    for dtype in kernels.DTYPES:
        for name in kernels.KERNELS:
            check(f"kernel {name} {dtype}", partial(kernels.kernel, name=name, dtype=dtype))

    # From here on the process group is open: NCCL where every rank has a GPU, else gloo.
    with examination.ranks():
        # 2. What runs: versions, devices, links beside what the cost model assumes, groups.
        check("versions", exchanges.versions)
        check("devices", exchanges.devices_of_ranks)
        check("links", exchanges.links)
        check("groups", exchanges.groups)

        # 3. Every collective that graphs use, alone, and several joined into one.
        for kind in exchanges.KINDS:
            check(f"{kind} alone", partial(exchanges.alone, kind=kind))
        for kind in exchanges.FUSED_KINDS:
            check(f"{kind} joined", partial(exchanges.in_bucket, kind=kind))

        # 4. Five layouts against one device: the loss and every gradient of a small GPT.
        for title, layout in training.layouts(examination.session.ranks).items():
            check(f"parity {title}", partial(training.parity, layout=layout))

        # 5. Dropout has one mask, whatever the layout; attention's kernel drops by its seed.
        check("dropout", kernels.dropout)
        check("dropout of attention", kernels.attention)

        # 6. A step as planned and as measured, and ten in which no rank may wait for its GPU.
        check("step", training.step)
        check("peak", training.peak)
        check("synchronisation", training.synchronisation)
    return examination.close()


if __name__ == "__main__":
    sys.exit(main())
