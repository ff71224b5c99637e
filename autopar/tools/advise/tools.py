"""What other tools can express, and their options for it, each in the tool's own words.

Example: TOOLS["torchtitan"].write(degrees) is a TOML file with [parallelism] and [training]. Beside
each stands what was looked at: a release, a commit, or options as programs pass them.
tests/report/test_advise.py reads what is written with the tool itself where it installs on a CPU,
else by the options that were looked at.
"""

from __future__ import annotations

import json
from typing import Any

from autopar.tools.advise.degrees import Degrees, Tool

_MAIN_GRADIENT_BYTES = 4  # Megatron-LM sums gradients in a whole float32 buffer on each rank
_MIXED = {"bfloat16": "bf16", "float16": "fp16"}


def _toml(tables: dict[str, dict[str, Any]]) -> str:
    """Return tables as TOML: JSON's strings, numbers and booleans are TOML's as well."""
    lines = []
    for name, values in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(v)}" for key, v in values.items()), ""]
    return "\n".join(lines)


def _yaml(values: dict[str, Any], indent: str = "") -> str:
    """Return a dict of dicts as YAML: JSON's strings, numbers and booleans are YAML's as well."""
    lines = []
    for key, value in values.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{key}:\n{_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{key}: {json.dumps(value)}\n")
    return "".join(lines)


# -- torchtitan ------------------------------------------------------------------------------------
def _torchtitan_refuses(degrees: Degrees) -> str:
    if degrees.expert > 1 and degrees.tensor > 1:
        return "how torchtitan splits an expert by tensor parallelism was not looked at"
    if degrees.expert > 1 and degrees.expert % degrees.context:
        return "torchtitan's ranks that share experts take in those of a context"
    return ""


def _torchtitan(degrees: Degrees) -> str:
    length = {"seq_len": degrees.sequence_length} if degrees.sequence_length else {}
    stages: dict[str, Any] = {"pipeline_parallel_degree": degrees.pipeline}
    if degrees.pipeline > 1:
        stages["pipeline_parallel_schedule"] = "1F1B"
        stages["pipeline_parallel_microbatch_size"] = degrees.local_batch
    return _toml(
        {
            "parallelism": {
                "data_parallel_replicate_degree": degrees.replicate,
                "data_parallel_shard_degree": degrees.shard,
                "fsdp_reshard_after_forward": "always" if degrees.regathers else "never",
                "tensor_parallel_degree": degrees.tensor,
                **stages,
                "context_parallel_degree": degrees.context,
                "expert_parallel_degree": degrees.expert,
            },
            "training": {
                "local_batch_size": degrees.local_batch * degrees.microbatches,
                "global_batch_size": degrees.global_batch,
                **length,
            },
            "activation_checkpoint": {"mode": "full" if degrees.recomputes else "none"},
        }
    )


# -- Megatron-LM -----------------------------------------------------------------------------------
def _megatron_refuses(degrees: Degrees) -> str:
    if degrees.regathers and not degrees.recomputes:
        return "Megatron-LM's distributed optimizer keeps weights whole"
    if degrees.context > 1 and degrees.replicate > 1:
        return "replicas beside contexts, which the distributed optimizer takes as shards"
    return "" if min(degrees.replicate, degrees.shard) == 1 else "one data-parallel size"


def _megatron(degrees: Degrees) -> str:
    flags = [
        f"--tensor-model-parallel-size {degrees.tensor}",
        f"--pipeline-model-parallel-size {degrees.pipeline}",
        f"--micro-batch-size {degrees.local_batch}",
        f"--global-batch-size {degrees.global_batch}",
    ]
    if degrees.sequence_length:
        flags.append(f"--seq-length {degrees.sequence_length}")
    if degrees.context > 1:
        flags.append(f"--context-parallel-size {degrees.context}")
    if degrees.expert > 1:
        flags.append(f"--expert-model-parallel-size {degrees.expert}")
    if degrees.tensor > 1:
        flags.append("--sequence-parallel")
    if degrees.holders > 1:
        flags.append("--use-distributed-optimizer")
    if degrees.data * degrees.context > 1:
        flags.append("--overlap-grad-reduce")
    if degrees.holders > 1:
        flags.append("--overlap-param-gather")
    if degrees.dtype in _MIXED:
        flags.append(f"--{_MIXED[degrees.dtype]}")
    if degrees.recomputes:
        flags += ["--recompute-granularity full", "--recompute-method uniform"]
        flags.append("--recompute-num-layers 1")
    return " \\\n".join(flags) + "\n"


def _megatron_bytes(degrees: Degrees, parameters: int) -> float:
    """Return the float32 gradients that every rank holds whole; with weights that a plan of autopar
    has as shards while blocks run again.
    """
    shard_bytes = 2 if degrees.recomputes and degrees.holders > 1 else 0
    return float((_MAIN_GRADIENT_BYTES + shard_bytes) * parameters)


# -- accelerate and transformers -------------------------------------------------------------------
def _hugging_face_refuses(degrees: Degrees) -> str:
    if degrees.shard == 1 and degrees.replicate > 1 and degrees.tensor > 1:
        return "accelerate combines tensor parallelism with FSDP alone"
    return ""


def _accelerate(degrees: Degrees) -> str:
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if degrees.shard > 1 else "MULTI_GPU",
        "mixed_precision": _MIXED.get(degrees.dtype, "no"),
        "num_machines": max(1, degrees.ranks // degrees.ranks_per_node),
        "num_processes": degrees.ranks,
    }
    if degrees.shard > 1:
        values["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": degrees.regathers,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": degrees.recomputes,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    if degrees.tensor > 1 or degrees.shard > 1:
        sizes = _parallelism(degrees)
        values["parallelism_config"] = {f"parallelism_config_{k}": v for k, v in sizes.items()}
    return _yaml(values)


def _parallelism(degrees: Degrees) -> dict[str, int]:
    return {
        "dp_replicate_size": degrees.replicate,
        "dp_shard_size": degrees.shard,
        "tp_size": degrees.tensor,
    }


def _transformers(degrees: Degrees) -> str:
    """Return the arguments of TrainingArguments, `parallelism_config` those of ParallelismConfig;
    under FSDP blocks are computed again by FSDP's own option.
    """
    values: dict[str, Any] = {
        "per_device_train_batch_size": max(1, degrees.local_batch),
        "gradient_accumulation_steps": 1,
    }
    if degrees.dtype in _MIXED:
        values[_MIXED[degrees.dtype]] = True
    if degrees.shard > 1:
        values["fsdp"] = True
        values["fsdp_config"] = {
            "version": 2,
            "reshard_after_forward": degrees.regathers,
            "activation_checkpointing": degrees.recomputes,
        }
    else:
        values["activation_checkpointing"] = degrees.recomputes
    if degrees.tensor > 1 or degrees.shard > 1:
        values["parallelism_config"] = _parallelism(degrees)
    return json.dumps(values, indent=2) + "\n"


# -- DeepSpeed -------------------------------------------------------------------------------------
def _deepspeed_refuses(degrees: Degrees) -> str:
    if degrees.tensor > 1 and degrees.regathers:
        return "AutoTP goes with ZeRO 0, 1 and 2, which keep weights whole"
    if min(degrees.replicate, degrees.shard) > 1 and not degrees.regathers:
        return "MiCS, which shards within replicas, is ZeRO 3"
    return ""


def _deepspeed(degrees: Degrees) -> str:
    zero: dict[str, Any] = {"stage": 0 if degrees.shard == 1 else 3 if degrees.regathers else 2}
    if zero["stage"]:
        zero |= {"overlap_comm": True, "contiguous_gradients": True}
    if degrees.replicate > 1 and degrees.shard > 1:
        zero["mics_shard_size"] = degrees.shard
    values: dict[str, Any] = {
        "train_batch_size": degrees.global_batch,
        "train_micro_batch_size_per_gpu": degrees.local_batch,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
    }
    if degrees.dtype in _MIXED:
        values[_MIXED[degrees.dtype]] = {"enabled": True}
    if degrees.tensor > 1:
        values["tensor_parallel"] = {"autotp_size": degrees.tensor}
    return json.dumps(values, indent=2) + "\n"


TOOLS = {
    tool.name: tool
    for tool in (
        Tool(
            "megatron", "Megatron-LM of 2025", "megatron.sh", True,
            _megatron_refuses, _megatron, _megatron_bytes, context=True, expert=True,
            pipeline=True,
        ),
        Tool(
            "torchtitan", "torchtitan 000204a4", "job.toml", True,
            _torchtitan_refuses, _torchtitan, context=True, expert=True, pipeline=True,
        ),
        Tool(
            "accelerate", "accelerate 1.15", "accelerate.yaml", False,
            _hugging_face_refuses, _accelerate,
        ),
        Tool(
            "deepspeed", "DeepSpeed 1b88ac36", "ds_config.json", False,
            _deepspeed_refuses, _deepspeed,
        ),
        Tool(
            "transformers", "transformers 5.23", "training_arguments.json", False,
            _hugging_face_refuses, _transformers,
        ),
    )
}  # fmt: skip
