"""The first stage of the funnel, `space`: the meshes that a layout is searched on, with its rules.

Example: "auto" on one node of 8 ranks has x8, x2.y4, which stands for x4.y2, and x2.y2.z2, all
without a rule; "fsdp" has data8, whose axis splits the batch and every parameter.

A layout, a world and an annotated program enter, a `Space` leaves: the candidates of the layout
and, where "auto" compares itself with named layouts, those of these `rivals`. What a named layout
asks is in named_layouts.py. bound.py is the next stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from autopar.cost.many_meshes import distinct_meshes
from autopar.errors import LayoutError
from autopar.ir.dim_roles import expert_atoms
from autopar.ir.graph import remember
from autopar.ir.mesh import Axis, Mesh, factorings
from autopar.ir.program import Program
from autopar.planner.constraint import Constraint
from autopar.planner.named_layouts import NAMES, meshes_with_rules
from autopar.planner.request import Layouts
from autopar.world import World

Candidate = tuple[Mesh, Constraint]  # a mesh, and what a layout asks of the nodes on it

MOST_AXES = 4
_LETTERS = {1: "x", 2: "xy", 3: "xyz", 4: "wxyz"}
_MOST_REMEMBERED = 64  # layouts of a graph, and worlds


class Space(NamedTuple):
    """What is searched for a layout: its `candidates`. Where several plans are `compared` by their
    steps, `rivals` are the candidates of the named layouts that "auto" competes with, by name.
    """

    candidates: list[Candidate]
    rivals: dict[str, list[Candidate]]
    compared: bool


def space(layout: Layouts, world: World, program: Program, compared: bool) -> Space:
    """Return what is searched for a layout. Raises LayoutError where no mesh fits it."""
    rivals = rival_candidates(world.ranks, program) if compared and layout == "auto" else {}
    return Space(searched_candidates(layout, world, program), rivals, compared)


def searched_candidates(layout: Layouts, world: World, program: Program) -> list[Candidate]:
    """Return `candidates` without those of "auto" that another one stands for (`distinct_meshes`),
    the same list for the same graph. Raises LayoutError where no mesh fits.
    """
    every = candidates(layout, world.ranks, program)
    if layout != "auto":
        return every

    def find() -> list[Candidate]:
        distinct = set(distinct_meshes([mesh for mesh, _ in every], world))
        return [(mesh, rules) for mesh, rules in every if mesh in distinct]

    return remember(program.module.graph, "searched candidates", (world, every), find)


def candidates(layout: Layouts, ranks: int, program: Program) -> list[Candidate]:
    """Return the meshes of a layout with its rules, the same list for the same graph. Raises
    LayoutError where none fits.
    """
    return remember(
        program.module.graph,
        "candidates",
        (program.annotations, program.signature),
        lambda: _candidates(layout, ranks, program),
        (repr(layout), ranks),
        _MOST_REMEMBERED,
    )


def _candidates(layout: Layouts, ranks: int, program: Program) -> list[Candidate]:
    if layout == "auto":
        return [(mesh, Constraint("auto")) for mesh in _all_meshes(ranks)]
    return list(meshes_with_rules(layout, ranks, program))


def _all_meshes(ranks: int) -> Iterator[Mesh]:
    """Yield every mesh of up to four axes, in all orders: an inner axis has faster links."""
    if ranks == 1:
        yield Mesh(())
        return
    for count in range(1, MOST_AXES + 1):
        for sizes in factorings(ranks, count):
            if min(sizes) > 1:
                yield Mesh(tuple(Axis(n, s) for n, s in zip(_LETTERS[count], sizes, strict=True)))


def rivals(program: Program) -> tuple[str, ...]:
    """Return the named layouts that "auto" is compared with: "cp" where annotate cut a sequence, so
    where it is long and causal; "ep" where there are experts.
    """
    assert program.annotations is not None
    absent = set()
    if program.annotations.strided_from is None:
        absent.add("cp")
    if not expert_atoms(program):
        absent.add("ep")
    return tuple(name for name in NAMES[1:] if name not in absent)


def rival_candidates(ranks: int, program: Program) -> dict[str, list[Candidate]]:
    """Return the candidates of every rival that has a mesh of so many ranks."""
    of_name: dict[str, list[Candidate]] = {}
    for name in rivals(program) if ranks > 1 else ():
        try:
            of_name[name] = candidates(name, ranks, program)
        except LayoutError:
            continue
    return of_name
