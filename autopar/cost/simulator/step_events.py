"""The events of a training step, read off a rewritten program: every op and collective of forward,
backward and optimizer.

The backward is the forward graph read from its end: a reshard has the collective of its adjoint, a
matmul has one matmul for the gradient of its input and one for that of its weight, anything else
takes twice its forward. The optimizer starts when all gradients are there, as it does in torch.

`timeline` calls `Events(program, world).run()` and simulates the result; `joinable` and `fuse`
then say which collectives may be fused, and what the fused one takes. graph_events.py calls `link`.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import fx

from autopar.cost.algorithms import Stage, stages
from autopar.cost.communication import SentCollective, flat_price, sent_collectives
from autopar.cost.compute import node_seconds, op_bytes_per_s, optimizer_seconds
from autopar.cost.contention import lost_s
from autopar.cost.microbatches import OncePerStep
from autopar.cost.network import Pattern, pattern, size, within
from autopar.cost.simulator.buckets import Bucket
from autopar.cost.simulator.engine import Event
from autopar.ir.graph import inline, stored_nodes
from autopar.ir.program import Program
from autopar.ir.strategy import Strategy
from autopar.world import World

ROOTED = ("broadcast", "reduce")  # the collectives of SUMMA's panels


@lru_cache(maxsize=1 << 12)
def link(world: World, digits: Pattern) -> int:
    """Return the links that the groups of this pattern share with others: the number of the
    outermost level that they cross.
    """
    block = 1
    for number, level in enumerate(world.levels):
        block *= level.ranks
        if within(digits, block) == size(digits):
            return number
    return len(world.levels)


_FUSABLE = ("all_gather", "all_reduce", "reduce_scatter")


class _FuseKey(NamedTuple):
    """The properties that collectives must share to be fused."""

    kind: str
    digits: Pattern
    element_bytes: float
    copied: bool  # copied together and apart again (passes/overlap/bucket.py)


class Events:
    """Makes the events of a step, in the order in which torch runs them: `run`. Those of a
    micro-batch `between` the first and the last have no collectives that run once a step, and no
    optimizer. After that `joinable` says which of them may be fused, and `fuse` makes the fused
    event.
    """

    def __init__(self, program: Program, world: World, between: bool = False) -> None:
        program = dataclasses.replace(program, module=inline(program.module))
        assert program.plan is not None and program.annotations is not None
        self.program, self.world, self.between = program, world, between
        self.once = OncePerStep.of(program) if between else OncePerStep()
        self.plan, self.notes = program.plan, program.annotations
        self.nodes = [n for n in program.module.graph.nodes if n.op != "output"]
        self.events: list[Event] = []
        self.products: list[bool] = []  # for every event, whether it is a matmul
        # The collectives that may be fused, and the bytes of the unsharded value of each.
        self.joinable: dict[int, tuple[_FuseKey, float]] = {}
        self.events_of: dict[fx.Node, tuple[int, ...]] = {}  # the events that a value depends on
        self.ahead = stored_nodes(program)
        self.last = {n.meta["source"]: n for n in self.nodes if _computes(n)}
        self.entries = {entry.node: entry for entry in program.signature.inputs}
        self.gradients: dict[fx.Node, tuple[int, ...]] = defaultdict(tuple)
        self.carrying = self._carrying()
        self.moved: dict[fx.Node, list[SentCollective]] = defaultdict(list)
        self.repeated: dict[fx.Node, list[SentCollective]] = defaultdict(list)
        for collective in sent_collectives(program):
            (self.repeated if collective.again else self.moved)[collective.node].append(collective)
        self.blocks: dict[str | None, list[fx.Node]] = defaultdict(list)  # recomputed nodes
        for node in self.nodes:
            if node.meta.get("again"):
                self.blocks[node.meta.get("block")].append(node)

    def run(self) -> list[Event]:
        """Return the events of forward, backward and optimizer."""
        for node in self.nodes:
            self._forward(node)
        for node in self.program.module.graph.output_node().all_input_nodes:
            self.gradients[node] = self.events_of[node]
        for node in reversed(self.nodes):
            if node in self.carrying and self.gradients[node]:
                self._again(node.meta.get("block"), self.gradients[node])
                self._backward(node)
        if not self.between:
            self._optimizer()
        return self.events

    def _carrying(self) -> set[fx.Node]:
        """Return the nodes whose values carry a gradient."""
        sources = {name for name, _ in self.notes.gradient}
        carrying: set[fx.Node] = set()
        for node in self.nodes:
            if node.op == "placeholder":
                entry = self.entries.get(node.name)
                carries = entry is not None and entry.trainable
            elif "step" in node.meta:
                carries = node.meta["element"].gradient > 0
            else:
                carries = node.meta.get("source") in sources
            if carries and (node.op == "placeholder" or carrying & set(node.all_input_nodes)):
                carrying.add(node)
        return carrying

    # -- forward -----------------------------------------------------------------------------------
    def _forward(self, node: fx.Node) -> None:
        """Add the forward of a node."""
        if node.op == "placeholder":
            self.events_of[node] = ()
            return
        after = _union(self.events_of[n] for n in node.all_input_nodes)
        collectives = self.moved[node]
        if "step" not in node.meta:
            self.events_of[node] = self._work(
                node, self._seconds(node)[0], collectives, after, "forward"
            )
        else:
            self.events_of[node] = self._collectives(node, collectives, after, "forward")

    def _seconds(self, node: fx.Node) -> tuple[float, float]:
        """Return the seconds of the node's computation, forward and backward."""
        source = node.meta.get("source", "")
        choice = self.plan.choices.get(source)
        if choice is None or self.last.get(source) is not node:
            return 0.0, 0.0
        rule = self.notes.specs[source]
        strategy = Strategy((), choice.operands, choice.results, _rank_count(self, source))
        dtype = node.meta["dtype"]
        forward = node_seconds(rule, strategy, dtype, False, self.world)
        if (source, 0) not in self.notes.gradient:
            return forward, 0.0
        return forward, node_seconds(rule, strategy, dtype, True, self.world) - forward

    def _work(
        self,
        node: fx.Node,
        seconds: float,
        collectives: Sequence[SentCollective],
        after: tuple[int, ...],
        phase: Any,
    ) -> tuple[int, ...]:
        """Add an op with the collectives inside it, which follow it one by one; SUMMA's panels run
        while the matmul computes, one piece ahead. Return the events that its value depends on.
        """
        collectives = [
            collective for collective in collectives if collective.backward == (phase == "backward")
        ]
        panels = [
            collective for collective in collectives if collective.traffic.collective in ROOTED
        ]
        if panels:
            return self._panels(node, seconds, panels, after, phase)
        if seconds or (len(after) > 1 and not collectives):
            after = (self._add(node, "compute", seconds, after, phase),)
        return self._collectives(node, collectives, after, phase)

    def _panels(
        self,
        node: fx.Node,
        seconds: float,
        collectives: Sequence[SentCollective],
        after: tuple[int, ...],
        phase: Any,
    ) -> tuple[int, ...]:
        """Add the pieces of a SUMMA matmul: each needs its panels, and sends its partial
        sums on.
        """
        pieces = max(
            self.plan.mesh.sizes[axis] for collective in collectives for axis in collective.axes
        )
        incoming = [
            collective for collective in collectives if collective.traffic.collective == "broadcast"
        ]
        outgoing = [
            collective for collective in collectives if collective.traffic.collective == "reduce"
        ]
        computed: tuple[int, ...] = ()
        sent: tuple[int, ...] = ()
        for _ in range(pieces):
            received = tuple(
                self._send(node, collective, after, phase, pieces) for collective in incoming
            )
            computed = (
                self._add(node, "compute", seconds / pieces, (*computed, *received), phase),
            )
            sent += tuple(
                self._send(node, collective, computed, phase, pieces) for collective in outgoing
            )
        return sent or computed

    def _collectives(
        self,
        node: fx.Node,
        collectives: Iterable[SentCollective],
        after: tuple[int, ...],
        phase: Any,
    ) -> tuple[int, ...]:
        for collective in collectives:
            if self.once.has(collective):
                continue
            if collective.backward == (phase == "backward"):
                after = (self._send(node, collective, after, phase),)
        return after

    def _send(
        self,
        node: fx.Node,
        move: SentCollective,
        after: tuple[int, ...],
        phase: Any,
        pieces: int = 1,
    ) -> int:
        """Add a collective and return its event. A hierarchical one has an event for each of its
        stages, which run over groups of their own, as they do in scheduled graphs.
        """
        digits = pattern(self.plan.mesh, move.axes)
        for stage in stages(move.traffic.collective, digits, move.hierarchy):
            self._may_join(stage, move, pieces)
            after = (self._stage(node, stage, move, after, phase, pieces),)
        return after[0]

    def _stage(
        self,
        node: fx.Node,
        stage: Stage,
        move: SentCollective,
        after: tuple[int, ...],
        phase: Any,
        pieces: int,
    ) -> int:
        """Add one stage of a collective."""
        price = flat_price(stage.kind, stage.digits, move.bytes / stage.parts, self.world)
        in_flight_bytes = 0.0
        if "step" in node.meta:
            in_flight_bytes = (
                node.meta["layout"].local_size * node.meta["element"].bytes / stage.parts
            )
        return self._add(
            node,
            stage.kind,
            price.seconds / pieces,
            after,
            phase,
            # a lane for each process group, as in scheduled graphs
            lane=".".join(move.axes) + (str(stage.digits) if move.hierarchy else ""),
            link=link(self.world, stage.digits),
            bytes=price.bytes / pieces,
            ahead=node in self.ahead and (phase == "forward" or move.again),
            in_flight_bytes=in_flight_bytes,
            takes_s=lost_s(price.seconds, self.world) / pieces,
        )

    def _may_join(self, stage: Stage, move: SentCollective, pieces: int) -> None:
        """Note whether the collective that is added next may be fused
        (passes/overlap/bucket.py).
        """
        kind = stage.kind
        if pieces == 1 and not move.inside and kind in _FUSABLE:
            copied = self.world.backend == "gloo" and move.traffic.collective != "all_reduce"
            fuse_key = _FuseKey(kind, stage.digits, move.element_bytes, copied)
            self.joinable[len(self.events)] = fuse_key, move.bytes / stage.parts

    def fuse(self, members: Bucket) -> Event:
        """Return the event that stands for several collectives as one."""
        fused = tuple(self.events[index] for index in members)
        kind, digits, _, copied = self.joinable[members[0]][0]
        unsharded_bytes = sum(self.joinable[index][1] for index in members)
        price = flat_price(kind, digits, unsharded_bytes, self.world)
        copying = copied * 2 * unsharded_bytes / op_bytes_per_s(self.world.device)
        return fused[0]._replace(
            name=f"{fused[0].name} and {len(fused) - 1} more",
            seconds=price.seconds + copying,
            bytes=price.bytes,
            in_flight_bytes=sum(event.in_flight_bytes for event in fused),
            takes_s=lost_s(price.seconds, self.world) + copying,  # the computing thread copies
            members=fused,
        )

    def _add(
        self,
        node: fx.Node,
        kind: str,
        seconds: float,
        after: tuple[int, ...],
        phase: Any,
        **more: Any,
    ) -> int:
        """Add an event and return its index."""
        source = str(node.meta.get("source", ""))
        rule = self.notes.specs.get(source) if kind == "compute" else None
        self.products.append(rule is not None and rule.flops > 0)
        name = node.name if kind == "compute" else f"{kind} {node.name}"
        chain = node.meta.get("chain", "")
        self.events.append(Event(name, kind, seconds, after, phase, chain, **more))
        return len(self.events) - 1

    # -- backward ----------------------------------------------------------------------------------
    def _again(self, block: str | None, after: tuple[int, ...]) -> None:
        """Add the forward of a recomputed block once more, when the backward comes to it. What
        needs stored tensors alone, as a weight that is gathered again, may come long before.
        """
        nodes = self.blocks.pop(block, [])
        events_of: dict[fx.Node, tuple[int, ...]] = {}
        for node in nodes:
            begin = () if node in self.ahead else after
            inputs = _union(events_of.get(n, begin) for n in node.all_input_nodes) or begin
            seconds = 0.0 if "step" in node.meta else self._seconds(node)[0]
            events_of[node] = self._work(node, seconds, self.repeated[node], inputs, "backward")
        block_events = _union([after, *events_of.values()])
        for node in nodes:
            if self.gradients[node]:
                self.gradients[node] = _union([self.gradients[node], block_events])

    def _backward(self, node: fx.Node) -> None:
        """Add the backward of a node, once the gradient of its value is there."""
        inputs = [n for n in node.all_input_nodes if n in self.carrying]
        after, collectives = self.gradients[node], self.moved[node]
        if node.op == "placeholder" or not inputs:
            return
        if "step" in node.meta:
            self._credit(inputs, self._collectives(node, collectives, after, "backward"))
            return
        seconds = self._seconds(node)[1]
        source = node.meta.get("source")
        weights = [n for n in inputs if n in self.ahead]
        others = [n for n in inputs if n not in self.ahead]
        is_matmul = source in self.notes.specs and self.notes.specs[source].product is not None
        if is_matmul and seconds and weights and others and not node.meta.get("inside"):
            self._credit(others, (self._add(node, "compute", seconds / 2, after, "backward"),))
            self._credit(weights, (self._add(node, "compute", seconds / 2, after, "backward"),))
        else:
            self._credit(inputs, self._work(node, seconds, collectives, after, "backward"))

    def _credit(self, nodes: Iterable[fx.Node], events: tuple[int, ...]) -> None:
        """Add the events to those that the gradients of the nodes depend on."""
        for node in nodes:
            self.gradients[node] = tuple(dict.fromkeys((*self.gradients[node], *events)))

    def _optimizer(self) -> None:
        """Add the optimizer's step on every parameter, after all gradients."""
        placeholders = [n for n in self.nodes if n.op == "placeholder" and self.gradients.get(n)]
        gradients = _union(self.gradients[n] for n in placeholders)
        if not gradients:
            return
        arrived = (self._add(placeholders[0], "compute", 0.0, gradients, "optimizer"),)
        for node in placeholders:
            if self.entries[node.name].kind == "parameter":
                layout = self.program.layouts[node.name]
                width = self.program.dtypes[node.name].itemsize
                seconds = optimizer_seconds(layout, width, self.world)
                self._add(node, "compute", seconds, arrived, "optimizer")


def _computes(node: fx.Node) -> bool:
    return "source" in node.meta and "step" not in node.meta and node.op == "call_function"


def _rank_count(step: Events, source: str) -> int:
    """Return among how many ranks a node's work is divided."""
    ranks, sizes = 1, step.notes.specs[source].sizes
    for axis, split in zip(step.plan.mesh.axes, step.plan.choices[source].splits, strict=True):
        ranks *= axis.size if split in sizes else 1
    return ranks


def _union(groups: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the union of the events, in their order."""
    return tuple(dict.fromkeys(i for events in groups for i in events))
