"""What test_other_calls.py starts under torchrun: `other_calls_ranks.py FILE LAYOUT…`. Under each
layout a model is trained, and called as a training script does besides: in eval mode, with an
incomplete batch, with other sequence lengths, without labels. Every result and gradient is held
against the original on one device; the largest differences go into FILE.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.world import ranks
from on_ranks import unsharded

BATCH, SEQUENCE, WORDS, WIDTH = 8, 12, 64, 32


class Model(nn.Module):
    """A residual block with running statistics, dropout, and a constant that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.dropout = nn.BatchNorm1d(2 * WIDTH), nn.Dropout(0.3)
        self.head = nn.Linear(WIDTH, WORDS)
        self.scale = torch.tensor(1.5)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embedding(ids)
        y = self.norm((self.up(x) * self.scale).transpose(1, 2)).transpose(1, 2)
        logits: Tensor = self.head(x + self.down(self.dropout(F.gelu(y))))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(rows: int = BATCH, length: int = SEQUENCE) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * length)
    tokens = torch.randint(0, WORDS, (rows, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def calls() -> Iterator[tuple[str, AbstractContextManager[Any], tuple[Tensor, ...]]]:
    yield "no_grad", torch.no_grad(), batch()
    yield "an incomplete batch", torch.no_grad(), batch(5)
    yield "another length", torch.no_grad(), batch(7, 9)
    yield "no labels", torch.no_grad(), batch(3)[:1]
    yield "inference_mode", torch.inference_mode(), batch(2)[:1]
    yield "with gradients", nullcontext(), batch(6)


def differences(par: Any, single: nn.Module) -> Iterator[tuple[str, float]]:
    """How far each call is from the same call of the original, which holds the same numbers."""
    for name, context, inputs in calls():
        with context:
            result, expected = par(*inputs), single(*inputs)
            yield name, float((unsharded(result) - expected).abs().max())
        if expected.requires_grad:
            par.zero_grad()
            result.backward()
            expected.backward()
            for parameter, trained in single.named_parameters():
                gradient = unsharded(par.get_parameter(parameter).grad)
                yield f"{name}: {parameter}", float((gradient - trained.grad).abs().max())


def train(par: Any, optimizer: torch.optim.Optimizer, rows: int) -> None:
    optimizer.zero_grad()
    par(*batch(rows)).backward()
    optimizer.step()


def facts_of(layout: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model()
    par: Any = autopar.parallelize(copy.deepcopy(model), inputs=batch(), layout=layout)
    optimizer = torch.optim.AdamW(par.parameters(), lr=1e-2)
    places = [parameter.to_local().data_ptr() for parameter in par.parameters()]
    for rows in (BATCH, 5, BATCH):
        train(par, optimizer, rows)
    single = copy.deepcopy(model)
    single.load_state_dict({name: unsharded(value) for name, value in par.state_dict().items()})
    apart = dict(differences(par.eval(), single.eval()))
    stays = places == [parameter.to_local().data_ptr() for parameter in par.parameters()]
    train(par.train(), optimizer, BATCH)
    return {"apart": apart, "stays": stays, "graphs": len(par._autopar.graphs.others)}


def different_calls() -> str:
    """What a rank is told where rank 0 alone gets an incomplete batch, in the second call."""
    par: Any = autopar.parallelize(Model(), inputs=batch(), layout="ddp")
    par(*batch()).backward()
    try:
        par(*batch(BATCH if dist.get_rank() else 5)).backward()
    except autopar.RankError as error:
        return str(error)
    return ""


def seeded() -> dict[str, Any]:
    """Losses with dropout after torch.manual_seed, on ranks whose seeds differ, too."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 1))
    x = torch.arange(BATCH * WIDTH).reshape(BATCH, WIDTH) / WIDTH
    par: Any = autopar.parallelize(model, inputs=(x,), layout="fsdp")

    def steps(seed: int) -> list[float]:
        torch.manual_seed(seed)
        return [float(par(x).sum().detach()) for _ in range(3)]

    facts: dict[str, Any] = {"runs": [steps(3), steps(3), steps(4), steps(4 + dist.get_rank())]}
    facts["same"] = len(set(ranks.all_of(json.dumps(facts)))) == 1
    return facts


def alone(path: str) -> None:
    """What the ranks are told where rank 1 alone calls torch.manual_seed, long after the calls that
    are all compared; each writes it into a file of its own.
    """
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 1))
    par: Any = autopar.parallelize(model, inputs=(torch.ones(BATCH, WIDTH),), layout="fsdp")
    said, began = "", 0.0
    try:
        for step in range(400):
            if step == 200 and dist.get_rank():
                torch.manual_seed(5)
                began = time.monotonic()
            par(torch.ones(BATCH, WIDTH))
    except autopar.RankError as error:
        said = str(error)
    facts = {"said": said, "seconds": time.monotonic() - began}
    Path(f"{path}.{dist.get_rank()}").write_text(json.dumps(facts), encoding="utf-8")
    os._exit(0)  # a rank that was told leaves, and the other one is told then


def main() -> None:
    path, *layouts = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if layouts == ["alone"]:
        alone(path)
    facts: dict[str, Any] = {layout: facts_of(layout) for layout in layouts}
    facts["seeded"] = seeded()
    facts["different"] = ranks.all_of(different_calls())
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(facts), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
