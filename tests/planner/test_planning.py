"""Planning at full size: Llama-3-8B's widths on the meta device, no process group, no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest


def plan(layers: int, ranks: int, layout: str) -> None:
    """Runs in a process of its own, for its memory: prints what planning took and gave."""
    import torch
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    import autopar
    from benchmarks.planning.__main__ import peak

    config = LlamaConfig(
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
        num_hidden_layers=layers,
        max_position_embeddings=4096,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(64, 4096, dtype=torch.int64)
    started = time.process_time()
    inputs = {"input_ids": ids, "labels": ids.clone()}
    result = autopar.plan(model, ranks, inputs, layout=layout)
    facts = {
        "seconds": time.process_time() - started,
        "GB": peak(),
        "ranks": result.mesh.size,
        "passes": result.seconds_by_pass,
        "parameters": len(result.stored),
        "modelled": [result.seconds, result.comm_bytes, result.peak_bytes],
        "group": torch.distributed.is_initialized(),
        "meta": all(p.is_meta for p in model.parameters()),
    }
    print(json.dumps(facts))


slow = pytest.mark.slow


@pytest.mark.slow_cells("4-8-auto")
@pytest.mark.parametrize(
    ("layers", "ranks", "layout"),
    [
        (4, 8, "auto"),
        pytest.param(32, 8, "auto", marks=slow),
        pytest.param(32, 64, "auto", marks=slow),
        pytest.param(32, 64, "fsdp", marks=slow),
    ],
)
def test_planning_a_model_on_meta(layers: int, ranks: int, layout: str) -> None:
    """In less than 2 GB with torch and transformers in it; benchmarks.planning says how fast."""
    script = f"import sys; sys.path[:0] = {sys.path!r}; import test_planning; "
    script += f"test_planning.plan({layers}, {ranks}, {layout!r})"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["GB"] < 2, facts
    assert facts["ranks"] == ranks
    assert facts["parameters"] == 3 + 9 * layers
    assert min(facts["modelled"]) > 0
    assert set(facts["passes"]) >= {"trace", "annotate", "chains", "choose", "rewrite", "finalize"}
    assert facts["passes"]["trace"] > 0.1
    assert facts["meta"] and not facts["group"]
