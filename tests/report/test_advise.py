"""Advice for other tools: the degrees are the best that a tool has, and the tool reads its own
words, where it installs on a CPU; else they are held against what its documentation names.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from dataclasses import fields, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
import moe_models
from autopar.errors import PlanError
from autopar.tools.advise import TOOLS, advise
from autopar.tools.advise.degrees import (
    MODES,
    Degrees,
    contexts_of,
    experts_of,
    splits_of,
    stages_of,
)
from priced import EMULATED

WORLD = autopar.World.preset("dgx-h100", 8)
NODES = autopar.World.preset("dgx-h100", 16)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Tokens to a loss, through blocks that repeat."""

    def __init__(self, width: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def model_and_tokens(rows: int = 64) -> tuple[nn.Module, tuple[torch.Tensor]]:
    with torch.device("meta"):
        return Model().to(torch.bfloat16), (torch.zeros(rows, 128, dtype=torch.long),)


def degrees_of(
    replicate: int = 1, shard: int = 1, tensor: int = 1, mode: str = "none", dtype: str = "bfloat16"
) -> Degrees:
    return Degrees(replicate, shard, tensor, mode, 4, 128, 8, 4, dtype, 1, 1, 1, 1)


def expressible(tool: str) -> list[Degrees]:
    """All degrees of two nodes that a tool has, and some of one rank."""
    every = [degrees_of(*split, mode) for split, mode in product(splits_of(NODES), MODES)]
    if TOOLS[tool].context:
        every += [more for plain in every for more in contexts_of(plain)]
    if TOOLS[tool].expert:
        every += [more for each in every for more in experts_of(each, (8, 12))]
    if TOOLS[tool].pipeline:
        every += [
            replace(degrees_of(1, shard, tensor), pipeline=pipeline, microbatches=microbatches)
            for pipeline, microbatches, shard, tensor in stages_of(NODES, 4, 64)
        ]
    return [d for d in (*every, degrees_of(dtype="float32")) if not TOOLS[tool].refuses(d)]


# -- the search ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "tool",
    [t if t == "torchtitan" else pytest.param(t, marks=pytest.mark.slow) for t in TOOLS],
)
def test_the_best_of_what_was_tried_is_advised(tool: str) -> None:
    model, inputs = model_and_tokens()
    advice = advise(model, WORLD, inputs, tool, compare=False)
    steps = {d: step for d, step in advice.tried if isinstance(step, float)}
    assert len(steps) > 3
    assert steps[advice.degrees] == min(steps.values()) == advice.plan.overlapped
    assert all(d.ranks == 8 and not TOOLS[tool].refuses(d) for d in steps)
    again = autopar.plan(
        model, WORLD, inputs, TOOLS[tool].layout(advice.degrees),
        recompute=advice.degrees.mode, smaller=False, outputs="sharded",
    )  # fmt: skip
    assert again.overlapped == advice.plan.overlapped


@pytest.mark.slow
def test_the_gain_is_that_of_the_own_plan_and_names_what_is_beyond() -> None:
    model, inputs = model_and_tokens(rows=2)  # few rows: data parallelism alone is no way
    advice = advise(model, WORLD, inputs, "deepspeed")
    assert advice.own is not None
    own, theirs = advice.own.overlapped, advice.plan.overlapped
    assert own is not None and theirs is not None and own < theirs
    assert advice.gain == pytest.approx(1 - own / theirs)
    mesh, *beyond = advice.beyond
    assert str(advice.own.mesh) in mesh and str(advice.plan.mesh) in mesh
    assert beyond


