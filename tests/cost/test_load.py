"""Who shares a link when all groups of an axis run at once: in levels, askew, in irregular
networks; held against what was published.
"""

from __future__ import annotations

import math

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.network import Load, _load_edge_by_edge, halves, load, members, pattern, within
from autopar.errors import WorldError
from autopar.ir.mesh import Mesh
from autopar.world import KINDS, Level, World
from autopar.world.gpus import NCCL_REACHES
from priced import CORE, EMULATED, GPU, price


# -- contention ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("mesh", "axes", "rate"),
    [
        ("data2.x8", "x", 450e9),  # within a node: NVLink
        ("data2.x8", "data", 50e9),  # 8 groups share the 400 GB/s of a node's cards
        ("data4.x4", "data", 100e9),  # stride 4: 4 groups
        ("data8.x2", "data", 200e9),
        ("data16", "data", 400e9),  # one ring over both nodes has all cards to itself
        ("data2.x4.y2", "data y", 100e9),  # groups of 2 in each of two nodes: 4 groups
    ],
)
def test_groups_share_the_uplink_of_a_node(mesh: str, axes: str, rate: float) -> None:
    world = World.preset("dgx-h100", 16)
    digits = pattern(Mesh.parse(mesh), tuple(axes.split()))
    assert 1 / load(world, digits).ring == pytest.approx(NCCL_REACHES * rate)


