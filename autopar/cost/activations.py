"""Saved activations: what autograd keeps of each node between forward and backward, in bytes.

What a node saves is found by running it once on tensors without storage, so there is no list of ops
that could go out of date. A plan's bytes are a sum over its nodes and its stored tensors, which a
search can weigh at a price in seconds a byte: a search for time alone then turns away from plans
that do not fit (Everett, 1963).

Every value that the backward needs counts once: the nodes that save it share it. The sum leaves out
short-lived memory; cost/peak.py sees all of it.

An annotated program enters, bytes for each element of operands and results leave (`Share`). The
planner's searches call it: fit.py, simulate.py, exact_search.py, bounds/.
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
from autopar.ir.containers import tensors_in
from autopar.ir.graph import block_of, producer
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.program import Program, Value
from autopar.ir.sharding_rule import OpShardingRule, operands_of, results_of, shape_of, value_of
from autopar.ir.strategy import IDLE, Strategy
from autopar.ops.local import Call, emit_local

aten = torch.ops.aten


@dataclass(frozen=True)
class SavedActivations:
    """The memory that a node saves for its backward: which operands and which results (indices, as
    in a Strategy), and the bytes of tensors made inside (statistics, masks) where nothing is split.

    `views`: for every result, the operand whose storage it shares, or None for a storage of its
    own. Saving a view keeps the operand's storage alive, so count the operand.
    """

    operands: frozenset[int] = frozenset()
    results: frozenset[int] = frozenset()
    inside_bytes: float = 0.0
    views: tuple[int | None, ...] = ()
    operand_element_bytes: tuple[int, ...] = ()
    result_element_bytes: tuple[int, ...] = ()


class SavedActivationsByNode:
    """`saved_activations` with a cache: nodes that look alike are run once."""

    def __init__(self, gradient: frozenset[Value]) -> None:
        self._gradient = gradient
        self._by_key: dict[Hashable, SavedActivations] = {}

    def __call__(self, node: fx.Node) -> SavedActivations:
        key = (node.target, _node_key(node, self._gradient))
        if key not in self._by_key:
            self._by_key[key] = saved_activations(node, self._gradient)
        return self._by_key[key]


def saved_activations(node: fx.Node, gradient: frozenset[Value]) -> SavedActivations:
    """Return what a traced node saves for the backward where the values in `gradient` carry
    gradients.

    The node is run as the rewrite would emit it with nothing split. A cross-entropy whose classes
    or tokens are split saves its logits instead of their log-softmax, which has the same size: it
    is reported to save the logits.
    """
    operands = operands_of(node)
    results = [v for v in results_of(node) if isinstance(v, Tensor)]
    operand_element_bytes = tuple(0 if n is None else value_of(n).dtype.itemsize for n in operands)
    result_element_bytes = tuple(v.dtype.itemsize for v in results)
    with fake_mode():
        stand_ins = [_stand_in(n, gradient) for n in operands]
        saved_tensors: list[Tensor] = []

        def keep(x: Tensor) -> Tensor:
            saved_tensors.append(x)
            return x

        with saved_tensors_hooks(keep, lambda x: x):
            outputs = _run(node, stand_ins)
        saved = _classify_saved(stand_ins, outputs, saved_tensors)
    if node.target is aten.cross_entropy_loss.default and saved.operands | saved.results:
        saved = SavedActivations(saved.operands | {0}, frozenset(), 0.0, saved.views)
    return SavedActivations(
        saved.operands,
        saved.results,
        saved.inside_bytes,
        saved.views,
        operand_element_bytes,
        result_element_bytes[: len(outputs)],
    )


def _node_key(node: fx.Node, gradient: frozenset[Value]) -> str:
    """Return all that a node's saved activations depend on, as text."""

    def facts(value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        traced = value_of(value)
        if not isinstance(traced, Tensor):
            return str(traced)
        return tuple(traced.shape), traced.stride(), traced.dtype, producer(value) in gradient

    return repr(pytree.tree_map(facts, (node.args, node.kwargs)))


def _stand_in(node: fx.Node | None, gradient: frozenset[Value]) -> Tensor | None:
    """Return a tensor without storage in an operand's place, with the same strides (where these are
    not contiguous, a reshape copies). It is no leaf, as hardly any operand is one.
    """
    if node is None:
        return None
    value = value_of(node)
    needs_gradient = producer(node) in gradient and value.dtype.is_floating_point
    tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return tensor.requires_grad_().clone() if needs_gradient else tensor


def _run(node: fx.Node, operands: list[Tensor | None]) -> list[Tensor]:
    """Run the node as it is emitted on a mesh without axes, and return the tensors that it
    gives.
    """
    graph, mesh = fx.Graph(), Mesh()
    env: dict[fx.Node, Any] = {}
    placeholders: list[fx.Node | None] = []
    for index, tensor in enumerate(operands):
        placeholder = None if tensor is None else graph.placeholder(f"operand_{index}")
        placeholders.append(placeholder)
        if placeholder is not None:
            env[placeholder] = tensor
    seed = graph.placeholder("seed")
    env[seed] = torch.zeros((), dtype=torch.int64)
    layouts = [None if t is None else Layout(mesh, tuple(t.shape), ()) for t in operands]
    results = [Layout(mesh, shape_of(v), ()) for v in results_of(node) if isinstance(v, Tensor)]
    call = Call(graph, node, placeholders, layouts, results, _no_axis, lambda: seed)
    last = emit_local(call)
    for emitted in graph.nodes:
        if emitted.op == "call_function":
            args, kwargs = fx.map_arg((emitted.args, emitted.kwargs), env.__getitem__)
            env[emitted] = emitted.target(*here(args), **here(kwargs))
    return tensors_in(env[last])


def _no_axis(name: str) -> fx.Node:
    raise AssertionError(f"nothing is split, but axis {name} is asked for its place")


def here(value: Any) -> Any:
    """Return the arguments of a node with every device replaced by that of the stand-ins."""
    return pytree.tree_map(
        lambda x: torch.device("cpu") if isinstance(x, torch.device) else x, value
    )


def _storage_key(tensor: Tensor) -> int:
    """Return a key for the storage of a tensor that is alive: the same key for all its views."""
    return id(tensor.untyped_storage())


def _classify_saved(
    operands: list[Tensor | None], outputs: list[Tensor], saved_tensors: list[Tensor]
) -> SavedActivations:
    """Sort the saved tensors by whose storage it is: an operand's, a result's, or one made
    inside.
    """
    operand_of = {
        _storage_key(t): i for i, t in reversed(list(enumerate(operands))) if t is not None
    }
    result_of = {_storage_key(t): i for i, t in reversed(list(enumerate(outputs)))}
    result_views = tuple(operand_of.get(_storage_key(t)) for t in outputs)
    saved_bytes = {_storage_key(t): t.untyped_storage().nbytes() for t in saved_tensors}
    saved_operands = frozenset(operand_of[key] for key in saved_bytes if key in operand_of)
    saved_results = frozenset(
        result_of[key] for key in saved_bytes if key in result_of and key not in operand_of
    )
    inside_bytes = sum(
        size for key, size in saved_bytes.items() if key not in operand_of and key not in result_of
    )
    return SavedActivations(saved_operands, saved_results, float(inside_bytes), result_views)


class Share(NamedTuple):
    """A node's share of the saved activations: bytes for every element that a rank has of its
    operands and results, as pairs (index, bytes), and the bytes inside where nothing is split.
    `undivided`: dims of operands, (operand, dim), whose split does not divide what is inside: an
    expert's tokens may be all of them.
    """

    operands: tuple[tuple[int, float], ...]
    results: tuple[tuple[int, float], ...]
    inside: float
    undivided: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class ActivationMemory:
    """The saved activations of an annotated program's nodes, and its parameters' memory for
    training.
    """

    program: Program
    optimizer: Optimizer = "adamw"

    def of(self, node: fx.Node) -> Share:
        """Return the node's share of the saved activations."""
        return self._shares[node.name]

    def bytes_per_element(self, element_bytes: int, trained: bool) -> float:
        """Return the bytes for every element of a parameter that a rank stores: its gradient and
        states. The parameter itself counts as what the matmuls save, or is gathered from it, except
        where weights are gathered again.
        """
        own = float(element_bytes if self.program.counting.again else 0)
        if not trained:
            return float(element_bytes)
        return own + element_bytes + self._states(element_bytes, trained)

    def _states(self, element_bytes: int, trained: bool) -> float:
        """Return the bytes of the optimizer's states for every element of a parameter."""
        optimizer = self.optimizer
        element_state_bytes = (
            STATES[optimizer] * element_bytes if isinstance(optimizer, str) else float(optimizer)
        )
        return element_state_bytes * trained

    @cached_property
    def _shares(self) -> Mapping[str, Share]:
        """The share of every searched node, by its name; a value that several nodes save is divided
        among them.
        """
        notes = self.program.annotations
        assert notes is not None
        saved_of = SavedActivationsByNode(notes.gradient)
        nodes = [
            n
            for n in self.program.module.graph.nodes
            if n.op == "call_function" and n.name in notes.searched and n.name in notes.specs
        ]
        saved_by_name = {node.name: saved_of(node) for node in nodes}
        roots: dict[Value, Value] = {}  # by view, the value whose storage it shares
        keepers: Counter[Value] = Counter()
        for node in nodes:
            saved, operands = saved_by_name[node.name], operands_of(node)
            for index, operand in enumerate(saved.views):
                source = None if operand is None else operands[operand]
                if source is not None:
                    source_value = producer(source)
                    roots[node.name, index] = roots.get(source_value, source_value)
            keepers.update(dict.fromkeys(_saved_values(node, saved, roots), 1))
        for value in self.program.counting.again:
            keepers[roots.get(value, value)] = 0
        return {
            node.name: _share(node, saved_by_name[node.name], roots, keepers)._replace(
                undivided=_uneven_dims(notes.specs[node.name])
            )
            for node in nodes
        }


@dataclass(frozen=True)
class ParameterMemory(ActivationMemory):
    """The memory that every plan holds for its parameters when the backward ends: themselves, their
    gradients and the optimizer's states. No peak is below that, whatever is recomputed.
    """

    def of(self, node: fx.Node) -> Share:
        return Share((), (), 0.0)

    def bytes_per_element(self, element_bytes: int, trained: bool) -> float:
        return element_bytes * (1.0 + trained) + self._states(element_bytes, trained)


@dataclass(frozen=True)
class MidstepMemory(ActivationMemory):
    """The memory that a plan without recomputation holds between forward and backward: the saved
    activations and the optimizer's states. No peak of such a plan is below that.
    """

    def bytes_per_element(self, element_bytes: int, trained: bool) -> float:
        return self._states(element_bytes, trained)


class Price(NamedTuple):
    """The memory that a search counts, and what a byte of it costs a plan, in seconds."""

    memory: ActivationMemory
    seconds_per_byte: float


def _saved_values(
    node: fx.Node, saved: SavedActivations, roots: Mapping[Value, Value]
) -> list[Value]:
    """Return the values that a node saves; a view counts as the value whose storage it shares."""
    operands = operands_of(node)
    saved_operands = [producer(n) for i in sorted(saved.operands) if (n := operands[i]) is not None]
    saved_results = [(node.name, i) for i in sorted(saved.results) if saved.views[i] is None]
    return [roots.get(value, value) for value in (*saved_operands, *saved_results)]


def _share(
    node: fx.Node, saved: SavedActivations, roots: Mapping[Value, Value], keepers: Counter[Value]
) -> Share:
    """Return a node's share: each saved value is divided among the nodes that save it."""
    operands = operands_of(node)

    def portion(value: Value) -> float:
        keeper_count = keepers[roots.get(value, value)]
        return 1.0 / keeper_count if keeper_count else 0.0

    operand_shares = [
        (i, saved.operand_element_bytes[i] * portion(producer(n)))
        for i in sorted(saved.operands)
        if (n := operands[i]) is not None
    ]
    result_shares = [
        (i, saved.result_element_bytes[i] * portion((node.name, i)))
        for i in sorted(saved.results)
        if saved.views[i] is None
    ]
    nonzero = [[pair for pair in pairs if pair[1]] for pairs in (operand_shares, result_shares)]
    return Share(tuple(nonzero[0]), tuple(nonzero[1]), saved.inside_bytes)


def _uneven_dims(rule: OpShardingRule) -> tuple[tuple[int, int], ...]:
    """Return the dims of operands that are an uneven factor."""
    return tuple(
        (operand, dim)
        for operand, dims in enumerate(rule.operands)
        for dim, names in enumerate(dims or ())
        if rule.uneven.intersection(names)
    )


def regather_weights(program: Program) -> Program:
    """Return the annotated program with the weights of matmuls in repeated blocks gathered again in
    the backward instead of saved.
    """
    notes = program.annotations
    assert notes is not None
    weights = set()
    for node in program.module.graph.nodes:
        value, users = (node.name, 0), list(node.users)
        is_matrix = value in notes.weights and len(shape_of(value_of(node))) > 1
        if is_matrix and len(users) == 1 and block_of(users[0]):
            weights.add(value)
    return replace(program, counting=replace(program.counting, again=frozenset(weights)))


def bytes_of(share: Share, strategy: Strategy) -> float:
    """Return the bytes of a node's share on one rank, under a strategy."""
    total = sum(
        _elements(strategy.operands[i]) * element_bytes for i, element_bytes in share.operands
    )
    total += sum(
        _elements(strategy.results[i]) * element_bytes for i, element_bytes in share.results
    )
    ranks = max(1, strategy.ranks)
    for operand, dim in share.undivided[:1]:
        layout = strategy.operands[operand]
        assert layout is not None
        ranks //= math.prod(digit.size for digit in layout.digits(dim))
    return total + share.inside / ranks


def _elements(layout: Layout | None) -> float:
    return 0.0 if layout is None else float(layout.local_size)


def activation_bytes(memory: ActivationMemory, plan: Plan) -> float:
    """Return the bytes of a complete plan on one rank."""
    total = 0.0
    for node in memory.program.module.graph.nodes:
        choice = plan.choices.get(node.name)
        if choice is not None:
            pairs = zip(plan.mesh.axes, choice.splits, strict=True)
            ranks = math.prod(axis.size for axis, split in pairs if split not in IDLE)
            strategy = Strategy((), choice.operands, choice.results, ranks)
            total += bytes_of(memory.of(node), strategy)
    parameters = {e.node for e in memory.program.signature.inputs if e.kind == "parameter"}
    for node in memory.program.module.graph.nodes:
        if node.name in parameters and node.name in plan.stored:
            size = value_of(node).dtype.itemsize
            total += memory.bytes_per_element(size, True) * plan.stored[node.name].local_size
    return total
