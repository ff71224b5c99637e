"""One change of state as one node of a graph, a call of a function of collectives.py; and the
process groups that the nodes of an emitted graph go over.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import every_node
from autopar.ir.layout import SUMS, TRAFFIC, Step
from autopar.ops import collectives, comm

Levels = tuple[int, ...]
_LEVELS = "inside", "backward_inside"  # what says so of a change, forward and backward


def emit_step(
    graph: fx.Graph,
    x: fx.Node,
    step: Step,
    coordinate: Callable[[str], fx.Node],
    levels: tuple[Levels, Levels] = ((), ()),
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


def levels_of(node: fx.Node, backward: bool) -> Levels:
    """How the forward or backward collective of such a node goes; () in one level."""
    found: Any = node.kwargs.get(_LEVELS[backward], ())
    return (found,) if isinstance(found, int) else tuple(found)


def set_levels(node: fx.Node, backward: bool, levels: Levels) -> None:
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
        if file == collectives.__name__:
            found |= _of_change(node)
        elif file.startswith(f"{collectives.__package__}."):
            found |= _of_sharded(node)
    return frozenset(found)


def _of_change(node: fx.Node) -> set[str]:
    assert callable(node.target)
    taken = inspect.signature(node.target).parameters
    if "lane" not in taken or node.kwargs.get("of") == "R":
        return set()  # nothing is sent in either direction
    axis, mesh, lane = (node.kwargs.get(key, 0) for key in ("axis", "mesh", "lane"))
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
            return collectives.replicate, (), {}
        case "R->I":
            return collectives.invariant, (), {}
        case "I->P" | "R->P":
            return collectives.partial, (), {"of": before.kind}
        case "P->I" | "P->R":
            return collectives.all_reduce, (), {"to": after.kind}
        case "P->S":
            digit = {"dim": after.dim, "inner": step.after.inner(axis)}
            return collectives.reduce_scatter, (), digit
        case "S->R":
            return collectives.all_gather, (), {"dim": before.dim, "inner": step.before.inner(axis)}
        case "S->S":
            dims = {"from_dim": before.dim, "to_dim": after.dim}
            inner = {"from_inner": step.before.inner(axis), "to_inner": step.after.inner(axis)}
            return collectives.all_to_all, (), {**dims, **inner}
    return None


def _placing(step: Step, coordinate: Callable[[str], fx.Node]) -> _Call:
    """The changes that depend on the rank's own place."""
    axis = step.axes[-1]
    before, after = step.before.state(axis), step.after.state(axis)
    place = _one_or_all(tuple(coordinate(name) for name in step.axes))
    match step.kind:
        case "I->S" | "R->S":
            digit = {"dim": after.dim, "inner": step.after.inner(axis)}
            return collectives.take_slice, (place,), {**digit, "of": before.kind}
        case "S->I":
            digit = {"dim": before.dim, "inner": step.before.inner(axis)}
            return collectives.all_gather, (), {**digit, "coordinate": place, "to": "I"}
        case "S->P":
            digit = {"dim": before.dim, "inner": step.before.inner(axis)}
            return collectives.place, (place,), digit
    raise AssertionError(step.kind)
