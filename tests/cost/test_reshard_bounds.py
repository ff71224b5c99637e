"""Conversions as arrays against changes.steps, one pair of layouts at a time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar import World
from autopar.cost.communication import path_seconds
from autopar.cost.many_meshes import Meshes
from autopar.errors import LayoutError
from autopar.ir.layout import Element, I, Layout, P, R, S
from autopar.ir.mesh import Mesh
from autopar.ir.reshard import reshard_steps
from autopar.planner import bound
from autopar.planner.bounds.factor_graph import FIRST_SLOT, INVARIANT, PARTIAL, REPLICATED, Kind
from autopar.planner.bounds.reshard_costs import ReshardBounds

WORLD = World.preset("dgx-h100", ranks=32)
KIND = Kind((64, 32, 96), ((0, 1, 64), (1, 1, 32), (2, 1, 96)), Element(2, 2))
STATES = (INVARIANT, REPLICATED, PARTIAL, *range(FIRST_SLOT, FIRST_SLOT + 3))
BIG = 1e6


def reshard_bounds(
    meshes: list[Mesh], sources: tuple[int, ...], targets: tuple[int, ...]
) -> ReshardBounds:
    return ReshardBounds(KIND, frozenset(sources), frozenset(targets), Meshes(meshes, WORLD))


def table(bounds: ReshardBounds, axes: int, pull: bool = False) -> np.ndarray:
    """Seconds [source, target, mesh] between joint states, from push or from pull."""
    count = len(bounds.states) ** axes
    rows = []
    for place in range(count):
        start = np.full((count, bounds.meshes.mesh_count), BIG, np.float32)
        start[place] = 0
        shaped = start.reshape((len(bounds.states),) * axes + (-1,))
        across = bounds.pull(shaped) if pull else bounds.push(shaped)
        rows.append(across.reshape(count, -1))
    return np.stack(rows, axis=1 if pull else 0)


def layout(mesh: Mesh, states: tuple[int, ...]) -> Layout:
    """An outer axis has the outer digit of a dim that it shares."""
    left = list(KIND.shape)
    axis_states = []
    for axis, state in zip(mesh.axes, states, strict=True):
        if state < FIRST_SLOT:
            axis_states.append((I, R, P)[state])
            continue
        dim = state - FIRST_SLOT
        left[dim] //= axis.size
        axis_states.append(S(dim, left[dim]))
    return Layout(mesh, KIND.shape, tuple(axis_states))


def test_push_and_pull_are_one_table() -> None:
    meshes = [Mesh.parse("x4.y8"), Mesh.parse("x2.y16"), Mesh.parse("x16.y2")]
    reshards = reshard_bounds(meshes, STATES[:5], STATES[1:])
    np.testing.assert_allclose(
        table(reshards, 2), table(reshards, 2, pull=True), rtol=1e-5, atol=1e-9
    )


@pytest.mark.parametrize("text", ["x4.y8", "x2.y16"])
def test_no_path_of_layout_steps_costs_less(text: str) -> None:
    mesh = Mesh.parse(text)
    reshards = reshard_bounds([mesh], STATES, STATES)
    seconds = table(reshards, 2)[..., 0]
    joint = list(itertools.product(reshards.states, repeat=2))
    legal = [(n, layout(mesh, states)) for n, states in enumerate(joint)]
    for (i, source), (j, target) in itertools.product(legal, repeat=2):
        exact = path_seconds(reshard_steps(source, target), KIND.element, WORLD)
        assert seconds[i, j] <= exact * (1 + 1e-4) + 1e-12, (str(source), str(target))


def test_meshes_together_are_as_each_alone() -> None:
    meshes = [Mesh.parse("x4.y8"), Mesh.parse("x2.y16")]
    both = table(reshard_bounds(meshes, STATES, STATES), 2)
    for place, mesh in enumerate(meshes):
        alone = table(reshard_bounds([mesh], STATES, STATES), 2)
        np.testing.assert_array_equal(both[..., place], alone[..., 0])


def test_a_sample_of_paths_on_three_axes_costs_no_less() -> None:
    mesh = Mesh.parse("x4.y4.z2")
    reshards = reshard_bounds([mesh], STATES, STATES)
    pushed, pulled = table(reshards, 3)[..., 0], table(reshards, 3, pull=True)[..., 0]
    joint = list(itertools.product(reshards.states, repeat=3))
    pairs = np.random.default_rng(0).integers(len(joint), size=(1500, 2)).tolist()
    for i, j in pairs:
        try:
            source, target = layout(mesh, joint[i]), layout(mesh, joint[j])
        except LayoutError:
            continue
        exact = path_seconds(reshard_steps(source, target), KIND.element, WORLD)
        assert pushed[i, j] <= exact * (1 + 1e-4) + 1e-12, (str(source), str(target))
        assert pulled[i, j] <= exact * (1 + 1e-4) + 1e-12, (str(source), str(target))


def test_reshards_among_letters_cost_what_their_path_does() -> None:
    mesh = Mesh.parse("x4.y4.z2")
    reshards = reshard_bounds([mesh], STATES[:3], STATES[:3])
    seconds = table(reshards, 3)[..., 0]
    joint = [layout(mesh, states) for states in itertools.product(reshards.states, repeat=3)]
    for (i, source), (j, target) in itertools.product(enumerate(joint), repeat=2):
        exact = path_seconds(reshard_steps(source, target), KIND.element, WORLD)
        assert seconds[i, j] == pytest.approx(exact, rel=1e-5), (str(source), str(target))


@pytest.mark.parametrize("states", [(0, 1, 2), (2, 0, 2, 2, 1), (1, 1)])
def test_a_joint_state_costs_what_its_cheapest_option_does(states: tuple[int, ...]) -> None:
    """A joint state costs what its cheapest joint option does; an option what its state does."""
    known, generator = (0, 1, 2), np.random.default_rng(0)
    seconds = generator.random((len(states), len(states), 4), np.float32)
    expected = np.full((3, 3, 4), BIG, np.float32)
    for (i, a), (j, b) in itertools.product(enumerate(states), repeat=2):
        expected[a, b] = np.minimum(expected[a, b], seconds[i, j])
    np.testing.assert_array_equal(bound.least(seconds, states, known), expected)
    spread = bound.spread(expected, states, known)
    np.testing.assert_array_equal(spread, expected[np.ix_(states, states)])
