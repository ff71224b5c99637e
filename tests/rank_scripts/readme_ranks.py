"""README's program on gloo ranks: started by test_readme.py, as on_ranks.py says."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import readme
from on_ranks import everywhere

if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    names = readme.run(int(sys.argv[2]))
    losses = everywhere(float(names["loss"].detach()))
    weights = {name: p.full_tensor().tolist() for name, p in names["model"].named_parameters()}
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps({"losses": losses, "weights": weights}))
    dist.barrier()
    dist.destroy_process_group()
