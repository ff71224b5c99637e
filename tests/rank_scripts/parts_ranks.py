"""What test_parts.py starts under torchrun: `parts_ranks.py FILE LAYOUT…`. An exponential average
of a parallel model, and states of the plain model and of another layout that it loads; how far each
is from one device goes into FILE.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.blocks = nn.ModuleList([nn.Sequential(*copy.deepcopy(layers)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def averaged(model: nn.Module, x: Tensor) -> AveragedModel:
    """The average over three steps of training the model."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
        average.update_parameters(model)
    return average


def facts_of(layout: str) -> dict[str, float]:
    x = torch.arange(128.0).sin().view(8, 16)
    one, first = Net(), Net()
    par: Any = autopar.parallelize(Net(), inputs=(x,), layout=layout)
    average, expected = averaged(par, x), averaged(one, x)
    facts = {"average": abs(float(average(x) - expected(x)))}
    with torch.no_grad():
        few = x[:3]
        facts["average in eval mode"] = abs(float(average.eval()(few) - expected.eval()(few)))
    par.load_state_dict(first.state_dict())
    facts["plain"] = abs(float(par(x) - first(x)))
    other = autopar.parallelize(copy.deepcopy(one), inputs=(x,), layout="ddp")
    par.load_state_dict(other.state_dict())
    return {**facts, "other layout": abs(float(par(x) - one(x)))}


def main() -> None:
    path, *layouts = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    facts = {layout: facts_of(layout) for layout in layouts}
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(facts), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
