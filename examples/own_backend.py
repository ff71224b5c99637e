"""A backend of one's own: a function that is given a graph and gives back what runs it.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/own_backend.py

It is called twice, with the scheduled forward and backward of the rank: ATen ops and functional
collectives on the rank's own tensors. This one counts what it finds there, and runs it as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

import autopar
from autopar.tools.decoders import Gpt, small_weights
from compile_backend import SMALL, batches


def counting(graph: fx.GraphModule, example_inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Says what the graph holds, in the order in which it is first called."""
    if dist.get_rank() == 0:
        calls = Counter(
            str(node.target) for node in graph.graph.nodes if node.op == "call_function"
        )
        print(f"a graph of {len(example_inputs)} tensors:")
        for name, count in calls.items():
            print(f"  {count:3} × {name}")
    return graph.forward


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = next(batches())
    model = Gpt(SMALL).apply(small_weights)
    par = autopar.parallelize(model, inputs=inputs, layout="fsdp", backend=counting)
    loss = par(*inputs)
    loss.backward()
    if dist.get_rank() == 0:
        print(f"loss {float(loss.detach()):.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
