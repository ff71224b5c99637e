"""What a call of a parallel module costs outside its graph, in CPU time of a rank.

    python -m benchmarks.step_time.calls

A Llama of 423 modules (32 layers, as an 8B has, of small widths) runs under fsdp on two gloo ranks.
Each call compares the modules with what was traced, binds the arguments, reads the parameters' own
parts and cuts the inputs: all that `par(**batch)` does before and after the graph runs. The graph
is replaced by a function that returns at once; a step is a forward and a backward with it.
Gradients are recorded, as in training, which hands every parameter to autograd; a call without
gradients is measured beside it. Every kind of call is measured in batches that take turns, and the
table has the median of the quickest batch and of the slowest: what else runs on the machine makes
batches slower, also in CPU time. Wanted: at most 1 ms for either call in the quickest, and 1 % of
the step.
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
BATCHES = 8  # of calls of each kind in turns, after one that warms up


def llama(width: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=32,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def seconds_of(work: Any, times: int) -> float:
    """Return the median of the CPU seconds of this thread over so many runs."""
    seconds = []
    for _ in range(times):
        began = time.thread_time()
        work()
        seconds.append(time.thread_time() - began)
    return statistics.median(seconds)


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
    works = {
        "call_s": lambda: par(**batch),
        "without_gradients_s": torch.no_grad()(lambda: par(**batch)),
        "compare_s": lambda: state.graphs.graph_for((), batch),
    }
    medians: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(1 + BATCHES):
        for name, work in works.items():
            medians[name].append(seconds_of(work, times))
    graph.run = run
    return {
        "modules": len(list(par.modules())), "parameters": len(list(par.parameters())),
        **{name: (min(values[1:]), max(values[1:])) for name, values in medians.items()},
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
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    sizes = options.width, options.rows, options.tokens, options.times
    if options.out:
        on_rank(options.out, *sizes)
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
    columns = {
        "compare": facts["compare_s"], "call outside its graph": facts["call_s"],
        "without gradients": facts["without_gradients_s"],
    }  # fmt: skip
    table = Table("modules", "parameters", *(f"{name}, ms" for name in columns), "of a step")
    longest_s = max(facts["call_s"][0], facts["without_gradients_s"][0])
    share = longest_s / facts["step_s"]
    table.add_row(
        str(facts["modules"]), str(facts["parameters"]),
        *(f"{low * 1e3:.2f} to {high * 1e3:.2f}" for low, high in columns.values()),
        f"{share:.2%}",
    )  # fmt: skip
    Console().print(table)
    met = longest_s <= WANTED_S and share <= WANTED_SHARE
    verdict = "met" if met else "missed"
    print(f"wanted: at most {WANTED_S * 1e3:g} ms and {WANTED_SHARE:.0%}: {verdict}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