class Attention(nn.Module):
    """Tokens to a loss, through causal attention."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.token, self.qkv = nn.Embedding(512, width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, 512)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows, length = tokens.shape
        qkv = self.qkv(self.token(tokens)).view(rows, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        logits = self.out(x.transpose(1, 2).flatten(2))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def test_a_single_long_sequence_is_split() -> None:
    with torch.device("meta"):
        model, tokens = Attention().to(torch.bfloat16), torch.zeros(1, 65_536, dtype=torch.long)
    advice = advise(model, WORLD, (tokens,), "torchtitan", compare=False)
    assert advice.degrees.context > 1 and advice.degrees.data == 1
    assert advice.plan.mesh.sizes["context"] == advice.degrees.context
    assert f"context_parallel_degree = {advice.degrees.context}" in advice.text


def test_stages_are_taken_where_links_are_slow() -> None:
    with torch.device("meta"):
        model, tokens = Model(1024, 4), torch.zeros(8, 32, dtype=torch.long)
    advice = advise(model, EMULATED, (tokens,), "torchtitan")
    steps = {d: step for d, step in advice.tried if isinstance(step, float)}
    assert {d.pipeline for d in steps} == {1, 2, 4}
    assert steps[advice.degrees] == min(steps.values()) and advice.degrees.pipeline > 1
    assert advice.plan.pipeline.ranks == advice.degrees.pipeline
    assert advice.plan.microbatches == advice.degrees.microbatches
    assert f"pipeline_parallel_degree = {advice.degrees.pipeline}" in advice.text
    assert advice.own is not None and advice.own.pipeline.ranks == advice.degrees.pipeline


def test_stages_whose_bubble_is_too_long_are_not_planned() -> None:
    model, inputs = model_and_tokens(rows=16)
    advice = advise(model, WORLD, inputs, "torchtitan", compare=False)
    staged = {d: outcome for d, outcome in advice.tried if d.pipeline > 1}
    assert staged and advice.degrees.pipeline == 1
    assert any("bubble" in outcome for outcome in staged.values() if isinstance(outcome, str))


@pytest.mark.slow
def test_experts_are_split() -> None:
    model, _, kwargs = moe_models.mixtral()
    world = autopar.World.preset("dgx-h100", 4)
    advice = advise(model, world, kwargs, "torchtitan", compare=False)
    planned = {d: step for d, step in advice.tried if isinstance(step, float)}
    assert {d.expert for d in planned} == {1, 2, 4}
    assert planned[advice.degrees] == min(planned.values())


@pytest.mark.slow
def test_less_memory_shards_and_recomputes() -> None:
    model, inputs = model_and_tokens()
    free = advise(model, WORLD, inputs, "torchtitan", compare=False)
    assert free.degrees.mode == "none"
    tight = advise(
        model, WORLD, inputs, "torchtitan", memory=0.6 * free.plan.peak_bytes, compare=False
    )
    assert tight.degrees.mode != "none"
    assert tight.plan.peak_bytes <= 0.6 * free.plan.peak_bytes
    unfit = [why for _, why in tight.tried if isinstance(why, str)]
    assert unfit


@pytest.mark.slow
def test_what_a_tool_stores_besides_the_plan_counts() -> None:
    model, inputs = model_and_tokens()
    megatron = TOOLS["megatron"]
    assert megatron.more_bytes(degrees_of(shard=16), 1000) == 4000
    free = advise(model, WORLD, inputs, "megatron", compare=False)
    parameters = sum(p.numel() for p in model.parameters())
    more = megatron.more_bytes(free.degrees, parameters // free.degrees.tensor)
    limit = (free.plan.peak_bytes + more / 2) / 0.92
    try:
        tight = advise(model, WORLD, inputs, "megatron", memory=limit, compare=False)
    except PlanError:
        return
    assert (tight.degrees, tight.plan.peak_bytes) != (free.degrees, free.plan.peak_bytes)


@pytest.mark.slow
def test_errors_say_what_to_do() -> None:
    model, inputs = model_and_tokens()
    with pytest.raises(PlanError, match=r"no exporter for 'alpa': there are megatron, torchtitan"):
        advise(model, WORLD, inputs, "alpa")
    with pytest.raises(
        PlanError, match=r"no degrees that deepspeed can express fit .*: no plan fits"
    ):
        advise(model, WORLD, inputs, "deepspeed", memory=1e6, compare=False)


def test_tensor_parallelism_stays_within_a_node() -> None:
    splits = list(splits_of(NODES))
    assert all(prod(split) == 16 and split[2] in (1, 2, 4, 8) for split in splits)
    assert {(2, 8, 1), (1, 16, 1), (16, 1, 1), (2, 1, 8), (1, 2, 8)} <= set(splits)


# -- what the tools read ---------------------------------------------------------------------------
# torchtitan/config/job_config.py at 000204a4: tables and their options with types or choices
TITAN: dict[str, dict[str, Any]] = {
    "parallelism": {
        "data_parallel_replicate_degree": int,
        "data_parallel_shard_degree": int,
        "fsdp_reshard_after_forward": ("default", "always", "never"),
        "tensor_parallel_degree": int,
        "pipeline_parallel_degree": int,
        "pipeline_parallel_schedule": ("1F1B", "Interleaved1F1B", "GPipe", "ZBVZeroBubble"),
        "pipeline_parallel_microbatch_size": int,
        "context_parallel_degree": int,
        "expert_parallel_degree": int,
    },
    "training": {"local_batch_size": int, "global_batch_size": int, "seq_len": int},
    "activation_checkpoint": {"mode": ("selective", "full", "none")},
}


@pytest.mark.parametrize("degrees", expressible("torchtitan"), ids=str)
def test_torchtitan_takes_the_config_that_is_written(degrees: Degrees) -> None:
    job = tomllib.loads(TOOLS["torchtitan"].write(degrees))
    for table, options in job.items():
        for name, value in options.items():
            kind = TITAN[table][name]
            assert value in kind if isinstance(kind, tuple) else type(value) is kind, (name, value)
    sizes, training = job["parallelism"], job["training"]
    data = sizes["data_parallel_replicate_degree"] * sizes["data_parallel_shard_degree"]
    contexts = sizes["context_parallel_degree"]
    stages = sizes["pipeline_parallel_degree"]
    assert data * contexts * sizes["tensor_parallel_degree"] * stages == degrees.ranks
    if stages > 1:  # torchtitan/distributed/pipeline_parallel.py asserts the first
        rows, each = training["local_batch_size"], sizes["pipeline_parallel_microbatch_size"]
        assert rows % each == 0 and rows // each == degrees.microbatches >= stages
    experts = sizes["expert_parallel_degree"]  # the range that job_config.py gives
    assert experts == 1 or contexts <= experts <= sizes["data_parallel_shard_degree"] * contexts
    assert training["global_batch_size"] == training["local_batch_size"] * data
    assert (sizes["fsdp_reshard_after_forward"] == "always") == degrees.regathers
    assert (job["activation_checkpoint"]["mode"] == "full") == degrees.recomputes


def megatron_parser() -> argparse.ArgumentParser:
    """The options of Megatron-LM that are used, with the types that its programs give them."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name in (
        "tensor-model-parallel-size", "pipeline-model-parallel-size", "micro-batch-size",
        "global-batch-size", "seq-length", "recompute-num-layers", "context-parallel-size",
        "expert-model-parallel-size",
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int)
    for name in (
        "sequence-parallel", "use-distributed-optimizer", "overlap-grad-reduce",
        "overlap-param-gather", "bf16", "fp16",
    ):  # fmt: skip
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--recompute-granularity", choices=("full", "selective"))
    parser.add_argument("--recompute-method", choices=("uniform", "block"))
    return parser


