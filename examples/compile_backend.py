"""Train on all ranks with nothing changed in the script but the backend of torch.compile.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/compile_backend.py

Every rank holds all parameters, gives the same global batch, and gets the same loss and gradients;
what lies between is spread over the ranks. Prints every loss beside that of one device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.tools.decoders import Gpt, Sizes, small_weights

STEPS, BATCH, CONTEXT = 10, 8, 32
SMALL = Sizes("gpt", layers=2, width=64, heads=4, vocabulary=64, context=CONTEXT)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Counting, from somewhere: the next token is the last one plus 1."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        start = torch.randint(SMALL.vocabulary, (BATCH, 1), generator=draw)
        text = (start + torch.arange(CONTEXT + 1)) % SMALL.vocabulary
        yield text[:, :-1], text[:, 1:]


def train(model: nn.Module, call: Callable[..., Tensor]) -> list[float]:
    """The loss of every step, in nats."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for tokens, targets in batches():
        optimizer.zero_grad()
        loss = call(tokens, targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same parameters on every rank
    model = Gpt(SMALL).apply(small_weights)
    alone = copy.deepcopy(model)
    losses = train(model, torch.compile(model, backend="autopar"))
    expected = train(alone, alone)
    if dist.get_rank() == 0:
        for step, (ours, reference) in enumerate(zip(losses, expected, strict=True), start=1):
            print(f"step {step:2}   {dist.get_world_size()} ranks {ours:.6f}   one {reference:.6f}")
        print(f"head.weight is {tuple(model.head.weight.shape)} here, whole on each rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
