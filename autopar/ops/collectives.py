"""The reshards that emitted graphs call: differentiable functions on the rank's local tensor.

On a mesh axis a tensor is I (invariant), R (replicated), S (sharded) or P (partial). The state of a
value fixes that of its gradient: I has I, R has P, S has S, P has R. Each function makes one step
of a reshard:

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

These arguments mean the same in every function:
    axis        the name of a mesh axis, or a tuple of names: then one collective runs over their
                common group, whose ranks count in mesh order, whatever the order of the tuple
    mesh        the mesh as `str(mesh)`, such as "data2.x2"
    dim         the tensor dim
    inner       the axis holds one digit of the dim; `inner` is the number of LOCAL elements of the
                dim to the right of that digit. None: the outermost digit, that is contiguous slices
    coordinate  the rank's own coordinate on the axis: int64 of shape (1,), a tensor so that graphs
                are the same on all ranks; for several axes one of each, in mesh order
    inside      sizes of the inner levels of a hierarchical collective, innermost first: see
                autopar/ops/comm.py. `backward_inside` says the same for the backward collective
    reduce_dtype  the dtype that the gradient is summed in, if it is wider than the gradient's own

Every communication goes through `autopar.ops.comm`.

The passes call `emit_step` to append one such call to a graph, and the runtime calls `groups_of`
for the process groups that an emitted graph needs.
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

# -- the reshards ----------------------------------------------------------------------------------


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
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """S → R or I: the dim grows by the axis size. `coordinate` is needed for I, whose backward
    takes the rank's own slice.

    On "x2", rank 0 with [0, 1] and rank 1 with [2, 3]: both get [0, 1, 2, 3]; with inner=1 both get
    [0, 2, 1, 3].
    """
    forward_route, backward_route = _routes(axis, mesh, inside, backward_inside)
    dim = dim % x.dim()
    inner = x.shape[dim] if inner is None else inner
    if to == "R":
        return autograd.AllGather.apply(x, dim, inner, forward_route, backward_route, reduce_dtype)
    assert coordinate is not None, (
        "all_gather to I takes its own slice in the backward: pass `coordinate`"
    )
    own_coordinate = _joint_coordinate(coordinate, axis, mesh)
    return autograd.AllGatherToInvariant.apply(x, own_coordinate, dim, inner, forward_route)


def reduce_scatter(
    x: Tensor,
    axis: Axes,
    dim: int,
    mesh: str,
    inner: int | None = None,
    inside: Hierarchy = (),
    backward_inside: Hierarchy = (),
) -> Tensor:
    """P → S: the values are summed over the axis and the dim shrinks by the axis size. The dim is
    read as (outer, axis, inner), so `inner` counts AFTER the scatter.

    On "x2", rank 0 with [0, 1] and rank 1 with [2, 3]: rank 0 gets [2], rank 1 gets [4].
    """
    forward_route, backward_route = _routes(axis, mesh, inside, backward_inside)
    dim = dim % x.dim()
    inner = x.shape[dim] // comm.size_of(axis, mesh) if inner is None else inner
    return autograd.ReduceScatter.apply(x, dim, inner, forward_route, backward_route)


def all_reduce(
    x: Tensor,
    axis: Axes,
    mesh: str,
    to: Literal["R", "I"] = "R",
    inside: Hierarchy = (),
    backward_inside: Hierarchy = (),
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """P → R or I: the sum over the ranks of the axis, or of several axes at once where `axis` is a
    tuple.
    """
    forward_route, backward_route = _routes(axis, mesh, inside, backward_inside)
    if to == "R":
        return autograd.AllReduce.apply(x, forward_route, backward_route, reduce_dtype)
    return autograd.AllReduceToInvariant.apply(x, forward_route)


def replicate(
    x: Tensor,
    axis: Axes,
    mesh: str,
    backward_inside: Hierarchy = (),
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """I → R: the value stays as it is; the gradients of the ranks are summed in the backward, over
    several axes at once where `axis` is a tuple.
    """
    return autograd.Replicate.apply(x, comm.route(axis, mesh, backward_inside), reduce_dtype)


def invariant(x: Tensor, axis: Axes, mesh: str) -> Tensor:
    """R → I: the value stays as it is; in the backward every rank takes gradient / size, its part
    of the full gradient.
    """
    return autograd.Scale.apply(x, 1, comm.size_of(axis, mesh))


def partial(x: Tensor, axis: Axes, mesh: str, of: Literal["I", "R"] = "I") -> Tensor:
    """I or R → P: every rank holds x / size. The gradient passes unchanged for I and is divided by
    the size for R.
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
) -> Tensor:
    """I or R → S: the rank's own slice. The dim is read as (outer, axis, inner), so `inner` counts
    AFTER the slicing.
    """
    size, dim = comm.size_of(axis, mesh), dim % x.dim()
    inner = x.shape[dim] // size if inner is None else inner
    own_coordinate = _joint_coordinate(coordinate, axis, mesh)
    if of == "I":
        backward_route = comm.route(axis, mesh, backward_inside)
        return autograd.SliceOfInvariant.apply(x, own_coordinate, dim, inner, size, backward_route)
    return autograd.SliceOfReplicated.apply(x, own_coordinate, dim, inner, size)


