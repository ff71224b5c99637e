"""The contracts of the passes over derived graphs: the manager checks each after every run."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar import _compat
from autopar.cost.simulator.graph_events import collective_of
from autopar.passes import OPTIONS, OVERLAP, overlap_derived
from autopar.passes.overlap import DerivedGraph
from autopar.passes.pass_manager import OverlapPass, PassManager
from autopar.world import World
from derived import FOUR, arrived, called, placed

aten = torch.ops.aten


def two_sums() -> fx.Graph:
    """Two products, each summed over the ranks."""
    graph = fx.Graph()
    x, w = placed(graph, [(8, 8), (8, 8)])
    for _ in range(2):
        product = called(graph, aten.mm.default, (x, w))
        x = arrived(graph, "all_reduce", (product, "sum", "autopar/x4/x"))
    graph.output((x,))
    return graph


def without_a_sum(derived: DerivedGraph, world: World) -> DerivedGraph:
    issue = next(node for node in derived.graph.nodes if collective_of(node) is not None)
    (wait,) = issue.users
    wait.replace_all_uses_with(issue.all_input_nodes[0])
    derived.graph.erase_node(wait)
    derived.graph.erase_node(issue)
    return derived


def without_a_wait(derived: DerivedGraph, world: World) -> DerivedGraph:
    issue = next(node for node in derived.graph.nodes if collective_of(node) is not None)
    (wait,) = issue.users
    wait.replace_all_uses_with(issue)
    derived.graph.erase_node(wait)
    return derived


def of_another_shape(derived: DerivedGraph, world: World) -> DerivedGraph:
    output = derived.graph.output_node()
    with derived.graph.inserting_before(output):
        output.args = ((called(derived.graph, aten.t.default, tuple(output.all_input_nodes)),),)
        output.args = ((called(derived.graph, aten.sum.default, tuple(output.all_input_nodes)),),)
    return derived


LOST = {
    "chunk": "are sent, not",
    "summa_fusion": "less is sent",
    "bucket": "are sent, not",
    "schedule": "nodes were lost",
    "limit_memory": "nodes were lost",
}


@pytest.mark.parametrize("listed", OVERLAP, ids=[listed.name for listed in OVERLAP])
def test_the_manager_checks_what_every_pass_makes(listed: OverlapPass) -> None:
    derived = DerivedGraph(two_sums(), "forward")
    PassManager().run_overlap([listed], derived, FOUR)
    for broken, says in (
        (without_a_sum, LOST.get(listed.name, "other collectives")),
        (without_a_wait, "nothing waits for all_reduce"),
        (of_another_shape, "another shape"),
    ):
        steps, derived = [listed._replace(run=broken)], DerivedGraph(two_sums(), "forward")
        with pytest.raises(AssertionError, match=says), _compat.fake_mode():
            PassManager().run_overlap(steps, derived, FOUR)


def test_passes_run_in_the_order_of_the_list_and_as_options_say() -> None:
    ran: list[str] = []

    def names(*options: str) -> list[str]:
        ran.clear()
        overlap_derived(DerivedGraph(two_sums(), "forward"), FOUR, options, PassManager(ran.append))
        return list(dict.fromkeys(name for name in ran if name != "fill_buckets"))

    always = ["reinplace", "views"]
    assert OPTIONS == ("chunk", "bucket", "schedule")
    assert names(*OPTIONS) == ["chunk", "summa_fusion", "bucket", "schedule", *always]
    assert names("schedule") == ["schedule", *always]
    assert names() == always
    assert ran[-1] == "fill_buckets"
