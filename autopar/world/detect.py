"""What this process can find out about the world that it runs in."""

from __future__ import annotations

import dataclasses
import os
from typing import NamedTuple

import torch
import torch.distributed as dist

from .gpus import GPUS, PCIE_BYTES_PER_S, PEER_BYTES_PER_S, known
from .hardware import Device, Level
from .presets import (
    CPU_BYTES_PER_S,
    CPU_FLOP_PER_S,
    CPU_LAUNCH_S,
    GLOO_BYTES_PER_S,
    GLOO_LAUNCH_S,
    GLOO_NETWORK_S,
    GLOO_S,
    LAUNCH_S,
    NETWORK_S,
    NVLINK_S,
    PCIE_S,
)

# Nothing tells of the network between nodes: one 200 Gb/s card a GPU, 10 Gb/s Ethernet a CPU node.
_GPU_NETWORK = Level(1, 25e9, NETWORK_S, per="rank")
_CPU_NETWORK = Level(1, 1.25e9, GLOO_NETWORK_S)


class Found(NamedTuple):
    """What a World is made of."""

    levels: tuple[Level, ...]
    device: Device
    backend: str
    launch_s: float


def running() -> tuple[int, int]:
    """(ranks, ranks a node): of the process group, else of torchrun's environment, else 1."""
    if dist.is_available() and dist.is_initialized():
        ranks = dist.get_world_size()
    else:
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return ranks, _per_node(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", "0")))


def _per_node(ranks: int, told: int = 0) -> int:
    """Ranks a node: as told, else the GPUs here, else all; all too where these do not divide."""
    here = told or (torch.cuda.device_count() if torch.cuda.is_available() else ranks)
    return here if 0 < here < ranks and ranks % here == 0 else ranks


def like_here(ranks: int, per_node: int | None = None) -> Found:
    """So many ranks, on nodes like this one."""
    per_node = per_node or _per_node(ranks)
    gpu = torch.cuda.is_available()
    inside = _peers(per_node) if gpu else Level(per_node, GLOO_BYTES_PER_S, GLOO_S)
    levels = [inside]
    if ranks > per_node:
        outside = _GPU_NETWORK if gpu else _CPU_NETWORK
        levels.append(dataclasses.replace(outside, ranks=ranks // per_node))
    backend = "nccl" if gpu else "gloo"
    if dist.is_available() and dist.is_initialized():
        backend = dist.get_backend()
    if gpu:
        return Found(tuple(levels), _gpu(), backend, LAUNCH_S)
    return Found(tuple(levels), _cpu(per_node), backend, GLOO_LAUNCH_S)


def _gpu() -> Device:
    """By its name; one that is not known is taken for an A100 with its own memory."""
    properties = torch.cuda.get_device_properties(0)
    like = GPUS[known(properties.name) or "A100"]
    memory = float(properties.total_memory)
    return dataclasses.replace(like, name=properties.name, memory_bytes=memory)


def _cpu(ranks: int) -> Device:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
    rate = CPU_FLOP_PER_S * torch.get_num_threads()
    return Device("cpu", {"float32": rate}, memory, CPU_BYTES_PER_S, launch_s=CPU_LAUNCH_S)


def _peers(ranks: int) -> Level:
    """NVLink or its like where the model has it and all the GPUs here reach one another; else PCIe.
    A process that is shown one GPU only can go by the model alone.
    """
    here = range(torch.cuda.device_count())
    reach = all(torch.cuda.can_device_access_peer(a, b) for a in here for b in here if a != b)
    fast = PEER_BYTES_PER_S.get(known(torch.cuda.get_device_properties(0).name) or "")
    if fast is not None and reach:
        return Level(ranks, fast, NVLINK_S)
    return Level(ranks, PCIE_BYTES_PER_S if reach else PCIE_BYTES_PER_S / 2, PCIE_S)
