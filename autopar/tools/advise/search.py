"""The best degrees for another tool: each that it can express is planned as a named layout.

Example: `autopar advise llama3-8b --world dgx-h100 --ranks 64 --batch 64x4096 --for torchtitan`. A
model, a world, inputs and a tool's name enter, an `Advice` leaves. The model is traced and
annotated once, and once more for every number of micro-batches that stages run. cli/ calls
`advise`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.cost.memory import Budget, Limit, Optimizer
from autopar.errors import LayoutError, PlanError
from autopar.ir.containers import tensors_in
from autopar.ir.dim_roles import expert_atoms
from autopar.ir.graph import blocks
from autopar.ir.plan import Plan
from autopar.ir.plan_table import format_bytes
from autopar.ir.program import Program
from autopar.passes.pass_manager import PassManager
from autopar.planner.confirm import finish_plan
from autopar.planner.division_search import computed_seconds
from autopar.planner.planner import analyse, choose_plan, plan_division
from autopar.planner.request import Layouts, PlanRequest, Stages
from autopar.planner.tracing import Inputs, trace_model
from autopar.tools.advise.degrees import (
    MODES,
    Degrees,
    Tool,
    contexts_of,
    experts_of,
    splits_of,
    stages_of,
)
from autopar.tools.advise.tools import TOOLS
from autopar.world import World

_LISTED = 4  # subgraphs in which a tool's plan differs from autopar's own


@dataclass(frozen=True)
class Advice:
    """The best degrees for `tool`, `text` in its own words, and `plan`, what autopar models for
    them. `own` is autopar's plan for the same memory, in as many stages and micro-batches, None
    where it was not asked for. `tried`: every candidate with the seconds of its modelled step, or
    the reason why it is none.
    """

    tool: Tool
    degrees: Degrees
    text: str
    plan: Plan
    own: Plan | None
    tried: tuple[tuple[Degrees, float | str], ...]

    @property
    def gain(self) -> float:
        """The part of the tool's step that autopar's own plan saves, 0 where that was not asked."""
        return (
            0.0
            if self.own is None
            else max(0.0, 1 - self.own.step_seconds / self.plan.step_seconds)
        )

    @property
    def beyond(self) -> tuple[str, ...]:
        """What of autopar's own plan the tool cannot express, one sentence a subgraph."""
        if self.own is None or not self.gain:
            return ()
        theirs = {row.subgraph: row.layout for row in self.plan.rows}
        lines = [
            f"{row.subgraph}: autopar splits {row.layout}, {self.tool.name} {theirs[row.subgraph]}"
            for row in self.own.rows
            if _is_matmul(row.layout)
            and _is_matmul(theirs.get(row.subgraph, ""))
            and _sizes(row.layout, self.own) != _sizes(theirs[row.subgraph], self.plan)
        ]
        more = [f"and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
        between = ["the layouts of activations between matmuls"] if not lines else []
        mesh = f"the mesh: autopar has {self.own.mesh}, {self.tool.name} {self.plan.mesh}"
        return (mesh, *lines[:_LISTED], *more, *between)


def _is_matmul(layout: str) -> bool:
    """Whether a layout of the table is that of a product: its axes split loop dims."""
    return bool(layout) and all(text.strip()[-1] in "mnk" for text in layout.split(","))


def _sizes(layout: str, plan: Plan) -> dict[str, int]:
    """Return over how many ranks a layout of the table splits each loop dim: {"m": 8, "n": 2}."""
    sizes: dict[str, int] = {}
    for text in layout.split(","):
        axis, _, letter = text.strip().partition("→")
        sizes[letter] = sizes.get(letter, 1) * plan.mesh.sizes.get(axis, 1)
    return sizes


def advise(
    model: nn.Module,
    world: World,
    inputs: Inputs,
    tool: str,
    memory: Limit = "auto",
    optimizer: Optimizer = "adamw",
    compare: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Advice:
    """Return the fastest degrees that a tool can express for `model` on `world`, by modelled
    seconds, within `memory`. `inputs` and the other options are those of `autopar.plan`; `compare`
    plans without the tool's limits, too. Raises PlanError for an unknown tool and where no degrees
    fit.

    >>> import autopar
    >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    >>> world = autopar.World.preset("dgx-h100", 8)
    >>> advice = advise(model, world, (torch.ones(32, 64),), "deepspeed", compare=False)
    >>> advice.degrees.ranks, advice.plan.mesh.size
    (8, 8)
    """
    if tool not in TOOLS:
        raise PlanError(f"there is no exporter for {tool!r}: there are {', '.join(TOOLS)}")
    budget = Budget.of(world, memory, optimizer, "auto")
    manager = PassManager(progress)
    source = trace_model(model, inputs, manager)
    analysed = analyse(manager, source, PlanRequest(overlap=True))
    planning = _Planning(model, inputs, source, analysed, world, budget)
    degrees, plan, tried = _fastest(TOOLS[tool], planning, progress)
    own_layout: Layouts = "auto"
    if degrees.pipeline > 1:
        own_layout = Stages(degrees.pipeline, "auto", schedule="auto")
    count = degrees.microbatches
    own = planning.plan(own_layout, "auto", microbatches=count) if compare else None
    return Advice(TOOLS[tool], degrees, TOOLS[tool].write(degrees), plan, own, tried)


@dataclass
class _Planning:
    """A model that was traced and annotated once, to plan under many layouts; in micro-batches it
    is traced on the rows of one.
    """

    model: nn.Module
    inputs: Inputs
    source: Program
    program: Program
    world: World
    budget: Budget

    def plan(
        self, layout: Layouts, recompute: Any, more_bytes: float = 0.0, microbatches: int = 1
    ) -> Plan:
        """Return the plan of a layout, with so many bytes less on each device. Raises PlanError
        where it does not fit, LayoutError where the layout does not.
        """
        limit = self.budget.memory_bytes
        if limit is not None:
            limit -= more_bytes
            if limit <= 0:
                raise PlanError(f"{format_bytes(more_bytes)} are held beside the plan")
        budget = replace(self.budget, memory_bytes=limit, recompute=recompute)
        request, manager = PlanRequest(layout, budget, overlap=True), PassManager()
        if microbatches > 1:
            return plan_division(self.model, self.inputs, self.world, request.divided(microbatches))
        chosen = choose_plan(manager, self.program, self.world, request)
        return finish_plan(manager, self.source, chosen, self.world, request)


def _candidates(tool: Tool, planning: _Planning) -> Iterator[Degrees | str]:
    """Yield the degrees of a world, or why some are none for this tool or this batch; those with
    stages come last.
    """
    notes = planning.program.annotations
    tensors = tensors_in(planning.inputs)
    tokens = next((x for x in tensors if x.dim() == 2 and not x.is_floating_point()), None)
    batch = 0 if tokens is None or tokens.shape[0] != 1 else 1  # one row has no factor
    if notes is not None and notes.batch is not None:
        batch = notes.batch.size
    layers = len(blocks(planning.source.module.graph.nodes))
    world = planning.world
    facts = (
        0 if tokens is None else tokens.shape[1],
        world.levels[0].ranks if world.levels else 1,
        layers,
        _dtype(planning.source),
    )
    experts = [atom.size for atom in expert_atoms(planning.program)]
    long = notes is not None and notes.strided_from is not None
    for replicate, shard, tensor in splits_of(world):
        plain = Degrees(replicate, shard, tensor, "none", 0, *facts, 1, 1, 1, 1)
        sizes = [plain]
        if tool.context and long:
            sizes += contexts_of(plain)
        if tool.expert:
            sizes += [grouped for each in sizes for grouped in experts_of(each, experts)]
        for each in sizes:
            if not batch or batch % each.data:
                yield f"a batch of {batch} rows is not divided by {each.data} data ranks"
                continue
            for mode in MODES:
                degrees = replace(each, mode=mode, local_batch=batch // each.data)
                if mode != "gathers" or degrees.regathers:
                    yield tool.refuses(degrees) or degrees
    for pipeline, microbatches, shard, tensor in stages_of(world, layers, batch):
        rows = batch // (shard * microbatches)
        plain = Degrees(1, shard, tensor, "none", rows, *facts, 1, 1, pipeline, microbatches)
        for mode in (MODES[0], MODES[-1]) if tool.pipeline else ():
            degrees = replace(plain, mode=mode)
            yield tool.refuses(degrees) or degrees


def _parameters(source: Program) -> list[torch.Tensor]:
    """Return the parameters, a tied one once."""
    entries = [entry for entry in source.signature.inputs if entry.kind == "parameter"]
    return list({id(t): t for e in entries for t in [source.tensors[e.target]]}.values())


def _dtype(source: Program) -> str:
    """Return the dtype of most parameters: "bfloat16"."""
    counts: dict[str, int] = {}
    for parameter in _parameters(source):
        name = str(parameter.dtype).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + parameter.numel()
    return max(counts, key=lambda name: counts[name], default="float32")


def _fastest(
    tool: Tool, planning: _Planning, progress: Callable[[str], None] | None
) -> tuple[Degrees, Plan, tuple[tuple[Degrees, float | str], ...]]:
    """Return the candidate with the shortest modelled step, its plan, and what was tried. Of one
    mesh the modes are tried from the fastest on, until one fits; stages, where their bubble alone
    does not make them slower. Raises PlanError where none does.
    """
    candidates = list(_candidates(tool, planning))
    parameters = sum(parameter.numel() for parameter in _parameters(planning.source))
    tried: list[tuple[Degrees, float | str]] = []
    plans: dict[Degrees, Plan] = {}
    fit_meshes: set[Degrees] = set()  # in the first mode
    degrees_of = [d for d in candidates if isinstance(d, Degrees)]
    for number, degrees in enumerate(degrees_of):
        mesh = replace(degrees, mode=MODES[0])
        if mesh in fit_meshes:
            continue
        if progress is not None:
            progress(f"{tool.name}: {number + 1} of {len(degrees_of)}")
        stages, microbatches = degrees.pipeline, degrees.microbatches
        whole = [plan for known, plan in plans.items() if known.pipeline == 1]
        fastest = min(whole, key=lambda plan: plan.step_seconds, default=None)
        if stages > 1 and fastest is not None:
            least = computed_seconds(fastest) * (1 + (stages - 1) / microbatches)
            if least > fastest.step_seconds:
                tried.append((degrees, f"its bubble alone makes a step of {least:.3g} s"))
                continue
        more_bytes = tool.more_bytes(degrees, parameters // (degrees.tensor * stages))
        try:
            plans[degrees] = planning.plan(
                tool.layout(degrees), degrees.mode, more_bytes, microbatches
            )
        except (LayoutError, PlanError) as error:
            tried.append((degrees, str(error)))
            continue
        fit_meshes.add(mesh)
        tried.append((degrees, plans[degrees].step_seconds))
    if not plans:
        reasons = [why for _, why in tried] or [d for d in candidates if isinstance(d, str)]
        raise PlanError(
            f"no degrees that {tool.name} can express fit {planning.world}: {reasons[-1]}"
        )
    best = min(plans, key=lambda degrees: plans[degrees].step_seconds)
    return best, plans[best], tuple(tried)