def place(
    x: Tensor, coordinate: Coordinate, axis: Axes, dim: int, mesh: str, inner: int | None = None
) -> Tensor:
    """S → P: zeros everywhere except the rank's own slice. The dim grows by the axis size; `inner`
    is as for `all_gather`.
    """
    dim = dim % x.dim()
    inner = x.shape[dim] if inner is None else inner
    own_coordinate = _joint_coordinate(coordinate, axis, mesh)
    return autograd.Place.apply(x, own_coordinate, dim, inner, comm.size_of(axis, mesh))


def all_to_all(
    x: Tensor,
    axis: Axes,
    mesh: str,
    from_dim: int,
    to_dim: int,
    from_inner: int | None = None,
    to_inner: int | None = None,
) -> Tensor:
    """S(from_dim) → S(to_dim), for two different dims: from_dim grows by the axis size, to_dim
    shrinks by it.

    `from_inner` is `inner` as for `all_gather`, `to_inner` as for `reduce_scatter`.
    """
    ((size, group),) = comm.route(axis, mesh)
    from_dim, to_dim = from_dim % x.dim(), to_dim % x.dim()
    assert from_dim != to_dim, f"all_to_all within dim {from_dim}"
    from_inner = x.shape[from_dim] if from_inner is None else from_inner
    to_inner = x.shape[to_dim] // size if to_inner is None else to_inner
    return autograd.AllToAll.apply(x, from_dim, to_dim, from_inner, to_inner, size, group)


def _routes(
    axis: Axes, mesh: str, inside: Hierarchy, backward_inside: Hierarchy
) -> tuple[Route, Route]:
    forward_route = comm.route(axis, mesh, inside)
    return forward_route, comm.route(axis, mesh, backward_inside)


def _joint_coordinate(coordinate: Coordinate, axis: Axes, mesh: str) -> Tensor:
    """Return the rank's coordinate in the common group of several axes, from its coordinate on
    each.
    """
    if isinstance(coordinate, Tensor):
        return coordinate
    joint, *others = coordinate
    for next_coordinate, size in zip(others, comm.sizes_of(axis, mesh)[1:], strict=True):
        joint = joint * size + next_coordinate
    return joint


HierarchySizes = tuple[int, ...]
_HIERARCHY_KWARGS = "inside", "backward_inside"  # forward, backward


def emit_step(
    graph: fx.Graph,
    x: fx.Node,
    step: Step,
    coordinate: Callable[[str], fx.Node],
    levels: tuple[HierarchySizes, HierarchySizes] = ((), ()),
    reduce_dtype: torch.dtype | None = None,
) -> fx.Node:
    """Append to `graph` the node that reshards the local part of a value `x` by one `step`.

    `coordinate` returns the node of the rank's own coordinate on an axis; it is called only where
    the step needs it. `levels` are the levels of the hierarchical collectives, forward and
    backward; () is flat. `reduce_dtype` is the dtype that the gradient is summed in (None: its
    own), where the backward is a sum.
    """
    function, args, kwargs = _call_without_coordinate(step) or _call_with_coordinate(
        step, coordinate
    )
    axis_and_mesh = {"axis": _unwrap_single(step.axes), "mesh": str(step.before.mesh)}
    named_levels = zip(_HIERARCHY_KWARGS, levels, strict=True)
    options: dict[str, Any] = {
        name: _unwrap_single(inside) for name, inside in named_levels if inside
    }
    if reduce_dtype is not None and TRAFFIC[step.kind][1] in SUMS:
        options["reduce_dtype"] = reduce_dtype
    return graph.call_function(function, (x, *args), {**axis_and_mesh, **kwargs, **options})


