"""Named layouts: those of the literature, each a short constraint on the search; "auto" is none.

A layout names its mesh axes and gives each a `Role`: which loop dims of Y[m,n] = X[m,k] · W[k,n] it
takes, what it may split elsewhere, and how parameters are stored on it. A layout, ranks and an
annotated program enter `meshes_with_rules`; meshes with constraints leave for space.py.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from torch import fx

from autopar.errors import LayoutError
from autopar.ir.dim_roles import (
    Kinds,
    dim_kinds,
    expert_atoms,
    loop_dim_atoms,
    parameter_loop_dims,
    parameter_products,
    weight_matmuls,
)
from autopar.ir.graph import module_path, remember
from autopar.ir.mesh import Axis, Mesh, factorings
from autopar.ir.program import Program
from autopar.ir.sharding_rule import HEADS_OF_A_KEY, KEY_HEADS
from autopar.planner.constraint import Constraint, Role, fits
from autopar.planner.request import (
    Grid,
    Grid2D,
    Grid3D,
    Grid4D,
    Grid25D,
    GridContext,
    GridEP,
    GridHSDP,
    Layouts,
    Stages,
)

_DATA = Role("m", "batch", stored="whole")
_SHARDED_DATA = Role("m", "batch", stored="split")
_EVERY_SHARDED = Role("m", "batch", stored="every")
_EXPERT = Role("m", "batch", stored="every", experts=True)
_TENSOR = Role("nk", "inner")
_SEQUENCE = Role("nk", "inner", elsewhere="sequence")
_CONTEXT = Role("m", "sequence", stored="every")
_HEADS_OF_CONTEXT = Role("m", "sequence", stored="every", heads=True)
_OF_ATTENTION = {"strided": _CONTEXT, "contiguous": _CONTEXT, "heads": _HEADS_OF_CONTEXT}
_INNER = Role("nk", "inner", spread=True, apart=True)
_OUTER = Role("nk", "residual", spread=True, apart=True)
_CUBE = Role("mnk", "unsequenced", spread=True, apart=True)
_SUMMA_ROW = Role("m", "batch", stored="k")
_SUMMA_COLUMN = Role("n", "features", stored="n", spread=True)

_ONE_AXIS = {
    "ddp": ("data", _DATA),
    "fsdp": ("data", _EVERY_SHARDED),
    "megatron": ("tp", _TENSOR),
    "megatron-sp": ("tp", _SEQUENCE),
    "cp": ("context", _CONTEXT),  # context parallelism: arXiv 2407.21783, section 3.3.2
}
NAMES = ("auto", *_ONE_AXIS, "atp", "3d", "4d", "2.5d", "ep")


# -- from a layout to meshes -----------------------------------------------------------------------
def meshes_with_rules(
    layout: Layouts, ranks: int, program: Program
) -> Iterator[tuple[Mesh, Constraint]]:
    """Yield the meshes of a named layout, of a grid or of a dict of these, with constraints. Raises
    LayoutError where none fits.
    """
    reads = program.annotations, program.signature
    facts = remember(program.module.graph, "facts", reads, partial(_Facts.of, program))
    kinds, letters = facts.kinds, facts.letters
    if isinstance(layout, Mapping):
        yield _hybrid(layout, ranks, kinds, letters, program)
        return
    assert not isinstance(layout, Stages)  # pipelines.py plans what is within them
    refused: LayoutError | None = None
    any_fits = False
    for grid in _grids(layout, ranks):
        try:
            mesh, roles = _mesh(grid, ranks)
            _check_experts(grid, mesh, roles, program)
            _check_batch(grid, mesh, roles, program)
            _check_sequence(grid, mesh, roles, program, kinds)
            _check_heads(grid, mesh, roles, program)
            _check_products(grid, mesh, roles, facts.products, facts.with_convolutions)
        except LayoutError as error:
            refused = refused or error
            continue
        any_fits = True
        yield mesh, Constraint(str(layout), (("*", roles),), kinds, letters, _summa_axes(grid))
    if refused is not None and not any_fits:
        raise refused if layout == grid else LayoutError(f"no grid of {layout!r} fits: {refused}")


def roles_of(layout: Layouts) -> Iterator[Role | None]:
    """Yield the roles of a layout's axes; None for axes that may split anything."""
    if isinstance(layout, Mapping):
        for each in layout.values():
            yield from roles_of(each)
    elif isinstance(layout, str) and layout in _ONE_AXIS:
        yield _ONE_AXIS[layout][1]
    else:
        yield None


