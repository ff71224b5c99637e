"""choose: the mesh and a layout for every node, of least modelled time (planner/mesh_search.py)."""

from __future__ import annotations

import dataclasses

from autopar.cost.memory import Budget
from autopar.ir.graph import blocks
from autopar.ir.program import Program
from autopar.planner.mesh_search import best, with_bounds
from autopar.planner.named_layouts import Layouts, candidates
from autopar.world import World


def choose(
    program: Program,
    world: World,
    layout: Layouts,
    redundant: bool = False,
    budget: Budget | None = None,
) -> Program:
    """The best plan over every mesh that `layout` allows on the ranks of `world`, with a proven
    bound; ties go to fewer axes, then to the first mesh.

    `budget`: with recompute "full" or "gathers" every repeated block is; "auto" leaves it to what
    follows.
    """
    given = list(candidates(layout, world.ranks, program))
    found = best(program, given, world, redundant)
    meshes = with_bounds(given, found.bounds)
    plan = dataclasses.replace(found.plan, bound=found.bound, meshes=meshes)
    return unmet_constraints(dataclasses.replace(program, plan=plan), budget)


def unmet_constraints(program: Program, budget: Budget | None) -> Program:
    """The chosen program with its plan dropping what the budget asks of every repeated block."""
    asked = "auto" if budget is None else budget.recompute
    every = blocks(program.module.graph.nodes) if asked in ("full", "gathers") else ()
    again, fetched = every * (asked == "full"), every * (asked == "gathers")
    assert program.plan is not None
    plan = dataclasses.replace(program.plan, recompute=again, regather=fetched)
    return dataclasses.replace(program, plan=plan)


def check(program: Program) -> None:
    """The contract: every searched node has a choice whose layouts are of its tensors' shapes, on
    the plan's mesh.
    """
    assert program.plan is not None and program.annotations is not None
    for name in program.annotations.searched & program.annotations.specs.keys():
        assert name in program.plan.choices, f"choose left {name} without a layout"
    for entry in program.signature.inputs:
        if entry.kind == "parameter":
            assert entry.node in program.plan.stored, (
                f"choose left parameter {entry.target} without a stored layout"
            )
    for name, choice in program.plan.choices.items():
        for layout, value in zip(choice.results, _shapes(program, name), strict=True):
            assert layout.shape == value and layout.mesh == program.plan.mesh, (
                f"{name} of shape {value} is to lie as ({layout}) of {layout.shape} on mesh "
                f"{layout.mesh}, the plan's is {program.plan.mesh}"
            )


def _shapes(program: Program, name: str) -> list[tuple[int, ...]]:
    from autopar.ir.sharding_rule import results_of, shape_of

    node = next(n for n in program.module.graph.nodes if n.name == name)
    return [shape_of(v) for v in results_of(node) if hasattr(v, "shape")]
