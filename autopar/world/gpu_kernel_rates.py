"""What GPUs' kernels reach, from published and measured figures: the nominal rates of gpus.py
until one calibrates.

`with_kernel_rates` takes a device of a data sheet and returns it with the shares that matmuls and
attention reach and the bandwidth of the other ops. Sources:

- attention on H100: arXiv 2407.08608 (FlashAttention-3), figures 5 and 6, TFLOP/s of cuDNN, which
  torch takes on Hopper, and of FlashAttention-2, which it takes on Ampere; 16,384 tokens, 2,048
  features. The backward was measured without a mask: a causal one is taken to lose as much of it as
  of the forward.
- attention on A100: arXiv 2307.08691 (FlashAttention-2), section 4: the forward reaches 73 % of the
  peak, the backward 63 %, without a mask; shorter sequences and masks lose what they lose on H100.
- matmuls and other ops on H100: benchmarks/model/gpu_rates.json, one H100 SXM5 under torch 2.11
  (`python -m benchmarks.model.gpu_rates`): 0.71 of the data sheet's bfloat16 from 17 GFLOP on, 0.59
  at 8.6, under load that the power limit throttles; elementwise ops and norms 0.75 of the memory's
  bandwidth. Devices with the same die are taken to reach the same, and other ops on A100 that share
  of its bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from autopar.world.hardware import Attention, Device

KEYS = (512, 1024, 2048, 4096, 8192, 16384)
_H100_PEAK = 989.4  # TFLOP/s that the figures below are shares of
_HOPPER = ("H100", "H100 PCIe", "H100 NVL", "H200", "GH200")
_AMPERE = ("A100", "A100-SXM4-80GB", "A100-PCIE-40GB", "A100 80GB PCIe")
_HOPPER_MATMULS = ((8.6e9, 0.59), (1.7e10, 0.71))  # FLOPs, and the share from there on
_OPS = 0.75  # of memory_bytes_per_s


# Mean of |modelled / published - 1| of `python -m benchmarks.model.published`, by device.
OFF_PUBLISHED = {"H100": 0.074, "A100-SXM4-80GB": 0.054, "A100": 0.068}


class Rates(NamedTuple):
    """TFLOP/s of attention at each of KEYS: forward without and with a causal mask, and backward
    without one.
    """

    forward: tuple[float, ...]
    causal: tuple[float, ...]
    backward: tuple[float, ...]

    def scaled(self, forward: float, backward: float) -> Rates:
        """Return these rates with the last forward and backward as given, the others in
        proportion.
        """
        f, b = forward / self.forward[-1], backward / self.backward[-1]
        return Rates(
            tuple(f * x for x in self.forward),
            tuple(f * x for x in self.causal),
            tuple(b * x for x in self.backward),
        )


# By head size.
CUDNN_ON_H100 = {
    64: Rates(
        (335, 373, 395, 408, 412, 413),
        (225, 288, 334, 363, 379, 388),
        (266, 348, 395, 417, 432, 433),
    ),
    128: Rates(
        (497, 574, 617, 609, 600, 595),
        (315, 410, 484, 518, 529, 539),
        (305, 408, 465, 499, 518, 516),
    ),
}
FLASH_2_ON_H100 = {
    64: Rates(
        (282, 306, 318, 321, 322, 324),
        (180, 229, 262, 284, 295, 299),
        (198, 238, 264, 279, 287, 291),
    ),
    128: Rates(
        (309, 350, 362, 368, 370, 370),
        (191, 260, 298, 319, 333, 335),
        (214, 260, 291, 310, 318, 322),
    ),
}
_A100_PEAK, _A100_FORWARD, _A100_BACKWARD = 312.0, 0.73, 0.63
FLASH_2_ON_A100 = {
    size: rates.scaled(
        _A100_PEAK * _A100_FORWARD * rates.forward[-1] / FLASH_2_ON_H100[128].forward[-1],
        _A100_PEAK * _A100_BACKWARD * rates.backward[-1] / FLASH_2_ON_H100[128].backward[-1],
    )
    for size, rates in FLASH_2_ON_H100.items()
}


def attention_points(
    by_head_size: Mapping[int, Rates], peak: float, slower: float = 1.0
) -> tuple[Attention, ...]:
    """Return bfloat16 attention as shares of `peak` TFLOP/s, of a kernel so many times slower."""
    points = []
    for size, rates in by_head_size.items():
        for place, keys in enumerate(KEYS):
            full, causal, backward = (line[place] / peak / slower for line in rates)
            masked = backward * causal / full
            points.append(Attention("bfloat16", False, keys, size, full, backward))
            points.append(Attention("bfloat16", True, keys, size, causal, masked))
    return tuple(points)


def with_kernel_rates(device: Device) -> Device:
    """Return the device with what is known of its kernels.

    >>> device = Device("H100", {"bfloat16": 989.4e12}, 80e9, 3.35e12)
    >>> with_kernel_rates(device).efficiency["bfloat16"][-1]
    (17000000000.0, 0.71)
    """
    if device.name not in (*_HOPPER, *_AMPERE):
        return device
    device = replace(device, op_bytes_per_s=_OPS * device.memory_bytes_per_s)
    if device.name in _AMPERE:
        return replace(device, attention=attention_points(FLASH_2_ON_A100, _A100_PEAK))
    halves = dict.fromkeys(("bfloat16", "float16"), _HOPPER_MATMULS)
    attention = attention_points(CUDNN_ON_H100, _H100_PEAK)
    return replace(device, efficiency={**device.efficiency, **halves}, attention=attention)
