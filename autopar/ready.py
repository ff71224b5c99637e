"""What a plan carries along in the process that made it: graphs to read formulas and times off."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import torch
from torch import fx

from autopar._compat import pytree
from autopar.cost.simulator.timeline import Timeline, timeline
from autopar.errors import PlanError
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.layouts import Layouts
from autopar.ops.devices import on_device, without_devices
from autopar.report.why import Why, why
from autopar.world import World


@dataclasses.dataclass(frozen=True)
class Ready:
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

    def on_device(self, device: torch.device) -> Ready:
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
