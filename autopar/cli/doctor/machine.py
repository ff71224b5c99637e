"""What is here, without running anything on several ranks: versions, devices, what the cost model
knows of them, backends, shared memory, links; and what will not work here, and why.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import warnings
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import WorldError
from autopar.world import Device, World
from autopar.world.presets import known
from autopar.world.world import CALIBRATED, calibrated

LEAST_TORCH = (2, 11)  # as pyproject.toml says
SHARED_BYTES = 2**30  # of /dev/shm that NCCL and loaders of data get along with
_TOLD = re.compile(
    r"(NCCL|GLOO|TORCH_NCCL|RCCL|OMP)_\w+|CUDA_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES"
    r"|WORLD_SIZE|LOCAL_WORLD_SIZE|CUDA_LAUNCH_BLOCKING|PYTORCH_(CUDA_)?ALLOC_CONF"
    r"|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
)  # variables that change what ranks do; none of them names a person or a host
Facts = dict[str, Any]


def facts() -> Facts:
    """All of it, as JSON: "versions", "devices", "backends", "environment", "world", "warnings".

    Example: facts()["versions"]["torch"] is "2.13.0"
    """
    return {
        "versions": versions(),
        "devices": devices(),
        "backends": backends(),
        "environment": environment(),
        "world": links(),
        "warnings": shortcomings(),
    }


def versions() -> Facts:
    """Of Python, torch and what it was built with, and autopar."""
    found: Facts = {
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
        found["cudnn"] = torch.backends.cudnn.version()
        if dist.is_available() and dist.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def devices() -> list[Facts]:
    """The GPUs that this process sees, else its CPU; `known_as`: the entry of the cost model's
    table of GPUs that each is planned by, None where it knows none.
    """
    if not torch.cuda.is_available():
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return [{"name": "cpu", "cores": os.cpu_count(), "memory_bytes": memory}]
    return [gpu(number) for number in range(torch.cuda.device_count())]


def gpu(number: int) -> Facts:
    """One GPU by its number."""
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
    """Which backends of collectives this torch has."""
    if not dist.is_available():
        return {"nccl": False, "gloo": False, "mpi": False}
    found = {"nccl": dist.is_nccl_available(), "gloo": dist.is_gloo_available()}
    return {**found, "mpi": dist.is_mpi_available()}


def environment() -> Facts:
    """Cores, threads, shared memory, and the variables that change what ranks do."""
    told = {name: os.environ[name] for name in sorted(os.environ) if _TOLD.fullmatch(name)}
    return {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "shared_memory_bytes": _shared_memory(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "variables": told,
    }


def links() -> Facts:
    """The world that a plan would be made for here, and what the cost model takes its device to do.
    `calibrated`: it was measured, so nothing in it is assumed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `shortcomings` says it
        found, wrong = None, ""
        try:
            found, wrong = calibrated(None)
        except WorldError as error:
            wrong = str(error)
        world = found or _nominal()
    return {
        "text": str(world),
        "calibrated": found is not None,
        "file": wrong,
        "ranks": world.ranks,
        "levels": [vars(level) for level in world.levels],
        "device": _device(world.device),
        "peers": _peers(),
    }


def shortcomings() -> list[str]:
    """What will not work here or will be wrong, each with the reason and what to do."""
    found = [*_of_versions(), *_of_devices(), *_of_environment()]
    return [line for line in found if line]


# -- parts -----------------------------------------------------------------------------------------
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown: run from a folder, not installed"


def _nominal() -> World:
    """As `autopar plan` takes it where nothing is named: the ranks that run, else the GPUs here."""
    here, gpus = World.detect(), torch.cuda.device_count()
    return World.of(gpus) if here.ranks == 1 < gpus else here


def _device(device: Device) -> Facts:
    return {
        "name": device.name,
        "flop_per_s": dict(device.flop_per_s),
        "memory_bytes": device.memory_bytes,
        "memory_bytes_per_s": device.memory_bytes_per_s,
    }


def _peers() -> list[list[bool]]:
    """Whether GPU i reaches the memory of GPU j; [] with fewer than two."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = range(count if count > 1 else 0)
    return [[a == b or torch.cuda.can_device_access_peer(a, b) for b in here] for a in here]


def _shared_memory() -> int | None:
    return shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None


def _of_versions() -> list[str]:
    found = []
    number = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if number < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        found.append(f"torch {torch.__version__} is too old: autopar needs {least} or newer")
    if not dist.is_available():
        found.append("this torch has no torch.distributed: nothing runs on several ranks")
    elif sys.platform != "linux":
        found.append(f"ranks were never tried on {sys.platform}: plan and verify work")
    if find_spec("triton") is None and torch.cuda.is_available():
        found.append('triton is not installed: backend="inductor" does not work on GPUs')
    if not torch.cuda.is_available() and shutil.which(os.environ.get("CXX", "g++")) is None:
        found.append('there is no C++ compiler: backend="inductor" does not work on CPUs')
    return found


def _of_devices() -> list[str]:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = (
            "this torch was built for CPUs" if not built else "torch finds no GPU (see nvidia-smi)"
        )
        return [
            f"{why}: ranks run on gloo; kernels of GPUs, NCCL, the measured peak and the "
            "synchronisation of a step are not looked at"
        ]
    found = []
    if dist.is_available() and not dist.is_nccl_available():
        found.append("this torch has no NCCL: ranks cannot send from GPUs")
    gpus = devices()
    names = list(dict.fromkeys(one["name"] for one in gpus))
    if len(names) > 1:
        found.append(f"the GPUs differ ({', '.join(names)}): plans take all of them for the first")
    strange = [one["name"] for one in gpus if one["known_as"] is None]
    if strange:
        found.append(
            f"the cost model knows nothing of a {strange[0]} and takes it for an A100 with its own "
            "memory: measure it with `torchrun … -m autopar calibrate`"
        )
    if any(float(one["capability"]) < 8 for one in gpus) and torch.version.hip is None:
        found.append("a GPU older than Ampere has no bfloat16 products and no flash attention")
    if not all(all(row) for row in _peers()):
        found.append("not every GPU reaches every other: links are taken for PCIe through the host")
    return found


def _of_environment() -> list[str]:
    found = []
    shared = _shared_memory()
    if shared is not None and shared < SHARED_BYTES and torch.cuda.is_available():
        found.append(
            f"/dev/shm has {shared / 2**20:,.0f} MiB: NCCL may fail to start; give a container "
            "--shm-size=1g or more"
        )
    if "OMP_NUM_THREADS" not in os.environ and not torch.cuda.is_available():
        found.append(
            f"OMP_NUM_THREADS is not set: each rank takes {torch.get_num_threads()} threads, and "
            "ranks of one machine wait for one another; set it to 1"
        )
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        found.append("CUDA_LAUNCH_BLOCKING is set: nothing overlaps, every time is too long")
    where = links()
    if where["file"]:
        found.append(f"{CALIBRATED} does not count: {where['file']}")
    if not where["calibrated"] and where["ranks"] > 1:
        found.append(
            "links are assumed, not measured: `torchrun … -m autopar calibrate` takes two minutes"
        )
    return found