def _summa_axes(grid: str | Grid) -> tuple[str, ...]:
    """Return SUMMA's axes, where a layout has them."""
    return ("row", "col") if isinstance(grid, Grid25D) and grid.panels and grid.q > 1 else ()


def _grids(layout: str | Grid, ranks: int) -> list[str | Grid]:
    """Return the grids that a name stands for on this number of ranks."""
    if not isinstance(layout, str) or layout in _ONE_AXIS:
        return [layout]
    grids: list[str | Grid] = []
    match layout:
        case "atp":
            grids = [
                Grid2D(a, b, first) for a, b in factorings(ranks, 2) for first in ("column", "row")
            ]
        case "3d":
            grids = [Grid3D(*sizes) for sizes in factorings(ranks, 3)]
        case "4d":
            grids = [Grid4D(*sizes) for sizes in factorings(ranks, 4)]
        case "2.5d":
            grids = [*_tesseracts(ranks)]
        case "ep":
            grids = [GridEP(data, size) for size, data in factorings(ranks, 2) if size > 1]
            grids = grids or [GridEP(expert=ranks)]
        case _:
            raise LayoutError(
                f"unknown layout {layout!r}; known ones: {', '.join(NAMES)}, a Grid…, or a dict "
                "from module pattern to these"
            )
    if not grids:
        raise LayoutError(
            f"layout {layout!r} needs d · q² ranks with q at least d; {ranks} ranks are none: use "
            "4, 8, 9, 16, 18, 27 or 32"
        )
    return grids


