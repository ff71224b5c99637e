"""The calls of the public face: plan, apply, the two in one, and verify."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autopar._compat import pytree
from autopar.cost.memory import Budget, Limit, Optimizer, Recompute
from autopar.ir.plan import Plan
from autopar.ir.plan import reduce_dtype as read_reduce_dtype
from autopar.ops import devices
from autopar.passes.pass_manager import PassManager, Progress
from autopar.planner import edit, mesh_search, world_size
from autopar.planner.named_layouts import Layouts
from autopar.planner.planner import (
    Inputs,
    analyse,
    call_arguments,
    choose_plan,
    finish_plan,
    rewrite_for_ranks,
    trace_model,
)
from autopar.planner.request import PlanRequest
from autopar.runtime import agreement
from autopar.runtime.agreement import require_same_request
from autopar.runtime.apply import (
    agree_on_request,
    build_runner,
    current_tensors,
    plan_context,
    plan_on_rank_0,
    require_same_graph,
    tensors_by_name,
)
from autopar.runtime.arguments import check, check_room, check_together, warn_alone
from autopar.runtime.backends import Backend, Overlap
from autopar.runtime.module import NUMBERS, Deferred, ParallelModule
from autopar.runtime.original import compare_original
from autopar.runtime.reference import to_float64
from autopar.runtime.verify import Check, compare
from autopar.world import World, ranks


def plan(
    model: nn.Module,
    world: World | int | Any | None,
    inputs: Inputs,
    layout: Layouts = "auto",
    memory: Limit = "auto",
    optimizer: Optimizer = "adamw",
    recompute: Recompute = "auto",
    progress: Progress | None = None,
    smaller: bool = True,
    reduce_dtype: torch.dtype | str | None = None,
    overlap: Overlap = True,
) -> Plan:
    """The fastest layout of a model on a world, by model. Needs no process group, no GPU, no memory
    for the parameters.

    `inputs`: what the single-device model takes, at the global batch size: a tuple of positional or
    a dict of keyword arguments; on the meta device if you like. `layout`: "auto" or a name.
    `memory`: bytes on each device, "auto" is all that the world's devices have. On GPUs 8 % is
    kept back for the driver and the gaps of a caching allocator, on CPUs 2 % or 1 MiB for kernels.
    `optimizer`: whose states are among them, a name of autopar.cost.memory.STATES or bytes for
    every trained number. `recompute`: "full" computes every repeated block again in the backward,
    "gathers" only gathers the weights of their products again, "none" does neither, "auto" as
    little as makes it fit.
    `reduce_dtype`: torch.float32 adds up the gradients of parameters across ranks in float32, where
    they are of a narrower dtype (as FSDP's MixedPrecisionPolicy does); None: in their own dtype.
    `overlap`: as `apply` will be told: with it, plans are compared by a step in which communication
    runs under computation (plan.overlapped), else by the sum of all seconds (plan.seconds).
    `progress` is called with the name of each pass as it starts. `smaller=False` does not look
    whether a smaller world would be as fast (plan.smaller), which takes a few bounds on few meshes.
    Raises TraceError, LayoutError, PlanError (also where nothing fits), WorldError.

    Example: plan(model, 8, (tokens, targets)).table()
    """
    check(
        "plan", model=model, layout=layout, memory=memory, optimizer=optimizer, overlap=overlap,
        progress=progress, smaller=smaller,
    )  # fmt: skip
    found, summed = World.of(world), read_reduce_dtype(reduce_dtype)
    budget = Budget.of(found, memory, optimizer, recompute)
    check_room(model, found, budget)
    asked, pipeline = PlanRequest(layout, budget, summed, bool(overlap)), PassManager(progress)
    source = trace_model(model, inputs, pipeline)
    program = choose_plan(pipeline, analyse(pipeline, source, summed), found, asked)
    made = finish_plan(pipeline, source, program, found, asked)
    if not smaller:
        return made
    pipeline.progress("smaller worlds")
    fewer = world_size.smaller_world(program, made, asked)
    return dataclasses.replace(made, smaller=fewer)


def apply(
    model: nn.Module,
    plan: Plan,
    inputs: Inputs | None = None,
    backend: Backend = None,
    overlap: Overlap = True,
    sync_parameters: bool = True,
    device: torch.device | str | None = None,
) -> ParallelModule:
    """The model on the running ranks, by a plan. Collective: every rank calls it with the same
    plan.

    `inputs` are needed for a plan that was loaded from a file: the model is traced again.
    `backend`: None runs the graph, or the scheduled ones; else the name of a torch.compile backend
    or a callable. `overlap=False`: nothing is scheduled, every collective is waited for at once;
    True joins and schedules them; a tuple of "chunk", "bucket" and "schedule" picks.
    `sync_parameters`: where ranks hold other parameters or buffers than rank 0, as they do after
    another seed, rank 0's are written into the model, as DistributedDataParallel does, and a
    warning says so; False raises a RankError instead.
    `device`: where this rank computes, by default where the parameters are; of a model on the CPU
    under NCCL, the GPU that LOCAL_RANK numbers. Each parameter is cut where it is and only the
    rank's part is moved, so a model on the CPU may be larger than any GPU. Inputs are moved too.
    Else the model is left as it is; the parameters are copied. Raises WorldError where the plan's
    mesh and the running ranks differ, or two ranks of a node have one accelerator; PlanError where
    the model is another than planned.
    """
    with on_own_device(model, device) as place:
        return _applied(model, plan, inputs, backend, overlap, sync_parameters, place)


@contextmanager
def on_own_device(model: nn.Module, device: torch.device | str | None) -> Iterator[torch.device]:
    """The device of this rank, which is torch's current one meanwhile. Collective."""
    plain = isinstance(model, nn.Module) and not isinstance(model, Deferred | ParallelModule)
    place = devices.agree_on_device(
        model.parameters() if plain else (), device
    )  # `check` refuses others
    with devices.current_device(place):
        yield place


def _applied(
    model: nn.Module,
    plan: Plan,
    inputs: Inputs | None,
    backend: Backend,
    overlap: Overlap,
    sync_parameters: bool,
    place: torch.device,
) -> ParallelModule:
    check_together("apply", model=model, plan=plan, backend=backend, overlap=overlap)
    ready = ranks.together("reading the plan", lambda: plan_context(model, plan, inputs))
    ranks.agree(
        "plan", hashlib.sha256(json.dumps(plan.to_json(), sort_keys=True).encode()).hexdigest()[:16]
    )
    require_same_request(
        None, inputs, backend=backend, overlap=overlap, sync_parameters=sync_parameters
    )
    program = ready.program
    tensors = ranks.together("taking the parameters", lambda: current_tensors(model, program))
    ready = ready.on_device(place)
    program = ready.program
    device_mesh, run = build_runner(ready, place.type, backend, overlap)
    agreement.require_same_tensors(tensors, sync_parameters)
    program = dataclasses.replace(program, plan=ready.kept())
    order = list(tensors_by_name(model))
    # ranks that hold the same must drop the same; a module has one name on all of them
    seed, number = ranks.from_rank_0((torch.initial_seed(), next(NUMBERS)))
    placed = program, ready.graphs, device_mesh, ranks.rank(), seed, order, run, number
    return ranks.together(
        "placing the parameters", lambda: ParallelModule(*placed, tensors=tensors, device=place)
    )


def parallelize(
    model: nn.Module,
    world: World | int | Any | None = None,
    inputs: Inputs | None = None,
    layout: Layouts = "auto",
    backend: Backend = None,
    memory: Limit = "auto",
    optimizer: Optimizer = "adamw",
    recompute: Recompute = "auto",
    overlap: Overlap = True,
    reduce_dtype: torch.dtype | str | None = None,
    sync_parameters: bool = True,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Plan and apply in one: the model on the running ranks. Collective.

    `world` None: what is running, as `autopar calibrate` measured it here (world.json), else by
    nominal figures, which is said. `inputs` None: those of the first call. Rank 0 searches, the
    others receive its plan; if a rank fails, all raise. See `plan` and `apply` for the rest.

    Example, under torchrun: par = autopar.parallelize(model, inputs=(tokens, targets)); par(tokens,
    targets).backward()
    """
    with on_own_device(model, device) as place:
        check_together(
            "parallelize", model=model, layout=layout, memory=memory, optimizer=optimizer,
            overlap=overlap, backend=backend,
        )  # fmt: skip
        wanted = layout, backend, memory, optimizer, recompute, overlap, reduce_dtype
        last = sync_parameters, place
        if inputs is None:
            return Deferred(lambda given: parallelize(model, world, given, *wanted, *last))
        return _planned_and_applied(model, world, inputs, *wanted, *last)


def _planned_and_applied(
    model: nn.Module,
    world: World | int | Any | None,
    inputs: Inputs,
    layout: Layouts,
    backend: Backend,
    memory: Limit,
    optimizer: Optimizer,
    recompute: Recompute,
    overlap: Overlap,
    reduce_dtype: torch.dtype | str | None,
    sync_parameters: bool,
    place: torch.device,
) -> ParallelModule:
    warn_alone(world)
    limits = memory, optimizer, recompute
    own = layout, limits, reduce_dtype, overlap
    options = {"backend": backend, "sync_parameters": sync_parameters}
    found, asked = agree_on_request(world, *own, inputs=inputs, options=options)
    ranks.together("reading the limits", lambda: check_room(model, found, asked.budget))
    plan = plan_on_rank_0(model, found, inputs, asked)
    return _applied(model, plan, None, backend, overlap, sync_parameters, place)


def verify(
    model: nn.Module,
    world: World | int | Any | None,
    inputs: Inputs,
    layout: Layouts | Plan = "auto",
    tolerance: float = 1e-9,
    recompute: Recompute = "none",
    progress: Progress | None = None,
) -> Check:
    """Prove a layout on this model: every rank in lockstep in one process, in float64, against the
    original on one device.

    Compares every node, the loss, every gradient, and the parameters after three AdamW steps. A
    model of at most 1e11 FLOP a step, with real tensors, is itself run once as well, on copies:
    what it returns and every gradient are held against the graph that was traced.
    Raises VerificationError past `tolerance`. `recompute` "full": with every block recomputed.
    `layout` may be a plan, one from a file too, which is verified as it is: leave `world` None.

    Example: print(verify(model, 8, (tokens, targets), layout="megatron"))
    """
    check(
        "verify", model=model, layout_or_plan=layout, tolerance=tolerance, progress=progress,
    )  # fmt: skip
    found = layout.world if isinstance(layout, Plan) and world is None else World.of(world)
    pipeline = PassManager(progress)
    source = trace_model(model, inputs)
    summed = layout.reduce_dtype if isinstance(layout, Plan) else None  # in float64 all the same
    program = analyse(pipeline, to_float64(source), summed)
    assert program.annotations is not None
    flops = sum(spec.flops for spec in program.annotations.specs.values())
    if isinstance(layout, Plan):
        require_same_graph(layout, source)
        program = dataclasses.replace(program, plan=edit.check_edits(program, layout))
    else:
        budget = Budget.of(found, "auto", "adamw", recompute)
        program = choose_plan(pipeline, program, found, PlanRequest(layout, budget))
    several = rewrite_for_ranks(pipeline, program, found)
    pipeline.progress("compare")
    single = mesh_search.search_meshes(program, World.of(1), PlanRequest())
    one = rewrite_for_ranks(PassManager(), single, found)
    check_of_ranks = compare(several, one, pytree.tree_leaves(call_arguments(inputs)), tolerance)
    pipeline.progress("compare with the model")
    compare_original(model, source, call_arguments(inputs), flops)
    return check_of_ranks
