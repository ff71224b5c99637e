"""What test_two_hosts.py starts by torchrun on each host: three steps of a GPT, on all ranks and on
one device. `hosts_ranks.py FILE`: rank 0 writes what it saw into FILE.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.tools.decoders import Gpt, Sizes, small_weights
from autopar.world import ranks
from benchmarks.cluster import sent_bytes

STEPS, BATCH = 3, 8
SMALL = Sizes("gpt", layers=1, width=64, heads=4, vocabulary=32, context=16)


def losses(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    drawn, values = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        text = torch.randint(SMALL.vocabulary, (BATCH, SMALL.context + 1), generator=drawn)
        optimizer.zero_grad()
        loss = model(text[:, :-1].contiguous(), text[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # rank 0's weights are taken
    model = Gpt(SMALL).apply(small_weights)
    tokens = torch.zeros(BATCH, SMALL.context, dtype=torch.int64)
    par = autopar.parallelize(copy.deepcopy(model), inputs=(tokens, tokens), layout="fsdp")
    before = sent_bytes()
    facts = {
        "losses": losses(par),
        "sent": ranks.all_of(sent_bytes() - before),
        "levels": [level.ranks for level in autopar.World.detect().levels],
        "hosts": ranks.all_of(int(os.environ["GROUP_RANK"])),
        "one device": losses(model),
    }
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(facts), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
