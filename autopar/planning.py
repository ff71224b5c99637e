"""What is asked for, and the steps from a model to a plan, in reading order: trace, annotate,
chains, choose, rewrite, route, pipeline, forms, emit, recompute. Each runs with its contract.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar import sizing
from autopar.affordable import affordable
from autopar.arguments import without_cache
from autopar.cost.memory import Budget, with_flight
from autopar.cost.simulator.timeline import Timeline, timeline
from autopar.cost.summary import summarised
from autopar.errors import InputError
from autopar.fitting import fitted as made_to_fit
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.plan_table import Memory
from autopar.ir.program import Program
from autopar.ir.sharding_rule import shape_of
from autopar.layouts import Layouts
from autopar.ops.reshard_nodes import groups_of
from autopar.passes import annotate, chains, choose, finalize, hierarchy, kernel_choice, rewrite
from autopar.passes import recompute as recomputing
from autopar.passes import summa as panels
from autopar.passes.pass_manager import Pipeline
from autopar.passes.trace import trace
from autopar.ready import Ready, fingerprint
from autopar.world import World

Inputs = tuple[Any, ...] | list[Any] | Mapping[str, Any] | torch.Tensor


@dataclass(frozen=True)
class Asked:
    """What a plan is to be, in the words of `autopar.plan`. `layout` None: that of a file. `budget`
    None: whatever it needs, it was made to fit.
    """

    layout: Layouts | None = "auto"
    budget: Budget | None = None
    redundant: bool = False
    reduce_dtype: torch.dtype | None = None
    overlap: bool = False
    whole: bool = False  # parameters and results stay whole on every rank


def arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
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


def traced(model: nn.Module, inputs: Inputs, pipeline: Pipeline | None = None) -> Program:
    args, kwargs = arguments(inputs)
    with without_cache(model, kwargs):
        return _traced(model, args, kwargs, pipeline)


def _traced(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], pipeline: Pipeline | None
) -> Program:
    run = (pipeline or Pipeline()).run
    return run("trace", model, lambda given: trace.trace(given, args, kwargs), trace.check)


def analysed(
    pipeline: Pipeline,
    program: Program,
    reduce_dtype: torch.dtype | None = None,
    whole: bool = False,
) -> Program:
    program = pipeline.run("annotate", program, annotate.annotate, annotate.check)
    program = annotate.reduced_in(program, reduce_dtype)
    program = annotate.kept_whole(program) if whole else program
    return pipeline.run("chains", program, chains.chains, chains.check)


def chosen(pipeline: Pipeline, program: Program, world: World, asked: Asked) -> Program:
    def step(program: Program) -> Program:
        assert asked.layout is not None
        how = asked.layout, asked.redundant, asked.budget, asked.overlap
        return affordable(program, world, *how)

    return pipeline.run("choose", program, step, choose.check)


def rewritten(pipeline: Pipeline, program: Program, world: World) -> Program:
    """With everything that the plan says: blocks that it recomputes, too."""
    program = _emitted(pipeline, program, world)
    return pipeline.run("recompute", program, recomputing.recompute, recomputing.check)


def _emitted(pipeline: Pipeline, program: Program, world: World) -> Program:
    program = pipeline.run("rewrite", program, lambda p: rewrite.rewrite(p, world), rewrite.check)
    program = pipeline.run("route", program, lambda p: hierarchy.route(p, world), hierarchy.check)
    program = pipeline.run("pipeline", program, panels.pipeline, panels.check)
    program = pipeline.run(
        "forms", program, lambda p: kernel_choice.forms(p, world), kernel_choice.check
    )
    return pipeline.run("emit", program, finalize.emit, finalize.check)


def fitted(
    pipeline: Pipeline, source: Program, chosen: Program, world: World, asked: Asked
) -> Program:
    """Rewritten, with as little recomputed as makes it fit. Raises PlanError where nothing does."""
    program = _on_one_rank(source, _emitted(pipeline, chosen, world))

    def larger(needs: Memory) -> str:
        assert asked.budget is not None and chosen.plan is not None
        how = asked.layout or "auto", asked.redundant, asked.budget
        return sizing.larger(chosen, chosen.plan, *how, needs)

    def step(program: Program) -> Program:
        return made_to_fit(program, world, asked.budget, larger)

    program = pipeline.run("recompute", program, step, recomputing.check)
    assert program.plan is not None
    return dataclasses.replace(program, plan=_with_room(program.plan, asked))


def finished(
    pipeline: Pipeline, source: Program, chosen: Program, world: World, asked: Asked
) -> Plan:
    """The plan with its figures and what `apply` needs. Without a budget: it was made to fit."""
    program = fitted(pipeline, source, chosen, world, asked)
    assert program.plan is not None
    made = dataclasses.replace(
        summarised(program, world, _overlapped(program, world) if asked.overlap else None),
        fingerprint=fingerprint(source),
        groups=tuple(sorted(group.split("/", 2)[2] for group in groups_of(program.module))),
        seconds_by_pass=dict(pipeline.seconds),
    )
    ready = dataclasses.replace(program, plan=made)
    # under a limit of memory "auto" may have been a named layout
    layout = made.layout if asked.layout == "auto" else asked.layout
    kept = Ready(ready, pipeline.graphs, world, chosen, layout, asked.redundant)
    return dataclasses.replace(made, ready=kept)


def _with_room(plan: Plan, asked: Asked) -> Plan:
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
