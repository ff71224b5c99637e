"""What a call of a parallel module costs outside its graph, in CPU time of a rank.

    python -m benchmarks.step_time.calls

A Llama of 423 modules (32 layers, as an 8B has, of small widths) runs under fsdp on two gloo ranks.
Each call compares the modules with what was traced, binds the arguments, reads the parameters' own
parts and cuts the inputs: all that `par(**batch)` does before and after the graph runs. The graph
is replaced by a function that returns at once; a step is a forward and a backward with it.
Gradients are recorded, as in training, which hands every parameter to autograd; a call without
gradients is measured beside it. Wanted: at most 1 ms, and 1 % of the step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

import autopar

WANTED_S, WANTED_SHARE = 1e-3, 0.01


def llama(width: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=32,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def seconds_of(work: Any, times: int) -> list[float]:
    """Return the CPU seconds of this thread for each of so many runs."""
    found = []
    for _ in range(times):
        began = time.thread_time()
        work()
        found.append(time.thread_time() - began)
    return found


def measure(width: int, rows: int, tokens: int, times: int) -> dict[str, Any]:
    """Measure on this rank; all ranks call it."""
    model = llama(width)
    ids = torch.arange(rows * tokens).view(rows, tokens) % 512
    batch = {"input_ids": ids, "labels": ids}
    par: Any = autopar.parallelize(model, inputs=batch, layout="fsdp")
    state = par._autopar

    def step() -> None:
        par.zero_grad()
        par(**batch).loss.backward()

    began = time.perf_counter()
    for _ in range(4):
        step()
    step_s = (time.perf_counter() - began) / 4
    graph, bound = state.graphs.graph_for((), batch)
    run, results = graph.run, graph.run(*graph.values(bound, state))
    results = [x.detach() if isinstance(x, torch.Tensor) else x for x in results]
    graph.run = lambda *values: results
    seconds_of(lambda: par(**batch), 20)
    call = seconds_of(lambda: par(**batch), times)
    with torch.no_grad():
        without = seconds_of(lambda: par(**batch), times)
    compare = seconds_of(lambda: state.graphs.graph_for((), batch), times)
    graph.run = run
    return {
        "modules": len(list(par.modules())), "parameters": len(list(par.parameters())),
        "call_s": statistics.median(call), "without_gradients_s": statistics.median(without),
        "compare_s": statistics.median(compare),
        "step_s": step_s,
    }  # fmt: skip


def on_rank(out: str, width: int, rows: int, tokens: int, times: int) -> None:
    dist.init_process_group("gloo")
    facts = measure(width, rows, tokens, times)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    sizes = asked.width, asked.rows, asked.tokens, asked.times
    if asked.out:
        on_rank(asked.out, *sizes)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/facts.json"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "benchmarks.step_time.calls", "--out", out),
            *(arguments if arguments is not None else sys.argv[1:]),
        ]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        facts = json.loads(Path(out).read_text())
    table = Table("modules", "parameters", "compare, ms", "call outside its graph, ms")
    table.add_column("without gradients, ms")
    table.add_column("of a step")
    share = facts["call_s"] / facts["step_s"]
    table.add_row(
        str(facts["modules"]), str(facts["parameters"]), f"{facts['compare_s'] * 1e3:.2f}",
        f"{facts['call_s'] * 1e3:.2f}", f"{facts['without_gradients_s'] * 1e3:.2f}",
        f"{share:.2%}",
    )  # fmt: skip
    Console().print(table)
    met = facts["call_s"] <= WANTED_S and share <= WANTED_SHARE
    verdict = "met" if met else "missed"
    print(f"wanted: at most {WANTED_S * 1e3:g} ms and {WANTED_SHARE:.0%}: {verdict}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
