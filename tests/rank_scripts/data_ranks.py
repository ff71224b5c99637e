"""What test_data.py starts under torchrun: `data_ranks.py FILE LAYOUT…`. Under each a model is
trained on the batches of `par.loader`, and held against one device that reads every row; each rank
counts the rows that it reads. What was found goes into FILE.
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
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import autopar
from autopar import Grid4D
from autopar.errors import InputError
from autopar.world import ranks

ROWS, BATCH, LENGTH, WORDS, WIDTH = 21, 8, 6, 64, 32
LAYOUTS: dict[str, Any] = {
    "fsdp": "fsdp",
    "megatron": "megatron",
    "megatron-sp": "megatron-sp",
    "grid": Grid4D(x=2, data=2),
}


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Rows of tokens; it counts how often one is read."""

    def __init__(self) -> None:
        drawn = torch.manual_seed(7)
        self.tokens = torch.randint(0, WORDS, (ROWS, LENGTH + 1), generator=drawn)
        self.read: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        self.read.append(row)
        return self.tokens[row, :-1], self.tokens[row, 1:]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids)
        logits: Tensor = self.head(x + self.down(F.gelu(self.up(x))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def order(epoch: int) -> list[list[int]]:
    """The rows of every batch of an epoch, as the loader's documentation says."""
    rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3 + epoch)).tolist()
    return [rows[start : start + BATCH] for start in range(0, ROWS, BATCH)]


def train(layout: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    single, data = Model(), Tokens()
    example = tuple(torch.stack(column) for column in zip(*(data[i] for i in range(BATCH))))
    par: Any = autopar.parallelize(copy.deepcopy(single), inputs=example, layout=layout)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (par, single)]
    loader = par.loader(data, shuffle=True, seed=3)
    data.read.clear()
    apart, read = [], []
    for epoch in range(2):
        for batch, rows in zip(loader, order(epoch), strict=True):
            assert all(isinstance(x, DTensor) and x.shape[0] == len(rows) for x in batch)
            read.append(len(data.read))
            data.read.clear()
            full_batch = data.tokens[rows]
            losses = [par(*batch), single(full_batch[:, :-1], full_batch[:, 1:])]
            for loss, optimizer in zip(losses, optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            apart.append(float((losses[0] - losses[1]).abs()))
    parameters = dict(par.named_parameters())
    apart += [
        float((parameters[n].full_tensor() - p).abs().max()) for n, p in single.named_parameters()
    ]
    return {"apart": max(apart), "read": read, "batches": len(loader), "rows": str(par.rows())}


def resumed() -> dict[str, Any]:
    """An epoch that is cut off after a batch, and goes on in another loader, with workers."""
    data = Tokens()
    example = (data.tokens[:BATCH, :-1], data.tokens[:BATCH, 1:])
    par: Any = autopar.parallelize(Model(), inputs=example, layout="ddp")
    first = par.loader(data, shuffle=True, seed=3)
    list(first)
    for _ in first:
        state = first.state_dict()
        break
    later = par.loader(data, shuffle=True, seed=3, num_workers=2, prefetch_factor=2)
    later.load_state_dict(state)
    rest = [batch[0].full_tensor() for batch in later]
    wanted = [data.tokens[rows, :-1] for rows in order(1)[1:]]
    again = [batch[0].full_tensor() for batch in later]  # the epoch after it, whole
    facts = {
        "rest": [torch.equal(a, b) for a, b in zip(rest, wanted, strict=True)],
        "again": [
            torch.equal(a, data.tokens[r, :-1]) for a, r in zip(again, order(2), strict=True)
        ],
        "after": later.state_dict(),
        "own loader": own_loader(par, data),
    }
    try:
        par.loader(data, seed=dist.get_rank())
    except autopar.RankError as error:
        facts["seeds"] = str(error)
    try:
        par.loader(data, seed=4).load_state_dict(state)
    except InputError as error:
        facts["order"] = str(error)
    return facts


class Sentences(Tokens):
    """Rows of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths = [2 + (5 * row) % 4 for row in range(ROWS)]  # 2 to 5

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        tokens, targets = super().__getitem__(row)
        return tokens[: self.lengths[row]], targets[: self.lengths[row]]

    def full_batch(self, rows: list[int], size: int) -> tuple[Tensor, Tensor]:
        """A batch as one device would pad it."""
        samples = [self[row] for row in rows]
        own = [F.pad(x, (0, size - len(x)), value=0) for x, _ in samples]
        return torch.stack(own), torch.stack(
            [F.pad(y, (0, size - len(y)), value=-100) for _, y in samples]
        )


def in_buckets(layout: Any) -> dict[str, Any]:
    """Sentences in batches of 4, padded to 3 or 5 by what all of a batch need."""
    torch.manual_seed(0)
    single, data = Model(), Sentences()
    par: Any = autopar.parallelize(
        copy.deepcopy(single), inputs=data.full_batch(list(range(4)), 5), layout=layout
    )
    data.lengths[:8] = [2, 3] * 4
    loader = par.loader(data, buckets=(5, 3), lengths=data.lengths, pad=(0, -100), num_workers=1)
    apart, sizes = [], []
    for number, batch in enumerate(loader):
        rows = list(range(4 * number, min(4 * number + 4, ROWS)))
        sizes.append(list(batch[0].shape))
        full_batch = data.full_batch(rows, batch[0].shape[1])
        assert all(torch.equal(x.full_tensor(), y) for x, y in zip(batch, full_batch, strict=True))
        apart.append(float((par(*batch) - single(*full_batch)).abs().detach()))
    facts = {"apart": max(apart), "sizes": sizes}
    try:
        own = [dist.get_rank() + 1] * ROWS
        par.loader(data, buckets=(5,), lengths=own, pad=(0, -100))
    except autopar.RankError as error:
        facts["lengths"] = str(error)
    return facts


def own_loader(par: Any, data: Tokens) -> list[int]:
    """A DataLoader of one's own, with the rows that `par.sampler` names."""
    sampler = par.sampler(data, 4, drop_last=True)
    loader = DataLoader(data, batch_sampler=sampler)
    return [int(sampler.placed(batch)[0].shape[0]) for batch in loader]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    path, *names = sys.argv[1:]
    facts: dict[str, Any] = {name: train(LAYOUTS[name]) for name in names}
    facts["read"] = {name: ranks.all_of(facts[name]["read"]) for name in names}
    facts["resumed"] = resumed()
    facts["in buckets"] = in_buckets(LAYOUTS[names[0]])
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(facts), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
