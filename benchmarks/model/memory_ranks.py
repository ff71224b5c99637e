"""What every rank of `python -m benchmarks.model.memory` runs: the cases of a file.

On CPUs an allocator's hook (allocations.c) counts; on GPUs torch's own counters do. A rank that
runs alone is rank 0 of a group that moves nothing.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar._compat import pytree
from autopar.cost.memory import Recompute
from autopar.planner.pipelines import memory_by_rank
from autopar.world import ranks as running
from benchmarks import models

Sizes = dict[str, Any]  # of a configuration of transformers

STEPS = 4  # the first derives the graphs and makes the optimizer's states


@dataclass(frozen=True)
class Case:
    """A model of MODELS under a layout; `limit`: memory= as a part of what the plan without a limit
    needs, None for no limit. `between`: before each counted step the model is evaluated on the
    batch and on half of it, and a checkpoint is saved; all of that counts. `microbatches`: parts
    of a step, or "auto". `stages`: ranks of a pipeline, each of `rounds` stages under `schedule`.
    """

    model: str
    ranks: int
    layout: str
    recompute: Recompute = "none"
    limit: float | None = None
    overlap: bool = True
    between: bool = False
    microbatches: int | Literal["auto"] = 1
    stages: int = 1
    schedule: str = "1f1b"
    rounds: int = 1


@dataclass
class Counted:
    """Bytes, of the rank that held most: planned and measured at the peak of a step, the limit,
    between two steps, and above what was there while the model was cut, beside the parts of the
    plan. `refused`: why it did not run. `stage`: of a pipeline, whose ranks are counted apart.
    """

    case: Case
    planned: float = 0.0
    measured: float = 0.0
    limit: float = 0.0
    steady: float = 0.0
    state_bytes: float = 0.0  # parameters and optimizer, by the plan
    start: float = 0.0
    largest: float = 0.0  # of the parameters, whole
    refused: str = ""
    stage: int = 0
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Measured over planned."""
        return self.measured / self.planned if self.planned else 0.0


# -- models ----------------------------------------------------------------------------------------
Example = tuple[nn.Module, Any]


def _tokens(vocabulary: int, batch: int, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, vocabulary, (batch, sequence))
    return tokens, tokens.roll(-1, 1)


def gpt() -> Example:
    return models.gpt(2048, 128, 256, 8, 4), _tokens(2048, 16, 128)


def wide() -> Example:
    """Weights outweigh activations."""
    return models.gpt(1024, 16, 768, 12, 3), _tokens(1024, 8, 16)


def long() -> Example:
    """Activations outweigh weights."""
    return models.gpt(1024, 512, 192, 6, 3), _tokens(1024, 8, 512)


def llama() -> Example:
    return models.llama(8192, 128, 256, 8, 4, 704, 4), _tokens(8192, 8, 128)


def _labelled(sequence: int) -> dict[str, torch.Tensor]:
    ids, labels = _tokens(2048, 8, sequence)
    return {"input_ids": ids, "labels": labels}


def qwen() -> Example:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes: Sizes = {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 768,
        "head_dim": 32,
    }
    heads: Sizes = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, use_cache=False))
    return model, _labelled(128)


def gpt2(dropout: float = 0.1) -> Example:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: Sizes = {
        "vocab_size": 2048,
        "n_positions": 128,
        "n_embd": 256,
        "n_layer": 4,
        "n_head": 8,
    }
    drops: Sizes = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, use_cache=False)), _labelled(128)


