"""What a plan made in this process carries along: the programs and graphs that `why`, `timeline`,
`formula` and `apply` read.

Example: `plan.context.program` is the program of one rank, `plan.context.source` the annotated one
that was planned. confirm.py makes a `PlanContext`; the runtime reads it. `fingerprint` names the
traced graph.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING

import torch
from torch import fx

from autopar._compat import pytree
from autopar.cost.pipeline import PipelineTimeline
from autopar.cost.simulator import Timeline, timeline
from autopar.errors import PlanError
from autopar.ir.graph import forget
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ops.devices import on_device, without_devices
from autopar.passes.microbatches import Microbatches
from autopar.planner.pipelines import step_of
from autopar.planner.request import Layouts
from autopar.planner.why import Why, why
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
    microbatches: Microbatches | None = None  # None: a step is one

    @property
    def plan(self) -> Plan:
        """The plan that the program was rewritten by."""
        assert self.program.plan is not None
        return self.program.plan

    def without_tensors(self) -> Plan:
        """Return the plan as a parallel module holds it: it answers every question and holds no
        tensor.
        """
        programs = (dataclasses.replace(p, tensors={}) for p in (self.program, self.source))
        program, source = programs
        for module in (source.module, *self.graphs.values()):
            forget(module.graph)
        context = dataclasses.replace(self, program=program, source=source)
        return dataclasses.replace(self.plan, context=context)

    def on_device(self, device: torch.device) -> PlanContext:
        """Return this context with the tensors that its graph creates placed on the device of a
        rank.
        """
        module, microbatches = on_device(self.program.module, device), self.microbatches
        if microbatches is not None and microbatches.totals is not None:
            totals = on_device(microbatches.totals, device)
            microbatches = dataclasses.replace(microbatches, totals=totals)
        program = dataclasses.replace(self.program, module=module)
        return dataclasses.replace(self, program=program, microbatches=microbatches)

    def why(self, pattern: str) -> Why:
        """Answer `Plan.why`. Raises PlanError for a plan from a file."""
        if self.layout is None:
            raise PlanError(
                "a plan from a file does not know what it was chosen from: plan again in this "
                "process, with autopar.plan(model, world, inputs, layout)"
            )
        return why(self.source, self.plan, self.layout, pattern)

    def timeline(self, overlap: bool) -> Timeline | PipelineTimeline:
        """Answer `Plan.timeline`."""
        if self.plan.stage_starts:
            return PipelineTimeline(step_of(dataclasses.replace(self.plan, context=self)))
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