def _tesseracts(ranks: int) -> list[Grid25D]:
    """Return every 2.5D grid of this number of ranks."""
    return [
        Grid25D(q, ranks // q**2)
        for q in range(1, ranks + 1)
        if ranks % q**2 == 0 and q >= ranks // q**2
    ]


def _mesh(layout: str | Grid, ranks: int) -> tuple[Mesh, tuple[Role, ...]]:
    """Return the mesh of a layout, outer axis first, without axes of size 1, and the axes'
    roles.
    """
    axes = _axes(layout, ranks)
    if any(not isinstance(size, int) or size < 1 for _, size, _ in axes):
        raise LayoutError(f"{layout}: sizes are whole numbers, 1 or more")
    used = [(name, size, role) for name, size, role in axes if size > 1]
    mesh = Mesh(tuple(Axis(name, size) for name, size, _ in used))
    if mesh.size != ranks:
        sizes = " · ".join(str(size) for _, size, _ in axes)
        raise LayoutError(
            f"{layout} is for {sizes} = {mesh.size} ranks, the world has {ranks}: choose sizes "
            f"whose product is {ranks}"
        )
    return mesh, tuple(role for *_, role in used)


def _axes(layout: str | Grid, ranks: int) -> list[tuple[str, int, Role]]:
    """Return name, size and role of every axis of a layout, axes of size 1 included."""
    match layout:
        case str():
            name, role = _ONE_AXIS[layout]
            return [(name, ranks, role)]
        case Grid2D():
            if layout.first not in ("column", "row"):
                raise LayoutError(f"{layout}: `first` is 'column' or 'row'")
            first, second = (_INNER, _OUTER) if layout.first == "column" else (_OUTER, _INNER)
            return [("x", layout.d1, first), ("y", layout.d2, second)]
        case Grid3D():
            return [("x", layout.x, _CUBE), ("y", layout.y, _CUBE), ("z", layout.z, _CUBE)]
        case Grid4D():
            outer = [("data", layout.data, _DATA), ("z", layout.z, _SHARDED_DATA)]
            return [*outer, ("x", layout.x, _OUTER), ("y", layout.y, _INNER)]
        case GridHSDP():
            outer = [
                ("replicate", layout.replicate, _DATA),
                ("shard", layout.shard, _EVERY_SHARDED),
            ]
            return [*outer, ("tensor", layout.tensor, _SEQUENCE if layout.sequence else _TENSOR)]
        case GridContext():
            if layout.context < 1 or ranks % layout.context:
                raise LayoutError(
                    f"{layout} is for a multiple of {layout.context} ranks, the world has {ranks}"
                )
            if isinstance(layout.within, str) and layout.within not in _ONE_AXIS:
                raise LayoutError(f"{layout}: `within` is a Grid… or one of {', '.join(_ONE_AXIS)}")
            if layout.attention not in _OF_ATTENTION:
                raise LayoutError(f"{layout}: `attention` is {' or '.join(_OF_ATTENTION)}")
            axes = _axes(layout.within, ranks // layout.context)
            place = sum(role.splits == "batch" for *_, role in axes)
            context = ("context", layout.context, _OF_ATTENTION[layout.attention])
            return [*axes[:place], context, *axes[place:]]
        case GridEP():
            outer = [("data", layout.data, _EVERY_SHARDED), ("expert", layout.expert, _EXPERT)]
            return [*outer, ("tensor", layout.tensor, _SEQUENCE if layout.sequence else _TENSOR)]
        case Grid25D():
            _check_depth(layout, ranks)
            inner = [("row", layout.q, _SUMMA_ROW), ("col", layout.q, _SUMMA_COLUMN)]
            return [("depth", layout.d, _DATA), *inner]
    raise LayoutError(
        f"{layout!r} is no layout: a name ({', '.join(NAMES)}), a Grid…, or a dict from "
        "module pattern to these"
    )


def _check_depth(grid: Grid25D, ranks: int) -> None:
    if grid.q < grid.d:
        alternatives = ", ".join(f"Grid25D({g.q}, {g.d})" for g in _tesseracts(ranks))
        raise LayoutError(
            f"{grid}: q must be at least d, or the copies outweigh what they save; for "
            f"{ranks} ranks use {alternatives or 'another layout'}"
        )


def _hybrid(
    layout: Mapping[str, str | Grid],
    ranks: int,
    kinds: Kinds,
    letters: Mapping[str, tuple[str, ...]],
    program: Program,
) -> tuple[Mesh, Constraint]:
    """Return the mesh of the largest grid; a layout of one axis plays its role on all its axes."""
    if not layout:
        raise LayoutError("an empty dict of layouts; give patterns of module paths, '*' for all")
    unknown = [v for v in layout.values() if isinstance(v, str) and v not in (*_ONE_AXIS, "auto")]
    if unknown:
        raise LayoutError(
            f"layout {unknown[0]!r} in a dict: a Grid…, or one of auto, {', '.join(_ONE_AXIS)}"
        )
    _check_patterns(list(layout), program)
    meshes = {pattern: _mesh(grid, ranks) for pattern, grid in layout.items() if grid != "auto"}
    if not meshes:
        raise LayoutError("a dict with nothing but 'auto' says nothing; use layout='auto'")
    mesh = max((m for m, _ in meshes.values()), key=lambda m: len(m.axes))
    rules: list[tuple[str, tuple[Role, ...] | None]] = []
    for pattern, grid in layout.items():
        if pattern not in meshes:
            rules.append((pattern, None))
            continue
        own, roles = meshes[pattern]
        if (own.names == mesh.names and own != mesh) or len(own.axes) not in (1, len(mesh.axes)):
            raise LayoutError(
                f"layout {grid} of {pattern!r} has mesh {own}, another one has {mesh}: "
                "use grids of equal sizes"
            )
        played = roles if len(roles) == len(mesh.axes) else roles * len(mesh.axes)
        _check_batch(grid, mesh, played, program)
        _check_sequence(grid, mesh, played, program, kinds)
        _check_heads(grid, mesh, played, program)
        rules.append((pattern, played))
    name = ", ".join(f"{pattern}: {grid}" for pattern, grid in layout.items())
    panels = next((axes for grid in layout.values() if (axes := _summa_axes(grid))), ())
    return mesh, Constraint(f"hybrid ({name})", tuple(rules), kinds, letters, panels)


def _check_patterns(patterns: list[str], program: Program) -> None:
    """Check that every pattern is the first to fit some module. Raises LayoutError."""
    paths = {module_path(node) for node in program.module.graph.nodes if node.op != "output"}
    paths |= {e.target.rpartition(".")[0] for e in program.signature.inputs if e.kind != "user"}
    left = set(paths)
    for place, pattern in enumerate(patterns):
        taken = {path for path in left if fits(path, pattern)}
        left -= taken
        if taken:
            continue
        matching = [path for path in paths if fits(path, pattern)]
        earlier = [p for p in patterns[:place] if any(fits(path, p) for path in matching)]
        if earlier:
            raise LayoutError(
                f"the pattern {pattern!r} stands after {earlier[0]!r}, which takes every module "
                "that it matches: the first that fits counts, so put it before"
            )
        names = {".".join(path.split(".")[:n]) for path in paths for n in range(1, 9)} - {""}
        near = difflib.get_close_matches(pattern, sorted(names), 3, 0.4)
        raise LayoutError(
            f"the pattern {pattern!r} matches no module of the model that computes; near it are "
            f"{', '.join(near or sorted(names)[:3])}; '*' is all"
        )


# -- checks and facts ------------------------------------------------------------------------------
def _check_batch(layout: str | Grid, mesh: Mesh, roles: tuple[Role, ...], program: Program) -> None:
    """Check that the axes that split the batch divide it; a model without inputs that have dims has
    none to split, and every rank computes all of it. Raises LayoutError.
    """
    assert program.annotations is not None
    fed = {e.node for e in program.signature.inputs if e.kind == "user"}
    placeholders = program.module.graph.find_nodes(op="placeholder")
    if not any(node.meta["val"].dim() for node in placeholders if node.name in fed):
        return
    axes = [axis for axis, role in zip(mesh.axes, roles, strict=True) if role.splits == "batch"]
    ranks = 1
    for axis in axes:
        ranks *= axis.size
    batch = program.annotations.batch
    if axes and (batch is None or batch.size % ranks):
        size = "no batch dim of 2 or more" if batch is None else f"a batch of {batch.size}"
        names = " and ".join(f"{axis.name} of {axis.size}" for axis in axes)
        raise LayoutError(
            f"layout {layout!r} puts axis {names} ranks on the factor batch, but the inputs have "
            f"{size}: use a batch that {ranks} "
            f"divides, in every micro-batch of it, fewer ranks, or layout 'auto'"
        )


def _check_sequence(
    layout: str | Grid, mesh: Mesh, roles: tuple[Role, ...], program: Program, kinds: Kinds
) -> None:
    """Check that an axis that splits the sequence divides one. Raises LayoutError."""
    assert program.annotations is not None
    chains = [
        [atom.size for atom in dim if atom.number in kinds.sequence and not atom.opaque]
        for dims in program.annotations.dims.values()
        for dim in dims
    ]
    for axis, role in zip(mesh.axes, roles, strict=True):
        if role.splits != "sequence":
            continue
        if any(size % axis.size == 0 for sizes in chains for size in sizes):
            continue
        lengths = sorted({math.prod(sizes) for sizes in chains if sizes})
        inside = f"sequences of {lengths[-1]} tokens" if lengths else "no sequence of token ids"
        raise LayoutError(
            f"layout {layout!r} puts axis {axis.name} of {axis.size} ranks on the factor sequence, "
            f"but the inputs have {inside}: use a length that {axis.size} divides, fewer ranks, "
            "or layout 'auto'"
        )


def _check_heads(layout: str | Grid, mesh: Mesh, roles: tuple[Role, ...], program: Program) -> None:
    """Check that an axis that splits the heads of attention divides them, with what other axes
    split of them. Raises LayoutError.
    """
    notes = program.annotations
    assert notes is not None
    specs = notes.specs
    attentions = [name for name, rule in specs.items() if rule.attends is not None]
    for axis, role in zip(mesh.axes, roles, strict=True):
        if not role.heads:
            continue
        if not attentions:
            raise LayoutError(
                f"layout {layout!r} splits the heads of attention, and the model has no attention "
                "that is one op: call torch's scaled_dot_product_attention, or take "
                "attention='strided'"
            )
        others = [
            a.size
            for a, r in zip(mesh.axes, roles, strict=True)
            if "n" in r.takes and (r.splits in ("inner", "any") or r.elsewhere == "sequence")
        ]
        ranks = math.prod([axis.size, *others])
        for name in attentions:
            factors = notes.factors[name]
            chain = [a.size for f in (KEY_HEADS, HEADS_OF_A_KEY) for a in factors.get(f, ())]
            if any(size % axis.size == 0 for size in chain) and math.prod(chain) % ranks == 0:
                continue
            tensor_parallel = f" beside {math.prod(others)} of tensor parallelism" if others else ""
            heads = " × ".join(str(size) for size in chain) or "none"
            raise LayoutError(
                f"layout {layout!r} puts axis {axis.name} of {axis.size} ranks"
                f"{tensor_parallel} on the heads of attention, and {name} has {heads}, of which an "
                "axis splits one number: use a number of ranks that divides it, or "
                "attention='strided'"
            )


def _check_experts(
    layout: str | Grid, mesh: Mesh, roles: tuple[Role, ...], program: Program
) -> None:
    """Check that the model has experts, where an axis is to split them, and that it divides them.
    Raises LayoutError.
    """
    inner = layout.within if isinstance(layout, GridContext) else layout
    atoms = expert_atoms(program) if isinstance(inner, GridEP) else ()
    if isinstance(inner, GridEP) and not atoms:
        raise LayoutError(
            f"layout {layout!r} is for a mixture of experts, and the model has none that are one "
            "op or an einsum over a weight of theirs, (experts, …): use another layout, or 'auto'"
        )
    for axis in (axis for axis, role in zip(mesh.axes, roles, strict=True) if role.experts):
        uneven = [atom.size for atom in atoms if atom.size % axis.size]
        if uneven:
            divisors = (n for n in range(2, axis.size) if axis.size % n == 0)
            sizes = [n for n in divisors if not any(atom.size % n for atom in atoms)]
            remedy = f"expert={sizes[-1]} and more data" if sizes else "another layout"
            raise LayoutError(
                f"layout {layout!r} puts axis {axis.name} of {axis.size} ranks on a layer of "
                f"{uneven[0]} experts, of which every rank would hold {uneven[0] / axis.size:.3g}: "
                f"use {remedy}, or layout 'auto'"
            )


class _Products:
    """Matmuls, and what axes may split of them."""

    def __init__(self, program: Program, kinds: Kinds, nodes: Iterable[fx.Node]) -> None:
        matmuls = [(module_path(node), loop_dim_atoms(program, node)) for node in nodes]
        self.paths, self.sides = [path for path, _ in matmuls], [sides for _, sides in matmuls]
        self.kinds = kinds
        self._sizes: dict[tuple[str, str], list[int]] = {}

    def fit(self, axis: Axis, role: Role) -> list[bool]:
        """Return for each matmul whether an axis of this role divides what it would split, and the
        weight as stored. (Too few heads are no error: attention is then replicated.)
        """
        used = [role.takes == "m"] * len(self.sides)
        for letter in role.takes:
            used = [
                u or not s % axis.size
                for u, s in zip(used, self._of(letter, role.splits), strict=True)
            ]
        if role.stored not in ("n", "k"):
            return used
        return [
            u and not s % axis.size for u, s in zip(used, self._of(role.stored, "any"), strict=True)
        ]

    def text(self, place: int, letter: str, role: Role) -> str:
        """Return how large a loop dim of a matmul is, and what of it an axis of this role may split
        where that is not all: "k = 24 stays whole", "n = 3 × 8 of which 8 may be split".
        """
        sizes = [atom.size for atom in self.sides[place][letter]]
        size = f"{letter} = {' × '.join(map(str, sizes)) or '1'}"
        free = self._of(letter, role.splits)[place]
        if free == math.prod(sizes):
            return size
        return f"{size} stays whole" if free == 1 else f"{size} of which {free} may be split"

    def _of(self, letter: str, splits: str) -> list[int]:
        """Return how much of a loop dim an axis with these splits may split, for each matmul."""
        if (letter, splits) not in self._sizes:
            self._sizes[letter, splits] = [
                math.prod(a.size for a in sides[letter] if self.kinds.allowed(splits, a))
                for sides in self.sides
            ]
        return self._sizes[letter, splits]


class _Facts(NamedTuple):
    """What named layouts ask of a program, whatever the layout: the kinds of its dims, the loop
    dims of its parameters, its matmuls with a weight, and these with its convolutions.
    """

    kinds: Kinds
    letters: Mapping[str, tuple[str, ...]]
    products: _Products
    with_convolutions: _Products

    @staticmethod
    def of(program: Program) -> _Facts:
        """Return the facts of an annotated program."""
        kinds = dim_kinds(program)
        products = _Products(program, kinds, [node for node, _ in weight_matmuls(program)])
        every = _Products(program, kinds, parameter_products(program))
        return _Facts(kinds, parameter_loop_dims(program), products, every)


def _check_products(
    layout: str | Grid,
    mesh: Mesh,
    roles: tuple[Role, ...],
    products: _Products,
    with_convolutions: _Products,
) -> None:
    """Check that axes divide most weights and their matmuls, or most of these with the convolutions
    among them: a convolutional net's one matmul may be a head of ten classes. Raises LayoutError.
    """
    for axis, role in zip(mesh.axes, roles, strict=True):
        unfit = [place for place, fits in enumerate(products.fit(axis, role)) if not fits]
        fit = sum(with_convolutions.fit(axis, role))
        if (
            unfit
            and 2 * len(unfit) >= len(products.sides)
            and 2 * fit <= len(with_convolutions.sides)
        ):
            listed = [
                f"{products.paths[i] or 'the model'} "
                f"({products.text(i, 'k', role)}, {products.text(i, 'n', role)})"
                for i in unfit[:3]
            ]
            more = f" and {len(unfit) - 3} more" if len(unfit) > 3 else ""
            raise LayoutError(
                f"layout {layout!r} puts axis {axis.name} of {axis.size} ranks on rows or columns "
                f"of weights, where it may split {_MAY_SPLIT[role.splits]} alone, and {axis.size} "
                f"divides none of these in {len(unfit)} of {len(products.sides)} products: "
                f"{', '.join(listed)}{more}; use an axis size that divides them, other sizes in "
                "the model, or layout 'auto'"
            )


_MAY_SPLIT = {  # by Role.splits
    "batch": "the batch",
    "sequence": "the sequence",
    "features": "features",
    "residual": "features of the residual stream",
    "inner": "features outside of the residual stream",
    "unsequenced": "batch and features",
    "any": "loop dims",
}
