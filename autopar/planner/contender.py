"""A plan on its way through the funnel, with what the stages have found out about it.

Example: solve.py makes a `Contender` of "fsdp" with the least seconds that its step could take;
simulate.py puts it first; fit.py fills in its memory, and which blocks it recomputes to fit.
"""

from __future__ import annotations

import dataclasses
import math

from autopar.cost.activations import Price
from autopar.cost.memory import Budget
from autopar.ir.deep_models import DeepModel
from autopar.ir.plan import Plan
from autopar.ir.plan_table import Memory
from autopar.ir.program import Program
from autopar.planner.rematerialize import RematerializationSearch


@dataclasses.dataclass(frozen=True, eq=False)
class Contender:
    """A program with a plan that competes with others.

    solve.py makes it: `deep` is the program with its runs of equal blocks, `least_step` the seconds
    of its step if all that can overlap does. fit.py finds some at a `price` of the bytes that they
    hold, `priced_bytes`, and fills in `memory`, the `repeated` seconds of what the backward runs
    again, and `rungs`, what else it could run again.
    """

    deep: DeepModel
    least_step: float = math.nan
    price: Price | None = None
    priced_bytes: float = math.nan
    memory: Memory | None = None
    repeated: float = 0.0
    rungs: RematerializationSearch | None = None

    program: Program = dataclasses.field(init=False)
    plan: Plan = dataclasses.field(init=False)
    seconds: float = dataclasses.field(init=False)  # summed, of a step with what runs twice

    def __post_init__(self) -> None:
        plan = self.deep.program.plan
        assert plan is not None
        object.__setattr__(self, "program", self.deep.program)
        object.__setattr__(self, "plan", plan)
        object.__setattr__(self, "seconds", plan.seconds + self.repeated)

    @property
    def peak(self) -> float:
        """The bytes at the peak, once the contender is made to fit."""
        assert self.memory is not None
        return self.memory.peak

    def fits(self, budget: Budget) -> bool:
        """Whether the memory is within the budget, once the contender is made to fit."""
        assert self.memory is not None
        return budget.fits(self.memory)
