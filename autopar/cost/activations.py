"""The bytes that a plan keeps, as a sum over its nodes and stored tensors, at a price in seconds a
byte: so a search for time alone turns away from plans that do not fit (Everett, 1963).

Every value that the backward needs counts once: those who keep it share it. The sum leaves out
what lives for a moment only; cost/peak.py knows all of it.

What autograd keeps of a node for the backward, found by running it once on tensors without
storage: no list of ops that could go out of date.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from autopar._compat import fake_mode, pytree
from autopar.cost.memory import STATES, Optimizer
from autopar.ir.graph import block_of, producer
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.program import Program, Value
from autopar.ir.sharding_rule import operands_of, results_of, shape_of, value_of
from autopar.ir.strategy import IDLE, Strategy
from autopar.ops.local import Call, emit_local

aten = torch.ops.aten


@dataclass(frozen=True)
class SavedActivations:
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


def operand_bytes(found: SavedActivations, strategy: Strategy, index: int) -> float:
    """Bytes on one rank of an operand in the layout that the strategy wants it in."""
    layout = strategy.operands[index]
    return 0.0 if layout is None else layout.local_size * float(found.operand_element_bytes[index])


def result_bytes(found: SavedActivations, strategy: Strategy, index: int) -> float:
    """Bytes on one rank of a result in the layout in which the strategy makes it."""
    return strategy.results[index].local_size * float(found.result_element_bytes[index])


def inner_bytes(found: SavedActivations, strategy: Strategy) -> float:
    """Bytes on one rank of what the node keeps that is neither operand nor result. It is divided as
    the largest tensor of the node is.
    """
    layouts = [x for x in (*strategy.operands, *strategy.results) if x is not None]
    if not layouts or not found.inside_bytes:
        return 0.0
    largest = max(layouts, key=lambda layout: math.prod(layout.shape))
    return found.inside_bytes * largest.local_size / math.prod(largest.shape)


class SavedActivationsByNode:
    """`saved` with a memory: nodes that look alike are run once."""

    def __init__(self, gradient: frozenset[Value]) -> None:
        self._gradient = gradient
        self._known: dict[Hashable, SavedActivations] = {}

    def __call__(self, node: fx.Node) -> SavedActivations:
        key = (node.target, _look(node, self._gradient))
        if key not in self._known:
            self._known[key] = saved_activations(node, self._gradient)
        return self._known[key]


def saved_activations(node: fx.Node, gradient: frozenset[Value]) -> SavedActivations:
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
        found = SavedActivations(found.operands | {0}, frozenset(), 0.0, found.views)
    return SavedActivations(
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


def _sorted(given: list[Tensor | None], outputs: list[Tensor], kept: list[Tensor]) -> SavedActivations:
    """Tells what was kept apart, by whose memory it is."""
    operands = {_memory(t): i for i, t in reversed(list(enumerate(given))) if t is not None}
    results = {_memory(t): i for i, t in reversed(list(enumerate(outputs)))}
    views = tuple(operands.get(_memory(t)) for t in outputs)
    inside = {_memory(t): t.untyped_storage().nbytes() for t in kept}
    taken = frozenset(operands[key] for key in inside if key in operands)
    made = frozenset(results[key] for key in inside if key in results and key not in operands)
    rest = sum(size for key, size in inside.items() if key not in operands and key not in results)
    return SavedActivations(taken, made, float(rest), views)


class Share(NamedTuple):
    """What a node keeps: bytes for every element that a rank has of its operands and results, by
    index, and bytes inside where nothing is split.
    """

    operands: tuple[tuple[int, float], ...]
    results: tuple[tuple[int, float], ...]
    inside: float


@dataclass(frozen=True)
class ActivationMemory:
    """What an annotated program's nodes keep for the backward, and its parameters for training."""

    program: Program
    optimizer: Optimizer = "adamw"

    def of(self, node: fx.Node) -> Share:
        """The node's share of what is kept."""
        return self._shares[node.name]

    def stored(self, element_bytes: int, trained: bool) -> float:
        """Bytes for every element of a parameter that a rank stores: gradient and states; itself is
        what the products keep, or gathered from it, but where weights are gathered again.
        """
        assert self.program.annotations is not None
        own = float(element_bytes if self.program.annotations.again else 0)
        if not trained:
            return float(element_bytes)
        return own + element_bytes + self._states(element_bytes, trained)

    def _states(self, element_bytes: int, trained: bool) -> float:
        """Bytes of the optimizer's states for every element of a parameter."""
        states = self.optimizer
        each = STATES[states] * element_bytes if isinstance(states, str) else float(states)
        return each * trained

    @cached_property
    def _shares(self) -> Mapping[str, Share]:
        notes = self.program.annotations
        assert notes is not None
        saved_of = SavedActivationsByNode(notes.gradient)
        nodes = [
            n
            for n in self.program.module.graph.nodes
            if n.op == "call_function" and n.name in notes.searched and n.name in notes.specs
        ]
        found = {node.name: saved_of(node) for node in nodes}
        roots: dict[Value, Value] = {}  # of a view: the value whose memory it shares
        keepers: Counter[Value] = Counter()
        for node in nodes:
            saved, operands = found[node.name], operands_of(node)
            for index, operand in enumerate(saved.views):
                source = None if operand is None else operands[operand]
                if source is not None:
                    own = producer(source)
                    roots[node.name, index] = roots.get(own, own)
            keepers.update(dict.fromkeys(_values(node, saved, roots), 1))
        for value in notes.again:
            keepers[roots.get(value, value)] = 0
        return {node.name: _share(node, found[node.name], roots, keepers) for node in nodes}


