"""Machines: whole ones by name, from published figures, and what this process sees.

Example: PRESETS["dgx-h100"] is eight of GPUS["H100"] (gpus.py) in a node, and the links that join
them; `World.preset` takes it.

Bandwidths are each way; `per` "rank" means one network card a GPU. Hop latencies are those that
NCCL's own tuning assumes for its ring (src/graph/tuning.cc: NVLink 0.5 to 3.4 µs, network 2.7 to
14 µs, by protocol), as is the time to start a collective (4 to 8 µs).

`World.detect` and `World.of` call `like_here`: eight processes that torchrun started on one node
with eight H100 are one level of 8 ranks on NVLink, the device "NVIDIA H100 80GB HBM3" and the
backend "nccl". What a process cannot see, such as the network between nodes, is nominal.
"""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from autopar.errors import WorldError
from autopar.world.gpus import (
    GPUS,
    LIKE,
    NCCL_REACHES,
    PCIE_BYTES_PER_S,
    PEER_BYTES_PER_S,
    known,
    pcie_bytes_per_s,
)
from autopar.world.hardware import Device, Level
from autopar.world.ranks import backends

NVLINK_S, PCIE_S, NETWORK_S, LAUNCH_S = 1e-6, 2e-6, 5e-6, 5e-6
# gloo on two cores, measured: an all-reduce of a few bytes takes 0.7 ms between two ranks of a node
# (two hops), 1.9 ms between two nodes (two hops), 3.4 ms over 2 × 2 (three hops of either kind).
GLOO_BYTES_PER_S = 1.5e9
GLOO_LAUNCH_S, GLOO_S, GLOO_NETWORK_S = 0.25e-3, 0.225e-3, 0.825e-3
CPU_FLOP_PER_S, CPU_BYTES_PER_S = 4e10, 1e10  # of one thread of a server core, float32
CPU_LAUNCH_S = 5e-6  # one small op of torch, nominal


@dataclass(frozen=True)
class Preset:
    """A machine of any number of nodes: `node` is the levels inside a node, `network` joins the
    nodes, `ranks` is the default number of ranks, `source` says where the figures are from.
    """

    device: Device
    node: tuple[Level, ...]
    network: Level
    ranks: int
    source: str
    backend: str = "nccl"
    launch_s: float = LAUNCH_S

    def levels(self, name: str, ranks: int) -> tuple[Level, ...]:
        """Return the levels of so many ranks. Raises WorldError, which calls the machine
        `name`, where they fill no whole nodes.
        """
        size = math.prod(level.ranks for level in self.node)
        if ranks < 1 or (ranks > size and ranks % size):
            raise WorldError(
                f"{name} has {size} ranks a node: {ranks} ranks fill no whole number of nodes; ask "
                f"for {max(1, ranks // size) * size} or {(ranks // size + 1) * size}"
            )
        levels, remaining = [], ranks
        for level in self.node:
            members = math.gcd(level.ranks, remaining) if remaining > level.ranks else remaining
            levels.append(_with_members(level, members))
            remaining //= members
        if remaining > 1:
            levels.append(replace(self.network, ranks=remaining))
        return tuple(level for level in levels if level.ranks > 1) or (levels[0],)


def _with_members(level: Level, ranks: int) -> Level:
    """Return a level with only so many of its members; direct wires to the others lie idle."""
    wires = (ranks - 1) / (level.ranks - 1) if level.direct and 1 < ranks < level.ranks else 1.0
    return replace(level, ranks=ranks, bytes_per_s=level.bytes_per_s * wires)


def card_a_rank(bytes_per_s: float) -> Level:
    """Return a level with a network card of this nominal rate for each rank."""
    return Level(1, NCCL_REACHES * bytes_per_s, NETWORK_S, per="rank")


def nvlink(ranks: int, gpu: str, direct: bool = False) -> Level:
    """Return the links between so many of these GPUs."""
    return Level(ranks, NCCL_REACHES * PEER_BYTES_PER_S[gpu], NVLINK_S, direct=direct)


