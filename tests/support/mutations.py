"""Emitted graphs broken in one place: what verify must find. A mutation of a node says whether it
applies to it.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from autopar.ir.layout import Digit
from autopar.ir.program import Program
from autopar.ops import collectives as c
from autopar.ops import sharded

aten = torch.ops.aten
Mutation = Callable[[fx.Node], bool]  # breaks a node of a copied graph; False: it cannot be


# -- changes of state ------------------------------------------------------------------------------
def dropped(node: fx.Node) -> bool:
    """The value goes on as it is: its collective, or the sum in its backward, is forgotten."""
    node.target, node.args, node.kwargs = aten.alias.default, node.args[:1], {}
    return True


def one_axis_forgotten(node: fx.Node) -> bool:
    axis = node.kwargs["axis"]
    if isinstance(axis, str):
        return False
    node.update_kwarg("axis", axis[0])
    return True


def another_axis(node: fx.Node) -> bool:
    others = [name for name in node.meta["step"].before.mesh.names if name != node.kwargs["axis"]]
    if not others or not isinstance(node.kwargs["axis"], str) or _invariant_again(node):
        return False
    node.update_kwarg("axis", others[0])
    return True


def _invariant_again(node: fx.Node) -> bool:
    """Whether this replicates a value for a sum that is invariant: every rank has one gradient of
    it, and a sum of that over another axis of this size is the same.
    """
    if node.target is not c.replicate:
        return False
    ends = [n for n in _single_uses(node) if n.target is c.invariant]
    return any(n.kwargs["axis"] == node.kwargs["axis"] for n in ends)


def _single_uses(node: fx.Node) -> Iterator[fx.Node]:
    """What uses the node, and what alone uses that, and so on."""
    while len(node.users) == 1:
        node = next(iter(node.users))
        yield node


def another_state(node: fx.Node) -> bool:
    """To I instead of R, of R instead of I, and so on: values stay, gradients do not."""
    if not node.meta["element"].gradient:
        return False
    if node.target is c.all_gather:
        return _gathered_to_another_state(node)
    key = "to" if node.target is c.all_reduce else "of"
    node.update_kwarg(key, {"I": "R", "R": "I"}[node.kwargs[key]])
    return True


def _gathered_to_another_state(node: fx.Node) -> bool:
    kwargs, axis = dict(node.kwargs), node.kwargs["axis"]
    if _only_own_part_has_a_gradient(node):
        return False
    if kwargs.pop("to", "R") == "I":
        del kwargs["coordinate"]
    elif isinstance(axis, str):
        kwargs.update(to="I", coordinate=_placeholder(node.graph, f"coordinate_{axis}"))
    else:
        return False
    node.kwargs = kwargs
    return True


def _only_own_part_has_a_gradient(gather: fx.Node) -> bool:
    """Whether what a rank gave is sliced off again, or meets values that are zero elsewhere: then
    a sum of the gradients over the ranks and the own gradient are one, and nothing is broken.
    """

    def same(node: fx.Node) -> bool:
        return all(node.kwargs.get(k) == gather.kwargs[k] for k in ("axis", "dim", "inner"))

    for node in _single_uses(gather):
        if node.target is c.take_slice:
            return same(node)
        placed = [x for x in node.all_input_nodes if x.target is c.place]
        if node.target is sharded.attention and any(map(same, placed)):
            return True
    return False


def another_dim(node: fx.Node) -> bool:
    rank, size = len(node.meta["step"].before.shape), node.meta["step"].group_size
    for dim in range(rank):
        extent = node.meta["step"].before.local_shape[dim]
        if dim != node.kwargs["dim"] and (node.target is c.all_gather or extent % size == 0):
            node.update_kwarg("dim", dim)
            node.update_kwarg("inner", None)
            return True
    return False


def another_digit(node: fx.Node) -> bool:
    """The same dim, cut or put together in another order."""
    step = node.meta["step"]
    grows = {c.all_gather: "inner", c.place: "inner", c.all_to_all: "from_inner"}
    key = grows.get(node.target, "inner")
    dim = node.kwargs["from_dim" if node.target is c.all_to_all else "dim"]
    length = (step.before if node.target in grows else step.after).local_shape[dim]
    return _other_divisor(node, key, length)


def another_digit_scattered(node: fx.Node) -> bool:
    """The same of what an all-to-all hands out."""
    length = node.meta["step"].after.local_shape[node.kwargs["to_dim"]]
    return _other_divisor(node, "to_inner", length)


def _other_divisor(node: fx.Node, key: str, length: int) -> bool:
    others = [d for d in range(1, length + 1) if length % d == 0 and d != node.kwargs[key]]
    if others:
        node.update_kwarg(key, others[0])
    return bool(others)


def another_place(node: fx.Node) -> bool:
    """The coordinate of the next rank: a stale offset."""
    kwargs = dict(node.kwargs)
    if "coordinate" in kwargs:
        kwargs["coordinate"] = _next_rank(node, kwargs["coordinate"])
        node.kwargs = kwargs
        return True
    if node.target not in (c.take_slice, c.place):
        return False
    x, place = node.args
    node.args = (x, _next_rank(node, place))
    return True


def _next_rank(node: fx.Node, places: Any) -> Any:
    if not isinstance(places, fx.Node):
        return type(places)([_next_rank(node, places[0]), *places[1:]])
    mesh = _mesh_of(node.graph)
    with node.graph.inserting_before(node):
        size = mesh.sizes[places.name.removeprefix("coordinate_")]
        moved = node.graph.call_function(aten.add.Scalar, (places, 1))
        return node.graph.call_function(aten.remainder.Scalar, (moved, size))


def _mesh_of(graph: fx.Graph) -> Any:
    return next(n.meta["layout"].mesh for n in graph.nodes if "layout" in n.meta)


def _placeholder(graph: fx.Graph, name: str) -> fx.Node:
    return next(n for n in graph.nodes if n.op == "placeholder" and n.name == name)


# -- sharded implementations -----------------------------------------------------------------------
def _argument(*names: str, change: Callable[[fx.Node, Any], Any]) -> Mutation:
    """Changes the first of the call's arguments of these names that is there and not empty."""

    def mutate(node: fx.Node) -> bool:
        call = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
        for name in names:
            value = call.arguments.get(name)
            if value is not None and value != () and value != []:
                changed = change(node, value)
                if changed is None:
                    return False
                call.arguments[name] = changed
                node.args, node.kwargs = call.args, call.kwargs
                return True
        return False

    mutate.__name__ = f"another_{names[0]}"
    return mutate


