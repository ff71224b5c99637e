"""The calls of the public face: plan, apply, the two in one, and verify."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from autopar._compat import pytree
from autopar.cost.memory import Budget, Limit, Optimizer, Recompute
from autopar.ir.garbage import without_collection
from autopar.ir.plan import Plan
from autopar.ir.progress import shown
from autopar.ops import devices
from autopar.passes.draws import draws
from autopar.passes.pass_manager import PassManager, Progress
from autopar.passes.trace.original import compare_original
from autopar.planner import edit
from autopar.planner.confirm import rewrite_for_ranks
from autopar.planner.division_search import in_fastest_division, is_open
from autopar.planner.padding import with_padding_of
from autopar.planner.pipelines import of_one_stage
from autopar.planner.planner import analyse, choose_plan, plan_division
from autopar.planner.request import (
    Layouts,
    MicrobatchCount,
    Outputs,
    PlanOptions,
    PlanRequest,
    Stages,
)
from autopar.planner.solve import search_meshes
from autopar.planner.tracing import Inputs, KnownTraces, call_arguments, trace_model, trace_step
from autopar.runtime import agreement
from autopar.runtime.agreement import require_same_request
from autopar.runtime.apply import (
    agree_on_request,
    current_tensors,
    plan_context,
    plan_on_rank_0,
    require_same_graph,
)
from autopar.runtime.arguments import check, check_room, check_together, warn_alone
from autopar.runtime.backends import Backend, Overlap
from autopar.runtime.microbatches_check import compare_microbatches
from autopar.runtime.module import NUMBERS, ParallelModule, parallel_module
from autopar.runtime.reference import to_float64
from autopar.runtime.stages_check import compare_stages
from autopar.runtime.training.deferred import Deferred
from autopar.runtime.training.runners import rank_runner
from autopar.runtime.verify import Check, compare
from autopar.world import World, ranks, store


@shown("planning")
@without_collection()
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
    outputs: Outputs = "replicated",
    microbatches: MicrobatchCount = 1,
) -> Plan:
    """Return the fastest layout of `model` on `world`, by modelled seconds. It needs no process
    group, no GPU, and no memory for the parameters: the model may be on the meta device.

    >>> import autopar
    >>> model, inputs = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), (torch.ones(4, 8),)
    >>> [row.layout for row in autopar.plan(model, 4, inputs, layout="megatron").rows[:2]]
    ['tp→n', 'tp→k']

    - `world`: a World, a number of ranks on nodes like this one, a DeviceMesh, or None: what runs.
    - `inputs`: what the model takes at the global batch size, a tuple or a dict by argument name.
    - `layout`: "auto"; "ddp", "fsdp" (ZeRO, arXiv 1910.02054, section 7), "megatron" (arXiv
      1909.08053, section 3), "megatron-sp" (arXiv 2205.05198, section 4.2.2), "cp" (arXiv
      2407.21783, section 3.3.2); "atp", "3d", "4d", "2.5d", "ep" for the best grid of a kind; a
      Grid2D, Grid3D, Grid4D, Grid25D, GridHSDP, GridEP or GridContext; a dict from module pattern
      to these; Stages of any of them.
    - `memory`: bytes on each device, of which 8 % on GPUs and at most 1 MiB on CPUs are reserved;
      "auto" is all that a GPU has, and no limit on CPUs.
    - `optimizer`: whose states count, a name of cost.memory.STATES or bytes for each trained
      number.
    - `recompute`: "full" runs each repeated block again in the backward, "selective" only its
      norms, activations and other cheap ops (arXiv 2205.05198, section 5), "gathers" gathers its
      weights again, "none" neither, "auto" as little as makes it fit.
    - `progress` is called with the name of each pass; `smaller` looks for a smaller world as fast.
    - `reduce_dtype`: torch.float32 sums narrower gradients of parameters in float32 (as FSDP does).
    - `overlap`: compare plans by a step that hides communication, not by the sum of all seconds.
    - `outputs`: "replicated" hands every rank all of every output, as a plain tensor; "sharded" the
      part that it computes, as a DTensor, for models whose large outputs (logits) nobody reads.
    - `microbatches`: a step runs in so many equal parts of the batch, one after the other, each
      with a forward and a backward, and holds the activations of one; the model returns its loss.
      "auto": more than one where that is faster than to recompute whole blocks, or the only way to
      fit, and with layout "auto" also stages, where a step is a twentieth shorter with them.

    Raises TraceError for a model that is no one graph, LayoutError for a layout that does not fit
    it, PlanError where nothing fits the memory, and WorldError for a `world` that is none.
    """
    check(
        "plan", model=model, layout=layout, memory=memory, optimizer=optimizer, overlap=overlap,
        progress=progress, smaller=smaller, outputs=outputs, microbatches=microbatches,
    )  # fmt: skip
    machines = World.of(world)
    options = PlanOptions(
        layout, memory, optimizer, recompute, reduce_dtype, overlap, outputs, microbatches
    )
    request = options.request(machines)
    check_room(model, machines, request.budget)
    traces = KnownTraces()
    attempt = partial(
        plan_division, model, inputs, machines, progress=progress, smaller=smaller, known=traces
    )
    return in_fastest_division(attempt, machines, request, microbatches, inputs)


def apply(
    model: nn.Module,
    plan: Plan,
    inputs: Inputs | None = None,
    backend: Backend = None,
    overlap: Overlap = True,
    sync_parameters: bool = True,
    device: torch.device | str | None = None,
) -> ParallelModule:
    """Return `model` on the running ranks, by a plan. Collective: every rank calls it with the same
    plan. The model itself is left as it is; its parameters are copied.

    >>> import autopar
    >>> model, inputs = nn.Linear(8, 16), (torch.ones(4, 8),)
    >>> par = autopar.apply(model, autopar.plan(model, 1, inputs))  # under torchrun: as many ranks
    >>> par(*inputs).shape
    torch.Size([4, 16])

    - `inputs`: as for `plan`, for a `plan` that was loaded from a file: the model is traced again.
    - `backend`: None runs the scheduled graphs as they are; else a torch.compile backend, by name
      or as a callable.
    - `overlap`: False waits for every collective at once; a tuple of "chunk", "bucket" and
      "schedule" picks passes.
    - `sync_parameters`: where ranks hold other parameters or buffers than rank 0, rank 0's are
      written into the model, as DistributedDataParallel does, with a warning; False raises
      RankError.
    - `device`: where this rank computes; by default where the parameters are, and under NCCL the
      GPU of LOCAL_RANK. Only the rank's part is moved, so a model on the CPU may be larger than a
      GPU.

    Raises WorldError where the plan's mesh and the running ranks differ, or two ranks of a node
    have one accelerator; PlanError where the model is another than planned; InputError where
    `inputs` are missing; RankError where the ranks disagree.
    """
    with on_own_device(model, device) as place:
        return _apply(model, plan, inputs, backend, overlap, sync_parameters, place)


@contextmanager
def on_own_device(model: nn.Module, device: torch.device | str | None) -> Iterator[torch.device]:
    """Make this rank's device torch's current one within the block, and give it. Collective."""
    plain = isinstance(model, nn.Module) and not isinstance(model, Deferred | ParallelModule)
    place = devices.agree_on_device(
        model.parameters() if plain else (), device
    )  # `check` refuses others
    with devices.current_device(place):
        yield place


def _apply(
    model: nn.Module,
    plan: Plan,
    inputs: Inputs | None,
    backend: Backend,
    overlap: Overlap,
    sync_parameters: bool,
    place: torch.device,
) -> ParallelModule:
    check_together("apply", model=model, plan=plan, backend=backend, overlap=overlap)
    context = ranks.together("reading the plan", lambda: plan_context(model, plan, inputs))
    ranks.agree(
        "plan", hashlib.sha256(json.dumps(plan.to_json(), sort_keys=True).encode()).hexdigest()[:16]
    )
    require_same_request(
        None, inputs, backend=backend, overlap=overlap, sync_parameters=sync_parameters
    )
    program = context.program
    tensors = ranks.together("taking the parameters", lambda: current_tensors(model, program))
    context = context.on_device(place)
    runner = rank_runner(context, place, backend, overlap)
    agreement.require_same_tensors(tensors, sync_parameters)
    bare_context = context.without_tensors()
    # ranks that hold the same must drop the same; a module has one name on all of them
    seed, number = ranks.from_rank_0((torch.initial_seed(), next(NUMBERS)))
    options = bare_context, backend, overlap
    return ranks.together(
        "placing the parameters",
        lambda: parallel_module(
            model, context.graphs, runner, place, tensors, seed, number, options
        ),
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
    outputs: Outputs = "replicated",
    microbatches: MicrobatchCount = 1,
) -> ParallelModule:
    """Return `model` on the running ranks: plan and apply in one. Collective. Rank 0 searches, the
    others receive its plan; if a rank fails, all raise.

    >>> import autopar
    >>> model, inputs = nn.Linear(8, 16), (torch.ones(4, 8),)
    >>> par = autopar.parallelize(model, 1, inputs)  # under torchrun, leave the world out
    >>> par(*inputs).sum().backward()

    - `world`: as in `plan`; None is what runs, as `autopar calibrate` measured it here
      (world.json), else by nominal figures, with a warning.
    - `inputs`: as in `plan`; None takes those of the first call.
    - `layout`, `memory`, `optimizer`, `recompute`, `reduce_dtype`, `outputs`, `microbatches`: as in
      `plan`.
    - `backend`, `overlap`, `sync_parameters`, `device`: as in `apply`.

    Raises what `plan` and `apply` raise.
    """
    options = PlanOptions(
        layout, memory, optimizer, recompute, reduce_dtype, overlap, outputs, microbatches
    )
    with on_own_device(model, device) as place:
        check_together(
            "parallelize", model=model, layout=layout, memory=memory, optimizer=optimizer,
            overlap=overlap, backend=backend, outputs=outputs, microbatches=microbatches,
        )  # fmt: skip
        if inputs is None:
            run: dict[str, Any] = {"backend": backend, "sync_parameters": sync_parameters}
            later = Deferred(
                lambda values: parallelize(
                    model, world, values, device=place, **run, **vars(options)
                ),
                ParallelModule,
            )
            return cast(ParallelModule, later)  # it has the same face
        return _plan_and_apply(model, world, inputs, options, backend, sync_parameters, place)


def _plan_and_apply(
    model: nn.Module,
    world: World | int | Any | None,
    inputs: Inputs,
    options: PlanOptions,
    backend: Backend,
    sync_parameters: bool,
    place: torch.device,
) -> ParallelModule:
    warn_alone(world)
    machines, request = agree_on_request(
        world, options, inputs, backend=backend, sync_parameters=sync_parameters
    )
    ranks.together("reading the limits", lambda: check_room(model, machines, request.budget))
    attempt = partial(plan_division, model, inputs, machines, known=KnownTraces())
    layout, microbatches = options.layout, options.microbatches
    searched: list[Plan] = []  # by rank 0

    def search() -> tuple[Layouts, int]:
        plan = in_fastest_division(
            attempt, machines, request, microbatches, inputs, pipelines=backend is None
        )
        searched.append(plan)
        within = layout.within if isinstance(layout, Stages) else layout
        return Stages.of(plan, within) if plan.stage_starts else within, plan.microbatches

    if is_open(layout, microbatches):
        layout, microbatches = ranks.from_rank_0(
            ranks.together("searching", lambda: store.done_on_rank_0(search))
        )
    divided = request.under(layout).divided(int(microbatches))
    machines, divided = ranks.together(
        "reading the layout", lambda: of_one_stage(machines, divided)
    )
    plan = plan_on_rank_0(model, machines, inputs, divided, known=next(iter(searched), None))
    return _apply(model, plan, None, backend, options.overlap, sync_parameters, place)


@shown("verifying")
def verify(
    model: nn.Module,
    world: World | int | Any | None,
    inputs: Inputs,
    layout: Layouts | Plan = "auto",
    tolerance: float = 1e-9,
    recompute: Recompute = "none",
    progress: Progress | None = None,
    outputs: Outputs = "replicated",
    microbatches: int = 1,
) -> Check:
    """Prove a layout on `model`: every rank runs in lockstep in one process, in float64, and is
    compared with the original on one device.

    >>> import autopar
    >>> model, inputs = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), (torch.ones(4, 8),)
    >>> autopar.verify(model, 4, inputs, layout="megatron").grad_error < 1e-9
    True

    Compared are every node, the loss, every gradient, and the parameters after three AdamW steps. A
    model of at most 1e11 FLOP a step, with real tensors, runs once itself, on copies: its results
    and gradients must be those of the graph that was traced.

    - `world`, `inputs`, `progress`, `outputs`: as in `plan`.
    - `tolerance`: the largest relative error (`Check`).
    - `layout`: as in `plan`, or a plan, from a file too, which is verified as it is: leave `world`
      None.
    - `recompute`: "full" recomputes every block in the backward.
    - `microbatches`: all together are compared with the whole batch, the first one on all ranks.

    Raises VerificationError past `tolerance`, naming the first wrong node; else as `plan` does.
    """
    check(
        "verify", model=model, layout_or_plan=layout, tolerance=tolerance, progress=progress,
        outputs=outputs, microbatches=microbatches,
    )  # fmt: skip
    if isinstance(layout, Stages):
        layout = plan(
            model, world, inputs, layout, recompute=recompute, smaller=False, outputs=outputs,
            microbatches=microbatches,
        )  # fmt: skip
        world = None
    machines = layout.world if isinstance(layout, Plan) and world is None else World.of(world)
    pipeline = PassManager(progress)
    count = layout.microbatches if isinstance(layout, Plan) else microbatches
    source, division = trace_step(model, inputs, count)
    budget = Budget.of(machines, "auto", "adamw", recompute)
    if isinstance(layout, Plan):
        request = PlanRequest.like(layout, None, budget)
    else:
        request = PlanRequest(layout, budget, outputs=outputs)
    program = analyse(pipeline, source, request)
    assert program.annotations is not None
    flops = sum(rule.flops for rule in program.annotations.specs.values())
    if isinstance(layout, Plan):
        require_same_graph(layout, source)
        padded = with_padding_of(program, layout)
        chosen = dataclasses.replace(padded, plan=edit.check_edits(padded, layout))
    else:
        chosen = choose_plan(pipeline, program, machines, request)
    chosen, program = to_float64(chosen), to_float64(program)
    on_ranks = rewrite_for_ranks(pipeline, chosen, machines)
    pipeline.progress("compare")
    single = search_meshes(program, World.of(1), PlanRequest())
    on_one_device = rewrite_for_ranks(PassManager(), single, machines)
    call = call_arguments(inputs)
    leaves, whole = pytree.tree_leaves(call), source
    if division is not None:
        whole = trace_model(model, inputs)
        drawn = any(entry.kind == "seed" for entry in on_one_device.signature.inputs)
        # what ranks run is compared, where it drops nothing
        traced = source if drawn else on_one_device
        leaves = compare_microbatches(draws(whole), traced, division, call, tolerance)
    result = compare(on_ranks, on_one_device, leaves, tolerance)
    if isinstance(layout, Plan) and layout.stage_starts:
        pipeline.progress("compare stages")
        errors = compare_stages(on_ranks, on_one_device, division, call, tolerance)
        result = dataclasses.replace(
            result,
            loss_error=max(result.loss_error, errors.loss),
            grad_error=max(result.grad_error, errors.gradient),
            step_error=max(result.step_error, errors.step),
            ranks=layout.ranks,
        )
    pipeline.progress("compare with the model")
    compare_original(model, whole, call, count * flops)
    return result
