"""What test_trainer.py starts under torchrun: transformers' Trainer on a parallel model.

`trainer_ranks.py FILE LAYOUT ACCUMULATED` trains, evaluates, saves, resumes under another layout
and gives the model back whole; rank 0 writes what it saw into FILE.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autopar
from on_ranks import caught
from trainer_cases import ROWS, arguments, fresh, history, rows

ROWS_OF_A_RANK = ROWS // 2


class Trainer(autopar.ParallelTrainer, transformers.Trainer):
    pass


def trainer(model: nn.Module, folder: str, accumulated: int) -> Any:
    parallel = arguments(folder, ROWS_OF_A_RANK, accumulated, save_strategy="steps", save_steps=2)
    return Trainer(model=model, args=parallel, train_dataset=rows(), eval_dataset=rows()[:11])


def parallel_model(layout: str) -> Any:
    batch = {name: torch.stack([row[name] for row in rows()[:ROWS]]) for name in rows()[0]}
    batch["num_items_in_batch"] = torch.tensor(1.0)
    return autopar.parallelize(fresh(), inputs=batch, layout=layout)


def difference(first: nn.Module, other: nn.Module) -> float:
    pairs = zip(first.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def main(file: str, layout: str, accumulated: int) -> None:
    dist.init_process_group("gloo")
    folder = f"{file}.run"
    par = parallel_model(layout)
    first = trainer(par, folder, accumulated)
    first.train()
    first.save_model(f"{folder}/final")
    predicted = first.predict(rows()[:11])

    other = parallel_model("ddp" if layout != "ddp" else "fsdp")
    second = trainer(other, folder, accumulated)
    second.train(resume_from_checkpoint=f"{folder}/checkpoint-2")

    unsharded = par.unshard()
    on_rank_1 = par.unshard(rank=1)
    loaded = type(unsharded).from_pretrained(f"{folder}/final")
    facts = {
        "history": history(first),
        "resumed": history(second),
        "predicted": list(predicted.predictions.shape),
        "parameters after resuming": difference(unsharded, other.unshard()),
        "saved": difference(unsharded, loaded),
        "on one rank": [type(on_rank_1).__name__, dist.get_rank()],
        "unsharded": type(unsharded).__name__,
        "plain": sorted({type(p).__name__ for p in unsharded.parameters()}),
        "tied": unsharded.lm_head.weight is unsharded.transformer.wte.weight,
        "generated": list(unsharded.generate(torch.ones(2, 4).long(), max_new_tokens=3).shape),
        "under ddp": caught(lambda: DistributedDataParallel(par)),
        "not parallel": caught(lambda: trainer(fresh(), folder, 1)),
        "other options": caught(lambda: par.save_pretrained(folder, state_dict={})),
        "no such rank": caught(lambda: par.unshard(rank=2)),
    }
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, facts["on one rank"])
    facts["on one rank"] = everywhere
    if not dist.get_rank():
        Path(file).write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
