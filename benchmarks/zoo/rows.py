"""One row of the table: a model is traced, planned and proven in every layout."""

from __future__ import annotations

import re
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

import autopar
from autopar.cost.compute import node_seconds
from autopar.ir.strategy import Strategy

RANKS = 4
NAMED_LAYOUTS = ("megatron", "fsdp")
Row = dict[str, Any]


def measure(factory: Callable[[], tuple[torch.nn.Module, Any]]) -> Row:
    """Return the row of a model: its plan, its parity in three layouts, and the CPU seconds."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, inputs = factory()
    row: Row = {"model": type(model).__name__, "layouts": {}}
    started = time.process_time()
    try:
        plan = autopar.plan(model, RANKS, inputs, overlap=False, smaller=False)
    except Exception as error:
        row["layouts"]["auto"] = reason(error)
    else:
        row |= facts(plan)
        row["layouts"]["auto"] = parity(model, None, inputs, plan)
        for layout in NAMED_LAYOUTS:
            row["layouts"][layout] = parity(model, RANKS, inputs, layout)
    return row | {"cpu_s": round(time.process_time() - started, 1)}


def parity(model: torch.nn.Module, world: int | None, inputs: Any, layout: Any) -> Row:
    """Return the largest relative error of loss, gradients and three steps; else the reason."""
    started = time.process_time()
    try:
        check = autopar.verify(model, world, inputs, layout)
    except Exception as error:
        return reason(error)
    errors = check.loss_error, check.grad_error, check.step_error
    seconds = round(time.process_time() - started, 1)
    return {"error": float(f"{max(errors):.1e}"), "nodes": check.nodes, "cpu_s": seconds}


def reason(error: Exception) -> Row:
    """Return what a layout was refused for, or failed with, without paths of this machine."""
    text = re.sub(r"(/[\w.-]+)+/", "", f"{type(error).__name__}: {error}")
    return {"reason": text[:2000]}


def facts(plan: autopar.Plan) -> Row:
    """Return what the plan says: its mesh, the seconds of planning, and the ops without a rule."""
    seconds = plan.seconds_by_pass
    assert plan.context is not None
    notes = plan.context.program.annotations
    assert notes is not None
    return {
        "mesh": str(plan.mesh) or "one rank",
        "trace_s": round(seconds["trace"], 1),
        "plan_s": round(sum(seconds.values()) - seconds["trace"], 1),
        "probed": list(notes.probed),
        "without_rule": costs_without_rule(plan),
    }


def costs_without_rule(plan: autopar.Plan) -> dict[str, float]:
    """Return for each op that runs unsharded for want of a rule its part of the modelled step.

    Only the computation counts: what the op's operands need to be gathered is in the collectives.
    """
    assert plan.context is not None
    program = plan.context.source
    notes = program.annotations
    if notes is None or not notes.unknown:
        return {}
    seconds: dict[str, float] = defaultdict(float)
    for node in program.module.graph.nodes:
        if str(node.target) in notes.unknown and node.name in plan.choices:
            choice = plan.choices[node.name]
            strategy = Strategy((), choice.operands, choice.results, 1)
            gradient = (node.name, 0) in notes.gradient
            dtype = getattr(node.meta.get("val"), "dtype", torch.float32)
            cost = node_seconds(notes.specs[node.name], strategy, dtype, gradient, plan.world)
            seconds[str(node.target)] += cost
    return {op: round(s / plan.seconds, 4) for op, s in sorted(seconds.items())}
