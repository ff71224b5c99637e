"""The named layouts: each is a short constraint on the search; "auto" is no constraint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .errors import LayoutError
from .layout import Layout
from .mesh import Axis, Mesh
from .program import Annotations, Atom, Program
from .rules import Spec
from .strategies import Strategy

NAMES = ("auto", "ddp", "fsdp", "megatron")


@dataclass(frozen=True)
class Constraint:
    """What a named layout asks of a mesh. `atoms` gives each axis the atoms that it may split in a product (None: any)."""

    name: str
    product_atoms: dict[str, frozenset[int]] = field(default_factory=dict)
    other_atoms: dict[str, frozenset[int]] = field(default_factory=dict)
    stored: str = "any"  # of parameters: "any", "whole", "split"

    def choices(self, spec: Spec, factors: dict[str, tuple[Atom, ...]], found: Sequence[Strategy], mesh: Mesh) -> list[Strategy]:
        """The strategies of a node that obey the layout; all of them where the node leaves it nothing to choose."""
        allowed = self.product_atoms if spec.product else self.other_atoms
        kept = [s for s in found if all(self._obeys(s, i, axis.name, allowed, factors) for i, axis in enumerate(mesh.axes))]
        if spec.product and self.product_atoms:
            split = [s for s in kept if all(slot is not None for slot in s.slots)]
            kept = split or kept
        return kept or list(found)

    def _obeys(
        self, strategy: Strategy, index: int, axis: str, allowed: dict[str, frozenset[int]], factors: dict[str, tuple[Atom, ...]]
    ) -> bool:
        slot = strategy.slots[index]
        if slot is None or axis not in allowed:
            return True
        return factors[slot.factor][slot.position].number in allowed[axis]

    def signature(self, spec: Spec, factors: dict[str, tuple[Atom, ...]]) -> tuple[tuple[str, str, int], ...]:
        """Which slots of a node the layout allows: nodes that look alike but differ here are searched apart."""
        allowed = self.product_atoms if spec.product else self.other_atoms
        return tuple(
            (axis, name, position)
            for axis, atoms in allowed.items()
            for name, chain in factors.items()
            for position, atom in enumerate(chain)
            if atom.number in atoms
        )

    def storage(self, found: Sequence[Layout]) -> list[Layout]:
        """The stored layouts of one parameter that obey the layout."""
        if self.stored == "whole":
            return [layout for layout in found if not layout.axes_of("S")]
        if self.stored == "split":
            most = max(len(layout.axes_of("S")) for layout in found)
            return [layout for layout in found if len(layout.axes_of("S")) == most]
        return list(found)


def candidates(layout: str, ranks: int, program: Program) -> Iterator[tuple[Mesh, Constraint]]:
    """The meshes that a layout may have on so many ranks, each with its constraint. Raises LayoutError for an unknown name."""
    assert program.annotations is not None
    if layout == "auto":
        for mesh in _meshes(ranks):
            yield mesh, Constraint("auto")
    elif layout in ("ddp", "fsdp"):
        batch = program.annotations.batch
        if batch is None or batch.size % ranks:
            size = "no batch dim" if batch is None else f"a batch of {batch.size}"
            raise LayoutError(
                f"layout {layout!r} puts axis data of {ranks} ranks on the factor batch, but the inputs have {size}: "
                f"use a batch that {ranks} divides, fewer ranks, or layout 'auto'"
            )
        stored = "whole" if layout == "ddp" else "split"
        yield Mesh((Axis("data", ranks),)), Constraint(layout, {"data": frozenset({batch.number})}, stored=stored)
    elif layout == "megatron":
        atoms = _megatron_atoms(program, program.annotations, ranks)
        yield Mesh((Axis("tp", ranks),)), Constraint(layout, {"tp": atoms}, {"tp": atoms})
    else:
        raise LayoutError(f"unknown layout {layout!r}; known ones: {', '.join(NAMES)}")


def _meshes(ranks: int) -> Iterator[Mesh]:
    """Every mesh of one or two axes; the link is uniform, so the order of two axes makes no difference."""
    if ranks == 1:
        yield Mesh(())
        return
    yield Mesh((Axis("x", ranks),))
    for inner in range(2, int(ranks**0.5) + 1):
        if ranks % inner == 0:
            yield Mesh((Axis("x", ranks // inner), Axis("y", inner)))


def _megatron_atoms(program: Program, notes: Annotations, ranks: int) -> frozenset[int]:
    """The atoms of weights, less the residual stream's (the one that most parameters have) and those of the inputs."""
    parameters = [entry.node for entry in program.signature.inputs if entry.kind == "parameter"]
    users = [entry.node for entry in program.signature.inputs if entry.kind == "user"]
    counts = Counter(atom.number for name in parameters for atoms in notes.dims[name, 0] for atom in atoms)
    sizes = {atom.number: atom.size for name in parameters for atoms in notes.dims[name, 0] for atom in atoms}
    taken = {atom.number for name in users for atoms in notes.dims[name, 0] for atom in atoms}
    hidden = {counts.most_common(1)[0][0]} if counts else set()
    atoms = frozenset(counts) - taken - hidden
    if not any(sizes[number] % ranks == 0 for number in atoms):
        listed = ", ".join(str(sizes[number]) for number in sorted(atoms)) or "none"
        raise LayoutError(
            f"layout 'megatron' puts axis tp of {ranks} ranks on rows or columns of weights, but {ranks} divides none of "
            f"their sizes ({listed}): use fewer ranks or layout 'auto'"
        )
    return atoms
