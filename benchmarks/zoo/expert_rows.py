"""One row of the table of mixtures of experts at real sizes: planned under "auto" for as many H100
as their authors had, and beside it a dense model of as many layers, to compare what planning takes.

Example: of Mixtral-8x7B on 64 ranks a row has the mesh, what each axis splits of the experts, the
step, the share of the peak, the memory, and the CPU seconds of planning.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

import autopar
from autopar.cost.throughput import throughput
from autopar.ir.strategy import IDLE
from autopar.ops.experts import experts_op
from benchmarks.zoo.real_models import mistral_shape, of_loss
from benchmarks.zoo.real_rows import apart, on_meta, whole_share
from benchmarks.zoo.rows import Row
from benchmarks.zoo.sizes import Example
from benchmarks.zoo.text_models import build

CPU_SECONDS = 900
SEQUENCES, TOKENS = 4, 4096  # of each rank, of each sequence


class Case(NamedTuple):
    """A mixture of experts by its configuration in transformers, and its dense layers, of which
    there are as many as in the paper in a model of full depth. `microbatches`: in which a step
    runs, where one alone does not fit. `published`: what others reached.
    """

    kind: str
    options: Mapping[str, Any]
    ranks: int
    dense_layers: int = 0
    microbatches: int = 1
    published: str = ""


CASES: dict[str, Case] = {
    "Mixtral-8x7B": Case(
        "mixtral",
        mistral_shape(
            vocab_size=32_000, num_local_experts=8, num_experts_per_tok=2,
            num_hidden_layers=32, sliding_window=None,
        ),
        64,
        published="468 Tflop/s a GPU, 47 % of the peak (Megatron-Core 0.9, bfloat16)",
    ),
    "Qwen3-30B-A3B": Case(
        "qwen3_moe",
        {
            "vocab_size": 151_936, "hidden_size": 2048, "moe_intermediate_size": 768,
            "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        },
        64,
    ),
    "DeepSeek-V3": Case(
        "deepseek_v3",
        {"num_hidden_layers": 61},  # the configuration's own sizes are the paper's
        1024,
        dense_layers=3,
        microbatches=4,
        published="180,000 hours of H800 for 10¹² tokens (arXiv 2412.19437), or 10.6 s for as many "
        "as a step here: 35 % of the peak of bfloat16, with most products in fp8, of whose peak "
        "it is 18 %; the row's products are all in bfloat16",
    ),
}  # fmt: skip


def depth(name: str, layers: int | None) -> int:
    """Return the number of layers that are planned of a model, where so many are asked for."""
    whole: int = CASES[name].options["num_hidden_layers"]
    return whole if layers is None else min(layers, whole)


def example(case: Case, layers: int) -> Example:
    """Return a model of so many layers on the meta device, and its inputs."""
    options = {"max_position_embeddings": TOKENS, **case.options, "num_hidden_layers": layers}
    if case.dense_layers:
        options["first_k_dense_replace"] = min(case.dense_layers, layers // 2)
    return of_loss(partial(_batch, case.kind, options, case.ranks))


def dense_example(case: Case, layers: int) -> Example:
    """Return a Mistral of as many layers, and as many tokens."""
    options = mistral_shape(vocab_size=32_000, num_hidden_layers=layers, sliding_window=None)
    return of_loss(partial(_batch, "mistral", options, case.ranks))


def _batch(kind: str, options: Mapping[str, Any], ranks: int) -> Example:
    model = build("AutoModelForCausalLM", kind, dict(options), dtype=torch.bfloat16)
    ids = torch.empty(SEQUENCES * ranks, TOKENS, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids.clone()}


def measure(name: str, known: Row, layers: int | None = None) -> Iterator[Row]:
    """Yield the row of a model as it grows, but for what it has already: its plan, then that of
    the dense model; of all layers, or of so many.
    """
    count = depth(name, layers)
    row: Row = {"ranks": CASES[name].ranks, "layers": count, **known}
    if "plan_s" not in known:
        row |= apart(partial(planned, name, count), CPU_SECONDS)
        yield row
    if "dense" not in known:
        yield {**row, "dense": apart(partial(planned_dense, name, count), CPU_SECONDS)}


def planned_dense(name: str, layers: int) -> Row:
    """Return the figures of the plan of the dense model beside a mixture of experts."""
    case = CASES[name]
    _, row = _planned(on_meta(partial(dense_example, case, layers)), case)
    return row


def planned(name: str, layers: int) -> Row:
    """Return the figures of the plan of a mixture of experts."""
    case = CASES[name]
    plan, row = _planned(on_meta(partial(example, case, layers)), case)
    return {**row, "experts": experts_split(plan), "whole_experts": whole_share(plan, experts_op)}


def _planned(subject: Example, case: Case) -> tuple[autopar.Plan, Row]:
    model, inputs = subject
    started = time.process_time()
    world = autopar.World.preset("dgx-h100", ranks=case.ranks)
    plan = autopar.plan(model, world, inputs, microbatches=case.microbatches)
    cpu = time.process_time() - started
    rate = throughput(plan, inputs)
    assert rate is not None
    return plan, {
        "parameters": sum(p.numel() for p in model.parameters()),
        "mesh": str(plan.mesh),
        "layout": plan.layout,
        "seconds": float(f"{plan.step_seconds:.4g}"),
        "utilization": float(f"{rate.utilization:.3g}"),
        "peak_bytes": round(plan.peak_bytes),
        "whole": float(f"{whole_share(plan):.3g}"),
        "plan_s": round(cpu, 1),
    }


def experts_split(plan: autopar.Plan) -> str:
    """Return what each axis splits of a layer of experts, most often: "x: t, y: e"; "–" for what
    splits nothing.
    """
    assert plan.context is not None
    graph = plan.context.source.module.graph
    layers = graph.find_nodes(op="call_function", target=experts_op)
    splits = [plan.choices[node.name].splits for node in layers]
    (most,) = {max(splits, key=splits.count)}
    letters = ("–" if split in IDLE else split for split in most)
    pairs = zip(plan.mesh.names, letters, strict=True)
    return ", ".join(f"{axis}: {letter}" for axis, letter in pairs)
