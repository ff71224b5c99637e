"""From a model and a request to a plan, in reading order.

Example: a request for Stages(4, "fsdp") and 16 micro-batches has the model traced on the rows of
one micro-batch, and planned for the ranks of one stage. division_search.py finds these numbers
where they are left open.

A model, its inputs, a world and a `PlanRequest` enter `plan_division`, a `Plan` leaves: traced,
analysed, searched, confirmed. `analyse` says what may be split how, `choose_plan` pads dims and
searches. `search_plan` is the funnel: each stage takes what the one before leaves, in a file of its
name.

    space → bound → solve → simulate → fit → confirm

Called by api.py, tools/ and, part by part, the runtime.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from torch import nn

from autopar.cost.least_bytes import is_excluded
from autopar.ir.plan import Plan
from autopar.ir.program import Program, check_choices
from autopar.passes import annotate, draws, masks
from autopar.passes.pass_manager import PassManager, Progress
from autopar.planner import world_size
from autopar.planner.bound import bound
from autopar.planner.confirm import finish_plan
from autopar.planner.constraint import Constraint
from autopar.planner.fit import fit, most_frugal
from autopar.planner.former_choices import with_former_choices
from autopar.planner.microbatch_plans import may_gather_once, plan_of_microbatch
from autopar.planner.padding import search_with_padding, search_with_rows_padded
from autopar.planner.pipelines import fit_in_stages, of_one_stage, require_microbatches
from autopar.planner.plan_cache import chosen_before
from autopar.planner.request import PlanRequest
from autopar.planner.simulate import simulate
from autopar.planner.solve import Contender, exact, solve
from autopar.planner.space import space
from autopar.planner.tracing import Inputs, KnownTraces, trace_step
from autopar.world import World


def plan_division(
    model: nn.Module,
    inputs: Inputs,
    machines: World,
    request: PlanRequest,
    progress: Progress | None = None,
    smaller: bool = False,
    known: KnownTraces | None = None,
) -> Plan:
    """Return the plan of a step that is divided as `request` says: into micro-batches, and into
    stages if these are its layout. `smaller`: the plan says whether fewer ranks would be as fast.
    `known`: traces of the model on these inputs, which divisions share.
    """
    machines, request = of_one_stage(machines, request)
    require_microbatches(request)
    pipeline = PassManager(progress)
    source, microbatches = trace_step(model, inputs, request.microbatches, pipeline, known)
    analysed = analyse(pipeline, source, request)
    search = partial(choose_plan, pipeline, analysed, machines)

    def finish(chosen: Program, inner: PlanRequest) -> Plan:
        return finish_plan(pipeline, source, chosen, machines, inner, microbatches)

    if request.stages is not None:
        return fit_in_stages(search, finish, request)[1]
    program = search(request)
    best = finish(program, request)
    if not smaller or request.microbatches > 1:
        return best
    pipeline.progress("smaller worlds")
    fewer = world_size.smaller_world(program, best, request)
    return dataclasses.replace(best, smaller=fewer)


def analyse(manager: PassManager, program: Program, request: PlanRequest | None = None) -> Program:
    """Return the program with random draws that no layout changes, masks as descriptions, its
    annotations (sharding rules, dims, factors, and what the request asks of parameters and outputs)
    and its chains.
    """
    request = request or PlanRequest()
    program = manager.run("draws", program, draws.draws, draws.check)
    program = manager.run("masks", program, masks.masks, masks.check)
    cut = partial(annotate.annotate, strided_from=request.strided_from)
    program = manager.run("annotate", program, cut, annotate.check)
    assert program.annotations is not None
    if request.layout == "auto" and program.annotations.strided_from is None:
        program = annotate.with_unsplit_queries(program)
    program = annotate.reduced_in(program, request.reduce_dtype)
    replicated_outputs = request.outputs == "replicated"
    program = annotate.replicate(program, request.replicated_parameters, replicated_outputs)
    return manager.run("chains", program, annotate.chains, annotate.check_chains)


def choose_plan(
    manager: PassManager, program: Program, world: World, request: PlanRequest
) -> Program:
    """Return the program with the plan that the search finds for this world, within the memory
    budget, after a check of its layouts; with the one that it found before, where plans are kept
    (plan_cache.py).
    """
    search = partial(search_plan, world=world, request=request)
    search = partial(search_with_padding, search, world=world, request=request)

    def choose(program: Program) -> Program:
        count = request.microbatches
        if count == 1:
            return chosen_before(program, world, request, search)
        gathers = 1 / count if may_gather_once(program, request) else 1.0
        counted = annotate.count_microbatch(program, count, 1 / count, gathers)
        chosen = chosen_before(counted, world, request, search)
        return plan_of_microbatch(
            annotate.count_microbatch(chosen, count, 1.0, 1.0), world, request
        )

    return manager.run("choose", program, choose, check_choices)


def choose_on_stored(manager: PassManager, program: Program, world: World, plan: Plan) -> Program:
    """Return the program, of the same model in another call, with a plan that stores its parameters
    as `plan` does, on the same mesh: with the choices of `plan`, where they are legal at these
    sizes, else the fastest one, of which nothing is asked that `plan`'s layout asks.
    """

    def choose(program: Program) -> Program:
        carried = with_former_choices(program, world, plan)
        return carried or search_with_rows_padded(search, program, plan)

    def search(program: Program) -> Program:
        constraint = Constraint(plan.layout, stored=plan.stored)
        best, least = exact(program, plan.mesh, constraint, world, thorough=False)
        return dataclasses.replace(program, plan=dataclasses.replace(best, bound=least))

    return manager.run("choose", program, choose, check_choices)


def search_plan(program: Program, world: World, request: PlanRequest) -> Program:
    """Return the annotated program with the fastest plan found that fits the request's budget, or
    that of least memory where none fits; without a limit, the plan of least time. Where bytes that
    every plan holds are above the limit, none is searched for its time.
    """
    bare = dataclasses.replace(program, tensors={}, plan=None)
    if is_excluded(bare, world.ranks, request.budget):
        chosen = most_frugal(bare, world, request)
    else:
        chosen = fit(bare, world, fastest_plans(bare, world, request), request)
    return dataclasses.replace(chosen, tensors=program.tensors)


def fastest_plans(program: Program, world: World, request: PlanRequest) -> list[Contender]:
    """Return the plan of the least sum of seconds; with overlap, the plans that compete by their
    simulated step, the fastest first.
    """
    assert request.layout is not None
    searched = space(request.layout, world, program, _are_compared(world, request))
    bounds = bound(program, searched, world)
    contenders = solve(program, world, searched, bounds, request)
    return simulate(contenders, request)


def _are_compared(world: World, request: PlanRequest) -> bool:
    """Whether several plans are compared by their steps with overlap: not where the request says
    what is recomputed, nor on one rank.
    """
    return request.overlap and world.ranks > 1 and request.recompute in ("auto", "none")
