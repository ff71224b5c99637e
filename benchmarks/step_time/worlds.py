"""The world that autopar plans for on an emulated cluster, where nothing was calibrated."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from autopar import World
from autopar.world import Device, Level
from autopar.world.machines import (
    CPU_BYTES_PER_S,
    GLOO_BYTES_PER_S,
    GLOO_LAUNCH_S,
    GLOO_NETWORK_S,
    GLOO_S,
)

_SIZE = 512


def by_hand(nodes: int, per_node: int, rate: float | None) -> World:
    """The rate as it was asked for, gloo's nominal figures for the rest, and products measured on
    all ranks at once, which share this machine's cores. Collective.
    """
    network = GLOO_BYTES_PER_S if rate is None else rate / 8
    levels = [Level(per_node, GLOO_BYTES_PER_S, GLOO_S)] if per_node > 1 or nodes == 1 else []
    if nodes > 1:
        levels.append(Level(nodes, network, GLOO_NETWORK_S))
    device = Device("cpu", {"float32": _products()}, 4e9, CPU_BYTES_PER_S)
    return World(tuple(levels), device, "gloo", "by hand", GLOO_LAUNCH_S)


def _products(seconds: float = 0.5) -> float:
    """FLOP/s of a rank, the same on all."""
    x = torch.randn(_SIZE, _SIZE)
    _ = x @ x
    if dist.is_initialized():
        dist.barrier()
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        _ = x @ x
        count += 1
    rate = torch.tensor(2 * _SIZE**3 * count / (time.perf_counter() - started))
    if dist.is_initialized():
        dist.all_reduce(rate)
        rate /= dist.get_world_size()
    return float(rate)
