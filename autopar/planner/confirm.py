"""The last stage of the funnel, `confirm`: the graph of one rank of the plan that was chosen, its
exact memory and its exact step.

Example: a plan that fits by its estimate is emitted whole; one block more is recomputed where its
exact peak is above the limit. Where no amount is enough, the refusal names the smallest world that
would do.

The annotated program with the chosen plan enters; the `Plan` leaves, with its figures and the
`PlanContext` that `apply` needs: `finish_plan`. Every pass runs through a `PassManager`, which
checks its contract.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import torch

from autopar.cost.memory import with_flight
from autopar.cost.simulator import Timeline, timeline
from autopar.cost.summary import compute_seconds_by_node, summary_rows
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.sharding_rule import shape_of
from autopar.ops.collectives import groups_of
from autopar.ops.sharded import draw
from autopar.passes import PIPELINE
from autopar.passes import recompute as recomputing
from autopar.passes.microbatches import Microbatches
from autopar.passes.pass_manager import PassManager
from autopar.planner.microbatch_plans import (
    gathers_once,
    interleave_microbatches,
    sums_once,
)
from autopar.planner.plan_context import PlanContext, fingerprint
from autopar.planner.plan_notes import (
    expert_notes,
    idle_note,
    padding_notes,
    replicated_matmuls,
    uneven_notes,
)
from autopar.planner.rematerialize import rematerialize_to_fit
from autopar.planner.request import PlanRequest
from autopar.planner.world_size import larger_world
from autopar.world import World


def rewrite_for_ranks(manager: PassManager, program: Program, world: World) -> Program:
    """Return the rank-local program that the plan describes, recomputed blocks included."""
    program = manager.run_all(PIPELINE, program, world)
    return manager.run("recompute", program, recomputing.recompute, recomputing.check)


def fit_to_memory(
    manager: PassManager, source: Program, chosen: Program, world: World, request: PlanRequest
) -> Program:
    """Return the rank-local program, with just enough blocks recomputed to fit the budget. Raises
    PlanError, naming the smallest world that would do, where no amount is enough.
    """
    assert chosen.plan is not None
    program = manager.run_all(PIPELINE, chosen, world)
    if request.stages is None:  # whose graph is cut by what the rewrite notes at its nodes
        program = _keep_traced_on_one_rank(source, program)
    step = partial(
        rematerialize_to_fit,
        world=world,
        budget=request.budget,
        larger=partial(larger_world, chosen, chosen.plan, request),
        free=request.layout == "auto",
        divisible=not request.seeks_microbatches and request.microbatches == 1,
    )
    program = manager.run("recompute", program, step, recomputing.check)
    program = gathers_once(sums_once(program, request), world, request)
    program = interleave_microbatches(program, world, request)
    assert program.plan is not None
    return dataclasses.replace(program, plan=_reserve_flight_bytes(program.plan, request))


def finish_plan(
    manager: PassManager,
    source: Program,
    chosen: Program,
    world: World,
    request: PlanRequest,
    microbatches: Microbatches | None = None,
    fitted: Program | None = None,
) -> Plan:
    """Return the plan with its figures and the context that `apply` needs. Without a budget in
    the request no limit applies: the plan was made to fit before. `fitted`: what `fit_to_memory`
    returned for this plan, where it was called already.
    """
    program = fitted or fit_to_memory(manager, source, chosen, world, request)
    assert program.plan is not None and program.annotations is not None
    plan = dataclasses.replace(
        summary_rows(
            program, world, _overlapped_timeline(program, world) if request.overlap else None
        ),
        fingerprint=fingerprint(source),
        strided_from=program.annotations.strided_from,
        groups=tuple(sorted(group.split("/", 2)[2] for group in groups_of(program.module))),
        seconds_by_pass=dict(manager.seconds),
    )
    plan = _with_reasons(plan, chosen, program, world, request)
    planned = dataclasses.replace(program, plan=plan)
    # under a limit of memory "auto" may have been a named layout
    layout = plan.layout if request.layout == "auto" else request.layout
    context = PlanContext(planned, manager.graphs, world, chosen, layout, microbatches)
    return dataclasses.replace(plan, context=context)


def _with_reasons(
    plan: Plan, chosen: Program, program: Program, world: World, request: PlanRequest
) -> Plan:
    """Return the plan with its notes: on sizes that no axis divides, padded or not, on tokens of
    experts, and on matmuls that axes replicate. Where "auto" replicates some that an axis could
    split, one sentence stands for all of them: it had the choice, so no layout is the reason. A
    plan from a file has the sentences of its matmuls.
    """
    notes = (*plan.notes, *padding_notes(chosen, plan), *uneven_notes(chosen, plan))
    notes += expert_notes(chosen, plan)
    replicated = [] if request.layout is None else replicated_matmuls(chosen, plan)
    idle = [each for each in replicated if each.divides] if request.layout == "auto" else []
    if idle:
        seconds = compute_seconds_by_node(program, world)
        notes = (*notes, idle_note(chosen, plan, idle, seconds))
    by_choice = {str(each) for each in idle}
    sentences = [sentence for each in replicated if (sentence := str(each)) not in by_choice]
    unsplit = tuple(dict.fromkeys((*sentences, *plan.unsplit)))
    return dataclasses.replace(plan, notes=notes, unsplit=unsplit)


def _reserve_flight_bytes(plan: Plan, request: PlanRequest) -> Plan:
    """Return the plan with the device's limit, and with the bytes that collectives in flight may
    hold below it.
    """
    if request.budget is None:  # the plan has both already
        return plan
    limit, memory = request.budget.memory_bytes or plan.device_limit, plan.memory
    if memory is not None and request.overlap and plan.mesh.axes:
        memory = with_flight(memory, limit)
        plan = dataclasses.replace(plan, memory=memory, peak_bytes=memory.peak)
    return dataclasses.replace(plan, device_limit=limit)


def _overlapped_timeline(program: Program, world: World) -> Timeline | None:
    """Return the step's timeline with communication under computation; None for one rank."""
    assert program.plan is not None
    return timeline(program, world) if program.plan.mesh.axes else None


def _keep_traced_on_one_rank(source: Program, program: Program) -> Program:
    """Return the program with the graph as it was traced where the world has one rank, unless it
    draws random numbers: they are the same on any number of ranks.
    """
    assert program.plan is not None
    drawn = program.module.graph.find_nodes(op="call_function", target=draw)
    if program.plan.mesh.axes or drawn:
        return program
    layouts = {
        n.name: Layout(Mesh(), shape_of(v), ())
        for n in source.module.graph.nodes
        if (v := n.meta.get("val")) is not None and isinstance(v, torch.Tensor)
    }
    return dataclasses.replace(
        program, module=source.module, signature=source.signature, layouts=layouts
    )
