"""Plans a step that is divided as its request says: traced, analysed, searched, confirmed.

Example: a request for Stages(4, "fsdp") and 16 micro-batches has the model traced on the rows of
one micro-batch, and planned for the ranks of one stage. division_search.py finds the numbers where
they are left open; api.py and tools/advise call `plan_division`.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from torch import nn

from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes.pass_manager import PassManager, Progress
from autopar.planner import world_size
from autopar.planner.confirm import finish_plan
from autopar.planner.pipelines import fit_in_stages, of_one_stage, require_microbatches
from autopar.planner.planner import analyse, choose_plan
from autopar.planner.request import PlanRequest
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
