"""What a plan is asked to be, and the part of the answer that needs no search.

Example: PlanRequest("fsdp", Budget.of(world, "auto", "adamw", "full")) asks for FSDP's layout
within the memory of the world's devices, with every repeated block recomputed. api.py and
runtime/apply.py build requests; planner.py and the searches read them.
"""

from __future__ import annotations

import dataclasses

import torch

from autopar.cost.memory import Budget
from autopar.ir.graph import blocks
from autopar.ir.program import Program
from autopar.planner.named_layouts import Layouts


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """What the caller of `autopar.plan` asks for.

    `layout` None: the layout of a plan from a file. `budget` None: no memory limit applies, because
    the plan was made to fit before. `reduce_dtype`: the dtype in which gradients of parameters are
    summed, None for their own. `overlap`: plans are compared by a step with communication under
    computation, else by the sum of their seconds. `whole`: parameters and results stay unsharded.
    """

    layout: Layouts | None = "auto"
    budget: Budget | None = None
    reduce_dtype: torch.dtype | None = None
    overlap: bool = False
    whole: bool = False

    @property
    def recompute(self) -> str:
        """The mode of recomputation: "auto", "full", "gathers" or "none"."""
        return "auto" if self.budget is None else self.budget.recompute

    @property
    def memory_bytes(self) -> float | None:
        """The limit on each device, None without one."""
        return None if self.budget is None else self.budget.memory_bytes

    def under(self, layout: Layouts) -> PlanRequest:
        """Return the same request for another layout."""
        return dataclasses.replace(self, layout=layout)


def with_asked_recomputation(program: Program, request: PlanRequest) -> Program:
    """Return the program with a plan, its plan with the recomputation that the request sets: with
    "full" every repeated block is recomputed, with "gathers" every one gathers its weights again;
    "auto" leaves both to the memory search.
    """
    assert program.plan is not None
    repeated = blocks(program.module.graph.nodes)
    recompute = repeated if request.recompute == "full" else ()
    regather = repeated if request.recompute == "gathers" else ()
    plan = dataclasses.replace(program.plan, recompute=recompute, regather=regather)
    return dataclasses.replace(program, plan=plan)
