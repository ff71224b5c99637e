"""Detect the world that this process runs in: its ranks, its devices and the links between them.

Example: eight processes that torchrun started on one node with eight H100 are one level of 8 ranks
on NVLink, the device "NVIDIA H100 80GB HBM3" and the backend "nccl". `World.detect` and `World.of`
call this. What a process cannot see, such as the network between nodes, is taken from the nominal
figures of presets.py.
"""

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

# The network between nodes cannot be seen. Assumed: a 200 Gb/s card a GPU, 10 Gb/s a CPU node.
_GPU_NETWORK = Level(1, 25e9, NETWORK_S, per="rank")
_CPU_NETWORK = Level(1, 1.25e9, GLOO_NETWORK_S)


class Found(NamedTuple):
    """The detected parts of a World; `launch_s` is the seconds to start a collective."""

    levels: tuple[Level, ...]
    device: Device
    backend: str
    launch_s: float


def running() -> tuple[int, int]:
    """Return (ranks, ranks a node) of the process group, else of torchrun's environment, else 1."""
    if dist.is_available() and dist.is_initialized():
        ranks = dist.get_world_size()
    else:
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return ranks, _ranks_per_node(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", "0")))


def _ranks_per_node(ranks: int, told: int = 0) -> int:
    """Return the ranks a node: `told`, else the number of GPUs here, else `ranks`; also `ranks`
    where that number does not divide them.
    """
    per_node = told or (torch.cuda.device_count() if torch.cuda.is_available() else ranks)
    return per_node if 0 < per_node < ranks and ranks % per_node == 0 else ranks


def like_here(ranks: int, per_node: int | None = None) -> Found:
    """Describe so many ranks on nodes like this one, `per_node` (default: a rank a GPU) on each."""
    per_node = per_node or _ranks_per_node(ranks)
    gpu = torch.cuda.is_available()
    within_node = _links_in_node(per_node) if gpu else Level(per_node, GLOO_BYTES_PER_S, GLOO_S)
    levels = [within_node]
    if ranks > per_node:
        network = _GPU_NETWORK if gpu else _CPU_NETWORK
        levels.append(dataclasses.replace(network, ranks=ranks // per_node))
    backend = "nccl" if gpu else "gloo"
    if dist.is_available() and dist.is_initialized():
        backend = running_backends().get("cuda" if gpu else "cpu", backend)
    if gpu:
        return Found(tuple(levels), _detect_gpu(), backend, LAUNCH_S)
    return Found(tuple(levels), _detect_cpu(per_node), backend, GLOO_LAUNCH_S)


def _detect_gpu() -> Device:
    """Return the GPU here, looked up by its name. An unknown one is planned as an A100 with its own
    memory, and a warning says so.
    """
    properties, name = torch.cuda.get_device_properties(0), _gpu_name()
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


def _gpu_name() -> str | None:
    """Return the entry of GPUS that the GPU of this process is; None where there is none."""
    properties = torch.cuda.get_device_properties(0)
    return known(properties.name, getattr(properties, "gcnArchName", ""))


def _detect_cpu(ranks: int) -> Device:
    """Return the CPU as the device of one of the `ranks` of this node, which share its memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
    rate = CPU_FLOP_PER_S * torch.get_num_threads()
    return Device("cpu", {"float32": rate}, memory, CPU_BYTES_PER_S, launch_s=CPU_LAUNCH_S)


def _links_in_node(ranks: int) -> Level:
    """Return the links inside a node: NVLink or its like where the GPU model has it and the GPUs
    here reach one another, else PCIe. A process that sees one GPU only goes by the model alone.
    """
    gpus = range(torch.cuda.device_count())
    peer_access = all(torch.cuda.can_device_access_peer(a, b) for a in gpus for b in gpus if a != b)
    name = _gpu_name()
    nvlink, pcie = PEER_BYTES_PER_S.get(name or ""), pcie_bytes_per_s(name)
    if nvlink is not None and peer_access:
        return Level(ranks, nvlink, NVLINK_S)
    return Level(ranks, pcie if peer_access else pcie / 2, PCIE_S)
