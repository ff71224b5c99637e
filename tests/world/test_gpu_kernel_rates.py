"""The nominal rates of GPUs' kernels: what the sources say, as shares of the peak."""

from __future__ import annotations

import json

import pytest
import torch

from autopar.cost.compute import attention_share, efficiency, op_bytes_per_s
from autopar.ir.sharding_rule import Attends
from autopar.world.gpu_kernel_rates import FLASH_2_ON_A100, KEYS
from autopar.world.gpus import GPUS
from benchmarks.model import gpu_rates


@pytest.mark.parametrize(
    ("gpu", "keys", "size", "causal", "tflops"),
    [
        ("H100", 4096, 128, True, 518),  # as in figure 5 of arXiv 2407.08608
        ("H100", 16384, 64, False, 413),
        ("H200", 512, 128, True, 315),
        ("A100-SXM4-80GB", 16384, 128, False, 0.73 * 312),  # section 4 of arXiv 2307.08691
    ],
)
def test_attention_is_as_fast_as_published(
    gpu: str, keys: int, size: int, causal: bool, tflops: float
) -> None:
    device = GPUS[gpu]
    share = attention_share(Attends(keys, size, causal), False, torch.bfloat16, device)
    assert share is not None
    assert share * device.rate(torch.bfloat16) == pytest.approx(tflops * 1e12, rel=1e-3)


def test_masks_and_short_sequences_cost_most() -> None:
    for name in ("H100", "A100"):
        for backward in (False, True):
            shares = [
                attention_share(Attends(keys, size, causal), backward, torch.bfloat16, GPUS[name])
                for size in (64, 128)
                for causal in (True, False)
                for keys in KEYS
            ]
            assert all(0.1 < share < 0.75 for share in shares if share is not None)
            assert len(shares) == 24 and None not in shares
    assert FLASH_2_ON_A100[64].backward[-1] < FLASH_2_ON_A100[128].backward[-1] == 0.63 * 312


def test_a_gpu_of_which_nothing_is_known_computes_as_its_data_sheet_says() -> None:
    assert GPUS["V100"].attention == () and op_bytes_per_s(GPUS["V100"]) == 900e9
    assert efficiency(1e12, torch.float16, GPUS["V100"]) == 0.8


def test_matmuls_of_an_h100_take_what_was_measured() -> None:
    """Large products of gpu_rates.json, in the median within a twentieth."""
    recorded = json.loads(gpu_rates.RECORDED.read_text())
    kind = ("mm", "bfloat16", "10 GFLOP and more", "forward")
    ratios = sorted(gpu_rates.ratios(recorded)[kind])
    assert ratios[len(ratios) // 2] == pytest.approx(1.0, abs=0.05)
