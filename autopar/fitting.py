"""Making a plan fit: the modelled peak against the memory that there is, and as little gathered
again or recomputed as it takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from autopar.cost.memory import Budget, refusal
from autopar.dropping import Rungs
from autopar.ir.graph import blocks
from autopar.ir.plan_table import Memory
from autopar.ir.program import Program
from autopar.passes import recompute
from autopar.world import World


def fitted(
    program: Program,
    world: World,
    budget: Budget | None,
    larger: Callable[[Memory], str] = lambda memory: "",
) -> Program:
    """The emitted program with its blocks recomputed as planned, and the plan with its memory.

    Where that does not fit and recompute is "auto": with as little as it takes made again in the
    backward, in the first blocks. Raises PlanError where nothing does. `budget` None: as planned,
    whatever it needs. `larger`: from what is needed here to the smallest world that it would fit,
    in words. A plan whose memory is known by now is not run again to find out.
    """
    assert program.plan is not None
    if budget is None:
        return recompute.recompute(program)
    if (known := program.plan.memory) is not None and budget.fits(known):
        rungs = Rungs(program, world, budget)
        return _with(rungs.made(rungs.start), known, budget)
    found, memory = effort(program, world, budget)
    if not budget.fits(memory):
        assert budget.memory_bytes is not None and found.plan is not None
        every = len(found.plan.recompute) == len(blocks(program.module.graph.nodes))
        name, advice = program.plan.layout, larger(memory)
        raise refusal(memory, budget.memory_bytes, world, name, every, advice)
    return found


def effort(program: Program, world: World, budget: Budget) -> tuple[Program, Memory]:
    """As `fitted`, but where nothing fits what comes nearest."""
    rungs = Rungs(program, world, budget)
    found = rungs.best()
    return _with(rungs.made(found.rung), found.memory, budget), found.memory


def _with(made: Program, memory: Memory, budget: Budget) -> Program:
    """With what is known that it needs."""
    assert made.plan is not None
    plan = dataclasses.replace(
        made.plan, memory=memory, peak_bytes=memory.peak, optimizer=budget.optimizer
    )
    return dataclasses.replace(made, plan=plan)
