"""The model, the rows and the arguments of test_trainer.py, alike there and on its ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

ROWS = 4  # of a global batch


def fresh() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, use_cache=False))


def rows() -> list[dict[str, Tensor]]:
    drawn = torch.randint(0, 32, (20, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row.clone()} for row in drawn]


def arguments(folder: str, rows_of_a_rank: int, accumulated: int, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        folder, max_steps=4, per_device_train_batch_size=rows_of_a_rank,
        per_device_eval_batch_size=rows_of_a_rank, gradient_accumulation_steps=accumulated,
        eval_strategy="steps", eval_steps=2, logging_steps=1, learning_rate=1e-2,
        max_grad_norm=0.5, report_to=[], use_cpu=True, disable_tqdm=True, **more,
    )  # fmt: skip


def history(trainer: Any) -> list[list[float]]:
    """What each step and each evaluation logged."""
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return [
        [float(entry[name]) for name in names if name in entry]
        for entry in trainer.state.log_history
        if "loss" in entry or "eval_loss" in entry
    ]
