"""GPUs by name, with their rates and memory from published figures.

Example: GPUS["H100"]. GPUS holds single devices under the names that their drivers give, at the
dense rates of the makers' data sheets (tensor cores). float32 is the plain rate: torch does not use
TF32 for matmuls unless asked to. gpu_kernel_rates.py says which share of them kernels reach.
"""

from __future__ import annotations

import re

from autopar.world.gpu_kernel_rates import with_kernel_rates
from autopar.world.hardware import Device

# The share of the data sheet's rate that matmuls reach, and the seconds to start a kernel: nominal
# until one calibrates; gpu_kernel_rates.py knows more of some GPUs. AxoNN's authors measured 280 of
# 312 TFLOP/s on A100, 813 of 989 on H100 and 125 of 191.5 on a die of MI250X (arXiv 2502.08145).
_REACHED = {"MI250X": 0.65}
_REACHED_BY_MOST = 0.8
_LAUNCH_S = 3e-6


def _gpu(
    name: str, half: float, single: float, double: float, memory: float, rate: float
) -> Device:
    """Return a GPU from its TFLOP/s by precision, its GB of memory, and its GB/s."""
    tflops = {"bfloat16": half, "float16": half, "float32": single, "float64": double}
    share = ((1.0, _REACHED.get(name, _REACHED_BY_MOST)),)
    device = Device(
        name,
        {dtype: rate * 1e12 for dtype, rate in tflops.items()},
        memory * 1e9,
        rate * 1e9,
        dict.fromkeys(tflops, share),
        _LAUNCH_S,
    )
    return with_kernel_rates(device)


# NVIDIA data sheets of each product (V100 2020; A100, A40, A10 2021; H100, H100 NVL, H200, GH200
# 2023; HGX B200 and GB200 NVL72 2024; HGX B300 and GB300 NVL72 2025; L4, L40, L40S 2023;
# whitepapers of Turing 2018, Ampere GA102 2020 and Ada 2022: half precision with float32
# accumulation; H20 as its resellers give it), AMD Instinct MI250X (one of its two dies, which is
# one device), MI300X.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("V100", 125, 15.7, 7.8, 16, 900),
        _gpu("T4", 65, 8.1, 0.25, 16, 320),
        _gpu("Quadro RTX 6000", 130.5, 16.3, 0.51, 24, 672),
        _gpu("RTX 3090", 71, 35.6, 0.56, 24, 936),
        _gpu("A40", 149.7, 37.4, 0.58, 48, 696),
        _gpu("A10", 125, 31.2, 0.98, 24, 600),
        _gpu("A100", 312, 19.5, 19.5, 40, 1555),
        _gpu("A100-SXM4-80GB", 312, 19.5, 19.5, 80, 2039),
        _gpu("A100-PCIE-40GB", 312, 19.5, 19.5, 40, 1555),
        _gpu("A100 80GB PCIe", 312, 19.5, 19.5, 80, 1935),
        _gpu("RTX 4090", 165.2, 82.6, 1.3, 24, 1008),
        _gpu("RTX 6000 Ada", 364.2, 91.1, 1.4, 48, 960),
        _gpu("L4", 121, 30.3, 0.49, 24, 300),
        _gpu("L40", 181, 90.5, 1.4, 48, 864),
        _gpu("L40S", 362, 91.6, 1.4, 48, 864),
        _gpu("H100", 989.4, 66.9, 66.9, 80, 3350),
        _gpu("H100 PCIe", 756, 51.2, 51.2, 80, 2000),
        _gpu("H100 NVL", 835.5, 60, 60, 94, 3900),
        _gpu("H20", 148, 44, 1, 96, 4000),
        _gpu("H200", 989.4, 66.9, 66.9, 141, 4800),
        _gpu("GH200", 989.4, 66.9, 66.9, 96, 4000),
        _gpu("B200", 2250, 75, 37, 180, 8000),
        _gpu("GB200", 2500, 80, 40, 186, 8000),
        _gpu("B300", 2250, 75, 1.2, 270, 8000),
        _gpu("GB300", 2500, 80, 1.4, 279, 8000),
        _gpu("MI250X", 191.5, 47.9, 47.9, 64, 1638),
        _gpu("MI300X", 1307, 163.4, 163.4, 192, 5300),
    )
}

# bytes/s each way of all of a GPU's links together (NVLink 2 to 5, Infinity Fabric), where these
# reach every other GPU of the node. PCIe cards may have a bridge to one neighbour, which cannot be
# seen: they get PCIe's rate.
PEER_BYTES_PER_S = {
    "V100": 150e9,
    "A100": 300e9,
    "A100-SXM4-80GB": 300e9,
    "H100": 450e9,
    "H20": 450e9,
    "H200": 450e9,
    "GH200": 450e9,
    "B200": 900e9,
    "GB200": 900e9,
    "B300": 900e9,
    "GB300": 900e9,
    "MI250X": 200e9,
    "MI300X": 448e9,
}
# The share of that, and of a network card's rate, that NCCL's large collectives reach: 350 to 360
# of 450 GB/s in a node of H100 (github.com/NVIDIA/nccl, issue 1281), 340 of 400 between such nodes
# (issue 1218), 225 of 300 over four A100 and 80 of 100 from such a node (arXiv 2305.13525).
NCCL_REACHES = 0.8
PCIE_BYTES_PER_S = 31.5e9  # PCIe 4.0 × 16: 16 GT/s × 16 lanes × 128/130 / 8 bits
_PCIE_5 = ("H100 PCIe", "H100 NVL", "H200")  # twice that

# By AMD's name of the instruction set, which ROCm gives where a driver's name does not help.
_ARCHITECTURES = {"gfx90a": "MI250X", "gfx942": "MI300X"}
LIKE = "A100"  # what an unknown GPU is planned as


def known(driver_name: str, architecture: str = "") -> str | None:
    """Return the name in GPUS for a driver's name such as "NVIDIA H100 80GB HBM3": the longest that
    matches whole words but for a last letter (an A10G is an A10, an A1000 is no A100); else the one
    for ROCm's architecture, such as "gfx942:sramecc+:xnack-"; else None.

    >>> known("NVIDIA L40S"), known("NVIDIA RTX A1000"), known("AMD Radeon Graphics", "gfx942")
    ('L40S', None, 'MI300X')
    """
    matches = [n for n in GPUS if re.search(rf"\b{re.escape(n)}[A-Z]?\b", driver_name)]
    return max(matches, key=len, default=_ARCHITECTURES.get(architecture.split(":")[0]))


def pcie_bytes_per_s(name: str | None) -> float:
    """Return the bytes/s each way of the PCIe slot of a GPU, by its name in GPUS."""
    return 2 * PCIE_BYTES_PER_S if name in _PCIE_5 else PCIE_BYTES_PER_S