@pytest.mark.parametrize("degrees", expressible("megatron"), ids=str)
def test_megatron_takes_the_options_that_are_written(degrees: Degrees) -> None:
    words = TOOLS["megatron"].write(degrees).replace("\\\n", " ").split()
    options = megatron_parser().parse_args(words)
    assert options.tensor_model_parallel_size == degrees.tensor
    contexts, experts = options.context_parallel_size or 1, options.expert_model_parallel_size or 1
    stages = options.pipeline_model_parallel_size
    data = degrees.ranks // degrees.tensor // contexts // stages
    assert stages == degrees.pipeline and degrees.layers % stages == 0
    assert (contexts, experts) == (degrees.context, degrees.expert) and data % experts == 0
    parts, left = divmod(options.global_batch_size, options.micro_batch_size * data)
    assert (parts, left) == (degrees.microbatches, 0)
    assert options.sequence_parallel == (degrees.tensor > 1)  # it is refused with one rank
    assert options.use_distributed_optimizer == (degrees.shard * degrees.context > 1)
    assert options.overlap_param_gather <= options.use_distributed_optimizer
    assert options.overlap_param_gather <= options.overlap_grad_reduce
    assert options.bf16 == (degrees.dtype == "bfloat16")
    assert (options.recompute_granularity == "full") == degrees.recomputes


@pytest.mark.parametrize("degrees", expressible("deepspeed"), ids=str)
def test_deepspeed_takes_the_config_that_is_written(degrees: Degrees) -> None:
    config = json.loads(TOOLS["deepspeed"].write(degrees))
    zero, tensor = config["zero_optimization"], config.get("tensor_parallel", {"autotp_size": 1})
    # deepspeed.ai, "Automatic Tensor Parallelism (Training)": ZeRO 0, 1 and 2 alone
    assert zero["stage"] in (0, 2, 3) and (tensor["autotp_size"] == 1 or zero["stage"] < 3)
    data = degrees.ranks // tensor["autotp_size"]
    rows = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    assert config["train_batch_size"] == rows * data  # DeepSpeed asserts this product
    assert zero.get("mics_shard_size", degrees.shard) == degrees.shard
    assert ("mics_shard_size" in zero) == (degrees.replicate > 1 and degrees.shard > 1)


@pytest.mark.parametrize("degrees", expressible("accelerate"), ids=str)
def test_accelerate(degrees: Degrees, tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    parallel = pytest.importorskip("accelerate.parallelism_config")
    path = tmp_path / TOOLS["accelerate"].file
    path.write_text(TOOLS["accelerate"].write(degrees))
    config = config_args.ClusterConfig.from_yaml_file(str(path))
    assert config.num_processes == degrees.ranks and config.num_machines in (1, 2)
    sizes = {
        key.removeprefix("parallelism_config_"): value
        for key, value in (config.parallelism_config or {}).items()
    }
    if sizes:
        total = parallel.ParallelismConfig(**sizes).total_size
        assert total == degrees.ranks
    assert (config.fsdp_config or {}).get("fsdp_reshard_after_forward", False) == degrees.regathers


@pytest.mark.parametrize("degrees", expressible("transformers"), ids=str)
def test_transformers_takes_the_arguments_that_are_written(
    degrees: Degrees, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    parallel = pytest.importorskip("accelerate.parallelism_config")
    values = json.loads(TOOLS["transformers"].write(degrees))
    sizes = values.pop("parallelism_config", None)
    config = None if sizes is None else parallel.ParallelismConfig(**sizes)
    if config is not None:
        assert config.total_size == degrees.ranks
    known = {field.name for field in fields(transformers.TrainingArguments)}
    assert values.keys() <= known
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        use_cpu=True,
        report_to=[],
        **{k: v for k, v in values.items() if k != "fsdp"},
    )
    assert arguments.per_device_train_batch_size == degrees.local_batch
    assert arguments.bf16 == (degrees.dtype == "bfloat16")