def hierarchy_of(node: fx.Node, backward: bool) -> HierarchySizes:
    """Return the levels of the forward or backward collective of a reshard node; () means flat."""
    sizes: Any = node.kwargs.get(_HIERARCHY_KWARGS[backward], ())
    return (sizes,) if isinstance(sizes, int) else tuple(sizes)


def set_hierarchy(node: fx.Node, backward: bool, levels: HierarchySizes) -> None:
    """Set the levels of the forward or backward collective of a reshard node; () makes it flat."""
    other_kwargs = {
        key: value for key, value in node.kwargs.items() if key != _HIERARCHY_KWARGS[backward]
    }
    node.kwargs = {
        **other_kwargs,
        **({_HIERARCHY_KWARGS[backward]: _unwrap_single(levels)} if levels else {}),
    }


def groups_of(module: fx.GraphModule) -> frozenset[str]:
    """Return the names of the process groups that an emitted graph communicates over, forward and
    backward: those that `process_groups.connect` opens for it.

    The reshards name their axes by `axis`, the sharded ops by the arguments `axes`, `token_axes`,
    `row`, `column` and `digits`.
    """
    names: set[str] = set()
    for node, _ in every_node(module):
        module_name = getattr(node.target, "__module__", None) or ""
        if module_name == __name__:
            names |= _groups_of_reshard(node)
        elif module_name.startswith(f"{__package__}."):
            names |= _groups_of_sharded_op(node)
    return frozenset(names)


_LOCAL = (invariant, partial, place)


def _groups_of_reshard(node: fx.Node) -> set[str]:
    assert callable(node.target)
    if node.target in _LOCAL or node.kwargs.get("of") == "R":
        return set()  # nothing is sent in either direction
    parameters = inspect.signature(node.target).parameters
    axis: Any = node.kwargs["axis"]
    mesh: Any = node.kwargs["mesh"]
    has_backward = node.kwargs.get("to") != "I"
    keys = [key for key in _HIERARCHY_KWARGS[: 1 + has_backward] if key in parameters] or [""]
    hierarchies: list[Any] = [node.kwargs.get(key, ()) for key in keys]
    return {group for inside in hierarchies for _, group in comm.route(axis, mesh, inside)}


def _groups_of_sharded_op(node: fx.Node) -> set[str]:
    assert callable(node.target)
    arguments = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
    if "mesh" not in arguments:
        return set()
    axis_sets = [
        arguments[key] for key in ("axes", "token_axes", "row", "column") if key in arguments
    ]
    axis_sets.append([axis for axis, *_ in arguments.get("digits", ())])
    return {comm.group_of(axes, arguments["mesh"]) for axes in axis_sets if axes}


_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def _unwrap_single(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else values


# Several axes together hold one digit; the last axis holds its right end, which gives `inner`.


def _call_without_coordinate(step: Step) -> _Call | None:
    """Return the call for a step that is the same on every rank, or None where it needs a
    coordinate.
    """
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


def _call_with_coordinate(step: Step, coordinate: Callable[[str], fx.Node]) -> _Call:
    """Return the call for a step that depends on the rank's own coordinate."""
    axis = step.axes[-1]
    before, after = step.before.state(axis), step.after.state(axis)
    own_coordinate = _unwrap_single(tuple(coordinate(name) for name in step.axes))
    match step.kind:
        case "I->S" | "R->S":
            digit = {"dim": after.dim, "inner": step.after.inner(axis)}
            return take_slice, (own_coordinate,), {**digit, "of": before.kind}
        case "S->I":
            digit = {"dim": before.dim, "inner": step.before.inner(axis)}
            return all_gather, (), {**digit, "coordinate": own_coordinate, "to": "I"}
        case "S->P":
            digit = {"dim": before.dim, "inner": step.before.inner(axis)}
            return place, (own_coordinate,), digit
    raise AssertionError(step.kind)
