"""What `autopar calibrate` does on the running ranks: join them, find a model's products, measure,
and hand back the world.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx, nn

from autopar._compat import pytree
from autopar.cost.calibration.fit import Attended
from autopar.cost.calibration.measure import Progress
from autopar.cost.calibration.procedure import calibrate, local_matmuls
from autopar.ir.sharding_rule import OpShardingRule, results_of
from autopar.passes import annotate
from autopar.passes.trace import trace
from autopar.planner.planner import Inputs, call_arguments
from autopar.world import World, ranks

UnshardedWork = tuple[torch.dtype, int, int, int]  # dtype, m, n, k of a product on one device


class Work(NamedTuple):
    """What calibration times of a model."""

    products: list[UnshardedWork]
    attended: list[Attended]


@contextmanager
def joined_work() -> Iterator[None]:
    """The process group that torchrun asks for, of NCCL where there are GPUs, else of gloo; one
    that runs already stays as it is, one process alone needs none.
    """
    if dist.is_initialized() or "WORLD_SIZE" not in os.environ:
        yield
        return
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def calibrate_on_ranks(
    build: Callable[[], tuple[nn.Module, Inputs]] | None = None,
    seconds: float = 120.0,
    progress: Progress = lambda share, doing: None,
) -> World:
    """The running world with what was measured in about so many seconds. Collective; what fails on
    one rank fails on all.

    `build` gives a model and its inputs, on the meta device if you like: its own products are
    measured too, in every size that a rank may get of them.
    """
    world = ranks.together("looking at the world", World.detect)
    work = Work([], [])
    if build is not None:
        work = ranks.together("reading the model's products", lambda: unsharded_work(*build()))
        ranks.agree("list of products", str(work))
    products = local_matmuls(work.products, world.ranks)
    return calibrate(world, products, seconds, progress, work.attended)


def unsharded_work(model: nn.Module, inputs: Inputs) -> Work:
    """The matrix products of a model as one device computes them, and its attention: each once."""
    program = annotate.annotate(trace.trace(model, *call_arguments(inputs)))
    assert program.annotations is not None
    specs = [
        (node, program.annotations.specs[node.name])
        for node in program.module.graph.nodes
        if node.name in program.annotations.specs
    ]
    attended = [(results_of(n)[0].dtype, s.attends) for n, s in specs if s.attends is not None]
    return Work(_products(specs), list(dict.fromkeys(attended)))


def _products(specs: Sequence[tuple[fx.Node, OpShardingRule]]) -> list[UnshardedWork]:
    found: dict[UnshardedWork, None] = {}
    for node, spec in specs:
        if spec.product is None or not all(spec.product):
            continue
        m, n, k = (math.prod(spec.sizes[name] for name in role) for role in spec.product)
        if spec.flops == 2 * m * n * k and not _batched(node):
            found[results_of(node)[0].dtype, m, n, k] = None
    return list(found)


def _batched(node: Any) -> bool:
    """Many small products in one are no large one: of the second operand, too, there are many."""
    return len(pytree.tree_leaves(node.args)[1].meta["val"].shape) > 2
