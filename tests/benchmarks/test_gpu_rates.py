"""The recorded rates of a GPU are rated against the cost model of today."""

from __future__ import annotations

import json

import pytest

from autopar.world.gpus import GPUS
from benchmarks.model import gpu_rates


def test_every_recorded_part_is_modelled() -> None:
    recorded = json.loads(gpu_rates.RECORDED.read_text())
    facts = {"op", "dtype", "m", "k", "n", "b", "h", "s", "d", "elements", "rows", "width"}
    facts |= {"vocabulary", "fused"}
    for row in recorded["rows"]:
        times = gpu_rates.modelled(row, GPUS["H100"])
        assert set(times) == set(row) - facts, row
        assert all(row[part] > 0 and took > 0 for part, took in times.items())


def test_a_row_is_rated_by_what_was_measured() -> None:
    device = GPUS["H100"]
    row = {"op": "mm", "dtype": "bfloat16", "m": 8192, "k": 8192, "n": 8192}
    took = gpu_rates.modelled(row, device)["forward"]
    assert took == pytest.approx(1e3 * 2 * 8192**3 / (0.71 * 989.4e12), rel=0.01)
    row |= {"forward": 2 * took, "dx": took, "dw": took / 2}
    rated = gpu_rates.ratios({"gpu": "NVIDIA H100 80GB HBM3", "rows": [row]})
    ratios = {kind[-1]: ratio for kind, (ratio,) in rated.items()}
    assert ratios == pytest.approx({"forward": 2.0, "dx": 1.0, "dw": 0.5})
