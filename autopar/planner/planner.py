"""From a traced model and a request to a plan, in reading order.

`analyse` says what may be split how. `search_plan` is the funnel: each stage takes what the one
before leaves, in a file of its name.

    space → bound → solve → simulate → fit → confirm

The program of a model, a `PlanRequest` and a world enter `choose_plan`, the program with its plan
leaves; confirm.py makes a `Plan` of it, with its figures. Called by api.py and the runtime.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes import annotate, draws, masks
from autopar.passes.pass_manager import PassManager
from autopar.planner.bound import bound
from autopar.planner.constraint import Constraint
from autopar.planner.contender import Contender
from autopar.planner.fit import fit
from autopar.planner.former_choices import with_former_choices
from autopar.planner.microbatch_plans import may_gather_once, plan_of_microbatch
from autopar.planner.padding import search_with_padding, search_with_rows_padded
from autopar.planner.plan_cache import chosen_before
from autopar.planner.plan_context import fingerprint
from autopar.planner.request import PlanRequest
from autopar.planner.simulate import simulate
from autopar.planner.solve import ShortenedModel, check_choices, exact, solve
from autopar.world import World


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
        name, count = fingerprint(program), request.microbatches
        if count == 1:
            return chosen_before(program, name, world, request, search)
        gathers = 1 / count if may_gather_once(program, request) else 1.0
        counted = annotate.count_microbatch(program, count, 1 / count, gathers)
        chosen = chosen_before(counted, name, world, request, search)
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
    that of least memory where none fits; without a limit, the plan of least time.
    """
    model = ShortenedModel.of(program, world)
    chosen = fit(model, fastest_plans(model, request), request)
    return dataclasses.replace(chosen, tensors=program.tensors)


def fastest_plans(model: ShortenedModel, request: PlanRequest) -> list[Contender]:
    """Return the plan of the least sum of seconds; with overlap, the plans that compete by their
    simulated step, the fastest first.
    """
    assert request.layout is not None
    layout, program, world = request.layout, model.program, model.world
    space = model.candidates(layout)
    bounds = model.once("bounds", layout, lambda: bound(program, space, world))
    contenders = solve(model, space, bounds, request)
    return simulate(contenders, request)
