"""Ways with bends, as calibration finds them, in every place that reads them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.cost import communication
from autopar.cost.algorithms import Algorithm, _best, algorithms, flat_algorithms
from autopar.cost.many_meshes import Meshes
from autopar.cost.network import pattern
from autopar.errors import WorldError
from autopar.ir.layout import Traffic
from autopar.ir.mesh import Mesh
from autopar.world import Device, Level, Measured, World

CORE = Device("core", {"float32": 4e10}, 8e9, 1e10)
BENT = Measured("all_gather", ((2, 1),), 2, 1e-3, 0.0, bends=((1e4, 3e-8), (1e5, 1e-8)))
PLAIN = World((Level(2, 6e8, 1e-4), Level(2, 5e7, 1e-3)), CORE)
WORLD = replace(
    PLAIN,
    measured=(
        BENT,
        replace(BENT, kind="reduce_scatter", start_s=5e-4, bends=((2e4, 1e-8),)),
        Measured("all_reduce", ((2, 2),), 2, 2e-3, 1e-9, bends=((1e3, 5e-8),)),
        Measured("all_reduce", ((4, 1),), 4, 3e-3, 2e-9, bends=((1e3, 8e-8),)),
    ),
)
SIZES = np.array([0.0, 500.0, 1e3, 3e3, 1e4, 7e4, 1e5, 5e5, 1e6])


def test_a_byte_costs_more_from_each_bend_on() -> None:
    (algorithm,) = flat_algorithms(WORLD, "all_gather", ((2, 1),))
    expected = np.interp(SIZES, [0, 1e4, 1e5, 1e6], [1e-3, 1e-3, 3.7e-3, 39.7e-3])
    assert [algorithm.seconds(size) for size in SIZES] == pytest.approx(expected)
    assert algorithm.all_seconds(SIZES) == pytest.approx(expected)


def test_two_levels_add_up_bend_by_bend() -> None:
    """A sum over four: scatter in the node, sum half across, gather in the node."""
    by_name = {
        algorithm.name: algorithm for algorithm in algorithms(WORLD, "all_reduce", ((4, 1),))
    }
    stages = [
        flat_algorithms(WORLD, kind, digits)[0]
        for kind, digits in (
            ("reduce_scatter", ((2, 1),)),
            ("all_reduce", ((2, 2),)),
            ("all_gather", ((2, 1),)),
        )
    ]
    for size in SIZES:
        scatter, across, gather = stages
        expected = scatter.seconds(size) + across.seconds(size / 2) + gather.seconds(size)
        assert by_name["two-level"].seconds(size) == pytest.approx(expected)


def test_what_is_never_the_fastest_is_left_out() -> None:
    low = Algorithm("measured", (), 1e-3, 0.0, ((1e4, 1e-8),))
    high = Algorithm("two-level", (2,), 1.5e-3, 0.0, ((1e4, 2e-8),))
    later = Algorithm("two-level", (4,), 2e-3, 1e-9)
    assert _best([low, high, later]) == (low, later)
    assert _best([high, low]) == (low,)


@pytest.mark.parametrize("contention", [0.0, 0.4])
@pytest.mark.parametrize("kind", ["all_gather", "all_reduce", "reduce_scatter", "all_to_all"])
def test_every_reader_says_the_same(kind: str, contention: float) -> None:
    """One price, an array of sizes, and an array of meshes."""
    world = replace(WORLD, contention=contention, launch_s=1e-2)
    meshes = [Mesh.parse("a2.b2"), Mesh.parse("b4.a1")]
    whole = np.stack([SIZES, SIZES])
    for axes in ((0,), (1,), (0, 1)):
        rated = Meshes(meshes, world).seconds(kind, axes, whole)
        for mesh, row in zip(meshes, rated, strict=True):
            names = tuple(mesh.axes[a].name for a in axes)
            array = communication.seconds(world, pattern(mesh, names), kind, SIZES)
            alone = [
                communication.collective_cost(
                    Traffic(kind, int(size)), names, mesh, 1, world
                ).seconds
                for size in SIZES
            ]
            assert row == pytest.approx(array) and alone == pytest.approx(array)


def test_a_step_pays_for_contention_at_every_start() -> None:
    """One in two levels starts three times; not where there is nobody to meet."""
    free = replace(WORLD, launch_s=1e-3)
    world, mesh = replace(free, contention=0.4), Mesh.parse("a4.b1")
    for size in (10, 10**6):
        traffic = Traffic("all_reduce", size)
        plain, late = (
            communication.collective_cost(traffic, ("a",), mesh, 1, w) for w in (free, world)
        )
        starts = 3 if plain.algorithm.inside else 1
        assert late.algorithm.name == plain.algorithm.name
        assert late.seconds == pytest.approx(plain.seconds + starts * 4e-4)
        assert communication.collective_cost(traffic, ("b",), mesh, 1, world).seconds == 0


@pytest.mark.parametrize(
    ("bends", "message"),
    [
        (((1e5, 1e-8), (1e4, 1e-8)), "write them in rising order"),
        (((1e4, -1e-8),), "seconds per byte from 10000 bytes on is -1e-08"),
        (((-1.0, 1e-8),), "Measured.bends: bytes is -1.0"),
    ],
)
def test_bends_that_cannot_be_are_refused(
    bends: tuple[tuple[float, float], ...], message: str
) -> None:
    with pytest.raises(WorldError, match=message):
        replace(BENT, bends=bends)
