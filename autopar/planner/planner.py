"""What is asked for, and the steps from a model to a plan, in reading order: trace, annotate,
chains, choose, rewrite, route, pipeline, forms, emit, recompute. Each runs with its contract.

What a plan carries along in the process that made it: graphs to read formulas and times off.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autopar._compat import pytree
from autopar.cost.memory import Budget, with_flight
from autopar.cost.simulator.timeline import Timeline, timeline
from autopar.cost.summary import summary_rows
from autopar.errors import InputError, PlanError
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.plan_table import Memory
from autopar.ir.program import Program
from autopar.ir.sharding_rule import shape_of
from autopar.ops.collectives import groups_of
from autopar.ops.devices import on_device, without_devices
from autopar.passes import annotate, chains, finalize, hierarchy, kernel_choice, rewrite
from autopar.passes import recompute as recomputing
from autopar.passes import summa as panels
from autopar.passes.pass_manager import PassManager
from autopar.passes.trace import trace
from autopar.passes.trace.signature import without_cache
from autopar.planner import choose, world_size
from autopar.planner.memory_search import search_within_memory
from autopar.planner.named_layouts import Layouts
from autopar.planner.rematerialize import rematerialize_to_fit as made_to_fit
from autopar.planner.why import Why, why
from autopar.world import World


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
    redundant: bool = False

    def kept(self) -> Plan:
        """The plan as a parallel module keeps it: it can be asked all, and holds no tensor."""
        assert self.program.plan is not None
        programs = (dataclasses.replace(p, tensors={}) for p in (self.program, self.source))
        program, source = programs
        ready = dataclasses.replace(self, program=program, source=source)
        return dataclasses.replace(self.program.plan, ready=ready)

    def on_device(self, device: torch.device) -> PlanContext:
        """Its graph with the tensors that it makes on the device of a rank."""
        module = on_device(self.program.module, device)
        return dataclasses.replace(self, program=dataclasses.replace(self.program, module=module))

    def why(self, pattern: str) -> Why:
        """See Plan.why."""
        plan = self.program.plan
        assert plan is not None
        if self.layout is None:
            raise PlanError(
                "a plan from a file does not know what it was chosen from: plan again in this "
                "process, with autopar.plan(model, world, inputs, layout)"
            )
        return why(self.source, plan, self.layout, self.redundant, pattern)

    def timeline(self, overlap: bool) -> Timeline:
        """See Plan.timeline."""
        return timeline(self.program, self.world, overlap)

    def formula(self, pattern: str) -> Any:
        """See Plan.formula."""
        from autopar.cost.formula import formula  # sympy: only where it is asked for

        own = tuple(
            e for e in self.program.signature.inputs if e.kind not in ("coordinate", "seed")
        )
        signature = dataclasses.replace(self.program.signature, inputs=own)
        traced = dataclasses.replace(
            self.program, module=self.graphs["annotate"], signature=signature
        )
        return formula(traced, self.program, pattern)


def fingerprint(program: Program) -> str:
    """Names a traced graph: its nodes with shapes and dtypes, and what feeds them; not the device,
    as a plan from the meta device is for any.
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


