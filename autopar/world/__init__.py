"""The hardware that a plan is for: how many ranks, what a device computes, what links carry.

A `World` (world.py) holds a `Device` and its `Level`s or `Link`s (hardware.py). It comes from a
preset or from what this process sees (machines.py), or from a file that calibration wrote or a
person edited (json_file.py). gpus.py has the rates and memory of GPUs, gpu_kernel_rates.py the
share of them that kernels reach. Running ranks talk to one another by collectives (ranks.py) or
through the store of torch.distributed (store.py).
"""

from autopar.world.hardware import (
    KINDS,
    Attention,
    Copied,
    Device,
    Form,
    KernelTimes,
    Level,
    Link,
    Measured,
)
from autopar.world.machines import PRESETS
from autopar.world.world import World

__all__ = [
    "KINDS",
    "PRESETS",
    "Attention",
    "Copied",
    "Device",
    "Form",
    "KernelTimes",
    "Level",
    "Link",
    "Measured",
    "World",
]
