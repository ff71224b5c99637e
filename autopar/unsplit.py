"""Which matrix products a plan computes whole on an axis, and why, in sentences for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import fx

from autopar.ir.graph import where
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Choice
from autopar.ir.program import Program
from autopar.ir.strategy import IDLE


def unsplit(program: Program, mesh: Mesh, choices: Mapping[str, Choice]) -> tuple[str, ...]:
    """One sentence for each axis on which a matrix product is computed whole."""
    found: list[str] = []
    for node in program.module.graph.nodes:
        if node.name in choices:
            found.extend(_of(program, node, mesh, choices[node.name]))
    return tuple(dict.fromkeys(found))


def _of(program: Program, node: fx.Node, mesh: Mesh, choice: Choice) -> Iterator[str]:
    assert program.annotations is not None
    spec, factors = program.annotations.specs[node.name], program.annotations.factors[node.name]
    if spec.product is None:
        return
    able = {f: factors[f] for f in spec.sizes if spec.splittable(f) and factors[f]}
    sizes = ", ".join(f"{f} = {' × '.join(str(a.size) for a in able[f])}" for f in able)
    for axis, split in zip(mesh.axes, choice.splits, strict=True):
        fits = any(a.size % axis.size == 0 for atoms in able.values() for a in atoms)
        why = f"may split none of {sizes} here" if fits else f"divides none of {sizes}"
        if split in IDLE:
            yield f"{where(node)}: axis {axis.name} of {axis.size} {why}"
