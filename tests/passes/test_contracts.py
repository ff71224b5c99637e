"""Every pass's contract, each broken once; the runner checks each one and keeps what it made."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, nop
from torch import fx

import autopar
import models
from autopar import listing
from autopar.ir.layout import I, Layout, P, R
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program, check_choices
from autopar.ops import collectives, sharded
from autopar.ops.collectives import set_hierarchy
from autopar.passes import (
    PIPELINE,
    annotate,
    draws,
    finalize,
    hierarchy,
    kernel_choice,
    masks,
    recompute,
    rewrite,
    summa,
    trace,
)
from autopar.planner import confirm, plan_context, planner, solve
from autopar.planner.request import PlanRequest
from autopar.world import World

aten = torch.ops.aten
CHECKS = {
    "trace": trace.check,
    "draws": draws.check,
    "masks": masks.check,
    "annotate": annotate.check,
    "chains": annotate.check_chains,
    "choose": check_choices,
    "rewrite": rewrite.check,
    "hierarchy": hierarchy.check,
    "summa": summa.check,
    "kernel_choice": kernel_choice.check,
    "finalize": finalize.check,
    "recompute": recompute.check,
}


@cache
def programs() -> dict[str, Program]:
    """What every pass makes of the GPT for a layout in 2.5D, which the pipeline pass rewrites."""
    model, args, _ = models.gpt()
    world = World.of(4)
    stages = {"trace": trace.trace(model, args)}
    stages["draws"] = draws.draws(stages["trace"])
    stages["masks"] = masks.masks(stages["draws"])
    stages["annotate"] = annotate.annotate(stages["masks"])
    stages["chains"] = annotate.chains(stages["annotate"])
    request = PlanRequest(autopar.Grid25D(q=2, d=1))
    stages["choose"] = solve.search_meshes(stages["chains"], world, request)
    stages["rewrite"] = rewrite.rewrite(stages["choose"], world)
    stages["hierarchy"] = hierarchy.hierarchy(stages["rewrite"], world)
    stages["summa"] = summa.summa(stages["hierarchy"], world)
    stages["kernel_choice"] = kernel_choice.kernel_choice(stages["summa"], world)
    stages["finalize"] = finalize.finalize(stages["kernel_choice"], world)
    stages["recompute"] = recompute.recompute(planned(stages["finalize"], recompute=("blocks.1",)))
    return stages


@pytest.mark.parametrize("name", CHECKS)
def test_every_pass_keeps_its_contract(name: str) -> None:
    CHECKS[name](programs()[name])


def changed(program: Program, **edits: Any) -> Program:
    """The program with other signature fields, or with its graph changed by `graph`."""
    edit: Callable[[fx.Graph], None] | None = edits.pop("graph", None)
    if edit is not None:
        module = copy.deepcopy(program.module)
        for new, old in zip(module.graph.nodes, program.module.graph.nodes, strict=True):
            new.meta = dict(old.meta)
        edit(module.graph)
        program = dataclasses.replace(program, module=module)
    return dataclasses.replace(program, signature=dataclasses.replace(program.signature, **edits))


def noted(program: Program, **edits: Any) -> Program:
    notes = dataclasses.replace(program.annotations, **edits)
    return dataclasses.replace(program, annotations=notes)


def planned(program: Program, **edits: Any) -> Program:
    return dataclasses.replace(program, plan=dataclasses.replace(program.plan, **edits))


def without(table: dict[Any, Any], key: Any) -> dict[Any, Any]:
    assert key in table, key
    return {k: v for k, v in table.items() if k != key}


def first_call(graph: fx.Graph, target: Any) -> fx.Node:
    return next(node for node in graph.nodes if node.target is target)


def one_input_less(program: Program) -> Program:
    return changed(program, inputs=program.signature.inputs[1:])


# -- one function for every way in which a contract can break --------------------------------------


def output_dropped(program: Program) -> Program:
    return changed(program, outputs=program.signature.outputs[:-1])


def value_forgotten(program: Program) -> Program:
    return changed(program, graph=lambda g: first_call(g, aten.gelu.default).meta.pop("val"))


def not_annotated(program: Program) -> Program:
    return dataclasses.replace(program, annotations=None)


def rule_forgotten(program: Program) -> Program:
    return noted(program, specs=without(program.annotations.specs, "gelu"))


def rule_of_two_results(program: Program) -> Program:
    specs = program.annotations.specs
    rule = dataclasses.replace(specs["gelu"], results=specs["gelu"].results * 2)
    return noted(program, specs={**specs, "gelu": rule})


def atoms_of_another_size(program: Program) -> Program:
    dims = program.annotations.dims
    first, *rest = dims["gelu", 0]
    twice = (dataclasses.replace(first[0], size=2 * first[0].size), *first[1:])
    return noted(program, dims={**dims, ("gelu", 0): (twice, *rest)})


def node_in_two_chains(program: Program) -> Program:
    return dataclasses.replace(program, chains=(*program.chains, program.chains[0]))


def node_in_no_chain(program: Program) -> Program:
    return dataclasses.replace(program, chains=program.chains[1:])


def choice_forgotten(program: Program) -> Program:
    return planned(program, choices=without(program.plan.choices, "gelu"))


def parameter_stored_nowhere(program: Program) -> Program:
    return planned(program, stored=without(program.plan.stored, "p_norm_weight"))


def choice_on_another_mesh(program: Program) -> Program:
    choice = program.plan.choices["gelu"]
    other = Layout(Mesh.parse("z8"), choice.results[0].shape, (I,))
    wrong = dataclasses.replace(choice, results=(other,))
    return planned(program, choices={**program.plan.choices, "gelu": wrong})


def partial_output(program: Program) -> Program:
    name = program.signature.outputs[-1].node
    mesh = program.plan.mesh
    layout = Layout(mesh, (), (P, *[R] * (len(mesh.axes) - 1)))
    return dataclasses.replace(program, layouts={**program.layouts, name: layout})


def panels_of_a_gathered_weight(program: Program) -> Program:
    def gather(graph: fx.Graph) -> None:
        product = next(
            n for n in graph.nodes if getattr(n.target, "__name__", "") == "summa_linear"
        )
        axis = product.args[3]
        where = {"axis": axis, "dim": 0, "mesh": str(program.plan.mesh)}
        with graph.inserting_before(product):
            gathered = graph.call_function(collectives.all_gather, (product.args[1],), where)
        product.args = (product.args[0], gathered, *product.args[2:])

    return changed(program, graph=gather)


def linear_that_copies_nothing(program: Program) -> Program:
    def replace(graph: fx.Graph) -> None:
        node = first_call(graph, aten.linear.default)
        x, weight, bias = (*node.args, None)[:3]
        node.target, node.args = sharded.linear, (x, weight, bias, ("", "", ""))

    return changed(program, graph=replace)


def call_that_nothing_uses(program: Program) -> Program:
    def add(graph: fx.Graph) -> None:
        used = first_call(graph, aten.gelu.default)
        with graph.inserting_after(used):
            graph.call_function(aten.neg.default, (used,)).meta["val"] = None

    return changed(program, graph=add)


def tensor_on_a_numbered_device(program: Program) -> Program:
    def place(graph: fx.Graph) -> None:
        first_call(graph, aten.arange.default).kwargs = {"device": torch.device("cuda:1")}

    return changed(program, graph=place)


def use_before_definition(program: Program) -> Program:
    def move(graph: fx.Graph) -> None:
        node = first_call(graph, aten.gelu.default)
        next(iter(node.users)).append(node)

    return changed(program, graph=move)


def one_in_other_levels(program: Program) -> Program:
    def change(graph: fx.Graph) -> None:
        node = next(n for n in graph.nodes if n.target is collectives.all_gather)
        set_hierarchy(node, False, (2,))

    return changed(program, graph=change)


def block_not_grouped(program: Program) -> Program:
    return planned(program, recompute=("blocks.0", "blocks.1"))


def node_left_outside(program: Program) -> Program:
    def add(graph: fx.Graph) -> None:
        node = first_call(graph, aten.gelu.default)
        with graph.inserting_after(node):
            new = graph.call_function(aten.neg.default, (node,))
        new.meta["chain"] = "blocks.1.(more)"

    return changed(program, graph=add)


def mask_drawn(program: Program) -> Program:
    def add(graph: fx.Graph) -> None:
        node = first_call(graph, aten.gelu.default)
        with graph.inserting_after(node):
            graph.call_function(aten.bernoulli.p, (node, 0.5))

    return changed(program, graph=add)


def mask_and_causal(program: Program) -> Program:
    def add(graph: fx.Graph) -> None:
        node = first_call(graph, aten.scaled_dot_product_attention.default)
        node.args = (*node.args[:3], node.args[0], 0.0, True)
        node.kwargs = {}

    return changed(program, graph=add)


BROKEN: list[tuple[str, Callable[[Program], Program], str]] = [
    ("trace", one_input_less, "placeholders and signature differ"),
    ("trace", output_dropped, "outputs and signature differ"),
    ("trace", value_forgotten, "gelu has no value"),
    ("draws", one_input_less, "placeholders and signature differ"),
    ("draws", mask_drawn, r"draws left \['bernoulli"),
    ("masks", one_input_less, "placeholders and signature differ"),
    ("masks", mask_and_causal, "has a mask and is causal"),
    ("annotate", not_annotated, "annotate left no annotations"),
    ("annotate", rule_forgotten, "gelu has no rule"),
    ("annotate", rule_of_two_results, "the rule of gelu has 2 results, not 1"),
    ("annotate", atoms_of_another_size, r"gelu: atoms .*size=32.* for a dim of 16"),
    ("chains", node_in_two_chains, "a node is in two chains"),
    ("chains", node_in_no_chain, "a searched node is in no chain"),
    ("choose", choice_forgotten, "choose left gelu without a layout"),
    ("choose", parameter_stored_nowhere, "parameter norm.weight without a stored layout"),
    ("choose", choice_on_another_mesh, r"gelu of shape \(16, 16, 256\) .* on mesh z8, the plan's"),
    ("rewrite", one_input_less, "placeholders and signature differ"),
    ("rewrite", partial_output, "output .* is partial"),
    ("hierarchy", one_input_less, "placeholders and signature differ"),
    ("hierarchy", one_in_other_levels, "what may be joined with .* goes in"),
    ("summa", one_input_less, "placeholders and signature differ"),
    ("summa", panels_of_a_gathered_weight, r"takes \['all_gather.*'\], which are gathered"),
    ("kernel_choice", one_input_less, "placeholders and signature differ"),
    ("kernel_choice", linear_that_copies_nothing, "copies nothing: it is an ordinary linear"),
    ("recompute", one_input_less, "placeholders and signature differ"),
    ("recompute", block_not_grouped, "1 blocks are recomputed, the plan names 2"),
    ("recompute", node_left_outside, r"neg.* of blocks.1 is not recomputed"),
    ("finalize", one_input_less, "placeholders and signature differ"),
    ("finalize", call_that_nothing_uses, "nothing uses neg"),
    ("finalize", tensor_on_a_numbered_device, "arange.* is made on cuda:1"),
]


@pytest.mark.parametrize(
    ("name", "breaks", "says"), BROKEN, ids=[f"{n}-{b.__name__}" for n, b, _ in BROKEN]
)
def test_a_broken_contract_is_noticed(
    name: str, breaks: Callable[[Program], Program], says: str
) -> None:
    with pytest.raises(AssertionError, match=says):
        CHECKS[name](breaks(programs()[name]))


@pytest.mark.parametrize(
    "name",
    [
        "trace",
        "draws",
        "masks",
        "rewrite",
        "hierarchy",
        "summa",
        "kernel_choice",
        "finalize",
        "recompute",
    ],
)
def test_a_graph_out_of_order_is_noticed(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"gelu.* used before it has been defined"):
        CHECKS[name](use_before_definition(programs()[name]))


# -- the runner ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in CHECKS if n != "trace"])
def test_the_runner_checks_what_every_pass_makes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that hands on what it was given, less an input or a chain, is caught right after."""

    def broken(program: Program, *rest: Any, **more: Any) -> Program:
        result = honest(program, *rest, **more)
        return noted(result, specs={}) if name == "annotate" else spoil(result)

    spoil = {"chains": node_in_no_chain, "choose": choice_forgotten}.get(name, one_input_less)
    own = {"annotate": annotate, "chains": annotate, "recompute": recompute}
    module = {**own, "draws": draws, "masks": masks}.get(name, planner)
    function = name if module is not planner else "search_plan"
    listed_pass = next((step for step in PIPELINE if step.name == name), None)
    honest = listed_pass.run if listed_pass is not None else getattr(module, function)
    if listed_pass is None:
        monkeypatch.setattr(module, function, broken)
    listed = tuple(p._replace(run=broken) if p.name == name else p for p in PIPELINE)
    monkeypatch.setattr(confirm, "PIPELINE", listed)
    model, args, _ = models.gpt()
    with pytest.raises(AssertionError):
        autopar.plan(model, 4, args, layout="ddp", overlap=False)