Inputs = tuple[Any, ...] | list[Any] | Mapping[str, Any] | torch.Tensor


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is to be, in the words of `autopar.plan`. `layout` None: that of a file. `budget`
    None: whatever it needs, it was made to fit.
    """

    layout: Layouts | None = "auto"
    budget: Budget | None = None
    redundant: bool = False
    reduce_dtype: torch.dtype | None = None
    overlap: bool = False
    whole: bool = False  # parameters and results stay whole on every rank


def call_arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) from what a user gives: a tuple of positional or a dict of keyword arguments,
    or one tensor.
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if not isinstance(inputs, tuple | list):
        raise InputError(
            "inputs are a tuple of positional arguments, a dict of keyword arguments, or one "
            f"tensor, not {type(inputs).__name__}"
        )
    return tuple(inputs), {}


def trace_model(model: nn.Module, inputs: Inputs, pipeline: PassManager | None = None) -> Program:
    args, kwargs = call_arguments(inputs)
    with without_cache(model, kwargs):
        return _traced(model, args, kwargs, pipeline)


def _traced(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], pipeline: PassManager | None
) -> Program:
    run = (pipeline or PassManager()).run
    return run("trace", model, lambda given: trace.trace(given, args, kwargs), trace.check)


def analyse(
    pipeline: PassManager,
    program: Program,
    reduce_dtype: torch.dtype | None = None,
    whole: bool = False,
) -> Program:
    program = pipeline.run("annotate", program, annotate.annotate, annotate.check)
    program = annotate.reduced_in(program, reduce_dtype)
    program = annotate.kept_whole(program) if whole else program
    return pipeline.run("chains", program, chains.chains, chains.check)


def choose_plan(
    pipeline: PassManager, program: Program, world: World, asked: PlanRequest
) -> Program:
    def step(program: Program) -> Program:
        assert asked.layout is not None
        how = asked.layout, asked.redundant, asked.budget, asked.overlap
        return search_within_memory(program, world, *how)

    return pipeline.run("choose", program, step, choose.check)


def rewrite_for_ranks(pipeline: PassManager, program: Program, world: World) -> Program:
    """With everything that the plan says: blocks that it recomputes, too."""
    program = _emitted(pipeline, program, world)
    return pipeline.run("recompute", program, recomputing.recompute, recomputing.check)


def _emitted(pipeline: PassManager, program: Program, world: World) -> Program:
    program = pipeline.run("rewrite", program, lambda p: rewrite.rewrite(p, world), rewrite.check)
    program = pipeline.run(
        "route", program, lambda p: hierarchy.choose_hierarchies(p, world), hierarchy.check
    )
    program = pipeline.run("pipeline", program, panels.summa, panels.check)
    program = pipeline.run(
        "forms", program, lambda p: kernel_choice.choose_kernels(p, world), kernel_choice.check
    )
    return pipeline.run("emit", program, finalize.finalize, finalize.check)


def fit_to_memory(
    pipeline: PassManager, source: Program, chosen: Program, world: World, asked: PlanRequest
) -> Program:
    """Rewritten, with as little recomputed as makes it fit. Raises PlanError where nothing does."""
    program = _on_one_rank(source, _emitted(pipeline, chosen, world))

    def larger(needs: Memory) -> str:
        assert asked.budget is not None and chosen.plan is not None
        how = asked.layout or "auto", asked.redundant, asked.budget
        return world_size.larger_world(chosen, chosen.plan, *how, needs)

    def step(program: Program) -> Program:
        return made_to_fit(program, world, asked.budget, larger)

    program = pipeline.run("recompute", program, step, recomputing.check)
    assert program.plan is not None
    return dataclasses.replace(program, plan=_with_room(program.plan, asked))


def finish_plan(
    pipeline: PassManager, source: Program, chosen: Program, world: World, asked: PlanRequest
) -> Plan:
    """The plan with its figures and what `apply` needs. Without a budget: it was made to fit."""
    program = fit_to_memory(pipeline, source, chosen, world, asked)
    assert program.plan is not None
    made = dataclasses.replace(
        summary_rows(program, world, _overlapped(program, world) if asked.overlap else None),
        fingerprint=fingerprint(source),
        groups=tuple(sorted(group.split("/", 2)[2] for group in groups_of(program.module))),
        seconds_by_pass=dict(pipeline.seconds),
    )
    ready = dataclasses.replace(program, plan=made)
    # under a limit of memory "auto" may have been a named layout
    layout = made.layout if asked.layout == "auto" else asked.layout
    kept = PlanContext(ready, pipeline.graphs, world, chosen, layout, asked.redundant)
    return dataclasses.replace(made, ready=kept)


def _with_room(plan: Plan, asked: PlanRequest) -> Plan:
    """With the limit, and with what communication under computation may hold below it."""
    if asked.budget is None:  # it has both
        return plan
    limit, memory = asked.budget.memory_bytes or plan.device_limit, plan.memory
    if memory is not None and asked.overlap and plan.mesh.axes:
        memory = with_flight(memory, limit)
        plan = dataclasses.replace(plan, memory=memory, peak_bytes=memory.peak)
    return dataclasses.replace(plan, device_limit=limit)


def _overlapped(program: Program, world: World) -> Timeline | None:
    """The step with communication under computation. None for one rank, and with blocks that are
    made again, which are scheduled too but no timeline is modelled of.
    """
    assert program.plan is not None
    plan = program.plan
    has_none = not plan.mesh.axes or plan.recompute or plan.regather
    return None if has_none else timeline(program, world)


def _on_one_rank(source: Program, program: Program) -> Program:
    """A world of one rank keeps the graph as it was traced."""
    assert program.plan is not None
    if program.plan.mesh.axes:
        return program
    layouts = {
        n.name: Layout(Mesh(), shape_of(v), ())
        for n in source.module.graph.nodes
        if (v := n.meta.get("val")) is not None and isinstance(v, torch.Tensor)
    }
    return dataclasses.replace(
        program, module=source.module, signature=source.signature, layouts=layouts
    )