def test_a_share_falls_with_the_stride_up_to_the_size_of_a_node() -> None:
    world = World.preset("dgx-h100", 1024)
    for stride in (1, 2, 4, 8, 16, 64):
        share = 1 / load(world, ((1024 // stride, stride),)).ring
        assert share == pytest.approx(NCCL_REACHES * 400e9 / min(stride, 8))


def test_wires_without_a_switch() -> None:
    """Two of four GPUs have one wire of three between them; a ring over all four uses all."""
    world = World((Level(4, 450e9, 0, direct=True), Level(2, 100e9, 0)), GPU, "nccl")
    rates = {digits: 1 / load(world, (digits,)).ring for digits in ((2, 1), (2, 2), (4, 1), (8, 1))}
    assert rates == pytest.approx({(2, 1): 150e9, (2, 2): 150e9, (4, 1): 450e9, (8, 1): 100e9})
    exchange = load(world, ((4, 1),)).exchange
    assert 1 / exchange == pytest.approx(150e9)  # each pair its own wire


# Bandwidth in GB/s that AxoNN's authors measured, by (axis size, ranks inside it): arXiv
# 2305.13525 and their code.
PERLMUTTER = {
    (2, 1): 76, (4, 1): 225, (8, 1): 80, (64, 1): 80,
    (2, 2): 76, (4, 2): 40, (16, 2): 40,
    (2, 4): 20, (8, 4): 20, (16, 8): 20, (4, 32): 20,
}  # fmt: skip
FRONTIER = {
    (2, 1): 129, (4, 1): 52, (8, 1): 135, (16, 1): 40, (2, 2): 50, (4, 2): 72, (8, 2): 20,
    (2, 4): 36, (4, 4): 10, (2, 8): 5, (8, 16): 5,
}  # fmt: skip


def test_perlmutter_as_axonn_measured_it() -> None:
    world = World.preset("perlmutter", 256)
    for digits, published in PERLMUTTER.items():
        modelled = 1e-9 / load(world, (digits,)).ring
        assert modelled == pytest.approx(published, rel=0.02), digits


def test_frontier_as_axonn_measured_it() -> None:
    """Between nodes exactly; inside one, where wires differ from pair to pair, to a factor 1.6."""
    world = World.preset("frontier", 256)
    for (ranks, stride), published in FRONTIER.items():
        modelled = 1e-9 / load(world, ((ranks, stride),)).ring
        factor = 1.001 if ranks * stride > 8 else 1.6
        assert published / factor <= modelled <= published * factor, (ranks, stride)


def test_axonns_own_ranking_of_20b_on_32_gpus() -> None:
    """Sums of activations within a node of Perlmutter cost more than gathering all weights over 32
    ranks (1.335 against 10.134 s): the trend of one layer's collectives.
    """
    world = World.preset("perlmutter", 32)
    h, tokens = 7168, 1024 * 2048
    weight, activation = 2.0 * 12 * h * h, 2.0 * tokens * h
    depth_only = price(world, "z32", "z", "all_gather", weight).seconds
    tensor = price(world, "z16.x2", "z", "all_gather", weight / 2).seconds
    tensor += 2 * price(world, "z16.x2", "x", "all_reduce", activation / 16).seconds
    assert tensor > 3 * depth_only


# -- patterns --------------------------------------------------------------------------------------
FACTORED = ["a16", "a2.b8", "a8.b2", "a4.b4", "a2.b2.c4", "a2.b4.c2", "a2.b2.c2.d2"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_costs_the_same_however_the_mesh_factors_it(kind: str) -> None:
    for world in (World.preset("dgx-h100", 32), World((Level(32, 1e9, 1e-4),), CORE)):
        for outer, inner in (("", ".x2"), ("y2.", ""), ("", "")):
            loads = {
                price(world, outer + mesh + inner, " ".join(Mesh.parse(mesh).names), kind, 1e7)
                for mesh in FACTORED
            }
            assert len(loads) == 1


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("count", [1e3, 1e6, 1e9])
def test_a_group_costs_no_more_than_its_axes_one_by_one(kind: str, count: float) -> None:
    """So that no mesh is preferred only because it has more axes."""
    for world in (World.preset("dgx-h100", 16), World((Level(16, 1e9, 1e-4),), CORE)):
        for mesh in FACTORED:
            names, left, total = Mesh.parse(mesh).names, count, 0.0
            for name in reversed(names):
                total += price(world, mesh, name, kind, left).seconds
                left /= Mesh.parse(mesh).sizes[name]
            assert price(world, "a16", "a", kind, count).seconds <= total * (1 + 1e-6)


def test_groups_of_axes_are_patterns_of_count_and_stride() -> None:
    mesh = Mesh.parse("a2.b3.c4")
    assert pattern(mesh, ("b",)) == ((3, 4),)
    assert pattern(mesh, ("c", "b")) == ((12, 1),)
    assert pattern(mesh, ("a", "c")) == ((2, 12), (4, 1))
    assert within(((2, 12), (4, 1)), 4) == 4
    assert within(((2, 12), (4, 1)), 24) == 8
    assert within(((3, 1),), 8) is None
    assert halves(((4, 3),)) == [(((2, 3),), ((2, 6),))]
    assert halves(((2, 8), (2, 1))) == [(((2, 1),), ((2, 8),))]
    for axes in (("a",), ("a", "c"), ("b", "c")):
        rows = {tuple(mesh.group(axes, rank)) for rank in range(24)}
        assert {tuple(row) for row in members(pattern(mesh, axes), 24).tolist()} == rows


POWERS = st.sampled_from([1, 2, 4])


@pytest.mark.slow
@given(st.lists(st.tuples(POWERS, st.integers(1, 9)), min_size=1, max_size=4), st.data())
def test_counting_every_edge_gives_what_the_shortcut_gives(
    levels: list[tuple[int, int]], data: st.DataObject
) -> None:
    world = World(tuple(Level(r, 1e9 * b, b * 1e-6) for r, b in levels), GPU, "nccl")
    stride = 2 ** data.draw(st.integers(0, int(math.log2(world.ranks))))
    count = 2 ** data.draw(st.integers(0, int(math.log2(world.ranks // stride))))
    if count == 1:
        return
    short, counted = load(world, ((count, stride),)), _load_edge_by_edge(world, ((count, stride),))
    assert short[:4] == pytest.approx(counted[:4])


def test_groups_askew_in_the_nodes() -> None:
    """Groups of 3 and 12 in nodes of 8: two groups cross the border of the middle node."""
    world = World.preset("dgx-h100", 24)
    assert 1 / load(world, ((3, 1),)).ring == pytest.approx(NCCL_REACHES * 200e9)
    assert 1 / load(world, ((12, 1),)).ring == pytest.approx(NCCL_REACHES * 200e9)
    assert price(world, "a8.b3", "b", "all_reduce", 1e9).seconds > 0


def test_a_mesh_larger_than_the_world_is_refused() -> None:
    with pytest.raises(WorldError, match="groups reach over 8 ranks, the world has 4"):
        price(EMULATED, "x8", "x", "all_reduce", 1)


# -- irregular networks ----------------------------------------------------------------------------
def tree(nodes: int, ranks: int, inside: float, uplink: float) -> World:
    graph = nx.Graph()
    for rank in range(nodes * ranks):
        graph.add_edge(rank, f"node {rank // ranks}", bytes_per_s=inside)
    for node in range(nodes):
        graph.add_edge(f"node {node}", "spine", bytes_per_s=uplink)
    return World.from_graph(graph, GPU)


def test_a_network_that_is_a_tree_is_what_its_levels_are() -> None:
    levels = World((Level(4, 3e11, 0), Level(4, 1e11, 0)), GPU, "nccl")
    network = tree(4, 4, 3e11, 1e11)
    for stride in (1, 2, 4, 8):
        for count in (2, 4, 8, 16):
            if count * stride <= 16:
                by_levels, other = (load(world, ((count, stride),)) for world in (levels, network))
                assert (by_levels.ring, by_levels.exchange) == pytest.approx(
                    (other.ring, other.exchange)
                )


def test_a_torus_prefers_its_own_axes() -> None:
    """4 × 4: rings along rows or columns have a link each; others are further apart."""
    grid = nx.grid_2d_graph(4, 4, periodic=True)
    torus = nx.relabel_nodes(grid, {(row, column): 4 * row + column for row, column in grid})
    nx.set_edge_attributes(torus, 1e10, "bytes_per_s")
    nx.set_edge_attributes(torus, 1e-6, "latency_s")
    world = World.from_graph(torus, GPU)
    rows, columns, skewed = (load(world, (digits,)) for digits in ((4, 1), (4, 4), (8, 2)))
    assert [1 / rows.ring, 1 / columns.ring] == pytest.approx([1e10, 1e10])
    assert rows.ring_hops == pytest.approx(4e-6)
    assert skewed.ring_hops / 8 > 2 * rows.ring_hops / 4
    assert price(world, "a4.b4", "b", "all_reduce", 1e9).seconds == pytest.approx(0.15, rel=1e-2)


def test_groups_that_cross_share_the_link_between_them() -> None:
    """0 – 1 – 2 – 3: the pairs {0, 2} and {1, 3} both pass 1 – 2."""
    line = nx.path_graph(4)
    nx.set_edge_attributes(line, 1e10, "bytes_per_s")
    world = World.from_graph(line, GPU)
    rates = [1 / load(world, digits).ring for digits in (((2, 1),), ((2, 2),), ((4, 1),))]
    assert rates == pytest.approx([1e10, 0.5e10, 1e10])


def test_equal_routes_share_a_flow() -> None:
    """Two spines carry half each."""
    graph = nx.Graph()
    for rank in range(2):
        for spine in ("s0", "s1"):
            graph.add_edge(rank, spine, bytes_per_s=1e9, latency_s=1e-6)
    routed = load(World.from_graph(graph, GPU), ((2, 1),))
    assert routed == Load(*map(pytest.approx, (5e-10, 4e-6, 5e-10, 2e-6, 2e-6)))


def test_a_fast_pair_is_worth_more_than_the_bus() -> None:
    """Four GPUs on one PCIe switch, bridges between 0 and 1, 2 and 3: the mesh's order matters."""
    graph = nx.Graph()
    graph.add_edges_from(((r, "pcie") for r in range(4)), bytes_per_s=1.6e10, latency_s=2e-6)
    graph.add_edges_from([(0, 1), (2, 3)], bytes_per_s=1e11, latency_s=1e-6)
    world = World.from_graph(graph, GPU)
    assert 1 / load(world, ((2, 1),)).ring == pytest.approx(1e11)
    assert 1 / load(world, ((2, 2),)).ring == pytest.approx(1.6e10)
