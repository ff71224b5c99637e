"""Applying a plan to a model on the ranks that run.

Rank 0 plans and sends its plan to all (`agree_on_request`, `plan_on_rank_0`); the model's tensors
are checked against those that it was planned with (`current_tensors`); process groups are opened
and the graph gets what runs it (`build_runner`); layouts become DTensor placements (`placements`,
`to_dtensor`). `api.apply`, `api.parallelize`, module.py and dynamo_backend.py call it.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from autopar._compat import nan_checks
from autopar.cost.memory import Budget
from autopar.errors import InputError, PlanError, WorldError
from autopar.ir.garbage import without_collection
from autopar.ir.layout import Layout
from autopar.ir.padding import Pads, unpadded_shape
from autopar.ir.plan import Plan
from autopar.ir.plan_table import format_ranks
from autopar.ir.program import Input, Program
from autopar.ir.progress import shown
from autopar.ops.collectives import groups_of
from autopar.ops.process_groups import connect, undone_on_failure
from autopar.passes import trace
from autopar.passes.interleave import interleave_microbatches
from autopar.passes.pass_manager import PassManager
from autopar.planner.confirm import finish_plan, fit_to_memory
from autopar.planner.edit import check_edits, compare_figures
from autopar.planner.former_choices import NOTE as FORMER_CHOICES
from autopar.planner.objective import cost_terms
from autopar.planner.padding import check_layout, with_padding_of
from autopar.planner.pipelines import fit_in_stages, in_stages, require_microbatches
from autopar.planner.plan_context import PlanContext, fingerprint
from autopar.planner.planner import analyse, choose_on_stored, choose_plan
from autopar.planner.request import PlanOptions, PlanRequest
from autopar.planner.tracing import Inputs, trace_step
from autopar.runtime.agreement import require_same_request
from autopar.runtime.backends import Backend, Overlap, runner
from autopar.world import World, ranks, store
from autopar.world.world import running_world, say_once

nan_checks()  # before the first DTensor


def tensors_by_name(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's parameters, then its buffers, by every name that each has."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def current_tensors(model: nn.Module, program: Program) -> dict[str, torch.Tensor]:
    """Return the model's parameters and buffers as they are now. Raises PlanError where one is
    gone, has another shape, dtype or requires_grad than when it was planned, or where tied tensors
    are no longer tied.
    """
    current = tensors_by_name(model)
    tensors = dict(program.tensors)
    for entry in program.signature.inputs:
        if entry.kind not in ("parameter", "buffer"):
            continue
        now = current.get(entry.target)
        shape = unpadded_shape(program.layouts[entry.node].shape, program.pads(entry.node))
        planned = _describe_tensor(shape, program.dtypes[entry.node], entry)
        actual = (
            "gone" if now is None else _describe_tensor(tuple(now.shape), now.dtype, entry, now)
        )
        if now is None or actual != planned:
            raise PlanError(
                f"{entry.kind} {entry.target} was {planned} when the model was planned and is "
                f"{actual} now: plan again"
            )
        if any(current.get(name) is not now for name in entry.names):
            raise PlanError(
                f"{', '.join(entry.names)} were one tensor when the model was planned and are no "
                "longer: plan again"
            )
        tensors[entry.target] = now
    return tensors


def _describe_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, entry: Input, now: torch.Tensor | None = None
) -> str:
    """Return the shape and dtype that the graph was made for, in words; for a parameter also
    whether it is trained.
    """
    trained = entry.trainable if now is None else now.requires_grad
    frozen = ", frozen" if entry.kind == "parameter" and not trained else ""
    return f"{shape} {dtype}{frozen}"


def build_runner(
    context: PlanContext, device_type: str, backend: Backend, overlap: Overlap
) -> tuple[DeviceMesh | None, Callable[..., Any]]:
    """Return the DeviceMesh of the running ranks (None for one rank), with the process groups that
    the planned graph names, and what runs the graph. Collective. Raises WorldError where the plan
    is for another number of ranks.
    """
    device_mesh = open_groups(context, device_type)
    world = ranks.from_rank_0(context.world)  # the order of collectives depends on it
    program = (
        interleave_microbatches(context.program) if context.plan.interleaved else context.program
    )
    return device_mesh, runner(program, world, backend, overlap)


def open_groups(context: PlanContext, device_type: str) -> DeviceMesh | None:
    """Open the process groups that a planned graph names, and return the DeviceMesh of its mesh,
    None for one rank. Collective. Raises WorldError where the plan is for another number of ranks.
    """
    plan = context.plan
    if ranks.running() != plan.ranks:
        raise WorldError(
            f"the plan is for {format_ranks(plan.ranks)} (mesh {str(plan.mesh) or 'of one rank'}"
            f"{f', {plan.pipeline.ranks} times' if plan.stage_starts else ''}), "
            f"{ranks.running()} are running: plan for "
            f"{ranks.running()}, or start {plan.ranks} with torchrun and call "
            "torch.distributed.init_process_group"
        )
    groups = groups_of(context.program.module)
    if not plan.mesh.axes:
        return None
    with undone_on_failure():
        return ranks.together(
            "opening process groups",
            lambda: connect(plan.mesh, device_type, groups, plan.pipeline.ranks),
        )


def agree_on_request(
    world: World | int | Any | None,
    options: PlanOptions,
    inputs: Inputs,
    replicated_parameters: bool = False,
    **others: Any,
) -> tuple[World, PlanRequest]:
    """Return rank 0's world and the PlanRequest, the same on every rank. Collective. `others`:
    arguments that say nothing of the plan, and must be the same, too. Raises WorldError, PlanError,
    and RankError where the ranks ask for different things.
    """
    ranks.together("reading the world", lambda: World.of(world))  # each rank's own, or it says why
    require_same_request(world, inputs, **vars(options), **others)
    common_world = ranks.together(
        "reading the world", lambda: store.done_on_rank_0(lambda: named_or_running(world))
    )
    # rank 0's, as all ranks must order sums alike
    common_world = dataclasses.replace(ranks.from_rank_0(common_world))
    return common_world, ranks.together(
        "reading the options", lambda: options.request(common_world, replicated_parameters)
    )


def named_or_running(world: World | int | Any | None) -> World:
    """Return the world that is named; without one, the running world, as it was calibrated here or
    is assumed, with a warning that says so.
    """
    if world is not None:
        return World.of(world)
    detected, note = running_world()
    if note:
        say_once(note)
    return detected


@shown("planning")
@without_collection()
def plan_on_rank_0(
    model: nn.Module,
    world: World,
    inputs: Inputs,
    request: PlanRequest,
    like: Plan | None = None,
    traced: Program | None = None,
    known: Plan | None = None,
) -> Plan:
    """Return rank 0's plan, on every rank. Collective. Each step that may fail on one rank alone is
    a `ranks.together` of its own, never one inside another. `like`: a plan of the same model for
    another call, whose mesh and stored layouts (by the names of parameters) are kept. `traced`: the
    model's trace, where it was made already. `known`: rank 0's plan, where it has searched already.
    """
    assert request.layout is not None
    if like is None:
        require_microbatches(request)
    pipeline = PassManager()
    count = request.microbatches
    source, microbatches = ranks.together(
        "tracing",
        lambda: (
            trace_step(model, inputs, count, pipeline)
            if traced is None
            else (pipeline.run("trace", traced, lambda program: program, trace.check), None)
        ),
    )
    ranks.agree("model", fingerprint(source))
    program = ranks.together("annotating", lambda: analyse(pipeline, source, request))
    if like is None:
        ranks.together("reading the layout", lambda: check_layout(program, world, request))

    def finish_stage(chosen: Program, inner: PlanRequest) -> Plan:
        return finish_plan(pipeline, source, chosen, world, inner, microbatches)

    choose = partial(choose_plan, pipeline, program, world)
    fitted: list[Program] = []  # by rank 0

    def search() -> Plan | None:
        if known is not None:
            return _as_searched(program, known, world)
        if like is not None:
            best = choose_on_stored(pipeline, program, world, _by_placeholder(like, program))
        else:
            if request.stages is not None:
                return fit_in_stages(choose, finish_stage, request)[0]
            best = choose(request)
        fitted.append(fit_to_memory(pipeline, source, best, world, request))
        return fitted[0].plan

    best_plan = ranks.together("searching", lambda: store.done_on_rank_0(search))
    data = ranks.from_rank_0(best_plan.to_json() if best_plan is not None else None)
    shared_plan = Plan.from_json(data)
    program = dataclasses.replace(with_padding_of(program, shared_plan), plan=shared_plan)
    without_budget = dataclasses.replace(request, budget=None)

    def finish() -> Plan:
        as_shared = [
            dataclasses.replace(own, plan=shared_plan)
            for own in fitted
            if own.plan is not None and shared_plan.decides_as(own.plan)
        ]
        plan = finish_plan(
            pipeline, source, program, world, without_budget, microbatches, *as_shared
        )
        if like is not None and plan.mesh.axes and not shared_plan.bound:
            plan = dataclasses.replace(plan, notes=(*plan.notes, FORMER_CHOICES))
        searched = shared_plan if shared_plan.stage_starts else None  # with its stages
        return in_stages(plan, request, like or searched)

    return ranks.together("rewriting", finish)


def _as_searched(program: Program, plan: Plan, world: World) -> Plan:
    """Return a finished plan of the annotated program with the seconds and the bound that a search
    gives, of one micro-batch without what runs twice: `finish_plan` adds the rest.
    """
    seconds = sum(cost_terms(with_padding_of(program, plan), plan, world).values())
    bound = plan.bound
    if plan.microbatches > 1 and plan.seconds:
        bound *= seconds / plan.seconds
    return dataclasses.replace(plan, seconds=seconds, bound=bound)


def _by_placeholder(plan: Plan, program: Program) -> Plan:
    """Return the plan with its stored layouts by the placeholders of a program, in place of the
    names of parameters.
    """
    entries = [e for e in program.signature.inputs if e.target in plan.stored]
    return dataclasses.replace(plan, stored={e.node: plan.stored[e.target] for e in entries})


def placements(layout: Layout) -> tuple[Placement, ...]:
    """Return the DTensor placements of a plain layout: one per mesh axis, in storage order. DTensor
    cuts axis by axis, outer first, so it can hold plain layouts alone. (With two strided shards
    torch's own cut and join are no inverses.)
    """
    assert layout.is_plain, f"{layout} of {layout.shape} is no layout that DTensor can hold"
    kinds = {"I": Replicate(), "R": Replicate(), "P": Partial()}
    axis_placements: list[Placement] = [
        Shard(state.dim) if state.kind == "S" else kinds[state.kind]
        for state in (layout.states[place] for place in layout.mesh.storage_order)
    ]
    return tuple(axis_placements) or (Replicate(),)


def to_dtensor(
    local: torch.Tensor, layout: Layout, device_mesh: DeviceMesh | None, pads: Pads = ()
) -> torch.Tensor:
    """Return this rank's part of a tensor as a DTensor; the part itself without a mesh. `pads`: of
    the layout, which neither the part nor the DTensor has.
    """
    if device_mesh is None:
        return local
    shape = torch.Size(unpadded_shape(layout.shape, pads))
    strides = _contiguous_strides(shape)
    return DTensor.from_local(
        local, device_mesh, placements(layout), run_check=False, shape=shape, stride=strides
    )


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor: (6, 2, 1) for the shape (4, 3, 2)."""
    strides, unit = [], 1
    for size in reversed(shape):
        strides.append(unit)
        unit *= size
    return tuple(reversed(strides))


def plan_context(model: nn.Module, plan: Plan, inputs: Inputs | None) -> PlanContext:
    """Return the plan's context, made anew where it is missing or outdated."""
    context: PlanContext | None = plan.context
    if context is not None and plan.decides_as(context.plan):
        return context
    if inputs is None:
        what = "from a file" if context is None else "that was changed since it was made"
        raise InputError(
            f"a plan {what} holds no graph: give apply the inputs too, so that it can trace the "
            "model again"
        )
    renewed = renew_plan(model, plan, inputs)
    for line in renewed.changed_figures:
        warnings.warn(line, stacklevel=2)
    assert isinstance(renewed.context, PlanContext)
    return renewed.context


def renew_plan(model: nn.Module, plan: Plan, inputs: Inputs) -> Plan:
    """Return a plan from a file for this model on the plan's world: edits are checked against the
    rules and every figure is computed anew; `changed_figures` says which differ. Raises PlanError
    for another model, and with the node for a choice that cannot be.

    Example: renew_plan(model, autopar.Plan.load("plan.json"), (tokens, targets)).table()
    """
    pipeline = PassManager()
    source, microbatches = trace_step(model, inputs, plan.microbatches, pipeline)
    require_same_graph(plan, source)
    request = PlanRequest.like(plan, None, Budget(None, plan.optimizer, "none"))
    program = with_padding_of(analyse(pipeline, source, request), plan)
    edited = check_edits(program, plan)
    seconds = sum(cost_terms(program, edited, plan.world).values())
    edited = dataclasses.replace(edited, seconds=seconds, memory=None)
    program = dataclasses.replace(program, plan=edited)
    renewed = finish_plan(pipeline, source, program, plan.world, request, microbatches)
    renewed = in_stages(renewed, request, plan)
    return compare_figures(plan, renewed)


def require_same_graph(plan: Plan, source: Program) -> None:
    if fingerprint(source) != plan.fingerprint:
        raise PlanError(
            f"the plan is for the graph {plan.fingerprint}, this model with these inputs gives "
            f"{fingerprint(source)}: plan again"
        )
