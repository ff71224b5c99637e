"""Calibration on the running ranks, for `autopar calibrate`: open the process group, list a model's
matmuls, measure them with the collectives, and return the calibrated world.

cli/calibrate.py calls it; the measuring itself is in cost/calibration.
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
from autopar.cost.calibration import calibrate, local_matmuls
from autopar.cost.calibration.fit import Attended
from autopar.cost.calibration.measure import Progress
from autopar.ir.sharding_rule import OpShardingRule, results_of
from autopar.passes import annotate, masks, trace
from autopar.planner.tracing import Inputs, call_arguments
from autopar.world import World, ranks

UnshardedWork = tuple[torch.dtype, int, int, int]  # dtype, m, n, k of a matmul on one device


class Work(NamedTuple):
    """The work of a model that calibration times: its matmuls and its attention."""

    matmuls: list[UnshardedWork]
    attentions: list[Attended]


@contextmanager
def open_process_group() -> Iterator[None]:
    """Open the process group that torchrun asks for within the block: NCCL where there are GPUs,
    else gloo. One that is open already stays as it is; one process alone needs none.
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
    """Return the running world with figures that were measured in about `seconds`. Collective; an
    error on one rank is raised on all.

    `build` returns a model and its inputs, on the meta device if you like: its own matmuls are
    measured too, in every size that a rank may get of them.
    """
    world = ranks.together("looking at the world", World.detect)
    work = Work([], [])
    if build is not None:
        work = ranks.together("reading the model's products", lambda: unsharded_work(*build()))
        ranks.agree("list of products", str(work))
    matmuls = local_matmuls(work.matmuls, world.ranks)
    return calibrate(world, matmuls, seconds, progress, work.attentions)


def unsharded_work(model: nn.Module, inputs: Inputs) -> Work:
    """Return the matmuls of a model as one device computes them, and its attention: each once."""
    program = annotate.annotate(masks.masks(trace.trace(model, *call_arguments(inputs))))
    assert program.annotations is not None
    rules = [
        (node, program.annotations.specs[node.name])
        for node in program.module.graph.nodes
        if node.name in program.annotations.specs
    ]
    attentions = [
        (results_of(n)[0].dtype, rule.attends._replace(share=None))
        for n, rule in rules
        if rule.attends is not None
    ]
    return Work(_list_matmuls(rules), list(dict.fromkeys(attentions)))


def _list_matmuls(rules: Sequence[tuple[fx.Node, OpShardingRule]]) -> list[UnshardedWork]:
    matmuls: dict[UnshardedWork, None] = {}
    for node, rule in rules:
        if rule.product is None or not all(rule.product):
            continue
        m, n, k = (math.prod(rule.sizes[name] for name in role) for role in rule.product)
        if rule.flops == 2 * m * n * k and not _is_batched(node):
            matmuls[results_of(node)[0].dtype, m, n, k] = None
    return list(matmuls)


def _is_batched(node: Any) -> bool:
    """Whether a matmul is batched: its second operand has a batch dim. Many small matmuls take a
    different time than a large one of the same flops.
    """
    return len(pytree.tree_leaves(node.args)[1].meta["val"].shape) > 2
