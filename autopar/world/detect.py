"""What this process can find out about the world that it runs in."""

from __future__ import annotations

import dataclasses
import os
import warnings
from typing import NamedTuple

import torch
import torch.distributed as dist

from autopar.world.hardware import Device, Level
from autopar.world.presets import (
    CPU_BYTES_PER_S,
    CPU_FLOP_PER_S,
    CPU_LAUNCH_S,
    GLOO_BYTES_PER_S,
    GLOO_LAUNCH_S,
    GLOO_NETWORK_S,
    GLOO_S,
    GPUS,
    LAUNCH_S,
    LIKE,
    NETWORK_S,
    NVLINK_S,
    PCIE_S,
    PEER_BYTES_PER_S,
    known,
    pcie_bytes_per_s,
)
from autopar.world.ranks import backends as running_backends

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
        backend = running_backends().get("cuda" if gpu else "cpu", backend)
    if gpu:
        return Found(tuple(levels), _gpu(), backend, LAUNCH_S)
    return Found(tuple(levels), _cpu(per_node), backend, GLOO_LAUNCH_S)


def _gpu() -> Device:
    """By its name; one that is not known is taken for an A100 with its own memory, and a warning
    says so.
    """
    properties, name = torch.cuda.get_device_properties(0), _known()
    memory, like = float(properties.total_memory), GPUS[name or LIKE]
    if name is None:
        warnings.warn(
            f"nothing is known of a {properties.name}: it is planned as an {LIKE} "
            f"({like.flops / 1e12:.0f} TFLOP/s, {like.memory_bytes_per_s / 1e9:.0f} GB/s) with its "
            f"own {memory / 2**30:.0f} GiB, its links as PCIe 4.0. Measure it with `autopar "
            "calibrate`, or give a World of your own",
            stacklevel=2,
        )
    return dataclasses.replace(like, name=properties.name, memory_bytes=memory)


def _known() -> str | None:
    properties = torch.cuda.get_device_properties(0)
    return known(properties.name, getattr(properties, "gcnArchName", ""))


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
    name = _known()
    fast, slot = PEER_BYTES_PER_S.get(name or ""), pcie_bytes_per_s(name)
    if fast is not None and reach:
        return Level(ranks, fast, NVLINK_S)
    return Level(ranks, slot if reach else slot / 2, PCIE_S)
