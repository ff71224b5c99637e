"""Decides which dims of a model are padded so that mesh axes divide them, and searches with them.

Example: GPT-2's vocabulary of 50,257 divides on no axis of 4 or 8 ranks. Under "megatron" it is
padded to 50,264 on 8 ranks, so that its rows are split as those of 50,304 are; under "fsdp", which
splits the batch alone, no weight is padded, but a batch of 7 rows is, to 8 on 4 ranks; under "cp"
a sequence of 1,023 tokens is, to 1,024.

Every dim is padded to a multiple of the ranks of a node first, and the search shows the axes that
split it. Where those have other sizes, the plan is carried over to dims that are padded to a
multiple of their own axes, as small as can be, so that plain Shards hold the parameters; only where
it cannot be carried over is it searched again. One more search is made without padding, where none
was used or a dim grew by more than a hundredth: the plan with padding is taken where its step is
shorter. Where it grew by less and no op splits it, only its storage, the plan is carried over to
the dim without padding, which need not be sliced off. A model whose dims divide is searched once.

An annotated program, a world, a request and the search enter; the program with its plan leaves,
padded or as it was. `with_padding_of` pads a program again as a plan says;
`search_with_rows_padded` pads the rows of a further call of a model. Called by planner.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import fx

from autopar.cost.simulator import bucket_seconds
from autopar.errors import LayoutError, PlanError
from autopar.ir.dim_roles import dim_kinds
from autopar.ir.graph import producer, remember, weights_of
from autopar.ir.layout import I, Layout, S
from autopar.ir.padding import Pad, Pads, plain_shards, resize
from autopar.ir.plan import Choice, Padding, Plan
from autopar.ir.program import Atom, Program, Value
from autopar.ir.sharding_rule import operands_of, results_of, shape_of
from autopar.passes import annotate, emit_program
from autopar.passes.pad import check, pad, paddable
from autopar.planner.bound import lower_bounds
from autopar.planner.named_layouts import roles_of
from autopar.planner.objective import cost_terms
from autopar.planner.request import GridContext, Layouts, PlanRequest
from autopar.planner.solve import with_bounds
from autopar.planner.space import candidates, searched_candidates
from autopar.world import World

Sizes = dict[int, int]  # the padded size of atoms, by their numbers
Search = Callable[[Program], Program]

_MOST = (
    2.0  # times its size: a dim is padded to no more where the layout that is asked for wants it
)
_MOST_OF_AUTO = 1.15  # the same where "auto" may choose axes that divide
_NEGLIGIBLE = 1.01  # times its size: a plan padded by no more needs no comparison without padding
_RANKS = 8  # of a node
_UNPADDED: dict[Value, tuple[Pad, ...]] = {}  # one object, by which a search is known again


def search_with_padding(
    search: Search, program: Program, world: World, request: PlanRequest
) -> Program:
    """Return the annotated program with the plan of `search`; padded, where a plan of it with
    padding has the shorter step.
    """
    sizes = _atoms_to_pad(program, world, request)
    if not sizes:
        return search(program)
    try:
        padded = _searched_padded(search, program, sizes, world)
    except (LayoutError, PlanError):
        padded = None
    if padded is not None and _growth(_plan(padded)) <= _NEGLIGIBLE:
        # whatever splits without padding was searched, too
        bare = _without_padding(padded, program, world, request)
        return padded if bare is None or _is_faster(padded, bare, world, request) else bare
    try:
        plain = search(program)
    except LayoutError:
        if padded is None:
            raise
        return padded
    if padded is None or not _is_faster(padded, plain, world, request):
        return plain
    return padded


def _growth(plan: Plan) -> float:
    """Return how many times its size the dim is that the plan pads most."""
    return max((each.padded / each.size for each in plan.padding), default=1.0)


def with_padding_of(program: Program, plan: Plan) -> Program:
    """Return the annotated program padded as the plan says. Raises PlanError where it has no such
    dims.
    """
    if not plan.padding or program.padding:
        return program
    sizes = _sizes_of(program, plan)
    return _annotated(program, sizes) if sizes else program


def _sizes_of(program: Program, plan: Plan) -> Sizes:
    """Return the atoms of an annotated program that a plan pads, of those that it has in this
    size.
    """
    if not plan.padding:
        return {}
    notes = annotate.with_uncut_sequences(program).annotations
    assert notes is not None
    sizes: Sizes = {}
    for each in plan.padding:
        dims = notes.dims.get((each.node, 0), ())
        atoms = dims[each.dim] if each.dim < len(dims) else ()
        if each.place < len(atoms) and atoms[each.place].size == each.size:
            sizes[atoms[each.place].number] = each.padded
        elif _is_stored_padded(plan, each):
            raise PlanError(
                f"the plan pads factor {each.place} of dim {each.dim} of {each.node} from "
                f"{each.size} to {each.padded}, and the graph has no such factor: plan again"
            )
    return sizes


def search_with_rows_padded(search: Search, program: Program, plan: Plan) -> Program:
    """Return the annotated program of a further call, padded where `plan` stores padded parameters,
    with the plan of `search`; with padded rows, where that plan is the faster one.
    """
    sizes = _sizes_of(program, plan)
    best = _padded_by_search(search, program, sizes)
    rows = {n: size for n, size in _rows(program, plan.mesh.size).items() if n not in sizes}
    if not rows or paddable(program, sizes | rows) != sizes | rows:
        return best
    wide = _padded_by_search(search, program, sizes | rows)
    fitted = {n: size for n, size in _fitted(wide, wide).items() if n in rows}
    if fitted and fitted != rows:
        wide = _padded_by_search(search, program, sizes | fitted)
    return wide if fitted and _plan(wide).seconds < _plan(best).seconds else best


def searched_in_paddings(
    search: Callable[[Program], Program | None], program: Program, plan: Plan, ranks: int
) -> Program | None:
    """Return the annotated program of a further call, padded where `plan` stores padded parameters,
    with the plan that `search` gives; where it gives none, with the rows of the batch padded to a
    multiple of `ranks`. None where it gives none for these, or no op could carry that padding.
    """
    sizes = _sizes_of(program, plan)
    rows = {n: size for n, size in _rows_for(program, ranks).items() if n not in sizes}
    wide = sizes | rows
    for each in (sizes, wide) if rows and paddable(program, wide) == wide else (sizes,):
        planned = search(_annotated(program, each) if each else program)
        if planned is not None:
            return _with_notes(planned, program, each)
    return None


def _rows_for(program: Program, ranks: int) -> Sizes:
    """Return the atoms of the batch with the next size that so many ranks divide, if they do not
    divide it as it is, and it does not grow too much.
    """
    notes = program.annotations
    assert notes is not None
    if notes.batch is None or notes.batch.opaque or not notes.batch.size % ranks:
        return {}
    padded = _multiple(notes.batch.size, ranks)
    return (
        dict.fromkeys(dim_kinds(program).batch, padded)
        if padded <= _MOST * notes.batch.size
        else {}
    )


def _padded_by_search(search: Search, program: Program, sizes: Sizes) -> Program:
    """Return the program with this padding and the plan of a search, which says what is padded."""
    padded = _annotated(program, sizes) if sizes else program
    return _with_notes(search(padded), program, sizes)


def check_layout(program: Program, world: World, request: PlanRequest) -> None:
    """Raise LayoutError where the layout that is asked for fits the annotated program neither as it
    is nor with padding.
    """
    assert request.layout is not None
    try:
        candidates(request.layout, world.ranks, program)
    except LayoutError as error:
        sizes = _atoms_to_pad(program, world, request)
        if not sizes:
            raise
        try:
            candidates(request.layout, world.ranks, _annotated(program, sizes))
        except LayoutError:
            raise error from None


def _is_stored_padded(plan: Plan, each: Padding) -> bool:
    """Whether the plan stores parts of a parameter with this padding."""
    stored = plan.stored.get(each.node)
    return stored is not None and stored.shape[each.dim] == each.padded


# -- what to pad -----------------------------------------------------------------------------------
def _atoms_to_pad(program: Program, world: World, request: PlanRequest) -> Sizes:
    """Return the atoms to pad, with their padded sizes: those of weights and of the batch that the
    layout may split, that no axis divides, and that ops can carry with padding.
    """
    sizes: Sizes = {}
    roles = [] if request.layout is None else list(roles_of(request.layout))
    if any(role is None or set(role.takes) & {"n", "k"} for role in roles):
        sizes |= _of_weights(program, _ranks_together(world), request)
    if any(role is None or role.splits == "batch" for role in roles):
        sizes |= _rows(program, world.ranks)
    if _tokens(program, world.ranks, request):
        program = annotate.with_uncut_sequences(program)
        sequences = _tokens(program, world.ranks, request)
        sizes |= {atoms[0].number: n for atoms, n in sequences.items() if len(atoms) == 1}
    return paddable(program, sizes) if sizes else {}


def _of_weights(program: Program, ranks: int, request: PlanRequest) -> Sizes:
    """Return the atoms of weights that an axis of so many ranks would not divide, with their padded
    sizes.
    """
    uneven = [(number, size) for number, size in _weight_atoms(program) if size % ranks]
    if not uneven:
        return {}
    kinds = dim_kinds(program)
    most = _MOST_OF_AUTO if request.layout == "auto" else _MOST
    return {
        number: padded
        for number, size in uneven
        if number not in kinds.batch | kinds.sequence
        and (padded := _padded(size, ranks, most)) > size
    }


def _rows(program: Program, ranks: int) -> Sizes:
    """Return the atoms of the batch that an axis of so many ranks would not divide, with their
    padded sizes.
    """
    notes = program.annotations
    assert notes is not None
    if notes.batch is None or not notes.batch.size % ranks or notes.batch.opaque:
        return {}
    size = notes.batch.size
    padded = _padded(size, ranks, _MOST)
    return dict.fromkeys(dim_kinds(program).batch, padded) if padded > size else {}


def _tokens(program: Program, ranks: int, request: PlanRequest) -> dict[tuple[Atom, ...], int]:
    """Return the sequences of token ids that an axis of so many ranks would not divide, by their
    atoms, with their padded sizes; none where the layout splits no sequence.
    """
    notes = program.annotations
    assert notes is not None
    long = notes.strided_from is not None
    if request.layout is None or not _splits_sequences(request.layout, long):
        return {}
    most = _MOST_OF_AUTO if request.layout == "auto" else _MOST
    kinds, sequences = dim_kinds(program), dict[tuple[Atom, ...], int]()
    for entry in program.signature.inputs:
        dims = notes.dims.get((entry.node, 0), ())
        atoms = dims[1] if entry.kind == "user" and len(dims) > 1 else ()
        size = math.prod(atom.size for atom in atoms)
        padded = _padded(size, ranks, most) if size % ranks else size
        if padded > size and all(a.number in kinds.sequence and not a.opaque for a in atoms):
            sequences[atoms] = padded
    return sequences


def _splits_sequences(layout: Layouts, long: bool) -> bool:
    """Whether a layout may split sequences; "auto" does where they are long."""
    if isinstance(layout, Mapping):
        return any(_splits_sequences(each, long) for each in layout.values())
    contexts = layout == "cp" or isinstance(layout, GridContext)
    return contexts or (layout == "auto" and long)


def _padded(size: int, ranks: int, most: float) -> int:
    """Return the largest size that some axis of these ranks may ask for: a multiple of its own, up
    to `most` times the size.
    """
    divisors = (n for n in range(2, min(ranks, size) + 1) if ranks % n == 0)
    padded = (_multiple(size, n) for n in divisors)
    return max((n for n in padded if n <= most * size), default=size)


def _multiple(size: int, of: int) -> int:
    """Return the next multiple from a size on."""
    return math.ceil(size / of) * of


def _ranks_together(world: World) -> int:
    """Return how many ranks may split one dim: those of the innermost levels, up to eight or a
    whole level, as axes of matmuls lie on fast links.
    """
    ranks = 1
    for level in world.levels:
        ranks *= level.ranks
        if ranks >= _RANKS:
            break
    return ranks if world.levels else world.ranks


def _weight_atoms(program: Program) -> Iterable[tuple[int, int]]:
    """Yield (number, size) of each atom of the weights of matmuls and embeddings."""
    notes = program.annotations
    assert notes is not None
    weights, seen = weights_of(program), set[int]()
    for node in program.module.graph.nodes:
        rule = notes.specs.get(node.name)
        if rule is None or not (rule.product or node.target is torch.ops.aten.embedding.default):
            continue
        for operand in operands_of(node):
            if operand is None or producer(operand) not in weights:
                continue
            for atom in (a for atoms in notes.dims[producer(operand)] for a in atoms):
                if atom.number not in seen and not atom.opaque:
                    seen.add(atom.number)
                    yield atom.number, atom.size


# -- searches with padding -------------------------------------------------------------------------
def _searched_padded(
    search: Search, program: Program, sizes: Sizes, world: World
) -> Program | None:
    """Return the program padded as its plan needs, with that plan; None where the plan splits none
    of the dims that were padded.
    """
    wide = _annotated(program, sizes)
    # first as if plain Shards could hold any part, to see which axes split the dims
    planned = search(dataclasses.replace(wide, padding=_UNPADDED))
    fitted = _fitted(wide, planned)
    if not fitted:
        return None
    if fitted == sizes and _is_storable(wide, planned):
        return _with_notes(dataclasses.replace(planned, padding=wide.padding), program, sizes)
    narrow = _annotated(program, fitted)
    chosen = None
    if fitted.keys() == sizes.keys() and not _has_other_atoms(program, sizes, fitted):
        chosen = _carried_over(planned, wide, narrow, world)
    if chosen is None:
        chosen = search(narrow)
        if not _fitted(narrow, chosen):
            return None
    return _with_notes(chosen, program, fitted)


def _has_other_atoms(program: Program, sizes: Sizes, fitted: Sizes) -> bool:
    """Whether sequences of other sizes are cut into other atoms, to which no digit carries over."""
    notes = program.annotations
    assert notes is not None
    if notes.strided_from is None or fitted == sizes:
        return False
    tokens = dim_kinds(annotate.with_uncut_sequences(program)).sequence
    return any(fitted[number] != sizes[number] for number in tokens & sizes.keys())


def _carried_over(planned: Program, wide: Program, narrow: Program, world: World) -> Program | None:
    """Return the program with the smaller padding and the plan found with the larger one; None
    where its layouts do not divide the smaller sizes, or plain Shards cannot hold its parameters.

    A cost is a constant and a part in proportion to a size, so no mesh's bound shrinks by more than
    the dims do.
    """
    plan = _plan(planned)
    shrunk = min(
        new.padded / old.padded
        for value, pads in narrow.padding.items()
        for old, new in zip(wide.padding[value], pads, strict=True)
    )

    def at(layout: Layout, value: Value, shape: tuple[int, ...]) -> Layout:
        if value in narrow.padding:
            return resize(layout, wide.padding[value], narrow.padding[value])
        if layout.shape != shape:  # of a weight that is padded piece by piece in the graph
            raise LayoutError(f"{value[0]} of {shape} has no padding to carry {layout.shape} to")
        return layout

    try:
        plan = dataclasses.replace(
            _with_layouts(plan, narrow, at),
            bound=plan.bound * shrunk,
            meshes=tuple((mesh, bound * shrunk) for mesh, bound in plan.meshes),
        )
    except LayoutError:
        return None
    carried = dataclasses.replace(narrow, plan=plan)
    if not _is_storable(narrow, carried):
        return None
    seconds = sum(cost_terms(carried, plan, world).values())
    plan = dataclasses.replace(plan, seconds=seconds, bound=min(plan.bound, seconds))
    return dataclasses.replace(carried, plan=plan)


def _with_layouts(
    plan: Plan, program: Program, at: Callable[[Layout, Value, tuple[int, ...]], Layout]
) -> Plan:
    """Return a plan of a program with other padding for this one: `at` takes the layout of a value
    there, the value, and its shape here, and returns the layout here, or raises LayoutError.
    """
    nodes = {node.name: node for node in program.module.graph.nodes}

    def of(layout: Layout, value: Value) -> Layout:
        return at(layout, value, shape_of(results_of(nodes[value[0]])[value[1]]))

    def choice_of(node: fx.Node, choice: Choice) -> Choice:
        sources = [None if n is None else producer(n) for n in operands_of(node)]
        return dataclasses.replace(
            choice,
            operands=tuple(
                layout if layout is None or source is None else of(layout, source)
                for layout, source in zip(choice.operands, sources, strict=True)
            ),
            results=tuple(of(layout, (node.name, i)) for i, layout in enumerate(choice.results)),
        )

    outputs = {str(n): entry.node for n, entry in enumerate(program.signature.outputs)}
    return dataclasses.replace(
        plan,
        choices={n: choice_of(nodes[n], each) for n, each in plan.choices.items() if n in nodes},
        stored={name: of(layout, (name, 0)) for name, layout in plan.stored.items()},
        copies={v: of(layout, v) for v, layout in plan.copies.items() if v[0] in nodes},
        outputs={
            number: of(layout, producer(nodes[outputs[number] or ""]))
            for number, layout in plan.outputs.items()
        },
        memory=None,  # of other sizes
    )


def _without_padding(
    planned: Program, program: Program, world: World, request: PlanRequest
) -> Program | None:
    """Return the program as it is with the plan of "auto" found with padding, where only storage
    splits what is padded: the vocabulary is stored in parts of its columns, if it was in rows, and
    its bias whole. None where an op splits it, or the plan is of another layout.
    """
    if request.layout != "auto":
        return None
    plan = _plan(planned)

    def at(layout: Layout, value: Value, shape: tuple[int, ...]) -> Layout:
        if layout.shape == shape:
            return layout
        pads = planned.padding.get(value, ())
        layout = resize(layout, pads, [each._replace(padded=each.size) for each in pads])
        if layout.shape != shape:
            raise LayoutError(f"{value[0]} of {shape} has no padding that {layout.shape} has")
        return layout

    try:
        stored = {n: _in_other_dims(layout, planned.pads(n)) for n, layout in plan.stored.items()}
        plan = _with_layouts(dataclasses.replace(plan, stored=stored), program, at)
    except LayoutError:
        return None
    meshes = searched_candidates("auto", world, program)
    bounds = lower_bounds(program, meshes, world)
    seconds = sum(cost_terms(program, plan, world).values())
    plan = dataclasses.replace(
        plan,
        seconds=seconds,
        bound=min(*bounds, seconds),
        meshes=with_bounds(meshes, bounds),
        padding=(),
    )
    return dataclasses.replace(program, plan=plan)


def _in_other_dims(layout: Layout, pads: Pads) -> Layout:
    """Return the layout of a parameter without its padding: axes that hold digits of a padded dim
    split the first other dim; the only dim of a parameter stays whole. Raises LayoutError where
    sizes do not divide.
    """
    if not pads:
        return layout
    sizes = {each.dim: each.outer * each.size * each.inner for each in pads}
    shape = tuple(sizes.get(dim, size) for dim, size in enumerate(layout.shape))
    other = next((dim for dim in range(len(shape)) if dim not in sizes), None)
    states, left = list(layout.states), list(shape)
    for place in layout.mesh.storage_order:
        state, axis = states[place], layout.mesh.axes[place]
        dim = other if state.dim in sizes else state.dim
        if dim is None:
            states[place] = I
        elif state.kind == "S":
            left[dim], rest = divmod(left[dim], axis.size)
            if rest:
                raise LayoutError(f"axis {axis.name} of size {axis.size} splits no dim of {shape}")
            states[place] = S(dim, left[dim])
    return Layout(layout.mesh, shape, tuple(states))


def _annotated(program: Program, sizes: Sizes) -> Program:
    """Return the padded program, annotated as the unpadded one is: once for each of these sizes."""
    bare = dataclasses.replace(program, tensors={}, plan=None)
    padded = remember(
        program.module.graph,
        "padded",
        (program.annotations, program.signature),
        lambda: _annotated_anew(bare, sizes),
        tuple(sorted(sizes.items())),
    )
    return dataclasses.replace(
        padded, tensors=program.tensors, plan=program.plan, counting=program.counting
    )


def _annotated_anew(program: Program, sizes: Sizes) -> Program:
    before = program.annotations
    assert before is not None
    padded = pad(annotate.with_uncut_sequences(program), sizes)
    check(padded)
    padded = annotate.annotate(padded, before.strided_from)
    padded = annotate.with_unsplit_queries(padded) if before.unsplit_queries else padded
    assert padded.annotations is not None
    notes = dataclasses.replace(
        padded.annotations,
        reduce_dtype=before.reduce_dtype,
        replicated_parameters=before.replicated_parameters,
        replicated_outputs=before.replicated_outputs,
    )
    return annotate.chains(dataclasses.replace(padded, annotations=notes))


def _fitted(padded: Program, planned: Program) -> Sizes:
    """Return the least padded sizes of the atoms that the plan found splits."""
    ranks: dict[Pad, int] = {}
    for value, pads in padded.padding.items():
        for layout in _layouts(planned, value):
            for each in pads:
                split = math.prod(
                    digit.size
                    for digit in layout.digits(each.dim)
                    if each.inner <= digit.stride < each.inner * each.padded
                )
                ranks[each] = max(ranks.get(each, 1), split)
    most: Sizes = {}
    sizes: Sizes = {}
    for each, split in ranks.items():
        if split > most.get(each.atom, 1):
            most[each.atom] = split
            sizes[each.atom] = _multiple(each.size, split)
    unpadded = {each.atom: each.size for each in ranks}
    return {atom: size for atom, size in sizes.items() if size > unpadded[atom]}


def _layouts(planned: Program, value: Value) -> Iterable[Layout]:
    """Yield the layouts that a plan gives a value: where it is made, and where it is stored."""
    plan = planned.plan
    assert plan is not None
    name, index = value
    if name in plan.choices:
        yield plan.choices[name].results[index]
    elif name in plan.stored:
        yield plan.stored[name]


def _is_storable(padded: Program, planned: Program) -> bool:
    """Whether plain Shards can hold every parameter as the plan stores it."""
    assert planned.plan is not None
    return all(
        plain_shards(layout, padded.pads(name)) for name, layout in planned.plan.stored.items()
    )


def _with_notes(planned: Program, program: Program, sizes: Sizes) -> Program:
    """Return the padded program, its plan with what is padded."""
    assert planned.plan is not None
    padding = tuple(_anchors(program, sizes))
    return dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, padding=padding))


def _anchors(program: Program, sizes: Mapping[int, int]) -> Iterable[Padding]:
    """Yield where each padded atom is found: in the first value of the graph that has it."""
    notes = annotate.with_uncut_sequences(program).annotations
    assert notes is not None
    left = dict(sizes)
    for node in program.module.graph.nodes:
        for dim, atoms in enumerate(notes.dims.get((node.name, 0), ())):
            for place, atom in enumerate(atoms):
                if atom.number in left:
                    yield Padding(node.name, dim, place, atom.size, left.pop(atom.number))


def _is_faster(padded: Program, plain: Program, world: World, request: PlanRequest) -> bool:
    """Whether the padded plan is the better one: it fits the memory where the other one does not,
    or its step is shorter.
    """
    budget = request.budget
    fits = [
        budget is None or plan.memory is None or budget.fits(plan.memory)
        for plan in (_plan(padded), _plan(plain))
    ]
    if fits[0] != fits[1]:
        return fits[0]
    return _step_seconds(padded, world, request) < _step_seconds(plain, world, request)


def _step_seconds(program: Program, world: World, request: PlanRequest) -> float:
    """Return the seconds of a step by the plan's measure: simulated with overlap, or summed."""
    if not request.overlap or not _plan(program).mesh.axes:
        return _plan(program).seconds
    return min(bucket_seconds(emit_program(program, world), world))


def _plan(program: Program) -> Plan:
    assert program.plan is not None
    return program.plan
