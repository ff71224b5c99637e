"""The pipeline in reading order: trace, annotate, chains, choose, rewrite, emit; and the four calls of the public face."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from ._compat import pytree
from .errors import PlanError
from .mesh import Mesh
from .module import ParallelModule
from .passes import annotate, chains, choose, emit, rewrite, trace
from .plan import Plan
from .program import Program
from .report.summary import summarised
from .verify import Check, compare, widened
from .world import World

Inputs = tuple[Any, ...] | list[Any] | Mapping[str, Any] | torch.Tensor
Backend = str | Callable[..., Any] | None


def _arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) from what a user gives: a tuple of positional or a dict of keyword arguments, or one tensor."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs), {}


class _Pipeline:
    """Runs passes one after the other, checks each one's contract, and keeps what it made."""

    def __init__(self) -> None:
        self.graphs: dict[str, fx.GraphModule] = {}
        self.seconds: dict[str, float] = {}

    def run(self, name: str, program: Program, step: Callable[[Program], Program], check: Callable[[Program], None]) -> Program:
        start = time.perf_counter()
        program = step(program)
        check(program)
        self.graphs[name] = program.module
        self.seconds[name] = time.perf_counter() - start
        return program


def _traced(model: nn.Module, inputs: Inputs) -> Program:
    args, kwargs = _arguments(inputs)
    return trace.trace(model, args, kwargs)


def _analysed(pipeline: _Pipeline, program: Program) -> Program:
    program = pipeline.run("annotate", program, annotate.annotate, annotate.check)
    return pipeline.run("chains", program, chains.chains, chains.check)


def _planned(pipeline: _Pipeline, program: Program, world: World, layout: str) -> Program:
    program = pipeline.run("choose", program, lambda p: choose.choose(p, world, layout), choose.check)
    return _rewritten(pipeline, program, world)


def _rewritten(pipeline: _Pipeline, program: Program, world: World) -> Program:
    return pipeline.run("rewrite", program, lambda p: rewrite.rewrite(p, world), rewrite.check)


def plan(
    model: nn.Module, world: World | int | Any | None, inputs: Inputs, layout: str = "auto"
) -> Plan:
    """The fastest layout of a model on a world, by model. Needs no process group, no GPU, no memory for the parameters.

    `inputs`: what the single-device model takes, at the global batch size: a tuple of positional or a dict of keyword arguments;
    on the meta device if you like. `layout`: "auto" or a name. Raises TraceError, LayoutError, PlanError, WorldError.
    """
    found = World.of(world)
    pipeline = _Pipeline()
    source = _traced(model, inputs)
    program = _planned(pipeline, _analysed(pipeline, source), found, layout)
    return _finished(source, program, found)


def _finished(source: Program, program: Program, world: World) -> Plan:
    assert program.plan is not None
    made = summarised(program, world)
    return dataclasses.replace(made, fingerprint=fingerprint(source))


def fingerprint(program: Program) -> str:
    """Names a traced graph: its nodes with shapes and dtypes, and what feeds them."""
    lines = [
        f"{n.name} {n.op} {n.target} {n.args} {n.kwargs} "
        + str([(tuple(v.shape), v.dtype) for v in pytree.tree_leaves(n.meta.get("val")) if isinstance(v, torch.Tensor)])
        for n in program.module.graph.nodes
    ]
    lines.extend(f"{e.kind} {e.node} {e.target}" for e in program.signature.inputs)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def verify(
    model: nn.Module, world: World | int | Any | None, inputs: Inputs, layout: str = "auto", tolerance: float = 1e-9
) -> Check:
    """Prove a layout on this model: every rank in lockstep in one process, in float64, against the original on one device.

    Compares every node, the loss, every gradient, and the parameters after three AdamW steps. Raises VerificationError past `tolerance`.
    """
    found = World.of(world)
    pipeline = _Pipeline()
    source = widened(_traced(model, inputs))
    program = _analysed(pipeline, source)
    several = _planned(pipeline, program, found, layout)
    one = _rewritten(pipeline, choose.choose(program, World.of(1), "auto"), found)
    leaves = pytree.tree_leaves(_arguments(inputs))
    return compare(several, one, leaves, tolerance)
