"""The meshes that are searched: none that costs what another one costs, and none that does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

import brute
from autopar.cost.many_meshes import distinct_meshes
from autopar.ir.mesh import Axis, Mesh
from autopar.planner.bound import lower_bounds
from autopar.planner.constraint import Constraint
from autopar.planner.solve import GAP
from autopar.planner.space import candidates, searched_candidates
from autopar.tools.targets import Batch, resolve
from autopar.world import Measured, World
from random_nets import random_problem
from traced import annotated

NODES = World.preset("dgx-h100", 64)  # eight nodes of eight


def names(meshes: list[str], world: World) -> list[str]:
    return [str(mesh) for mesh in distinct_meshes([Mesh.parse(text) for text in meshes], world)]


@pytest.mark.parametrize(
    ("world", "meshes", "distinct"),
    [
        (World.preset("dgx-h100", 8), ["x2.y4", "x4.y2"], ["x2.y4"]),
        (NODES, ["x2.y4.z8", "x4.y2.z8", "x2.y8.z4"], ["x2.y4.z8", "x2.y8.z4"]),
        (NODES, ["x2.y32", "x32.y2"], ["x2.y32", "x32.y2"]),
        (NODES, ["w2.x4.y2.z4", "w4.x2.y4.z2", "w2.x2.y4.z4"], ["w2.x4.y2.z4", "w2.x2.y4.z4"]),
    ],
)
def test_orders_of_axes_with_equal_links_are_one_mesh(
    world: World, meshes: list[str], distinct: list[str]
) -> None:
    assert names(meshes, world) == distinct


def test_axes_that_were_measured_apart_are_apart() -> None:
    """Ranks of a node that share a switch may be nearer than its links say."""
    world = World.preset("dgx-h100", 8)
    near = Measured("all_reduce", ((4, 1),), 4, 1e-6, 1e-12)
    assert names(["x2.y4", "x4.y2"], replace(world, measured=(near,))) == ["x2.y4", "x4.y2"]


def test_a_mesh_that_is_left_out_promises_no_gain_over_the_one_that_stands_for_it() -> None:
    """By the least step over everything, for random programs. What is left is which of two axes
    that share a dim is the outer one.
    """
    merged = 0
    for seed in range(20):
        program, mesh, world = random_problem(seed)
        sizes = [axis.size for axis in mesh.axes][::-1]
        turned = Mesh(tuple(map(Axis, mesh.names, sizes)))
        if turned == mesh or len(distinct_meshes([mesh, turned], world)) == 2:
            continue
        merged += 1
        here, there = (brute.least(program, each, world) for each in (mesh, turned))
        assert there == pytest.approx(here, rel=GAP), seed
    assert merged > 5


@pytest.mark.slow
def test_bounds_of_meshes_that_are_left_out_are_those_of_others() -> None:
    """For a decoder on two levels of links: no bound is lost."""
    target = resolve("gpt2", Batch(64, 1024), 64)
    program = annotated(target.model, target.inputs, {})
    every = candidates("auto", NODES.ranks, program)
    searched = searched_candidates("auto", NODES, program)
    assert len(searched) < len(every) and all(rules == Constraint("auto") for _, rules in searched)
    bounds = [round(seconds * 1e6) for seconds in lower_bounds(program, every, NODES)]
    left = [round(seconds * 1e6) for seconds in lower_bounds(program, searched, NODES)]
    assert set(left) == set(bounds)
