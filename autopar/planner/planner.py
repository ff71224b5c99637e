"""From a model and a request to a plan, in reading order.

`trace_model` → `analyse` (draws, masks, annotate, chains) → `choose_plan` → `fit_to_memory`
(rewrite, hierarchical collectives, SUMMA, matmul kernels, finalize, recompute) → `finish_plan` (the
figures).
What `choose_plan` runs is `search_plan`: candidates, bounds and exact search (mesh_search.py), then
the plans that compete by their overlapped step (overlap_search.py), then what fits the memory
(memory_search.py).

A model, its inputs, a `PlanRequest` and a world enter, a `Plan` leaves. Every pass runs through a
`PassManager`, which checks its contract.

`PlanContext` is what a plan made in this process carries along: the programs and graphs that `why`,
`timeline`, `formula` and `apply` read. Called by api.py, planner/edit.py and the runtime.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx, nn

from autopar._compat import pytree
from autopar.cost.memory import with_flight
from autopar.cost.simulator import Timeline, timeline
from autopar.cost.summary import compute_seconds_by_node, summary_rows
from autopar.errors import InputError, PlanError
from autopar.ir.containers import register
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.sharding_rule import shape_of
from autopar.ops.collectives import groups_of
from autopar.ops.devices import on_device, without_devices
from autopar.ops.sharded import draw
from autopar.passes import PIPELINE, annotate, draws, masks, trace
from autopar.passes import recompute as recomputing
from autopar.passes.microbatches import Parts
from autopar.passes.pass_manager import PassManager
from autopar.passes.trace.experts import one_op_of_experts
from autopar.passes.trace.signature import without_cache
from autopar.planner.bounds.factor_graph import frame
from autopar.planner.constraint import Constraint
from autopar.planner.deep_models import ShortenedModel
from autopar.planner.expert_notes import expert_notes
from autopar.planner.memory_search import search_within_memory
from autopar.planner.mesh_search import check_choices, exact, search_meshes
from autopar.planner.overlap_search import plans_by_step
from autopar.planner.padding import search_with_padding, with_padding_of
from autopar.planner.part_plans import in_turns, leanest, plan_of_part, sums_once
from autopar.planner.plan_cache import chosen_before
from autopar.planner.rematerialize import rematerialize_to_fit
from autopar.planner.request import Layouts, PlanRequest
from autopar.planner.unsplit import idle_note, padding_notes, replicated, uneven_notes
from autopar.planner.why import Why, why
from autopar.planner.world_size import larger_world
from autopar.world import World

if TYPE_CHECKING:
    from autopar.cost.formula import Formula


@dataclasses.dataclass(frozen=True)
class PlanContext:
    """What a plan made in this process carries along: the rewritten program, the graph after every
    pass, and the annotated program that was planned.
    """

    program: Program
    graphs: dict[str, fx.GraphModule]
    world: World
    source: Program
    layout: Layouts | None = None  # that was asked for; None for a plan from a file
    parts: Parts | None = None  # of a step in micro-batches

    def without_tensors(self) -> Plan:
        """Return the plan as a parallel module holds it: it answers every question and holds no
        tensor.
        """
        assert self.program.plan is not None
        programs = (dataclasses.replace(p, tensors={}) for p in (self.program, self.source))
        program, source = programs
        context = dataclasses.replace(self, program=program, source=source)
        return dataclasses.replace(self.program.plan, context=context)

    def on_device(self, device: torch.device) -> PlanContext:
        """Return this context with the tensors that its graph creates placed on the device of a
        rank.
        """
        module, parts = on_device(self.program.module, device), self.parts
        if parts is not None and parts.totals is not None:
            parts = dataclasses.replace(parts, totals=on_device(parts.totals, device))
        program = dataclasses.replace(self.program, module=module)
        return dataclasses.replace(self, program=program, parts=parts)

    def why(self, pattern: str) -> Why:
        """Answer `Plan.why`. Raises PlanError for a plan from a file."""
        plan = self.program.plan
        assert plan is not None
        if self.layout is None:
            raise PlanError(
                "a plan from a file does not know what it was chosen from: plan again in this "
                "process, with autopar.plan(model, world, inputs, layout)"
            )
        return why(self.source, plan, self.layout, pattern)

    def timeline(self, overlap: bool) -> Timeline:
        """Answer `Plan.timeline`."""
        return timeline(self.program, self.world, overlap)

    def formula(self, pattern: str) -> Formula:
        """Answer `Plan.formula`."""
        from autopar.cost.formula import formula  # sympy: only where it is asked for

        user_inputs = tuple(
            e for e in self.program.signature.inputs if e.kind not in ("coordinate", "seed")
        )
        signature = dataclasses.replace(self.program.signature, inputs=user_inputs)
        traced = dataclasses.replace(self.program, module=self.source.module, signature=signature)
        return formula(traced, self.program, pattern)


def fingerprint(program: Program) -> str:
    """Return 16 hex digits that name a traced graph: its nodes with shapes and dtypes, and its
    inputs. The device is left out, because a plan made on the meta device is valid for any.
    """
    lines = [
        f"{n.name} {n.op} {n.target} {without_devices(n.args)} {without_devices(n.kwargs)} "
        + str(
            [
                (tuple(v.shape), v.dtype)
                for v in pytree.tree_leaves(n.meta.get("val"))
                if isinstance(v, torch.Tensor)
            ]
        )
        for n in program.module.graph.nodes
    ]
    lines.extend(f"{e.kind} {e.node} {e.target}" for e in program.signature.inputs)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


class Call(NamedTuple):
    """The arguments of a call of the model, by position and by name."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Inputs = Call | tuple[Any, ...] | list[Any] | Mapping[str, Any] | torch.Tensor


