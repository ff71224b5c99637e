"""The bytes that a plan keeps, as a sum over its nodes and stored tensors, at a price in seconds a
byte: so a search for time alone turns away from plans that do not fit (Everett, 1963).

Every value that the backward needs counts once: those who keep it share it. The sum leaves out
what lives for a moment only; cost/peak.py knows all of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from torch import fx

from autopar.cost.memory import STATES, Optimizer
from autopar.cost.saved import Saved, SavedOf
from autopar.ir.graph import block_of, producer
from autopar.ir.layout import Layout
from autopar.ir.plan import Plan
from autopar.ir.program import Program, Value
from autopar.ir.sharding_rule import operands_of, shape_of, value_of
from autopar.ir.strategy import IDLE, Strategy


class Share(NamedTuple):
    """What a node keeps: bytes for every element that a rank has of its operands and results, by
    index, and bytes inside where nothing is split.
    """

    operands: tuple[tuple[int, float], ...]
    results: tuple[tuple[int, float], ...]
    inside: float


@dataclass(frozen=True)
class Kept:
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
        saved_of = SavedOf(notes.gradient)
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
class Stored(Kept):
    """What every plan holds of its parameters when the backward ends: themselves, their gradients
    and the optimizer's states. No peak is below that, whatever is dropped on the way.
    """

    def of(self, node: fx.Node) -> Share:
        return Share((), (), 0.0)

    def stored(self, element_bytes: int, trained: bool) -> float:
        return element_bytes * (1.0 + trained) + self._states(element_bytes, trained)


@dataclass(frozen=True)
class Middle(Kept):
    """What a plan that drops nothing holds between forward and backward: what nodes keep, and the
    optimizer's states. No peak of such a plan is below that.
    """

    def stored(self, element_bytes: int, trained: bool) -> float:
        return self._states(element_bytes, trained)


class Price(NamedTuple):
    """What keeping a byte costs a plan, in seconds, and what is kept."""

    kept: Kept
    seconds_per_byte: float


def _values(node: fx.Node, saved: Saved, roots: Mapping[Value, Value]) -> list[Value]:
    operands = operands_of(node)
    taken = [producer(n) for i in sorted(saved.operands) if (n := operands[i]) is not None]
    made = [(node.name, i) for i in sorted(saved.results) if saved.views[i] is None]
    return [roots.get(value, value) for value in (*taken, *made)]


def _share(
    node: fx.Node, saved: Saved, roots: Mapping[Value, Value], keepers: Counter[Value]
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


def bytes_kept(kept: Kept, plan: Plan) -> float:
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
