"""What runs a planned graph on a rank: the graph itself, a step in micro-batches, or the stages
that the rank has of a pipeline.

A plan's context enters `rank_runner` on all ranks together, a `Runner` leaves. api.py and
call_graphs.py make StepGraphs of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.ir.pipeline_schedule import actions, runs_in_halves
from autopar.ir.program import Program
from autopar.ops.links import Links
from autopar.passes.microbatches import without_microbatches
from autopar.passes.stages import cut
from autopar.planner.plan_context import PlanContext
from autopar.runtime.apply import build_runner, open_groups
from autopar.runtime.backends import Backend, Overlap, runner
from autopar.runtime.training.microbatches_run import MicrobatchesRun, batch_program
from autopar.runtime.training.stages_run import StagesRun, own_program
from autopar.world import ranks


class Runner(NamedTuple):
    """What runs a graph, its program with the inputs and outputs of a whole step on this rank, and
    the DeviceMesh of its mesh (None for one rank).
    """

    program: Program
    run: Callable[..., Any]
    device_mesh: DeviceMesh | None


def rank_runner(
    context: PlanContext, device: torch.device, backend: Backend, overlap: Overlap
) -> Runner:
    """Return what runs a plan's graph on this rank. Collective. Raises as `build_runner` does."""
    program = dataclasses.replace(context.program, plan=context.plan)
    if context.plan.stage_starts:
        return _stages_runner(context, program, device, backend, overlap)
    device_mesh, run = build_runner(context, device.type, backend, overlap)
    if context.microbatches is None:
        return Runner(program, run, device_mesh)
    step = MicrobatchesRun(run, program, context.microbatches, device_mesh)
    return Runner(batch_program(program, context.microbatches), step, device_mesh)


def _stages_runner(
    context: PlanContext,
    program: Program,
    device: torch.device,
    backend: Backend,
    overlap: Overlap,
) -> Runner:
    """Return what runs the stages of this rank. A call of another kind than the planned step runs
    as one micro-batch, which goes through the stages from the first to the last.
    """
    plan = context.plan
    pipeline, microbatches = plan.pipeline, context.microbatches or without_microbatches(program)
    device_mesh = open_groups(context, device.type)
    links = ranks.together(
        "opening process groups", partial(Links, plan.mesh, pipeline.ranks, ranks.rank())
    )
    world = ranks.from_rank_0(context.world)  # the order of collectives depends on it
    # what runs for as long as the module holds nothing of the whole model
    cut_program = dataclasses.replace(
        program, tensors={}, plan=dataclasses.replace(plan, context=None)
    )
    stages = cut(cut_program, plan.stage_starts)
    own = [stages[number] for number in pipeline.stages_of(links.copy)]
    schedule = actions(plan.schedule, pipeline, microbatches.count)
    splits = runs_in_halves(schedule)
    runs = {s.number: runner(s.program, world, backend, overlap, splits) for s in own}
    rank_program = own_program(program, own)
    run = StagesRun(
        rank_program, microbatches, device_mesh, stages, runs, schedule, pipeline, links, device
    )
    return Runner(batch_program(rank_program, microbatches), run, device_mesh)
