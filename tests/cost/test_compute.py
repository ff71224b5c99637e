"""What computing costs: the roofline on numbers and on arrays, efficiencies, whole nodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from autopar.cost.compute import efficiency, matmul_seconds, node_seconds
from autopar.errors import WorldError
from autopar.ir.layout import Layout, R
from autopar.ir.mesh import Mesh
from autopar.ir.sharding_rule import OpShardingRule
from autopar.ir.strategy import Strategy
from autopar.world import Device, Level, World

POINTS = ((1e6, 0.01), (1e8, 0.1), (1e9, 0.8))
CARD = Device("card", {"bfloat16": 1e14, "float32": 1e13}, 8e10, 1e12, {"float32": POINTS}, 1e-6)
PLAIN = Device("plain", {"float32": 1e12}, 8e9, 1e10)


def test_a_roofline_by_hand() -> None:
    assert matmul_seconds(1e12, 1e9, torch.float32, PLAIN) == pytest.approx(1.0)
    assert matmul_seconds(1e9, 1e10, torch.float32, PLAIN) == pytest.approx(1.0)
    assert matmul_seconds(0.0, 1e10, torch.float32, PLAIN) == pytest.approx(1.0)
    # 80 % of 1e13 FLOP/s, and the launch
    assert matmul_seconds(8e12, 1.0, torch.float32, CARD) == pytest.approx(1.0 + 1e-6)


def test_ops_that_are_no_products_have_a_bandwidth_of_their_own() -> None:
    device = replace(PLAIN, op_bytes_per_s=5e9)
    assert matmul_seconds(0.0, 1e10, torch.float32, device) == pytest.approx(2.0)
    assert matmul_seconds(1e9, 1e10, torch.float32, device) == pytest.approx(1.0)


def test_each_dtype_has_its_own_rate() -> None:
    ratio = matmul_seconds(1e15, 0.0, torch.float32, CARD) - 1e-6
    assert ratio == pytest.approx(10 * (matmul_seconds(1e15, 0.0, torch.bfloat16, CARD) - 1e-6))
    assert matmul_seconds(1e12, 0.0, torch.float16, CARD) == matmul_seconds(
        1e12, 0.0, torch.bfloat16, CARD
    )


def test_efficiency_is_a_line_on_logarithmic_axes_and_flat_beyond() -> None:
    assert efficiency(1e7, torch.float32, CARD) == pytest.approx(0.1**1.5)
    assert efficiency(1.0, torch.float32, CARD) == pytest.approx(0.01)
    assert efficiency(0.0, torch.float32, CARD) == pytest.approx(0.01)
    assert efficiency(1e20, torch.float32, CARD) == pytest.approx(0.8)
    assert efficiency(1e20, torch.float32, PLAIN) == 1.0
    device = Device("one", {"float32": 1e12}, 8e9, 1e10, {"float32": ((5.0, 0.5),)})
    assert efficiency(np.array([1.0, 1e9]), torch.float32, device).tolist() == pytest.approx(
        [0.5] * 2
    )


@pytest.mark.parametrize(
    "device",
    [CARD, PLAIN, replace(PLAIN, op_bytes_per_s=5e9)],
    ids=["calibrated", "nominal", "other ops"],
)
def test_arrays_give_what_numbers_give(device: Device) -> None:
    flops = np.array([0.0, 1.0, 1e6, 3e7, 1e9, 1e13])
    moved = np.array([1e9, 0.0, 1e3, 1e8, 1e6, 1e9])
    seconds = matmul_seconds(flops, moved, torch.float32, device)
    each = [matmul_seconds(float(f), float(b), torch.float32, device) for f, b in zip(flops, moved)]
    assert seconds == pytest.approx(np.array(each), rel=1e-12)
    table = matmul_seconds(flops.reshape(2, 3), moved.reshape(2, 3), torch.float32, device)
    assert table == pytest.approx(seconds.reshape(2, 3))


def test_a_node_and_its_backward() -> None:
    def unsplit(*shape: int) -> Layout:
        return Layout(Mesh.parse("x2"), shape, (R,))

    rule = OpShardingRule((), (), {}, flops=2.0 * 4 * 6 * 8)
    strategy = Strategy((), (unsplit(4, 6), None, unsplit(6, 8)), (unsplit(4, 8),), ranks=2)
    world = World((Level(2, 1e9, 0),), CARD)
    once = matmul_seconds(2.0 * 4 * 6 * 8 / 2, 2.0 * (24 + 48 + 32), torch.bfloat16, CARD)
    assert node_seconds(rule, strategy, torch.bfloat16, False, world) == pytest.approx(once)
    assert node_seconds(rule, strategy, torch.bfloat16, True, world) == pytest.approx(3 * once)


def test_efficiencies_that_cannot_be() -> None:
    def device(points: object, dtype: str = "float32") -> Device:
        return Device("d", {"float32": 1.0}, 1.0, 1.0, {dtype: points})  # type: ignore[dict-item]

    with pytest.raises(WorldError, match=r"efficiency\['float32'\] has points .* rising order"):
        device(((2.0, 0.5), (1.0, 0.5)))
    with pytest.raises(WorldError, match=r"efficiency\['float32'\]: share is 0"):
        device(((2.0, 0.0),))
    with pytest.raises(WorldError, match="no dtype 'floot'"):
        device((), "floot")
    with pytest.raises(WorldError, match=r"Device\.launch_s is -1"):
        Device("d", {"float32": 1.0}, 1.0, 1.0, launch_s=-1)
