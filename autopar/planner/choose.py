"""The choice of mesh and layouts: every node gets the layout of least modelled time.

An annotated program and a world enter; the program with a plan leaves. The search itself is in
planner/mesh_search.py. Called by memory_search.py, overlap_search.py and deep_models.py; `check` is
the contract of the pass "choose" in planner.py.
"""

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
    """Return the program with the best plan over every mesh that `layout` allows on the ranks of
    `world`, and a proven bound; ties go to fewer axes, then to the first mesh.

    `budget`: with recompute "full" every repeated block is recomputed, with "gathers" every one
    gathers its weights again; "auto" leaves both to the memory search.
    """
    layout_candidates = list(candidates(layout, world.ranks, program))
    best_found = best(program, layout_candidates, world, redundant)
    meshes = with_bounds(layout_candidates, best_found.bounds)
    plan = dataclasses.replace(best_found.plan, bound=best_found.bound, meshes=meshes)
    return unmet_constraints(dataclasses.replace(program, plan=plan), budget)


def unmet_constraints(program: Program, budget: Budget | None) -> Program:
    """Return the chosen program, its plan with the recomputation that the budget sets for every
    repeated block.
    """
    mode = "auto" if budget is None else budget.recompute
    repeated = blocks(program.module.graph.nodes) if mode in ("full", "gathers") else ()
    recompute, regather = repeated * (mode == "full"), repeated * (mode == "gathers")
    assert program.plan is not None
    plan = dataclasses.replace(program.plan, recompute=recompute, regather=regather)
    return dataclasses.replace(program, plan=plan)


def check(program: Program) -> None:
    """Check the contract: every searched node has a choice whose layouts have the shapes of its
    tensors and lie on the plan's mesh.
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
        for layout, shape in zip(choice.results, _shapes(program, name), strict=True):
            assert layout.shape == shape and layout.mesh == program.plan.mesh, (
                f"{name} of shape {shape} is to lie as ({layout}) of {layout.shape} on mesh "
                f"{layout.mesh}, the plan's is {program.plan.mesh}"
            )


def _shapes(program: Program, name: str) -> list[tuple[int, ...]]:
    """Return the shapes of a node's tensor results."""
    from autopar.ir.sharding_rule import results_of, shape_of

    node = next(n for n in program.module.graph.nodes if n.name == name)
    return [shape_of(v) for v in results_of(node) if hasattr(v, "shape")]
