"""What autograd keeps of a node for the backward, found by running it once on tensors without
storage: no list of ops that could go out of date.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from autopar._compat import fake_mode, pytree
from autopar.ir.graph import producer
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.program import Value
from autopar.ir.sharding_rule import operands_of, results_of, shape_of, value_of
from autopar.ir.strategy import Strategy
from autopar.ops.local import Call, emit_local

aten = torch.ops.aten


@dataclass(frozen=True)
class Saved:
    """What a node keeps until its backward: which operands and which results (indices, as in a
    Strategy), and bytes of what it makes inside (statistics, masks) where nothing is split.

    `views`: of every result the operand whose memory it shares, None for memory of its own. Saving
    a view keeps the operand's memory, so count the operand.
    """

    operands: frozenset[int] = frozenset()
    results: frozenset[int] = frozenset()
    inside_bytes: float = 0.0
    views: tuple[int | None, ...] = ()
    operand_element_bytes: tuple[int, ...] = ()
    result_element_bytes: tuple[int, ...] = ()


def operand_bytes(found: Saved, strategy: Strategy, index: int) -> float:
    """Bytes on one rank of an operand in the layout that the strategy wants it in."""
    layout = strategy.operands[index]
    return 0.0 if layout is None else layout.local_size * float(found.operand_element_bytes[index])


def result_bytes(found: Saved, strategy: Strategy, index: int) -> float:
    """Bytes on one rank of a result in the layout in which the strategy makes it."""
    return strategy.results[index].local_size * float(found.result_element_bytes[index])


def inside_bytes(found: Saved, strategy: Strategy) -> float:
    """Bytes on one rank of what the node keeps that is neither operand nor result. It is divided as
    the largest tensor of the node is.
    """
    layouts = [x for x in (*strategy.operands, *strategy.results) if x is not None]
    if not layouts or not found.inside_bytes:
        return 0.0
    largest = max(layouts, key=lambda layout: math.prod(layout.shape))
    return found.inside_bytes * largest.local_size / math.prod(largest.shape)


class SavedOf:
    """`saved` with a memory: nodes that look alike are run once."""

    def __init__(self, gradient: frozenset[Value]) -> None:
        self._gradient = gradient
        self._known: dict[Hashable, Saved] = {}

    def __call__(self, node: fx.Node) -> Saved:
        key = (node.target, _look(node, self._gradient))
        if key not in self._known:
            self._known[key] = saved(node, self._gradient)
        return self._known[key]


def saved(node: fx.Node, gradient: frozenset[Value]) -> Saved:
    """What a traced node keeps for the backward where these values carry gradients.

    The node is run as the rewrite would emit it with nothing split. A loss whose classes or tokens
    are split keeps its logits instead of their log-softmax, which has the same size: it is said to
    keep the logits.
    """
    operands = operands_of(node)
    results = [v for v in results_of(node) if isinstance(v, Tensor)]
    sizes = tuple(0 if n is None else value_of(n).dtype.itemsize for n in operands)
    made = tuple(v.dtype.itemsize for v in results)
    with fake_mode():
        given = [_stand_in(n, gradient) for n in operands]
        kept: list[Tensor] = []

        def keep(x: Tensor) -> Tensor:
            kept.append(x)
            return x

        with saved_tensors_hooks(keep, lambda x: x):
            outputs = _run(node, given)
        found = _sorted(given, outputs, kept)
    if node.target is aten.cross_entropy_loss.default and found.operands | found.results:
        found = Saved(found.operands | {0}, frozenset(), 0.0, found.views)
    return Saved(
        found.operands, found.results, found.inside_bytes, found.views, sizes, made[: len(outputs)]
    )


def _look(node: fx.Node, gradient: frozenset[Value]) -> str:
    """All that the result depends on, as text."""

    def facts(value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        found = value_of(value)
        if not isinstance(found, Tensor):
            return str(found)
        return tuple(found.shape), found.stride(), found.dtype, producer(value) in gradient

    return repr(pytree.tree_map(facts, (node.args, node.kwargs)))


def _stand_in(node: fx.Node | None, gradient: frozenset[Value]) -> Tensor | None:
    """A tensor without storage in an operand's place, lying in memory as it does (where it is not
    contiguous, a reshape copies); no leaf, as hardly any operand is one.
    """
    if node is None:
        return None
    value = value_of(node)
    wanted = producer(node) in gradient and value.dtype.is_floating_point
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return made.requires_grad_().clone() if wanted else made


def _run(node: fx.Node, given: list[Tensor | None]) -> list[Tensor]:
    """The tensors that the node gives, run as it is emitted on a mesh without axes."""
    graph, mesh = fx.Graph(), Mesh()
    env: dict[fx.Node, Any] = {}
    places: list[fx.Node | None] = []
    for index, tensor in enumerate(given):
        place = None if tensor is None else graph.placeholder(f"operand_{index}")
        places.append(place)
        if place is not None:
            env[place] = tensor
    seed = graph.placeholder("seed")
    env[seed] = torch.zeros((), dtype=torch.int64)
    layouts = [None if t is None else Layout(mesh, tuple(t.shape), ()) for t in given]
    results = [Layout(mesh, shape_of(v), ()) for v in results_of(node) if isinstance(v, Tensor)]
    call = Call(graph, node, places, layouts, results, _no_axis, lambda: seed)
    last = emit_local(call)
    for made in graph.nodes:
        if made.op == "call_function":
            args, kwargs = fx.map_arg((made.args, made.kwargs), env.__getitem__)
            env[made] = made.target(*here(args), **here(kwargs))
    return [t for t in pytree.tree_leaves(env[last]) if isinstance(t, Tensor)]


def _no_axis(name: str) -> fx.Node:
    raise AssertionError(f"nothing is split, but axis {name} is asked for its place")


def here(value: Any) -> Any:
    """Arguments of a node with every device replaced by that of the stand-ins."""
    return pytree.tree_map(
        lambda x: torch.device("cpu") if isinstance(x, torch.device) else x, value
    )


def _memory(tensor: Tensor) -> int:
    """Names the memory of a tensor that is alive: the same for all its views."""
    return id(tensor.untyped_storage())


def _sorted(given: list[Tensor | None], outputs: list[Tensor], kept: list[Tensor]) -> Saved:
    """Tells what was kept apart, by whose memory it is."""
    operands = {_memory(t): i for i, t in reversed(list(enumerate(given))) if t is not None}
    results = {_memory(t): i for i, t in reversed(list(enumerate(outputs)))}
    views = tuple(operands.get(_memory(t)) for t in outputs)
    inside = {_memory(t): t.untyped_storage().nbytes() for t in kept}
    taken = frozenset(operands[key] for key in inside if key in operands)
    made = frozenset(results[key] for key in inside if key in results and key not in operands)
    rest = sum(size for key, size in inside.items() if key not in operands and key not in results)
    return Saved(taken, made, float(rest), views)