PRESETS = {
    "dgx-a100": Preset(
        GPUS["A100-SXM4-80GB"],
        (nvlink(8, "A100"),),
        card_a_rank(25e9),
        8,
        "NVIDIA DGX A100 data sheet (2021): NVLink 600 GB/s both ways, 8 × 200 Gb/s InfiniBand",
    ),
    "dgx-h100": Preset(
        GPUS["H100"],
        (nvlink(8, "H100"),),
        card_a_rank(50e9),
        8,
        "NVIDIA DGX H100 data sheet (2023): NVLink 900 GB/s both ways, 8 × 400 Gb/s InfiniBand",
    ),
    "dgx-b200": Preset(
        GPUS["B200"],
        (nvlink(8, "B200"),),
        card_a_rank(50e9),
        8,
        "NVIDIA DGX B200 data sheet (2024): NVLink 1.8 TB/s both ways, 1440 GB and 64 TB/s of "
        "memory over 8 GPUs, 8 × 400 Gb/s",
    ),
    "gb200-nvl72": Preset(
        GPUS["GB200"],
        (nvlink(72, "GB200"),),
        card_a_rank(50e9),
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
        (nvlink(4, "GH200", direct=True),),
        card_a_rank(25e9),
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
    """Return the preset of this name. Raises WorldError for an unknown name."""
    if name not in PRESETS:
        raise WorldError(f"no world is called {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


# -- what this process sees ------------------------------------------------------------------------
# The network between nodes cannot be seen. Assumed: a 200 Gb/s card a GPU, 10 Gb/s a CPU node.
_GPU_NETWORK = card_a_rank(25e9)
_CPU_NETWORK = Level(1, 1.25e9, GLOO_NETWORK_S)


class Detected(NamedTuple):
    """The detected parts of a World; `launch_s` is the seconds to start a collective."""

    levels: tuple[Level, ...]
    device: Device
    backend: str
    launch_s: float


def running_ranks() -> tuple[int, int]:
    """Return (ranks, ranks a node) of the process group, else of torchrun's environment, else 1."""
    if dist.is_available() and dist.is_initialized():
        ranks = dist.get_world_size()
    else:
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return ranks, _ranks_per_node(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", "0")))


def _ranks_per_node(ranks: int, stated: int = 0) -> int:
    """Return the ranks a node: `stated`, else the number of GPUs here, else `ranks`; also `ranks`
    where that number does not divide them.
    """
    per_node = stated or (torch.cuda.device_count() if torch.cuda.is_available() else ranks)
    return per_node if 0 < per_node < ranks and ranks % per_node == 0 else ranks


def like_here(ranks: int, per_node: int | None = None) -> Detected:
    """Describe so many ranks on nodes like this one, `per_node` (default: a rank a GPU) on each.
    Ranks whose process group sends through gloo run on CPUs, also where there are GPUs.
    """
    per_node = per_node or _ranks_per_node(ranks)
    running = backends()
    by_gloo = bool(running) and running.get("cuda", "gloo") == "gloo"
    gpu = torch.cuda.is_available() and not by_gloo
    within_node = _links_in_node(per_node) if gpu else Level(per_node, GLOO_BYTES_PER_S, GLOO_S)
    levels = [within_node]
    if ranks > per_node:
        network = _GPU_NETWORK if gpu else _CPU_NETWORK
        levels.append(replace(network, ranks=ranks // per_node))
    backend = "nccl" if gpu else "gloo"
    backend = running.get("cuda" if gpu else "cpu", backend)
    if gpu:
        return Detected(tuple(levels), _detect_gpu(), backend, LAUNCH_S)
    return Detected(tuple(levels), _detect_cpu(per_node), backend, GLOO_LAUNCH_S)


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
    return replace(like, name=properties.name, memory_bytes=memory)


def _gpu_name() -> str | None:
    """Return the entry of GPUS that the GPU of this process is; None where there is none."""
    properties = torch.cuda.get_device_properties(0)
    return known(properties.name, getattr(properties, "gcnArchName", ""))


def _detect_cpu(ranks: int) -> Device:
    """Return the CPU as the device of one of the `ranks` of this node, which share its memory, and
    its threads where OMP_NUM_THREADS does not say how many each rank takes. A rank that has less
    than a thread does everything so much slower.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
    threads = torch.get_num_threads() / (1 if "OMP_NUM_THREADS" in os.environ else ranks)
    rate, share = {"float32": CPU_FLOP_PER_S * threads}, min(1.0, threads)
    return Device("cpu", rate, memory, CPU_BYTES_PER_S * share, launch_s=CPU_LAUNCH_S / share)


def _links_in_node(ranks: int) -> Level:
    """Return the links inside a node: NVLink or its like where the GPU model has it and the GPUs
    here reach one another, else PCIe. A process that sees one GPU only goes by the model alone.
    """
    gpus = range(torch.cuda.device_count())
    peer_access = all(torch.cuda.can_device_access_peer(a, b) for a in gpus for b in gpus if a != b)
    name = _gpu_name()
    pcie = pcie_bytes_per_s(name)
    if name in PEER_BYTES_PER_S and peer_access:
        return nvlink(ranks, str(name))
    return Level(ranks, pcie if peer_access else pcie / 2, PCIE_S)