def test_every_graph_is_stored_and_prints() -> None:
    model, args, _ = models.mlp()
    par = autopar.parallelize(model, 1, args)
    assert list(par.graphs) == list(CHECKS)
    assert set(par.plan.seconds_by_pass) == set(CHECKS)
    for graph in par.graphs.values():
        assert "linear" in str(graph.graph) and "linear" in listing(graph)
    context = autopar.plan(model, 4, args, layout="megatron").context
    text = listing(context.graphs["rewrite"])
    assert ">> all_reduce" in text and "# up" in text and "tp:P" in text
    assert "all_reduce" not in str(context.graphs["trace"].graph)


def test_passes_do_not_change_what_they_are_given() -> None:
    stages = programs()
    before = [str(program.module.graph) for program in stages.values()]
    annotate.annotate(draws.draws(stages["trace"]))
    annotate.chains(stages["annotate"])
    rewrite.rewrite(stages["choose"], World.of(4))
    world = World.of(4)
    finalize.finalize(summa.summa(hierarchy.hierarchy(stages["rewrite"], world), world), world)
    assert before == [str(program.module.graph) for program in stages.values()]
    assert plan_context.fingerprint(stages["trace"]) == plan_context.fingerprint(
        trace.trace(*models.gpt()[:2])
    )


# -- results that share memory ---------------------------------------------------------------------
def shared_results() -> fx.Graph:
    """`loss` and `loss.detach()`, where the loss is made invariant: its gradient is a quarter."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    whole = graph.call_function(torch.ops.aten.sum.default, (x,))
    loss = graph.call_function(collectives.invariant, (whole,), {"axis": "w", "mesh": "w4"})
    graph.output((loss, graph.call_function(torch.ops.aten.detach.default, (loss,))))
    return graph


def test_results_that_share_memory_keep_their_gradient_in_derived_graphs() -> None:
    """AOTAutograd makes both anew as views of the sum, and leaves out what `invariant` does."""
    graph = shared_results()
    finalize._copy_shared(graph)
    module = fx.GraphModule(torch.nn.Module(), graph)
    for run in (module, aot_function(module, nop)):
        x = torch.ones(3, requires_grad=True)
        run(x)[0].backward()
        assert torch.equal(x.grad, torch.full((3,), 0.25)), run


def test_results_of_their_own_are_not_copied() -> None:
    graph = shared_results()
    (output,) = graph.find_nodes(op="output")
    output.args = ((output.args[0][0],),)
    finalize._copy_shared(graph)
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
