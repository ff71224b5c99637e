"""The plans that autopar chooses for 92 calls, to compare a version with another one.

Examples:

    PYTHONPATH=. python tests/support/choices.py now.jsonl
    PYTHONPATH=. python tests/support/choices.py now.jsonl --than before.jsonl

writes for every call the modelled step, the sum and the proven gap of its plan, a line each, and
goes on where a file ends early. `--than` prints what differs from another file, and returns 1 where
a step is more than 0.3 % longer. Run it in a checkout of the other commit, with this file's path,
for the other file. The calls are those of tests/planner/test_auto.py, with and without overlap, and
twelve that are deep, of an odd number of ranks, or no decoders. It takes ten minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import autopar
import models

WORLDS = (
    *(("dgx-h100", ranks) for ranks in (2, 4, 8, 16, 64)),
    *(("ethernet-25g", ranks) for ranks in (2, 8, 16, 32)),
    *(("laptop", ranks) for ranks in (2, 4, 8)),
    *(("pcie-4090", ranks) for ranks in (2, 4, 8, 16)),
)
SUBJECTS: dict[str, Callable[[int], models.Example]] = {
    "mlp": lambda batch: (models.Mlp(), (torch.randn(batch, 64), torch.randn(batch, 64)), {}),
    "wide": lambda batch: (models.Mlp(2048, 8192), (torch.randn(batch, 2048),) * 2, {}),
    "gpt": lambda batch: (
        models.GptWithLogits(),
        (torch.zeros(batch, 16, dtype=torch.int64),) * 2,
        {},
    ),
    "gpt 768": lambda batch: (
        models.GptWithLogits(1024, 128, 768, 12, 2),
        (torch.zeros(batch, 128, dtype=torch.int64), torch.ones(batch, 128, dtype=torch.int64)),
        {},
    ),
}
LONGER = 0.003  # of a step
Build = Callable[[], tuple[Any, Any]]


class Call(NamedTuple):
    """A call of autopar.plan. `build` returns the model and its inputs."""

    name: str
    build: Build
    preset: str
    ranks: int
    options: dict[str, Any]


def ids(batch: int, sequence: int) -> torch.Tensor:
    return torch.ones(batch, sequence, dtype=torch.int64)


def gpt(layers: int, batch: int) -> Build:
    def build() -> tuple[Any, Any]:
        with torch.device("meta"):
            model = models.GptWithLogits(1024, 128, 768, 12, layers)
        return model, (ids(batch, 128), ids(batch, 128))

    return build


def t5(batch: int) -> Build:
    def build() -> tuple[Any, Any]:
        from transformers import T5Config, T5ForConditionalGeneration

        sizes = {"vocab_size": 1024, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 4}
        more = {"num_heads": 8, "dropout_rate": 0.0, "use_cache": False}
        with torch.device("meta"):
            model = T5ForConditionalGeneration(T5Config(**sizes, **more))
        names = ("input_ids", "decoder_input_ids", "labels")
        return model, dict.fromkeys(names, ids(batch, 64))

    return build


def llama(batch: int) -> Build:
    def build() -> tuple[Any, Any]:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"vocab_size": 1536, "hidden_size": 768, "intermediate_size": 2304}
        more = {"num_hidden_layers": 6, "num_attention_heads": 12, "num_key_value_heads": 6}
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**sizes, **more, use_cache=False))
        return model, dict.fromkeys(("input_ids", "labels"), ids(batch, 256))

    return build


def vit(batch: int) -> Build:
    def build() -> tuple[Any, Any]:
        from transformers import ViTConfig, ViTForImageClassification

        sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 5}
        more = {"num_attention_heads": 6, "image_size": 64, "patch_size": 8, "num_labels": 100}
        with torch.device("meta"):
            model = ViTForImageClassification(ViTConfig(**sizes, **more))
        pixels, labels = torch.zeros(batch, 3, 64, 64), torch.ones(batch, dtype=torch.int64)
        return model, {"pixel_values": pixels, "labels": labels}

    return build


def combinations() -> list[Any]:
    """40 of (model, batch, machine), the first few of them cheap."""
    draw = random.Random(0)
    every = [(s, b, *w) for s in SUBJECTS for b in (4, 16, 64) for w in WORLDS]
    cheap = [("mlp", 16, "dgx-h100", 8), ("gpt", 16, "laptop", 4), ("wide", 64, "pcie-4090", 8)]
    rest = draw.sample([c for c in every if c not in cheap], 37)
    return [*cheap, *(pytest.param(c, marks=pytest.mark.slow) for c in rest)]


def calls() -> Iterator[Call]:
    for param in combinations():
        ((subject, batch, preset, ranks),) = getattr(param, "values", (param,))
        for overlap in (True, False):
            name = f"{subject} {batch} {preset} {ranks} overlap={overlap}"

            def build(subject: str = subject, batch: int = batch) -> tuple[Any, Any]:
                return SUBJECTS[subject](batch)[:2]

            yield Call(name, build, preset, ranks, {"overlap": overlap})
    yield Call("96 layers on 24", gpt(96, 48), "dgx-h100", 24, {})
    yield Call("96 layers on 48", gpt(96, 96), "dgx-h100", 48, {})
    yield Call("96 layers on 24, Ethernet", gpt(96, 48), "ethernet-25g", 24, {})
    yield Call("7 layers on 8", gpt(7, 16), "dgx-h100", 8, {})
    yield Call("7 layers on 24, PCIe", gpt(7, 24), "pcie-4090", 24, {})
    yield Call("encoder-decoder on 8", t5(16), "dgx-h100", 8, {})
    yield Call("encoder-decoder on 6, Ethernet", t5(12), "ethernet-25g", 6, {})
    yield Call("6 KV heads on 24, Ethernet", llama(24), "ethernet-25g", 24, {})
    yield Call("6 KV heads on 24", llama(24), "dgx-h100", 24, {})
    yield Call("vit on 16, Ethernet", vit(32), "ethernet-25g", 16, {})
    yield Call("within 200 MB", gpt(2, 64), "dgx-h100", 8, {"memory": 2e8})
    yield Call("fsdp, 24 layers on 16", gpt(24, 32), "dgx-h100", 16, {"layout": "fsdp"})


def chosen(call: Call) -> dict[str, Any]:
    """Return the figures of the plan that autopar chooses."""
    torch.manual_seed(0)
    model, inputs = call.build()
    start = time.process_time()
    plan = autopar.plan(
        model, autopar.World.preset(call.preset, call.ranks), inputs, **call.options
    )
    taken = time.process_time() - start
    facts: dict[str, Any] = {"name": call.name, "layout": plan.layout, "mesh": str(plan.mesh)}
    return facts | {
        "step": plan.overlapped or plan.seconds, "sum": plan.seconds, "gap": plan.gap, "cpu": taken
    }  # fmt: skip


def read(path: Path) -> dict[str, dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def compare(rows: dict[str, dict[str, Any]], others: dict[str, dict[str, Any]]) -> int:
    """Print the plans that differ; return how many have a step that is longer."""
    pairs = [(others[name], row) for name, row in rows.items() if name in others]
    longer = 0
    for before, now in pairs:
        by = now["step"] / before["step"] - 1
        longer += by > LONGER
        if abs(by) > 1e-6 or now["gap"] > before["gap"] + 1e-6:
            print(
                f"{now['name']:44} step {by:+.2%}, gap {before['gap']:.2%} -> {now['gap']:.2%}, "
                f"{before['layout']} {before['mesh']} -> {now['layout']} {now['mesh']}"
            )
    most = max((now["step"] / before["step"] - 1 for before, now in pairs), default=0.0)
    cpu = [sum(pair[index]["cpu"] for pair in pairs) for index in (0, 1)]
    print(f"{len(pairs)} plans: steps at most {most:+.2%}; {cpu[0]:.0f} -> {cpu[1]:.0f} CPU s")
    return longer


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--than", type=Path, metavar="FILE", help="of another version")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    known = read(options.out)
    for call in calls():
        if call.name not in known:
            known[call.name] = row = chosen(call)
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return int(options.than is not None and compare(known, read(options.than)) > 0)


if __name__ == "__main__":
    sys.exit(main())
