"""One row of the table: a model is traced once, then planned and proven in every layout."""

from __future__ import annotations

import re
import time
import warnings
from collections import defaultdict
from typing import Any

import torch

from autopar._compat import pytree
from autopar.cost.compute import node_seconds
from autopar.cost.memory import Budget
from autopar.ir.program import Program
from autopar.ir.strategy import Strategy
from autopar.passes.pass_manager import PassManager
from autopar.passes.trace.original import compare_original
from autopar.planner import solve
from autopar.planner.confirm import rewrite_for_ranks
from autopar.planner.planner import analyse, choose_plan
from autopar.planner.request import PlanRequest
from autopar.planner.tracing import call_arguments, trace_model
from autopar.runtime.reference import to_float64
from autopar.runtime.verify import compare
from autopar.world import World
from benchmarks.zoo.sizes import Factory

RANKS, TOLERANCE = 4, 1e-9  # the tolerance is that of `autopar.verify`
LAYOUTS = ("auto", "megatron", "fsdp")
Row = dict[str, Any]


class Subject:
    """A traced model in float64, and its program on one device.

    `prove` does what `autopar.verify` does; here all layouts share one trace.
    """

    def __init__(self, model: torch.nn.Module, inputs: Any) -> None:
        self.leaves = pytree.tree_leaves(call_arguments(inputs))
        self.world = World.of(RANKS)
        started = time.process_time()
        source = trace_model(model, inputs)
        self.trace_s = time.process_time() - started
        self.budget = Budget.of(self.world, "auto", "adamw", "none")
        self.program = analyse(PassManager(), to_float64(source), PlanRequest("auto", self.budget))
        assert self.program.annotations is not None
        flops = sum(rule.flops for rule in self.program.annotations.specs.values())
        compare_original(model, source, call_arguments(inputs), flops)
        single = solve.search_meshes(self.program, World.of(1), PlanRequest())
        self.unsharded = rewrite_for_ranks(PassManager(), single, World.of(1))

    def choose(self, layout: str) -> Program:
        """Return the program with its plan in a layout."""
        request = PlanRequest(layout, self.budget)
        return choose_plan(PassManager(), self.program, self.world, request)

    def prove(self, chosen: Program) -> Row:
        """Return the largest relative error of the loss, the gradients and three steps."""
        on_ranks = rewrite_for_ranks(PassManager(), chosen, self.world)
        check = compare(on_ranks, self.unsharded, self.leaves, TOLERANCE)
        worst = max(check.loss_error, check.grad_error, check.step_error)
        return {"error": float(f"{worst:.1e}"), "nodes": check.nodes}


def measure(factory: Factory) -> Row:
    """Return the row of a model: its plan, its parity in every layout, and the CPU seconds."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, inputs = factory()
    row: Row = {"model": type(model).__name__, "layouts": {}}
    started = time.process_time()
    try:
        subject = Subject(model, inputs)
    except Exception as error:
        row["layouts"]["auto"] = reason(error)
    else:
        row["trace_s"] = round(subject.trace_s, 1)
        for layout in LAYOUTS:
            row["layouts"][layout] = layout_entry(subject, layout, row)
    return row | {"cpu_s": round(time.process_time() - started, 1)}


def layout_entry(subject: Subject, layout: str, row: Row) -> Row:
    """Return the parity in one layout, or what it is refused for or fails with. The row is told
    what the plan of "auto" says.
    """
    started = time.process_time()
    try:
        chosen = subject.choose(layout)
        if layout == "auto":
            row["plan_s"] = round(time.process_time() - started, 1)
            row |= facts(chosen, subject.world)
        return subject.prove(chosen)
    except Exception as error:
        return reason(error)


def reason(error: Exception) -> Row:
    """Return what a layout is refused for, or fails with, without paths of this machine."""
    text = re.sub(r"(/[\w.-]+)+/", "", f"{type(error).__name__}: {error}")
    return {"reason": text[:2000]}


def facts(program: Program, world: World) -> Row:
    """Return the plan's mesh, the ops that were probed, and the ops without a rule."""
    assert program.plan is not None and program.annotations is not None
    return {
        "mesh": str(program.plan.mesh) or "one rank",
        "probed": list(program.annotations.probed),
        "without_rule": costs_without_rule(program, world),
    }


def costs_without_rule(program: Program, world: World) -> dict[str, float]:
    """Return for each op that runs unsharded for want of a rule its part of the modelled step.

    Its computation counts; gathering its operands is in the step, and is not counted here.
    """
    plan, notes = program.plan, program.annotations
    assert plan is not None and notes is not None
    seconds: dict[str, float] = defaultdict(float)
    for node in program.module.graph.nodes:
        if str(node.target) in notes.unknown and node.name in plan.choices:
            choice = plan.choices[node.name]
            strategy = Strategy((), choice.operands, choice.results, 1)
            gradient = (node.name, 0) in notes.gradient
            dtype = getattr(node.meta.get("val"), "dtype", torch.float64)
            cost = node_seconds(notes.specs[node.name], strategy, dtype, gradient, world)
            seconds[str(node.target)] += cost
    return {op: float(f"{cost / plan.seconds:.2g}") for op, cost in sorted(seconds.items())}
