"""What test_restart.py starts under torchrun: a run that goes on from its last checkpoint.

`restart_ranks.py FILE FOLDER STEP [host]` trains under FSDP and saves every second step. The last
rank kills itself before STEP, and its torchrun (host), unless a checkpoint was there; who comes to
the end writes into FILE what it lost, and what a run that nothing disturbs loses on the same ranks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from saved_run import STEPS, parallel_run

DROP, EVERY = 0.3, 2


def main() -> None:
    path, folder, fatal = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run = parallel_run("fsdp", folder, DROP, seed=int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    start = run.checkpoints.load() or 0
    losses = []
    for step in range(start + 1, STEPS + 1):
        if step == fatal and not start and dist.get_rank() == dist.get_world_size() - 1:
            if sys.argv[4:] == ["host"]:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        losses += run.losses(1)
        if step % EVERY == 0:
            run.checkpoints.save(step)
    facts = {
        "ranks": dist.get_world_size(),
        "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        "start": start,
        "losses": losses,
        "undisturbed": parallel_run("fsdp", folder / "other", DROP).losses(STEPS),
    }
    if dist.get_rank() == 0:
        path.write_text(json.dumps(facts), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
