"""What of autopar works on this machine and what does not, each with the reason and the remedy.

Example: Ability("ranks on GPUs (NCCL)", False, "this torch was built for CPUs") is one line of
`autopar doctor`. machine.py puts them among its facts.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.distributed as dist

from autopar._compat import torch_versions

# What needs a package that autopar does not bring, and the extra that installs it ("": none does).
_PACKAGES = (
    ("a config.json as target", "transformers", "hf"),
    ("pages of plan --report and sweep --plot", "plotly", "report"),
    ("autopar.fabric_strategy()", "lightning_fabric", ""),
    ("autopar.prepare(accelerator, …)", "accelerate", ""),
    ("weights of safetensors", "safetensors", ""),
)
_LEAST_CAPABILITY = (8, 0)  # Ampere: bfloat16 matmuls, flash attention


@dataclass(frozen=True)
class Ability:
    """Something that autopar does; `why` it does not work here, with a remedy, "" where it does."""

    what: str
    works: bool
    why: str = ""


def abilities() -> list[Ability]:
    """Return what works here and what does not.

    Example: [a.what for a in abilities() if not a.works] on a laptop begins with "ranks on GPUs".
    """
    faults = [
        ("plan, sweep, verify, trace, graph", torch_versions.fault(torch.__version__)),
        ("ranks on CPUs (gloo)", _no_gloo()),
        ("ranks on GPUs (NCCL)", _no_nccl()),
        ("bfloat16 matmuls and flash attention on GPUs", _old_gpu()),
        ("the peak of a step and waits of the host, measured", _no_gpu()),
        ('backend="inductor"', _no_inductor()),
        *_missing_packages(),
    ]
    return [Ability(what, not why, why) for what, why in faults]


def _missing_packages() -> Iterator[tuple[str, str]]:
    for what, package, extra in _PACKAGES:
        name = f"'autopar[{extra}]'" if extra else package.replace("_", "-")
        missing = find_spec(package) is None
        yield what, f"{package} is not installed: pip install {name}" if missing else ""


def _no_gloo() -> str:
    if not dist.is_available():
        return "this torch has no torch.distributed: install one that has"
    if not dist.is_gloo_available():
        return "this torch was built without gloo"
    if sys.platform != "linux":
        return f"ranks were never tried on {sys.platform}: plan and verify work"
    return ""


def _no_gpu() -> str:
    if torch.cuda.is_available():
        return ""
    if not torch.version.cuda and not torch.version.hip:
        return "this torch was built for CPUs: install one for your GPUs, if you have some"
    return "torch finds no GPU: see nvidia-smi, CUDA_VISIBLE_DEVICES and the driver's version"


def _no_nccl() -> str:
    if _no_gpu():
        return _no_gpu()
    if not dist.is_available() or not dist.is_nccl_available():
        return "this torch has no NCCL: ranks cannot send from GPUs"
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if ranks > gpus:
        return f"{ranks} ranks of this node see {gpus} GPUs: start one rank for each GPU"
    return ""


def _old_gpu() -> str:
    if _no_gpu():
        return _no_gpu()
    if torch.version.hip is not None:
        return ""
    numbers = range(torch.cuda.device_count())
    old = [n for n in numbers if torch.cuda.get_device_capability(n) < _LEAST_CAPABILITY]
    return f"GPU {old[0]} is older than Ampere: plan for float16 or float32" if old else ""


def _no_inductor() -> str:
    if torch.cuda.is_available():
        return "" if find_spec("triton") else "triton is not installed: pip install triton"
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "there is no C++ compiler: install g++, or name one in CXX"
    return ""
