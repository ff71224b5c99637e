"""The description of this machine, without running anything on several ranks: versions, devices,
what the cost model assumes of them, backends, shared memory, links; and what will not work here,
and why.

`autopar doctor` prints `facts`; the doctor's examination writes them in its report.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import warnings
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import WorldError
from autopar.tools.doctor.abilities import abilities
from autopar.world import Device, World
from autopar.world.gpus import known
from autopar.world.world import CALIBRATED, read_calibration

SHARED_BYTES = 2**30  # enough of /dev/shm for NCCL and data loaders
_REPORTED_VARIABLES = re.compile(
    r"(NCCL|GLOO|TORCH_NCCL|RCCL|OMP)_\w+|CUDA_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES"
    r"|WORLD_SIZE|LOCAL_WORLD_SIZE|CUDA_LAUNCH_BLOCKING|PYTORCH_(CUDA_)?ALLOC_CONF"
    r"|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
)  # variables that change what ranks do; none of them names a person or a host
Facts = dict[str, Any]


def facts() -> Facts:
    """Return the description as JSON: "versions", "devices", "backends", "ranks", "environment",
    "world", "abilities", "warnings".

    Example: facts()["versions"]["torch"] is "2.13.0"
    """
    return {
        "versions": versions(),
        "devices": devices(),
        "backends": backends(),
        "ranks": ranks(),
        "environment": environment(),
        "world": links(),
        "abilities": [asdict(ability) for ability in abilities()],
        "warnings": shortcomings(),
    }


def versions() -> Facts:
    """Return the versions of Python, torch and what it was built with, and autopar."""
    version_by_name: Facts = {
        "autopar": _version("autopar"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "cudnn": None,
        "nccl": None,
    }
    if torch.cuda.is_available():
        version_by_name["cudnn"] = torch.backends.cudnn.version()
        if dist.is_available() and dist.is_nccl_available():
            version_by_name["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return version_by_name


def devices() -> list[Facts]:
    """Return the GPUs that this process sees, else its CPU; `known_as`: the entry of the cost
    model's table of GPUs that each is planned by, None where the table has none.
    """
    if not torch.cuda.is_available():
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return [{"name": "cpu", "cores": os.cpu_count(), "memory_bytes": memory}]
    return [gpu(number) for number in range(torch.cuda.device_count())]


def gpu(number: int) -> Facts:
    """Return the facts of one GPU, by its number."""
    properties = torch.cuda.get_device_properties(number)
    return {
        "name": properties.name,
        "index": number,
        "memory_bytes": properties.total_memory,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(number))),
        "processors": properties.multi_processor_count,
        "known_as": known(properties.name, getattr(properties, "gcnArchName", "")),
    }


def backends() -> dict[str, bool]:
    """Return which backends of collectives this torch has."""
    if not dist.is_available():
        return {"nccl": False, "gloo": False, "mpi": False}
    available = {"nccl": dist.is_nccl_available(), "gloo": dist.is_gloo_available()}
    return {**available, "mpi": dist.is_mpi_available()}


def ranks() -> Facts:
    """Return the ranks that run: this one's number, how many, how many on this node, and how many
    GPUs the process sees.
    """
    return {
        "started_by_torchrun": "WORLD_SIZE" in os.environ,
        "rank": int(os.environ.get("RANK", "0")),
        "running": int(os.environ.get("WORLD_SIZE", "1")),
        "on_node": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
    }


def environment() -> Facts:
    """Return cores, threads, shared memory, and the variables that change what ranks do."""
    variables = {
        name: os.environ[name] for name in sorted(os.environ) if _REPORTED_VARIABLES.fullmatch(name)
    }
    return {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "shared_memory_bytes": _shared_memory(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "variables": variables,
    }


def links() -> Facts:
    """Return the world that a plan would be made for here, and the figures that the cost model has
    for its device. `read_calibration`: they were measured, so none is assumed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `shortcomings` says it
        measured, fault = None, ""
        try:
            measured, fault = read_calibration(None)
        except WorldError as error:
            fault = str(error)
        world = measured or _nominal_world()
    return {
        "text": str(world),
        "calibrated": measured is not None,
        "file": fault,
        "ranks": world.ranks,
        "levels": [vars(level) for level in world.levels],
        "device": _device_facts(world.device),
        "peers": _peers(),
    }


def shortcomings() -> list[str]:
    """Return what will be wrong or slow here, each with the reason and what to do; `abilities` has
    what will not work.
    """
    lines = [*_device_warnings(), *_environment_warnings()]
    return [line for line in lines if line]


# -- facts -----------------------------------------------------------------------------------------
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown: run from a folder, not installed"


def _nominal_world() -> World:
    """Return the world as `autopar plan` takes it where none is named: the ranks that run, else the
    GPUs here.
    """
    here, gpus = World.detect(), torch.cuda.device_count()
    return World.of(gpus) if here.ranks == 1 < gpus else here


def _device_facts(device: Device) -> Facts:
    return {
        "name": device.name,
        "flop_per_s": dict(device.flop_per_s),
        "memory_bytes": device.memory_bytes,
        "memory_bytes_per_s": device.memory_bytes_per_s,
    }


def _peers() -> list[list[bool]]:
    """Return whether GPU i reaches the memory of GPU j; [] with fewer than two."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = range(count if count > 1 else 0)
    return [[a == b or torch.cuda.can_device_access_peer(a, b) for b in here] for a in here]


def _shared_memory() -> int | None:
    return shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None


def _device_warnings() -> list[str]:
    if not torch.cuda.is_available():
        return []
    lines = []
    gpus = devices()
    names = list(dict.fromkeys(device["name"] for device in gpus))
    if len(names) > 1:
        lines.append(f"the GPUs differ ({', '.join(names)}): plans take all of them for the first")
    unknown = [device["name"] for device in gpus if device["known_as"] is None]
    if unknown:
        lines.append(
            f"the cost model knows nothing of a {unknown[0]} and takes it for an A100 with its own "
            "memory: measure it with `torchrun … -m autopar calibrate`"
        )
    if not all(all(row) for row in _peers()):
        lines.append("not every GPU reaches every other: links are taken for PCIe through the host")
    return lines


def _environment_warnings() -> list[str]:
    lines = []
    shared = _shared_memory()
    if shared is not None and shared < SHARED_BYTES:
        users = "NCCL may fail to start" if torch.cuda.is_available() else "data loaders may fail"
        lines.append(
            f"/dev/shm has {shared / 2**20:,.0f} MiB: {users}; give a container --shm-size=1g or "
            "more"
        )
    if "OMP_NUM_THREADS" not in os.environ and not torch.cuda.is_available():
        lines.append(
            f"OMP_NUM_THREADS is not set: plans share the {torch.get_num_threads()} threads of "
            "this machine among its ranks, and torchrun gives each rank one; set it to the cores "
            "that each rank has"
        )
    cores, here = os.cpu_count() or 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if "OMP_NUM_THREADS" in os.environ and here * torch.get_num_threads() > cores:
        lines.append(
            f"{here} ranks of {torch.get_num_threads()} threads each share {cores} cores and wait "
            "for one another: a smaller OMP_NUM_THREADS, down to 1, is faster"
        )
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        lines.append("CUDA_LAUNCH_BLOCKING is set: nothing overlaps, every time is too long")
    world = links()
    if world["file"]:
        lines.append(f"{CALIBRATED} does not count: {world['file']}")
    if not world["calibrated"] and world["ranks"] > 1:
        lines.append(
            "links are assumed, not measured: `torchrun … -m autopar calibrate` takes two minutes"
        )
    return lines
