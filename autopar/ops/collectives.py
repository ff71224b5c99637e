"""The changes of state that emitted graphs call: differentiable functions on the rank's local
tensor.

On a mesh axis a tensor is I (invariant), R (replicated), S (sharded) or P (partial); the state
fixes its gradient's: I has I, R has P, S has S, P has R. CHANGES lists what each function does to
the value and to the gradient:

| function | from → to | forward | backward |
|---|---|---|---|
| replicate | I → R | nothing | all-reduce |
| take_slice(of="I") | I → S | take own slice | all-gather |
| take_slice(of="R") | R → S | take own slice | pad with zeros |
| all_gather(to="R") | S → R | all-gather | reduce-scatter |
| all_gather(to="I") | S → I | all-gather | take own slice |
| all_to_all | S → S | all-to-all | all-to-all |
| all_reduce(to="I") | P → I | all-reduce | nothing |
| all_reduce(to="R") | P → R | all-reduce | all-reduce |
| reduce_scatter | P → S | reduce-scatter | all-gather |
| invariant | R → I | nothing | divide by the axis size |
| partial(of="I") | I → P | divide by the axis size | nothing |
| place | S → P | place into zeros | take own slice |
| partial(of="R") | R → P | divide by the axis size | divide by the axis size |

Arguments that mean the same everywhere:
    axis        the name of a mesh axis, or a tuple of names: then the change is a joint one over
                their common group, whose ranks count in mesh order, whatever the order of the tuple
    mesh        the mesh as `str(mesh)`, such as "data2.x2"
    dim         the tensor dim
    inner       the axis holds one digit of the dim; `inner` is the number of LOCAL elements of the
                dim to the right of that digit. None: the outermost digit, that is contiguous slices
    coordinate  the rank's own place on the axis: int64 of shape (1,), a tensor so that graphs are
                the same on all ranks; for several axes one of each, in mesh order
    inside      the collective goes in two levels, so many ranks (neighbours on the axis) inside, or
                in more of them: see autopar/ops/comm.py. `backward_inside`: that of the backward
    reduce_dtype  what the gradient is added up in, if that is wider than its own dtype
    lane        which of the process groups carries it: what waits in one lane holds up no other

Every communication goes through `autopar.ops.comm`.

One change of state as one node of a graph, a call of a function of collectives.py; and the
process groups that the nodes of an emitted graph go over.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx

from autopar.ir.graph import every_node
from autopar.ir.layout import SUMS, TRAFFIC, Step
from autopar.ops import autograd, comm
from autopar.ops.comm import Axes, Hierarchy, Route

Coordinate = Tensor | Sequence[Tensor]

# -- the changes of state --------------------------------------------------------------------------


def all_gather(
    x: Tensor,
    axis: Axes,
    dim: int,
    mesh: str,
    inner: int | None = None,
    coordinate: Coordinate | None = None,
    to: Literal["R", "I"] = "R",
    inside: Hierarchy = (),
    backward_inside: Hierarchy = (),
    lane: int = 0,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """S → R or I: the dim grows by the axis size. `coordinate` is needed for I, whose backward
    takes the own slice.

    On "x2", rank 0 with [0, 1] and rank 1 with [2, 3]: both get [0, 1, 2, 3]; with inner=1 both get
    [0, 2, 1, 3].
    """
    there, back = _both_ways(axis, mesh, inside, backward_inside, lane)
    dim = dim % x.dim()
    inner = x.shape[dim] if inner is None else inner
    if to == "R":
        return autograd.AllGather.apply(x, dim, inner, there, back, reduce_dtype)
    assert coordinate is not None, (
        "all_gather to I takes its own slice in the backward: pass `coordinate`"
    )
    place = _joint(coordinate, axis, mesh)
    return autograd.AllGatherToInvariant.apply(x, place, dim, inner, there)


def reduce_scatter(
    x: Tensor,
    axis: Axes,
    dim: int,
    mesh: str,
    inner: int | None = None,
    inside: Hierarchy = (),
    backward_inside: Hierarchy = (),
    lane: int = 0,
) -> Tensor:
    """P → S: the dim shrinks by the axis size; it is read as (outer, axis, inner), so `inner`
    counts AFTER the scatter.
    """
    there, back = _both_ways(axis, mesh, inside, backward_inside, lane)
    dim = dim % x.dim()
    inner = x.shape[dim] // comm.size_of(axis, mesh) if inner is None else inner
    return autograd.ReduceScatter.apply(x, dim, inner, there, back)


def all_reduce(
    x: Tensor,
    axis: Axes,
    mesh: str,
    to: Literal["R", "I"] = "R",
    inside: Hierarchy = (),
    backward_inside: Hierarchy = (),
    lane: int = 0,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """P → R or I: the sum over the ranks of the axis; over several axes at once where `axis` is a
    tuple.
    """
    there, back = _both_ways(axis, mesh, inside, backward_inside, lane)
    if to == "R":
        return autograd.AllReduce.apply(x, there, back, reduce_dtype)
    return autograd.AllReduceToInvariant.apply(x, there)


def replicate(
    x: Tensor,
    axis: Axes,
    mesh: str,
    backward_inside: Hierarchy = (),
    lane: int = 0,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """I → R: the value stays; the ranks' gradients are summed, over several axes at once where
    `axis` is a tuple.
    """
    return autograd.Replicate.apply(x, comm.route(axis, mesh, backward_inside, lane), reduce_dtype)


def invariant(x: Tensor, axis: Axes, mesh: str) -> Tensor:
    """R → I: the value stays; every rank keeps its part, gradient / size, of the whole gradient."""
    return autograd.Scale.apply(x, 1, comm.size_of(axis, mesh))


def partial(x: Tensor, axis: Axes, mesh: str, of: Literal["I", "R"] = "I") -> Tensor:
    """I or R → P: every rank holds x / size; the gradient of I passes as it is, that of R is
    divided too.
    """
    size = comm.size_of(axis, mesh)
    return autograd.Scale.apply(x, size, 1 if of == "I" else size)


def take_slice(
    x: Tensor,
    coordinate: Coordinate,
    axis: Axes,
    dim: int,
    mesh: str,
    inner: int | None = None,
    of: Literal["I", "R"] = "I",
    backward_inside: Hierarchy = (),
    lane: int = 0,
) -> Tensor:
    """I or R → S: the own slice; the dim is read as (outer, axis, inner), so `inner` counts AFTER
    the slicing.
    """
    size, dim = comm.size_of(axis, mesh), dim % x.dim()
    inner = x.shape[dim] // size if inner is None else inner
    own = _joint(coordinate, axis, mesh)
    if of == "I":
        back = comm.route(axis, mesh, backward_inside, lane)
        return autograd.SliceOfInvariant.apply(x, own, dim, inner, size, back)
    return autograd.SliceOfReplicated.apply(x, own, dim, inner, size)


def place(
    x: Tensor, coordinate: Coordinate, axis: Axes, dim: int, mesh: str, inner: int | None = None
) -> Tensor:
    """S → P: zeros but for the own slice; the dim grows by the axis size, `inner` as for
    `all_gather`.
    """
    dim = dim % x.dim()
    inner = x.shape[dim] if inner is None else inner
    own = _joint(coordinate, axis, mesh)
    return autograd.Place.apply(x, own, dim, inner, comm.size_of(axis, mesh))


def all_to_all(
    x: Tensor,
    axis: Axes,
    mesh: str,
    from_dim: int,
    to_dim: int,
    from_inner: int | None = None,
    to_inner: int | None = None,
    lane: int = 0,
) -> Tensor:
    """S(from_dim) → S(to_dim), two different dims: from_dim grows by the axis size, to_dim shrinks
    by it.

    `from_inner` is `inner` as for `all_gather`, `to_inner` as for `reduce_scatter`.
    """
    ((size, group),) = comm.route(axis, mesh, (), lane)
    from_dim, to_dim = from_dim % x.dim(), to_dim % x.dim()
    assert from_dim != to_dim, f"all_to_all within dim {from_dim}"
    from_inner = x.shape[from_dim] if from_inner is None else from_inner
    to_inner = x.shape[to_dim] // size if to_inner is None else to_inner
    return autograd.AllToAll.apply(x, from_dim, to_dim, from_inner, to_inner, size, group)


def _both_ways(
    axis: Axes, mesh: str, inside: Hierarchy, backward_inside: Hierarchy, lane: int
) -> tuple[Route, Route]:
    there = comm.route(axis, mesh, inside, lane)
    return there, comm.route(axis, mesh, backward_inside, lane)


def _joint(coordinate: Coordinate, axis: Axes, mesh: str) -> Tensor:
    """The place in the common group of several axes, from that on each."""
    if isinstance(coordinate, Tensor):
        return coordinate
    own, *others = coordinate
    for place, size in zip(others, comm.sizes_of(axis, mesh)[1:], strict=True):
        own = own * size + place
    return own


HierarchySizes = tuple[int, ...]
_LEVELS = "inside", "backward_inside"  # what says so of a change, forward and backward


def emit_step(
    graph: fx.Graph,
    x: fx.Node,
    step: Step,
    coordinate: Callable[[str], fx.Node],
    levels: tuple[HierarchySizes, HierarchySizes] = ((), ()),
    reduce_dtype: torch.dtype | None = None,
) -> fx.Node:
    """Appends to `graph` the node that takes the local part of a value `x` through `step`.

    `coordinate` gives the rank's own place on an axis; it is asked only where the step needs it.
    `levels`: how the collectives go, forward and backward (see `cost.comm.levels`). `reduce_dtype`:
    what the gradient is added up in (None: its own), where the adjoint is a sum.
    """
    function, args, kwargs = _moving(step) or _placing(step, coordinate)
    where = {"axis": _one_or_all(step.axes), "mesh": str(step.before.mesh)}
    ways = zip(_LEVELS, levels, strict=True)
    how: dict[str, Any] = {name: _one_or_all(inside) for name, inside in ways if inside}
    if reduce_dtype is not None and TRAFFIC[step.kind][1] in SUMS:
        how["reduce_dtype"] = reduce_dtype
    return graph.call_function(function, (x, *args), {**where, **kwargs, **how})


def hierarchy_of(node: fx.Node, backward: bool) -> HierarchySizes:
    """How the forward or backward collective of such a node goes; () in one level."""
    found: Any = node.kwargs.get(_LEVELS[backward], ())
    return (found,) if isinstance(found, int) else tuple(found)


def set_hierarchy(node: fx.Node, backward: bool, levels: HierarchySizes) -> None:
    """Makes that collective go so."""
    kept = {key: value for key, value in node.kwargs.items() if key != _LEVELS[backward]}
    node.kwargs = {**kept, **({_LEVELS[backward]: _one_or_all(levels)} if levels else {})}


def groups_of(module: fx.GraphModule) -> frozenset[str]:
    """The names of the process groups that an emitted graph communicates over, forward and
    backward: all that `mesh.connect` is to open for it. A sharded function says its axes by the
    names of its arguments.
    """
    found: set[str] = set()
    for node, _ in every_node(module):
        file = getattr(node.target, "__module__", None) or ""
        if file == __name__:
            found |= _of_change(node)
        elif file.startswith(f"{__package__}."):
            found |= _of_sharded(node)
    return frozenset(found)


def _of_change(node: fx.Node) -> set[str]:
    assert callable(node.target)
    taken = inspect.signature(node.target).parameters
    if "lane" not in taken or node.kwargs.get("of") == "R":
        return set()  # nothing is sent in either direction
    where: Any = tuple(node.kwargs.get(key, 0) for key in ("axis", "mesh", "lane"))
    axis, mesh, lane = where
    both = node.kwargs.get("to") != "I"
    keys = [key for key in _LEVELS[: 1 + both] if key in taken] or [""]
    ways: list[Any] = [node.kwargs.get(key, ()) for key in keys]
    return {group for way in ways for _, group in comm.route(axis, mesh, way, lane)}


def _of_sharded(node: fx.Node) -> set[str]:
    assert callable(node.target)
    given = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
    if "mesh" not in given:
        return set()
    sets = [given[key] for key in ("axes", "token_axes", "row", "column") if key in given]
    sets.append([axis for axis, *_ in given.get("digits", ())])
    return {comm.group_of(axes, given["mesh"]) for axes in sets if axes}


_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def _one_or_all(found: tuple[Any, ...]) -> Any:
    return found[0] if len(found) == 1 else found


# The digits of several axes are one, jointly: the last axis has its right end.


def _moving(step: Step) -> _Call | None:
    """The changes that are the same on every rank."""
    axis = step.axes[-1]
    before, after = step.before.state(axis), step.after.state(axis)
    match step.kind:
        case "I->R":
            return replicate, (), {}
        case "R->I":
            return invariant, (), {}
        case "I->P" | "R->P":
            return partial, (), {"of": before.kind}
        case "P->I" | "P->R":
            return all_reduce, (), {"to": after.kind}
        case "P->S":
            digit = {"dim": after.dim, "inner": step.after.inner(axis)}
            return reduce_scatter, (), digit
        case "S->R":
            return all_gather, (), {"dim": before.dim, "inner": step.before.inner(axis)}
        case "S->S":
            dims = {"from_dim": before.dim, "to_dim": after.dim}
            inner = {"from_inner": step.before.inner(axis), "to_inner": step.after.inner(axis)}
            return all_to_all, (), {**dims, **inner}
    return None


def _placing(step: Step, coordinate: Callable[[str], fx.Node]) -> _Call:
    """The changes that depend on the rank's own place."""
    axis = step.axes[-1]
    before, after = step.before.state(axis), step.after.state(axis)
    own = _one_or_all(tuple(coordinate(name) for name in step.axes))
    match step.kind:
        case "I->S" | "R->S":
            digit = {"dim": after.dim, "inner": step.after.inner(axis)}
            return take_slice, (own,), {**digit, "of": before.kind}
        case "S->I":
            digit = {"dim": before.dim, "inner": step.before.inner(axis)}
            return all_gather, (), {**digit, "coordinate": own, "to": "I"}
        case "S->P":
            digit = {"dim": before.dim, "inner": step.before.inner(axis)}
            return place, (own,), digit
    raise AssertionError(step.kind)
