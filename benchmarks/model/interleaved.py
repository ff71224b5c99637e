"""What two micro-batches that run interleaved would gain, in the simulator.

    python -m benchmarks.model.interleaved

Two micro-batches of a step are independent but for gradients, so one may compute while the other
waits for its collectives. The events of two micro-batches, gradients deferred, are simulated once
one after the other and once alternating, by the scheduler that orders real steps. Printed is the
time of the second over the first, for a block-wise GPT of this width under several layouts.
"""

from __future__ import annotations

import argparse
import dataclasses

import torch

import autopar
from autopar.cost.simulator import interleave, simulate
from autopar.cost.simulator.step_events import Events
from autopar.tools.decoders import Gpt
from autopar.tools.targets import NAMED

LAYOUTS = ("ddp", "fsdp", "megatron", "megatron-sp", "atp")


def ratio(layout: str, world: autopar.World, width: int) -> float:
    """Seconds of two interleaved micro-batches over those of two one after the other."""
    gpt = NAMED["gpt2"]
    sizes = dataclasses.replace(gpt, width=width, heads=width // 128, layers=4, context=2048)
    with torch.device("meta"):
        model = Gpt(sizes).to(torch.bfloat16)
        ids = torch.zeros(2 * world.ranks, 2048, dtype=torch.long)
    plan = autopar.plan(
        model, world, (ids, ids), layout, memory=1e15, smaller=False, microbatches=2,
        outputs="sharded",
    )  # fmt: skip
    assert plan.context is not None
    events = Events(plan.context.program, world, between=True).run()
    return interleave(events).seconds / (2 * simulate(events).seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--worlds", nargs="+", default=["dgx-h100:8", "dgx-h100:16"])
    options = parser.parse_args()
    for text in options.worlds:
        name, ranks = text.split(":")
        world = autopar.World.preset(name, int(ranks))
        for layout in LAYOUTS:
            print(f"{text:14} {layout:12} {ratio(layout, world, options.width):.3f}", flush=True)


if __name__ == "__main__":
    main()
