"""The hardware: how many ranks, what a device can do, and what the links between ranks carry."""

from __future__ import annotations

import math
import os
import socket
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .errors import WorldError


@dataclass(frozen=True)
class Device:
    """One rank's device: floating-point rate in FLOP/s, memory in bytes, memory bandwidth in
    bytes/s.
    """

    name: str
    flops: float
    memory_bytes: float
    memory_bytes_per_s: float


@dataclass(frozen=True)
class Level:
    """One level of links, innermost first: `ranks` of the level below are joined at bytes/s each
    way per rank, latency in s.
    """

    ranks: int
    bytes_per_s: float
    latency_s: float


# Nominal figures, from the makers' data sheets (dense bf16); `autopar calibrate` will replace them
# by measured ones.
_GPUS = {
    "A100": Device("A100", 312e12, 40e9, 1.55e12),
    "H100": Device("H100", 989e12, 80e9, 3.35e12),
    "H200": Device("H200", 989e12, 141e9, 4.8e12),
    "B200": Device("B200", 2250e12, 192e9, 8e12),
}
_CPU_FLOPS = 4e10  # of one thread of a server core, fp32
_CPU_BANDWIDTH = 1e10
_GLOO = (
    1.5e9,
    0.7e-3,
)  # bytes/s and latency between processes of one machine, measured on two cores
_NVLINK = (2e11, 5e-6)
_NETWORK = (2.5e10, 1e-5)


@dataclass(frozen=True)
class World:
    """A cluster: `ranks` devices joined by `levels` of links.

    Example: World(8, Device("cpu", 4e10, 8e9, 1e10), (Level(8, 1.5e9, 7e-4),)). Raises WorldError
    where the levels do not multiply up to the ranks.
    """

    ranks: int
    device: Device
    levels: tuple[Level, ...]
    backend: str = "gloo"

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise WorldError(f"a world of {self.ranks} ranks: at least 1 is needed")
        joined = math.prod(level.ranks for level in self.levels)
        if joined != self.ranks:
            sizes = " × ".join(str(level.ranks) for level in self.levels) or "none"
            raise WorldError(
                f"the levels of links join {sizes} = {joined} ranks, the world has {self.ranks}"
            )

    @property
    def bytes_per_s(self) -> float:
        """Of the slowest link that is crossed: the uniform link of the cost model."""
        return min(
            (level.bytes_per_s for level in self.levels if level.ranks > 1), default=math.inf
        )

    @property
    def latency_s(self) -> float:
        return max((level.latency_s for level in self.levels if level.ranks > 1), default=0.0)

    def __str__(self) -> str:
        links = ", ".join(
            f"{level.ranks} at {level.bytes_per_s / 1e9:.3g} GB/s and {level.latency_s * 1e6:.3g} "
            "µs"
            for level in self.levels
            if level.ranks > 1
        )
        return (
            f"{self.ranks} rank{'s' if self.ranks > 1 else ''} of {self.device.name} "
            f"({self.device.flops / 1e12:.3g} TFLOP/s, {self.device.memory_bytes / 2**30:.3g} GiB "
            f"each), {self.backend}" + (f"; links: {links}" if links else "")
        )

    @staticmethod
    def of(given: World | int | Any | None) -> World:
        """A world from what a user may give: a World, a number of ranks like these here, a
        DeviceMesh, or None for what runs.
        """
        if isinstance(given, World):
            return given
        if given is None:
            return World.detect()
        if isinstance(given, int):
            return _local(given, given)
        if hasattr(given, "mesh") and hasattr(given, "mesh_dim_names"):
            return _local(given.mesh.numel(), given.mesh.numel())
        raise WorldError(
            f"a world is a World, a number of ranks or a DeviceMesh, not {type(given).__name__} "
            f"{given!r}"
        )

    @staticmethod
    def detect() -> World:
        """What runs: the process group, else torchrun's environment, else this process alone."""
        if dist.is_available() and dist.is_initialized():
            ranks = dist.get_world_size()
        else:
            ranks = int(os.environ.get("WORLD_SIZE", "1"))
        per_node = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
        if ranks % per_node:
            per_node = ranks
        return _local(ranks, per_node)


def _local(ranks: int, per_node: int) -> World:
    device = _device(per_node)
    inside, backend = (_GLOO, "gloo") if device.name.startswith("cpu") else (_NVLINK, "nccl")
    if dist.is_available() and dist.is_initialized():
        backend = dist.get_backend()
    outside = _NETWORK if inside == _NVLINK else _GLOO
    levels = [Level(per_node, *inside)]
    if ranks > per_node:
        levels.append(Level(ranks // per_node, *outside))
    return World(ranks, device, tuple(levels), backend)


def _device(ranks_here: int) -> Device:
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        known = next((d for key, d in _GPUS.items() if key in properties.name), _GPUS["A100"])
        return Device(
            properties.name, known.flops, float(properties.total_memory), known.memory_bytes_per_s
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / max(1, ranks_here)
    return Device(
        f"cpu of {socket.gethostname()}",
        _CPU_FLOPS * torch.get_num_threads(),
        memory,
        _CPU_BANDWIDTH,
    )
