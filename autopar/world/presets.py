"""Machines by name, from published figures. Bandwidths are each way; `per` "rank": one network
card a GPU.

Hop latencies are those that NCCL's own tuning assumes for its ring (src/graph/tuning.cc: NVLink 0.5
to 3.4 µs, network 2.7 to 14 µs, by protocol), as is the time to start a collective (4 to 8 µs).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..errors import WorldError
from .gpus import GPUS, PCIE_BYTES_PER_S
from .hardware import Device, Level

NVLINK_S, PCIE_S, NETWORK_S, LAUNCH_S = 1e-6, 2e-6, 5e-6, 5e-6
# gloo on two cores, measured: an all-reduce of a few bytes takes 0.7 ms between two ranks of a node
# (two hops), 1.9 ms between two nodes (two hops), 3.4 ms over 2 × 2 (three hops of either kind).
GLOO_BYTES_PER_S = 1.5e9
GLOO_LAUNCH_S, GLOO_S, GLOO_NETWORK_S = 0.25e-3, 0.225e-3, 0.825e-3
CPU_FLOP_PER_S, CPU_BYTES_PER_S = 4e10, 1e10  # of one thread of a server core, float32
CPU_LAUNCH_S = 5e-6  # one small op of torch, nominal


@dataclass(frozen=True)
class Preset:
    """A machine: `node`, the levels inside a node, and `network`, which joins as many nodes as
    there are; `ranks` where none are asked for; where the figures are from.
    """

    device: Device
    node: tuple[Level, ...]
    network: Level
    ranks: int
    source: str
    backend: str = "nccl"
    launch_s: float = LAUNCH_S

    def levels(self, name: str, ranks: int) -> tuple[Level, ...]:
        """The levels of so many ranks. Raises WorldError where they fill no whole nodes."""
        full = math.prod(level.ranks for level in self.node)
        if ranks < 1 or (ranks > full and ranks % full):
            raise WorldError(
                f"{name} has {full} ranks a node: {ranks} ranks fill no whole number of nodes; ask "
                f"for {max(1, ranks // full) * full} or {(ranks // full + 1) * full}"
            )
        found, left = [], ranks
        for level in self.node:
            taken = math.gcd(level.ranks, left) if left > level.ranks else left
            found.append(_part(level, taken))
            left //= taken
        if left > 1:
            found.append(replace(self.network, ranks=left))
        return tuple(level for level in found if level.ranks > 1) or (found[0],)


def _part(level: Level, ranks: int) -> Level:
    """A level of which only so many members are used: wires to the others lie idle."""
    wires = (ranks - 1) / (level.ranks - 1) if level.direct and 1 < ranks < level.ranks else 1.0
    return replace(level, ranks=ranks, bytes_per_s=level.bytes_per_s * wires)


def _cards(bytes_per_s: float) -> Level:
    """A network card for each rank."""
    return Level(1, bytes_per_s, NETWORK_S, per="rank")


PRESETS = {
    "dgx-a100": Preset(
        GPUS["A100-SXM4-80GB"],
        (Level(8, 300e9, NVLINK_S),),
        _cards(25e9),
        8,
        "NVIDIA DGX A100 data sheet (2021): NVLink 600 GB/s both ways, 8 × 200 Gb/s InfiniBand",
    ),
    "dgx-h100": Preset(
        GPUS["H100"],
        (Level(8, 450e9, NVLINK_S),),
        _cards(50e9),
        8,
        "NVIDIA DGX H100 data sheet (2023): NVLink 900 GB/s both ways, 8 × 400 Gb/s InfiniBand",
    ),
    "dgx-b200": Preset(
        GPUS["B200"],
        (Level(8, 900e9, NVLINK_S),),
        _cards(50e9),
        8,
        "NVIDIA DGX B200 data sheet (2024): NVLink 1.8 TB/s both ways, 1440 GB and 64 TB/s of "
        "memory over 8 GPUs, 8 × 400 Gb/s",
    ),
    "gb200-nvl72": Preset(
        GPUS["GB200"],
        (Level(72, 900e9, NVLINK_S),),
        _cards(50e9),
        72,
        "NVIDIA GB200 NVL72 data sheet (2024): 72 GPUs on one NVLink switch, 1.8 TB/s both ways "
        "each; one 400 Gb/s card a GPU",
    ),
    "perlmutter": Preset(
        GPUS["A100"],
        (Level(4, 225e9, NVLINK_S, direct=True),),
        Level(1, 80e9, NETWORK_S),
        4,
        "measured by AxoNN's authors (arXiv 2305.13525 and their code): 76 GB/s between two GPUs, "
        "225 over four, 80 from a node; nominal 300 and 4 × 25 (NERSC, Perlmutter architecture)",
    ),
    "frontier": Preset(
        GPUS["MI250X"],
        (Level(2, 129e9, NVLINK_S), Level(4, 195e9, NVLINK_S, direct=True)),
        Level(1, 40e9, NETWORK_S),
        8,
        "measured by AxoNN's authors (arXiv 2305.13525 and their code): 129 GB/s between the dies "
        "of one card, 40 from a node; 195 from a card to the three others, a wire each, fits the "
        "four other patterns within a node (52, 50, 72, 36) best, to a factor 1.5; nominal 200 and "
        "4 × 25 (OLCF, Frontier user guide)",
    ),
    "alps": Preset(
        GPUS["GH200"],
        (Level(4, 450e9, NVLINK_S, direct=True),),
        _cards(25e9),
        4,
        "four GH200 with 150 GB/s each way between any two (NVIDIA GH200 data sheet), a 200 Gb/s "
        "Slingshot card each (CSCS, Alps hardware)",
    ),
    "pcie-4090": Preset(
        GPUS["RTX 4090"],
        (Level(8, PCIE_BYTES_PER_S / 2, PCIE_S),),
        Level(1, 3.125e9, NETWORK_S),
        8,
        "NVIDIA Ada whitepaper (2022); PCIe 4.0 × 16, at half rate since every transfer passes "
        "through host memory (no peer access on GeForce); 25 Gb/s Ethernet between nodes",
    ),
    "ethernet-25g": Preset(
        GPUS["V100"],
        (Level(8, 150e9, NVLINK_S),),
        Level(1, 3.125e9, 20e-6),
        16,
        "AWS p3.16xlarge: 8 × V100 16 GB on NVLink (300 GB/s both ways), 25 Gb/s Ethernet; the "
        "latency is TCP's, nominal",
    ),
    "laptop": Preset(
        Device(
            "laptop core", {"float32": CPU_FLOP_PER_S}, 4e9, CPU_BYTES_PER_S, launch_s=CPU_LAUNCH_S
        ),
        (Level(4, GLOO_BYTES_PER_S, GLOO_S),),
        Level(1, 0.125e9, GLOO_NETWORK_S),
        4,
        "gloo between processes of one machine, measured on two cores; 16 GB over four; 1 Gb/s "
        "Ethernet between machines",
        "gloo",
        GLOO_LAUNCH_S,
    ),
}


def preset(name: str) -> Preset:
    """Raises WorldError for an unknown name."""
    if name not in PRESETS:
        raise WorldError(f"no world is called {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
