"""GPUs by the name that their driver gives: makers' data sheets, dense rates of the tensor cores.

float32 is the plain rate: torch does not use TF32 for matrix products unless asked to.
"""

from __future__ import annotations

from .hardware import Device

# What products reach of the data sheet's rate, and seconds to start a kernel: nominal until one
# calibrates. AxoNN's authors measured 280 of 312 TFLOP/s on A100, 813 of 989 on H100 and 125 of
# 191.5 on a die of MI250X (arXiv 2502.08145).
_REACHED = {"MI250X": 0.65}
_REACHED_BY_MOST = 0.8
_LAUNCH_S = 3e-6


def _gpu(
    name: str, half: float, single: float, double: float, memory: float, rate: float
) -> Device:
    """TFLOP/s, GB, GB/s."""
    tflops = {"bfloat16": half, "float16": half, "float32": single, "float64": double}
    share = ((1.0, _REACHED.get(name, _REACHED_BY_MOST)),)
    return Device(
        name,
        {dtype: rate * 1e12 for dtype, rate in tflops.items()},
        memory * 1e9,
        rate * 1e9,
        dict.fromkeys(tflops, share),
        _LAUNCH_S,
    )


# NVIDIA data sheets of each product (V100 2020; A100 2021; H100, H200, GH200 2023; HGX B200 and
# GB200 NVL72 2024; Ada whitepaper 2022: half precision with float32 accumulation), AMD Instinct
# MI250X (one of its two dies, which is one device), MI300X.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("V100", 125, 15.7, 7.8, 16, 900),
        _gpu("T4", 65, 8.1, 0.25, 16, 320),
        _gpu("A10", 125, 31.2, 0.98, 24, 600),
        _gpu("A100", 312, 19.5, 19.5, 40, 1555),
        _gpu("A100-SXM4-80GB", 312, 19.5, 19.5, 80, 2039),
        _gpu("RTX 4090", 165.2, 82.6, 1.3, 24, 1008),
        _gpu("L40S", 362, 91.6, 1.4, 48, 864),
        _gpu("H100", 989.4, 66.9, 66.9, 80, 3350),
        _gpu("H100 PCIe", 756, 51.2, 51.2, 80, 2000),
        _gpu("H200", 989.4, 66.9, 66.9, 141, 4800),
        _gpu("GH200", 989.4, 66.9, 66.9, 96, 4000),
        _gpu("B200", 2250, 75, 37, 180, 8000),
        _gpu("GB200", 2500, 80, 40, 186, 8000),
        _gpu("MI250X", 191.5, 47.9, 47.9, 64, 1638),
        _gpu("MI300X", 1307, 163.4, 163.4, 192, 5300),
    )
}

# bytes/s each way of all of a GPU's links together (NVLink 2 to 5, Infinity Fabric).
PEER_BYTES_PER_S = {
    "V100": 150e9,
    "A100": 300e9,
    "A100-SXM4-80GB": 300e9,
    "H100": 450e9,
    "H200": 450e9,
    "GH200": 450e9,
    "B200": 900e9,
    "GB200": 900e9,
    "MI250X": 200e9,
    "MI300X": 448e9,
}
PCIE_BYTES_PER_S = 31.5e9  # PCIe 4.0 × 16: 16 GT/s × 16 lanes × 128/130 / 8 bits


def known(driver_name: str) -> str | None:
    """The entry of GPUS for a name such as "NVIDIA H100 80GB HBM3"; the longest that fits."""
    fits = [name for name in GPUS if name in driver_name]
    return max(fits, key=len, default=None)
