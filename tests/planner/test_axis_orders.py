"""Orders of axes on one atom: those that a search may leave out, and that its plan is as fast."""

from __future__ import annotations

import pytest
import torch

import models
from autopar.ir.layout import I
from autopar.ir.mesh import Mesh
from autopar.ir.program import Annotations, Atom
from autopar.ir.strategy import AxisChoice, Slot
from autopar.planner.axis_orders import NestingOrders
from autopar.planner.bound import near, pass_messages
from autopar.planner.constraint import Constraint
from autopar.planner.exact_search import search
from autopar.world import World
from traced import annotated

MESH = Mesh.parse("w2.x2.y2.z2")
BATCH = Slot("b", 0)


def orders(*sets: str, mesh: Mesh = MESH) -> list[str]:
    """Return the orders left of the first of these sets of axes, each of which splits the batch of
    a node of its own.
    """
    factors = {str(place): {"b": (Atom(7, 64),)} for place in range(len(sets))}
    notes = Annotations({}, {}, factors, frozenset(factors), frozenset())
    joint: dict[str, list[tuple[AxisChoice, ...]]] = {
        str(place): [tuple(BATCH if axis in axes else I for axis in mesh.names)]
        for place, axes in enumerate(sets)
    }
    left = NestingOrders(notes, mesh, joint).of_node("0")
    return ["".join(order) for order in left(BATCH, tuple(sets[0]))]


def test_a_set_that_is_outside_already_asks_for_no_further_order() -> None:
    assert orders("wxyz", "wx", "wxy") == ["wxyz"]


def test_each_other_set_is_outside_in_an_order() -> None:
    assert orders("wxyz", "wxz", "wx") == ["wxyz", "wxzy"]
    assert orders("wxyz", "yz", "z") == ["wxyz", "zywx"]
    assert orders("wxyz", "wz", "yz") == ["wxyz", "wzxy", "yzwx"]


def test_axes_that_others_alone_have_do_not_matter() -> None:
    assert orders("wy", "xy") == ["wy", "yw"]
    assert orders("wy", "xz") == ["wy"]


def test_the_order_of_stored_tensors_comes_second() -> None:
    assert orders("zxy", mesh=Mesh.parse("z2.x2.y2")) == ["zxy", "xyz"]


def test_the_most_used_sets_share_an_order() -> None:
    assert orders("wxyz", "y", "yz", "yz", "xy", "xyz") == ["wxyz", "yzxw", "yxzw"]


@pytest.mark.slow_cells("w2.x2.y2.z2")
@pytest.mark.parametrize("mesh", ["w2.x2.y2.z2", "w2.x4.y2.z4"])
def test_a_search_among_nesting_orders_is_as_fast(mesh: str) -> None:
    with torch.device("meta"):
        model = models.GptWithLogits(1024, 128, 768, 12, 1)
    ids = torch.ones(64, 128, dtype=torch.int64)
    program, on, rules = annotated(model, (ids, ids), {}), Mesh.parse(mesh), Constraint("auto")
    world = World.preset("dgx-h100", on.size)
    bound = pass_messages(program, [(on, rules)], world)
    bound.run()
    joint = near(bound, 1.0, 4)
    every = search(program, on, world, rules, joint)
    nesting = search(program, on, world, rules, joint, nesting_orders=True)
    assert nesting.seconds == pytest.approx(every.seconds, rel=1e-9)