def _restrided(node: fx.Node, digits: Any) -> Any:
    """The first digit of a dim at another stride."""
    if isinstance(digits[0], tuple | Digit):
        axis, stride, size = digits[0]
        return [(axis, 2 if stride == 1 else 1, size), *digits[1:]]
    place = next((i for i, of_dim in enumerate(digits) if of_dim), None)
    if place is None:
        return None
    return [*digits[:place], _restrided(node, digits[place]), *digits[place + 1 :]]


def _later(node: fx.Node, seed: fx.Node) -> fx.Node:
    with node.graph.inserting_before(node):
        return node.graph.call_function(aten.add.Scalar, (seed, 1))


not_summed = _argument("axes", "token_axes", "tokens", change=lambda _, __: ())
restrided = _argument("digits", "digits_by_dim", change=_restrided)
misplaced = _argument("coordinates", change=_next_rank)
reseeded = _argument("seed", change=_later)
local_size = _argument("size", "width", change=lambda _, size: size // 2)
local_shape = _argument("shape", change=lambda _, shape: [*shape[:-1], shape[-1] // 2])
summed = _argument("reduction", change=lambda _, was: "sum" if was == "mean" else None)


# -- plain ops -------------------------------------------------------------------------------------
def undivided(node: fx.Node) -> bool:
    """A mean by the local count: what makes it the global one is forgotten."""
    if node.target is not aten.mul.Tensor or not isinstance(node.args[1], float):
        return False
    return dropped(node)


def another_divisor(node: fx.Node) -> bool:
    if node.target is not aten.mul.Tensor or not isinstance(node.args[1], float):
        return False
    node.update_arg(1, node.args[1] / 2)
    return True


def offset_seed(node: fx.Node) -> bool:
    if node.target is not aten.add.Scalar or getattr(node.args[0], "name", "") != "seed":
        return False
    node.update_arg(1, node.args[1] + 7)
    return True


MUTATIONS: dict[Any, tuple[Mutation, ...]] = {
    c.all_reduce: (dropped, one_axis_forgotten, another_axis, another_state),
    c.replicate: (dropped, one_axis_forgotten, another_axis),
    c.all_gather: (another_dim, another_digit, another_place, another_state),
    c.reduce_scatter: (another_dim, another_digit),
    c.take_slice: (another_digit, another_place, another_state),
    c.place: (another_digit, another_place),
    c.partial: (dropped, another_state),
    c.invariant: (dropped,),
    c.all_to_all: (another_digit, another_digit_scattered),
    sharded.cross_entropy: (not_summed, restrided, misplaced, summed),
    sharded.embedding: (restrided, misplaced),
    sharded.layer_norm: (not_summed, local_size),
    sharded.softmax: (not_summed,),
    sharded.dropout: (restrided, misplaced, reseeded, local_shape),
    sharded.draw: (restrided, misplaced, reseeded, local_shape),
    sharded.attention: (restrided, misplaced, reseeded),
    aten.mul.Tensor: (undivided, another_divisor),
    aten.add.Scalar: (offset_seed,),
}


def applicable(program: Program, target: Any = None) -> Iterator[tuple[str, Mutation]]:
    """(node, mutation) of all that a program can be broken by, at the nodes of one target if that
    is given.
    """
    for node in program.module.graph.nodes:
        for mutation in MUTATIONS.get(node.target, ()) if target in (None, node.target) else ():
            if broken(program, node.name, mutation) is not None:
                yield node.name, mutation


def broken(program: Program, name: str, mutation: Mutation) -> Program | None:
    """The program with that node mutated; None where the mutation does not apply."""
    module = copy.deepcopy(program.module)
    node = next(node for node in module.graph.nodes if node.name == name)
    if not mutation(node):
        return None
    module.recompile()
    return dataclasses.replace(program, module=module)
