import itertools
import math

import pytest

from autopar.errors import WorldError
from autopar.ir.mesh import Axis, Mesh, Within, group_name, group_ranks
from autopar.ops.process_groups import connect


def test_reads_back_what_it_writes():
    for text in ["", "data2", "data2.x4.d_z3", "z1.x10"]:
        assert str(Mesh.parse(text)) == text
    assert Mesh.parse("data2.x4").axes == (Axis("data", 2), Axis("x", 4))


def test_ranks_are_row_major():
    mesh = Mesh.parse("data2.x3.y4")
    assert mesh.size == 24
    assert mesh.names == ("data", "x", "y")
    assert mesh.sizes == {"data": 2, "x": 3, "y": 4}
    assert [mesh.stride(name) for name in mesh.names] == [12, 4, 1]
    for rank in range(24):
        place = mesh.coordinate(rank)
        assert place["data"] * 12 + place["x"] * 4 + place["y"] == rank


def test_groups_in_mesh_order_whatever_the_order_of_the_axes():
    mesh = Mesh.parse("data2.x3.y4")
    assert mesh.group(["x"], 14) == [14, 18, 22]
    assert mesh.group(["y", "data"], 5) == [4, 5, 6, 7, 16, 17, 18, 19]
    assert mesh.group(mesh.names, 23) == list(range(24))
    assert mesh.group((), 7) == [7]


def test_one_rank_has_no_axes():
    mesh = Mesh()
    assert (mesh.size, mesh.names, mesh.coordinate(0), mesh.group((), 0)) == (1, (), {}, [0])


def test_group_names_are_free_of_the_rank():
    assert group_name("data2.x2", ("data", "x")) == "autopar/data2.x2/data.x"


def test_group_names_lead_back_to_their_ranks():
    """For every part of every group: members differ in one digit of the place."""
    mesh = Mesh.parse("data2.x6.y2")
    for axes in (["x"], ["data", "x"], ["data", "y"], list(mesh.names)):
        ranks = math.prod(mesh.sizes[axis] for axis in axes)
        for rank in range(mesh.size):
            group = mesh.group(axes, rank)
            assert group_ranks(group_name(str(mesh), axes), rank) == group
            for size, stride in itertools.product((2, 3), (1, 2)):
                if ranks % (size * stride):
                    continue
                place = group.index(rank)
                within = [
                    other
                    for index, other in enumerate(group)
                    if index % stride == place % stride
                    and index // (stride * size) == place // (stride * size)
                ]
                name = group_name(str(mesh), axes, Within(size, stride))
                assert group_ranks(name, rank) == within


@pytest.mark.parametrize("text", ["data", "2", "data2x", "data2..x2", "d-1"])
def test_refuses_what_it_cannot_read(text):
    with pytest.raises(WorldError, match="cannot read"):
        Mesh.parse(text)


def test_refuses_malformed_axes():
    with pytest.raises(WorldError, match="no digit at the end"):
        Axis("d1", 2)
    with pytest.raises(WorldError, match="size 0"):
        Axis("x", 0)
    with pytest.raises(WorldError, match="twice"):
        Mesh((Axis("x", 2), Axis("x", 2)))
    with pytest.raises(WorldError, match=r"no axis 'z'.*data, x"):
        Mesh.parse("data2.x2").stride("z")
    with pytest.raises(WorldError, match="rank 4"):
        Mesh.parse("data2.x2").coordinate(4)


def test_connect_needs_a_running_process_group():
    with pytest.raises(WorldError, match="torchrun"):
        connect(Mesh.parse("x2"), "cpu")