def bert() -> Example:
    from transformers import BertConfig, BertForMaskedLM

    sizes: Sizes = {"vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 4}
    more: Sizes = {
        "num_attention_heads": 8,
        "intermediate_size": 1024,
        "max_position_embeddings": 128,
    }
    drops: Sizes = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return BertForMaskedLM(BertConfig(**sizes, **more, **drops)), _labelled(128)


def t5() -> Example:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: Sizes = {"vocab_size": 2048, "d_model": 256, "d_kv": 32, "d_ff": 1024, "num_layers": 2}
    more: Sizes = {
        "num_heads": 8,
        "dropout_rate": 0.0,
        "use_cache": False,
        "decoder_start_token_id": 0,
    }
    return T5ForConditionalGeneration(T5Config(**sizes, **more)), _labelled(64)


def vit() -> Example:
    from transformers import ViTConfig, ViTForImageClassification

    sizes: Sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
    more: Sizes = {"intermediate_size": 1024, "image_size": 64, "patch_size": 8, "num_labels": 32}
    drops: Sizes = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    pixels, labels = torch.randn(16, 3, 64, 64), torch.arange(16) % 32
    model = ViTForImageClassification(ViTConfig(**sizes, **more, **drops))
    return model, {"pixel_values": pixels, "labels": labels}


MODELS: dict[str, Callable[[], Example]] = {
    "gpt": gpt,
    "wide": wide,
    "long": long,
    "llama": llama,
    "qwen": qwen,
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "vit": vit,
}


# -- counting --------------------------------------------------------------------------------------
class Counter:
    """Bytes that the allocator of the rank's device holds now, and at most since `forget`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.hook = None if device.type == "cuda" else ctypes.CDLL(None)
        if self.hook is not None:
            for name in ("live_bytes", "peak_bytes", "lost_blocks"):
                getattr(self.hook, name).restype = ctypes.c_long

    def allocated_bytes(self) -> int:
        gc.collect()
        if self.hook is None:
            return torch.cuda.memory_allocated(self.device)
        assert not self.hook.lost_blocks(), "the hook's table is full"
        return int(self.hook.live_bytes())

    def peak(self) -> int:
        if self.hook is None:
            return torch.cuda.max_memory_allocated(self.device)
        return int(self.hook.peak_bytes())

    def forget(self) -> None:
        if self.hook is None:
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self.hook.forget_peak()


def count(case: Case, counter: Counter, folder: Path) -> Counted:
    """Run a case on the running ranks, of which each counts; `folder` takes checkpoints.
    Collective.
    """
    torch.manual_seed(0)
    _, inputs = MODELS[case.model]()
    inputs = pytree.tree_map(lambda x: x.to(counter.device), inputs)
    args, kwargs = (inputs, {}) if isinstance(inputs, tuple) else ((), inputs)
    before = counter.allocated_bytes()
    counted = Counted(case)
    try:
        module = _started(case, inputs, counter, counted)
    except autopar.PlanError as error:
        counted.refused = str(error)
        return counted
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for number in range(STEPS):
        steady = counter.allocated_bytes() - before
        counter.forget()
        if case.between and number:
            _between(module, optimizer, inputs, folder, number)
        outputs = module(*args, **kwargs)
        loss = _loss(outputs)
        try:
            loss.backward()
            optimizer.step()
        finally:
            optimizer.zero_grad()
        del outputs, loss
        if number:
            counted.measured = max(counted.measured, counter.peak() - before)
            counted.steady = max(counted.steady, steady) if number > 1 else steady
    return counted


def _between(
    module: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any, folder: Path, step: int
) -> None:
    """What a training script does between two steps."""
    halves = pytree.tree_map(lambda x: x[: len(x) // 2], inputs)
    module.eval()
    with torch.no_grad():
        for batch in (inputs, halves):
            module(*batch) if isinstance(batch, tuple) else module(**batch)
    module.train()
    autopar.Checkpoints(folder, most=1, model=module, optimizer=optimizer).save(step)


def _started(case: Case, inputs: Any, counter: Counter, counted: Counted) -> nn.Module:
    """The model on all ranks, with what the start took."""
    torch.manual_seed(0)
    model, _ = MODELS[case.model]()
    counted.largest = float(max(p.nbytes for p in model.parameters()))
    memory: Any = "auto"
    if case.limit is not None:
        counted.limit = memory = case.limit * _free(model, inputs, case.layout)
    there = counter.allocated_bytes()
    counter.forget()
    module = autopar.parallelize(
        model,
        inputs=inputs,
        layout=_layout(case),
        memory=memory,
        recompute=case.recompute if case.limit is None else "auto",
        overlap=case.overlap,
        microbatches=case.microbatches,
        device=counter.device,
    )
    counted.start = float(counter.peak() - there)
    plan = module.plan
    assert plan.memory is not None
    memory_of = plan.memory
    if case.stages > 1:
        counted.stage = dist.get_rank() // plan.mesh.size
        memory_of = memory_by_rank(plan)[counted.stage]
    counted.planned, counted.parts = memory_of.peak, asdict(memory_of)
    counted.state_bytes = memory_of.parameters + memory_of.optimizer
    return module


def _layout(case: Case) -> str | autopar.Stages:
    if case.stages == 1:
        return case.layout
    return autopar.Stages(case.stages, case.layout, case.schedule, case.rounds)


def _free(model: nn.Module, inputs: Any, layout: str) -> float:
    """Bytes at the peak of a plan without a limit."""
    free_bytes = 0.0
    if not dist.get_rank():
        plan = autopar.plan(model, dist.get_world_size(), inputs, layout, recompute="none")
        free_bytes = plan.peak_bytes
    return running.from_rank_0(free_bytes)


def _loss(outputs: Any) -> torch.Tensor:
    leaves = [x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor)]
    return next(x for x in leaves if x.requires_grad and not x.dim())


def _open_group(device: torch.device, alone_of: int) -> None:
    """Open the group of torchrun's ranks, or one of `alone_of` ranks that moves nothing."""
    if not alone_of:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=alone_of, store=FakeStore())


def main() -> None:
    source, out, alone_of = sys.argv[1], sys.argv[2], int(sys.argv[3])
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    _open_group(device, alone_of)
    counter = Counter(device)
    for number, case in enumerate(json.loads(Path(source).read_text())):
        folder = Path(out).with_suffix(f".{number}")
        own = asdict(count(Case(**case), counter, folder))
        everywhere: list[Any] = [own] * (1 if alone_of else dist.get_world_size())
        if not alone_of:
            dist.all_gather_object(everywhere, own)
        if not dist.get_rank():
            with Path(out).open("a", encoding="utf-8") as file:
                for stage in sorted({record["stage"] for record in everywhere}):
                    own_ranks = [record for record in everywhere if record["stage"] == stage]
                    most = max(own_ranks, key=lambda record: record["measured"])
                    file.write(json.dumps(most) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