@dataclass(frozen=True)
class Stored(ActivationMemory):
    """What every plan holds of its parameters when the backward ends: themselves, their gradients
    and the optimizer's states. No peak is below that, whatever is dropped on the way.
    """

    def of(self, node: fx.Node) -> Share:
        return Share((), (), 0.0)

    def stored(self, element_bytes: int, trained: bool) -> float:
        return element_bytes * (1.0 + trained) + self._states(element_bytes, trained)


@dataclass(frozen=True)
class Middle(ActivationMemory):
    """What a plan that drops nothing holds between forward and backward: what nodes keep, and the
    optimizer's states. No peak of such a plan is below that.
    """

    def stored(self, element_bytes: int, trained: bool) -> float:
        return self._states(element_bytes, trained)


class Price(NamedTuple):
    """What keeping a byte costs a plan, in seconds, and what is kept."""

    kept: ActivationMemory
    seconds_per_byte: float


def _values(node: fx.Node, saved: SavedActivations, roots: Mapping[Value, Value]) -> list[Value]:
    operands = operands_of(node)
    taken = [producer(n) for i in sorted(saved.operands) if (n := operands[i]) is not None]
    made = [(node.name, i) for i in sorted(saved.results) if saved.views[i] is None]
    return [roots.get(value, value) for value in (*taken, *made)]


def _share(
    node: fx.Node, saved: SavedActivations, roots: Mapping[Value, Value], keepers: Counter[Value]
) -> Share:
    operands = operands_of(node)

    def each(value: Value) -> float:
        several = keepers[roots.get(value, value)]
        return 1.0 / several if several else 0.0

    taken = [
        (i, saved.operand_element_bytes[i] * each(producer(n)))
        for i in sorted(saved.operands)
        if (n := operands[i]) is not None
    ]
    made = [
        (i, saved.result_element_bytes[i] * each((node.name, i)))
        for i in sorted(saved.results)
        if saved.views[i] is None
    ]
    kept = [[pair for pair in pairs if pair[1]] for pairs in (taken, made)]
    return Share(tuple(kept[0]), tuple(kept[1]), saved.inside_bytes)


def regathering(program: Program) -> Program:
    """The annotated program with its products' weights in repeated blocks gathered again in the
    backward instead of kept.
    """
    notes = program.annotations
    assert notes is not None
    found = set()
    for node in program.module.graph.nodes:
        value, users = (node.name, 0), list(node.users)
        matrix = value in notes.weights and len(shape_of(value_of(node))) > 1
        if matrix and len(users) == 1 and block_of(users[0]):
            found.add(value)
    return replace(program, annotations=replace(notes, again=frozenset(found)))


def bytes_of(share: Share, strategy: Strategy) -> float:
    """On one rank, under a strategy."""
    total = sum(_elements(strategy.operands[i]) * each for i, each in share.operands)
    total += sum(_elements(strategy.results[i]) * each for i, each in share.results)
    return total + share.inside / max(1, strategy.parts)


def _elements(layout: Layout | None) -> float:
    return 0.0 if layout is None else float(layout.local_size)


def activation_bytes(kept: ActivationMemory, plan: Plan) -> float:
    """Of a whole plan, on one rank."""
    total = 0.0
    for node in kept.program.module.graph.nodes:
        choice = plan.choices.get(node.name)
        if choice is not None:
            pairs = zip(plan.mesh.axes, choice.splits, strict=True)
            parts = math.prod(axis.size for axis, split in pairs if split not in IDLE)
            strategy = Strategy((), choice.operands, choice.results, parts)
            total += bytes_of(kept.of(node), strategy)
    parameters = {e.node for e in kept.program.signature.inputs if e.kind == "parameter"}
    for node in kept.program.module.graph.nodes:
        if node.name in parameters and node.name in plan.stored:
            size = value_of(node).dtype.itemsize
            total += kept.stored(size, True) * plan.stored[node.name].local_size
    return total
