"""What runs an emitted graph: the graphs that AOTAutograd derives from it, scheduled, or the graph
as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from . import ranks
from ._compat import BoxedCodeGen, aot_module_simplified, below_autograd, default_partition
from .cost.derived import Phase, writes
from .cost.simulate import Run
from .errors import PlanError
from .passes import bucket, inplace, schedule
from .program import Program
from .world import World

Backend = str | Callable[..., Any] | None


Overlap = bool | Sequence[str]
PASSES = ("bucket", "schedule")
OVERLAP: Overlap = False  # where a user does not say


def runner(
    program: Program, world: World, backend: Backend, overlap: Overlap
) -> Callable[..., Any]:
    """What a ParallelModule calls with the values of the graph's placeholders. `overlap`: True for
    all passes, False for none, or the names of some. Raises PlanError for another name.
    """
    passes = (PASSES if overlap else ()) if isinstance(overlap, bool) else tuple(overlap)
    unknown = [name for name in passes if name not in PASSES]
    if unknown:
        raise PlanError(f"overlap names {unknown[0]!r}; the passes are {', '.join(PASSES)}")
    if backend is not None:
        return torch.compile(program.module, backend=backend)
    assert program.plan is not None
    if not program.plan.mesh.axes or _runs_twice(program) or overlap is False:
        return program.module  # AOTAutograd would save what the plan says is computed again
    return Scheduled(program, world, passes)


def _runs_twice(program: Program) -> bool:
    return program.plan is not None and bool(program.plan.recompute or program.plan.regather)


class Scheduled:
    """Runs a program by its scheduled forward and backward, which are derived at the first call
    that wants gradients; without gradients it runs the graph as it is.

    `forward` and `backward`: the scheduled graphs, once there are; `modelled`: their runs.
    """

    def __init__(self, program: Program, world: World, passes: Sequence[str] = PASSES) -> None:
        self.module, self.world, self.passes = program.module, world, passes
        self.stored = frozenset(
            f"primals_{place}"
            for place, entry in enumerate(program.signature.inputs, start=1)
            if entry.kind not in ("user", "seed")
        )
        self._run: Callable[..., Any] | None = None
        self.forward: fx.GraphModule | None = None
        self.backward: fx.GraphModule | None = None
        self.modelled: dict[str, Run] = {}

    def __call__(self, *values: torch.Tensor) -> Any:
        if torch.compiler.is_compiling() or not self._wants(values):
            return self.module(*values)
        if self._run is None:
            self._run = ranks.together("deriving the backward", lambda: self.derived(values))
            ranks.agree("collective order", self.order())
        return self._run(*values)

    def order(self) -> str:
        """Names the order of all collectives, forward and backward."""
        assert self.forward is not None and self.backward is not None
        lines = [
            line
            for module in (self.forward, self.backward)
            for line in schedule.collectives_in_order(module.graph)
        ]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    @staticmethod
    def _wants(values: Sequence[torch.Tensor]) -> bool:
        """Whether this call records gradients, as the derived graphs do; under autocast other ops
        would run than were derived.
        """
        return (
            torch.is_grad_enabled()
            and any(value.requires_grad for value in values)
            and not torch.is_autocast_enabled(values[0].device.type)
        )

    def derived(self, values: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """Derive and schedule the graphs for such values; what runs them."""
        return aot_module_simplified(
            self.module,
            list(values),
            fw_compiler=_boxed,
            bw_compiler=_boxed,
            partition_fn=self._partition,
        )

    def _partition(
        self, joint: fx.GraphModule, inputs: Any, **more: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """AOTAutograd's own cut into forward and backward, each put in order."""
        self.forward, self.backward = default_partition(joint, inputs, **more)
        phases: tuple[tuple[fx.GraphModule, Phase], ...]
        phases = (self.forward, "forward"), (self.backward, "backward")
        for module, phase in phases:
            _sweep(module.graph)
            if "bucket" in self.passes:
                module.graph = bucket.bucket(module.graph, self.world, self.stored, phase)
            if "schedule" in self.passes:
                before = list(module.graph.nodes)
                run = schedule.schedule(module.graph, self.world, self.stored, phase)
                self.modelled[phase] = run
                schedule.check(module.graph, before)
            inplace.inplace(module.graph)
            inplace.check(module.graph)
            module.recompile()
        return self.forward, self.backward


def _sweep(graph: fx.Graph) -> None:
    """Remove what nothing uses. torch keeps what may draw random numbers, and so repeats a whole
    attention in the backward for nothing.
    """
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not writes(node):
            graph.erase_node(node)


def _boxed(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    """The graph as Python that takes a list and clears it, so that inputs can be freed early."""
    gm.graph.set_codegen(BoxedCodeGen())
    gm.recompile()

    def run(values: list[Any]) -> Any:
        with below_autograd():  # what an op or a collective costs there is spent for nothing
            return forward(values)

    forward = gm.forward
    run._boxed_call = True  # type: ignore[attr-defined]
    return run
