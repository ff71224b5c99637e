"""Derived forwards that gather weights once for several forwards: the same numbers, no gather."""

from __future__ import annotations

import torch
from torch import fx

import autopar
import models
from autopar.cost.microbatches import gathered_bytes
from autopar.cost.peak import peak_and_saved
from autopar.cost.simulator.graph_events import collective_of
from autopar.ir.graph import copy_graph, values_of_alone, with_more_results
from autopar.passes.overlap.weight_reuse import from_gathered, gathered_weights
from autopar.runtime.reusing_forward import ReusingForward, Run, StepWeights

functional = torch.ops._c10d_functional
aten = torch.ops.aten


def forward() -> fx.Graph:
    """x · (gathered w)ᵗ + the sum over ranks of x; w is gathered and cast."""
    graph = fx.Graph()
    w, x = (graph.placeholder(name) for name in ("w", "x"))
    for node in (w, x):
        node.meta["val"] = torch.empty(2, 4)
    sent = graph.call_function(functional.all_gather_into_tensor.default, (w, 2, "g"))
    whole = graph.call_function(functional.wait_tensor.default, (sent,))
    cast = graph.call_function(aten._to_copy.default, (whole,), {"dtype": torch.float64})
    turned = graph.call_function(aten.t.default, (cast,))
    product = graph.call_function(aten.mm.default, (x, turned))
    summed = graph.call_function(functional.all_reduce.default, (x, "sum", "g"))
    other = graph.call_function(functional.wait_tensor.default, (summed,))
    for node in graph.nodes:
        node.meta.setdefault("val", torch.empty(0))
    graph.output((product, other, turned))
    return graph


def collectives(graph: fx.Graph) -> list[str]:
    return [name for node in graph.nodes if (name := collective_of(node)) is not None]


def test_what_other_calls_take_of_parameters_alone_is_saved() -> None:
    graph = forward()
    assert gathered_weights(graph, {"w"}) == ("t_default",)
    assert gathered_weights(graph, ()) == ()
    everything = values_of_alone(graph, {"w", "x"}, lambda n: collective_of(n) is not None)
    assert {n.name for n in everything} == {"t_default", "mm_default", "wait_tensor_default_1"}


def test_the_first_forward_returns_what_it_gathers() -> None:
    graph = forward()
    more = with_more_results(graph, ("t_default",))
    (before,), (after,) = graph.output_node().args, more.output_node().args
    assert [str(n) for n in after] == [*map(str, before), "t_default"]  # type: ignore[union-attr]
    assert collectives(more) == collectives(graph)


def test_the_others_gather_nothing() -> None:
    graph = forward()
    reusing = from_gathered(graph, ("t_default",))
    assert collectives(reusing) == ["all_reduce"]
    names = [node.name for node in reusing.find_nodes(op="placeholder")]
    assert names == ["w", "x", "gathered_0"]
    product, _, saved = reusing.output_node().args[0]  # type: ignore[misc]
    assert saved.name == "gathered_0" and saved in product.all_input_nodes
    assert collectives(graph) == ["all_gather_into_tensor", "all_reduce"]  # a copy was changed
    copy_graph(reusing).lint()


def test_a_random_value_is_no_weight() -> None:
    graph = fx.Graph()
    w = graph.placeholder("w")
    noise = graph.call_function(aten.rand_like.default, (w,))
    sent = graph.call_function(functional.all_gather_into_tensor.default, (noise, 2, "g"))
    graph.output((graph.call_function(functional.wait_tensor.default, (sent,)),))
    assert gathered_weights(graph, {"w"}) == ()


def test_a_plan_with_its_weights_gathered_once_holds_them_between_microbatches() -> None:
    model, ids = models.GptWithLogits(), torch.zeros(16, models.SEQUENCE, dtype=torch.long)
    plan = autopar.plan(model, 4, (ids, ids), "fsdp", microbatches=4, smaller=False)
    assert plan.gathers_once and plan.context is not None
    memory = peak_and_saved(plan.context.program, "adamw", plan.world)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    assert 0.9 * whole < memory.weights < 1.05 * whole
    assert abs(gathered_bytes(plan.context.program) - memory.weights) < 0.05 * whole


def test_a_forward_that_is_derived_anew_gathers_its_own() -> None:
    first, second = ReusingForward(forward(), {"w"}), ReusingForward(forward(), {"w"})
    gathers = []

    def compiled(graph: fx.Graph) -> Run:
        def run(values: list[object]) -> list[object]:
            gathers.append("all_gather_into_tensor" in collectives(graph))
            return [None] * len(graph.output_node().args[0])  # type: ignore[arg-type]

        return run

    weights = StepWeights()
    for each in (first, first, second, second):
        if not each.has_variants:
            each.make(compiled)
        assert len(each.run([], weights)) == 3
    assert gathers == [True, False, True, False]
