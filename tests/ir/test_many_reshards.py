"""Reshards of many pairs of layouts at once are the paths of `reshard_steps`, to the last digit."""

from __future__ import annotations

import itertools
import random

import pytest

from autopar.cost.communication import path_terms, terms_between
from autopar.errors import LayoutError
from autopar.ir.layout import ORDER, Element, I, Layout, P, R, S
from autopar.ir.many_reshards import steps_between
from autopar.ir.mesh import Mesh
from autopar.ir.reshard import reshard_steps
from autopar.world import World

MESHES = {"x4": (8, 12), "x2.y3": (12, 36), "x2.y2.z3": (12, 24, 2), "w2.x2.y2.z2": (16, 8, 4)}


def layouts(mesh: Mesh, shape: tuple[int, ...], count: int, seed: int) -> list[Layout]:
    """Up to `count` legal layouts, drawn at random, with digits of every stride."""
    draw = random.Random(seed)
    strides = [(d, n) for d, size in enumerate(shape) for n in range(1, size) if size % n == 0]
    distinct: dict[Layout, None] = {}
    for _ in range(100 * count):
        states = [draw.choice([I, R, P, *[S(*draw.choice(strides))] * 4]) for _ in mesh.axes]
        try:
            distinct[Layout(mesh, shape, tuple(states))] = None
        except LayoutError:
            continue
    return [*distinct][:count]


def bits(mesh: Mesh, axes: tuple[str, ...]) -> int:
    return sum(1 << mesh.names.index(axis) for axis in axes)


@pytest.mark.parametrize("name", MESHES)
def test_every_step_is_that_of_its_path(name: str) -> None:
    mesh, shape = Mesh.parse(name), MESHES[name]
    sources, targets = layouts(mesh, shape, 25, 0), layouts(mesh, shape, 24, 1)
    assert len(targets) > 5
    paths: list[list[tuple[str, int, int]]] = [[] for _ in range(len(sources) * len(targets))]
    for steps in steps_between(sources, targets):
        for pair, kind, axes, elements in zip(*(x.tolist() for x in steps), strict=True):
            paths[pair].append((ORDER[kind], axes, elements))
    for path, (source, target) in zip(paths, itertools.product(sources, targets), strict=True):
        assert path == [
            (step.kind, bits(mesh, step.axes), max(step.before.local_size, step.after.local_size))
            for step in reshard_steps(source, target)
        ], (str(source), str(target))


@pytest.mark.parametrize("element", [Element(2, 2), Element(4, 0), Element(2, 4.0, 1.0, True)])
def test_seconds_are_those_of_each_path_to_the_last_digit(element: Element) -> None:
    world = World.preset("dgx-h100", ranks=16)
    mesh, shape = Mesh.parse("w2.x2.y2.z2"), (1024, 4096, 16)
    sources, targets = layouts(mesh, shape, 20, 2), layouts(mesh, shape, 21, 3)
    term_table = terms_between(sources, targets, element, world)
    for i, j in itertools.product(range(len(sources)), range(len(targets))):
        expected = path_terms(reshard_steps(sources[i], targets[j]), element, world)
        assert tuple(term_table[i, j].tolist()) == expected