def call_arguments(inputs: Inputs) -> Call:
    """Return (args, kwargs) of the model call from what a user passes: a tuple of positional
    arguments, a dict of keyword arguments, or one tensor. Raises InputError for anything else.
    """
    if isinstance(inputs, Call):
        call = inputs
    elif isinstance(inputs, Mapping):
        call = Call((), dict(inputs))
    elif isinstance(inputs, torch.Tensor):
        call = Call((inputs,), {})
    elif isinstance(inputs, tuple | list):
        call = Call(tuple(inputs), {})
    else:
        raise InputError(
            "inputs are a tuple of positional arguments, a dict of keyword arguments, or one "
            f"tensor, not {type(inputs).__name__}"
        )
    register((call.args, call.kwargs))
    return call


def trace_model(model: nn.Module, inputs: Inputs, manager: PassManager | None = None) -> Program:
    """Return the program that exporting and simplifying the model on these inputs gives."""
    args, kwargs = call_arguments(inputs)
    with without_cache(model, kwargs), one_op_of_experts(model):
        return _traced(model, args, kwargs, manager)


def _traced(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], manager: PassManager | None
) -> Program:
    """Run the trace pass."""
    run = (manager or PassManager()).run
    return run("trace", model, lambda module: trace.trace(module, args, kwargs), trace.check)


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
        counted = annotate.one_part(program, count, 1 / count)
        chosen = chosen_before(counted, name, world, request, search)
        return plan_of_part(annotate.one_part(chosen, count, 1.0), world, request)

    return manager.run("choose", program, choose, check_choices)


def choose_on_stored(manager: PassManager, program: Program, world: World, plan: Plan) -> Program:
    """Return the program, of the same model in another call, with the fastest plan that stores its
    parameters as `plan` does, on the same mesh. What `plan`'s layout asks of the model is dropped.
    """

    def choose(program: Program) -> Program:
        program = with_padding_of(program, plan)
        constraint = Constraint(plan.layout, stored=plan.stored)
        best, bound = exact(frame(program), plan.mesh, constraint, world, thorough=False)
        return dataclasses.replace(
            program, plan=dataclasses.replace(best, bound=bound, padding=plan.padding)
        )

    return manager.run("choose", program, choose, check_choices)


def search_plan(program: Program, world: World, request: PlanRequest) -> Program:
    """Return the annotated program with the fastest plan found that fits the request's budget, or
    that of least memory where none fits; without a limit, the plan of least time.
    """
    model = ShortenedModel(program, world)
    plans = fastest_plans(model, request)
    if request.memory_bytes is None:
        return plans[0]
    return search_within_memory(model, plans, request)


def fastest_plans(model: ShortenedModel, request: PlanRequest) -> list[Program]:
    """Return the program with the plan of the least sum of seconds; with overlap, the plans that
    compete by their simulated step, the fastest first.
    """
    least = search_meshes(model.program, model.world, request)
    if request.overlap and request.recompute not in ("full", "gathers", "selective"):
        return plans_by_step(model, least, request)
    return [least]


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
    chosen = leanest(chosen, request)
    assert chosen.plan is not None
    program = _keep_traced_on_one_rank(source, manager.run_all(PIPELINE, chosen, world))
    step = partial(
        rematerialize_to_fit,
        world=world,
        budget=request.budget,
        larger=partial(larger_world, chosen, chosen.plan, request),
    )
    program = manager.run("recompute", program, step, recomputing.check)
    program = in_turns(sums_once(program, request), world, request)
    assert program.plan is not None
    return dataclasses.replace(program, plan=_reserve_flight_bytes(program.plan, request))


def finish_plan(
    manager: PassManager,
    source: Program,
    chosen: Program,
    world: World,
    request: PlanRequest,
    parts: Parts | None = None,
) -> Plan:
    """Return the plan with its figures and the context that `apply` needs. Without a budget in
    the request no limit applies: the plan was made to fit before.
    """
    program = fit_to_memory(manager, source, chosen, world, request)
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
    context = PlanContext(planned, manager.graphs, world, chosen, layout, parts)
    return dataclasses.replace(plan, context=context)


def _with_reasons(
    plan: Plan, chosen: Program, program: Program, world: World, request: PlanRequest
) -> Plan:
    """Return the plan with notes on sizes that no axis divides, padded or not, on tokens of experts
    and, where "auto" replicates matmuls that an axis could split, one sentence for all of them: it
    had the choice, so no layout is the reason.
    """
    notes = (*plan.notes, *padding_notes(chosen, plan), *uneven_notes(chosen, plan))
    notes += expert_notes(chosen, plan)
    sentences = plan.unsplit
    if request.layout == "auto":
        idle = [each for each in replicated(chosen, plan.mesh, plan.choices) if each.divides]
        if idle:
            seconds = compute_seconds_by_node(program, world)
            notes = (*notes, idle_note(chosen, plan, idle, seconds))
            by_choice = {str(each) for each in idle}
            sentences = tuple(s for s in sentences if s not in by_choice)
    return dataclasses.replace(plan, notes=notes, unsplit=sentences)


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
