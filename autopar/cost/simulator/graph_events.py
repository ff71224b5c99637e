"""The events of a graph that AOTAutograd derived: aten ops and functional collectives on a rank's
own tensors, with the seconds of each on a world.

`graph_events` lists them for the engine; `graph_seconds` simulates them. The passes in
passes/overlap/ call both to decide what to chunk, fuse and reorder, and ask here what a node is: a
collective, a wait, a view, an op that writes (`collective_of`, `is_wait`, `carries_on`, `writes`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from autopar._compat import OpOverload, pytree
from autopar.cost.communication import flat_price, sent
from autopar.cost.compute import attention_seconds, matmul_seconds
from autopar.cost.contention import lost_s
from autopar.cost.network import Pattern, size
from autopar.cost.simulator.buckets import leading
from autopar.cost.simulator.engine import Event, simulate_overlap
from autopar.cost.simulator.step_events import ROOTED, link
from autopar.ir.band import Band
from autopar.ir.mesh import group_ranks
from autopar.ir.sharding_rule import Attends, bound, shape_of, value_of
from autopar.ops.sharded.masked_attention import (
    MASKED_ATTENTION,
    MASKED_ATTENTION_BACKWARD,
    places_of,
)
from autopar.world import World

Phase = Literal["forward", "backward"]

# The functional collectives by name, and the kind that the cost model knows each as. A broadcast or
# a reduce is one of as many pieces as there are ranks.
KINDS: dict[str, Any] = {
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
_NAMESPACES = ("_c10d_functional", "autopar")
_CALL_S = 35e-6  # seconds to issue a collective on gloo and wait for it (measured)
_FREE = (torch.ops.aten._unsafe_view.default, torch.ops.aten.lift_fresh.default)


@dataclass(frozen=True)
class Listed:
    """The events of a graph, in its order, and the node of each. Views and waits take no time and
    are not events.
    """

    events: tuple[Event, ...]
    nodes: tuple[fx.Node, ...]


def graph_events(graph: fx.Graph, world: World, stored: frozenset[str], phase: Phase) -> Listed:
    """Return the events of a forward or backward graph.

    `stored`: the names of the placeholders that are there before the step begins. Ops that draw
    random numbers or write into their operands keep their order.
    """
    events: list[Event] = []
    nodes: list[fx.Node] = []
    needs: dict[fx.Node, tuple[int, ...]] = {}
    fetched = fetchable(graph, stored)
    fixed: tuple[int, ...] = ()
    for node in graph.nodes:
        if node.op == "output":
            continue
        after = tuple(dict.fromkeys(i for n in node.all_input_nodes for i in needs[n]))
        if node.op != "call_function" or carries_on(node):
            needs[node] = after
            continue
        if keeps_place(node):
            after, fixed = (*after, *fixed), (len(events),)
        events.append(_event(node, after, world, node in fetched, phase))
        nodes.append(node)
        needs[node] = (len(events) - 1,)
    return Listed(tuple(events), tuple(nodes))


def fetchable(graph: fx.Graph, stored: frozenset[str]) -> set[fx.Node]:
    """Return the nodes that depend on stored tensors only, so that they may be fetched at
    any time.
    """
    fetched: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op != "output" and (node.name in stored or (inputs and fetched.issuperset(inputs))):
            fetched.add(node)
    return fetched


def sent_unchanged(backward: fx.Graph) -> frozenset[str]:
    """Return the names of the saved values that a backward sends as the forward left them, as
    SUMMA's panels of X. They may be fetched at any time like stored tensors, and are best fetched
    late.
    """
    names = set()
    for node in backward.nodes:
        operands = node.all_input_nodes if collective_of(node) is not None else []
        for operand in operands:
            while operand.op == "call_function" and carries_on(operand):
                operand = operand.all_input_nodes[0]
            if operand.op == "placeholder" and not operand.name.startswith("tangents"):
                names.add(operand.name)
    return frozenset(names)


def graph_seconds(graph: fx.Graph, world: World, stored: frozenset[str], phase: Phase) -> float:
    """Return the seconds of a graph: see `listed_seconds`."""
    return listed_seconds(graph_events(graph, world, stored, phase), world)


def listed_seconds(listed: Listed, world: World) -> float:
    """Return the seconds of a graph with its collectives overlapped, each with the cost of issuing
    it.
    """
    issued = sum(bool(event.lane) for event in listed.events)
    return simulate_overlap(listed.events).seconds + call_seconds(world) * issued


def call_seconds(world: World) -> float:
    """Return the seconds that the computing thread spends on issuing one collective and waiting for
    it.
    """
    return _CALL_S if world.backend == "gloo" else 0.0


def lead_to_matmuls(listed: Listed) -> list[bool]:
    """Return for every event whether a matmul depends on it later in the graph."""
    return leading(listed.events, [flops(node) > 0 for node in listed.nodes])


def off_path(listed: Listed) -> set[fx.Node]:
    """Return the collectives that no matmul waits for: gathers of stored tensors, which are issued
    ahead, and sums on which no matmul depends any more, which wait for the end of the backward.
    """
    leads, collectives = lead_to_matmuls(listed), set()
    for node, event, leads_on in zip(listed.nodes, listed.events, leads, strict=True):
        if event.lane and (event.ahead or (event.phase == "backward" and not leads_on)):
            collectives.add(node)
    return collectives


def origin(node: fx.Node) -> tuple[str, str]:
    """Return the name of the emitted graph's node that a derived node comes from, and the path of
    its subgraph; its own name and no path where that is not known.
    """
    custom = node.meta.get("custom", {})
    return custom.get("node", node.name), custom.get("module", "")


def is_wait(node: fx.Node) -> bool:
    """Whether the node waits for a functional collective."""
    return node.target is torch.ops._c10d_functional.wait_tensor.default


def collective_of(node: fx.Node) -> str | None:
    """Return the functional collective that a node issues, such as "all_reduce", in whichever form;
    None for other nodes.
    """
    return collective_named(node.target)


def collective_named(target: Any) -> str | None:
    """Return the functional collective that an op is, as `collective_of` does for a node."""
    if not isinstance(target, OpOverload) or target.namespace not in _NAMESPACES:
        return None
    name = target._schema.name.split("::")[1].rstrip("_")
    return name if name in KINDS else None


def group_of(node: fx.Node) -> str:
    """Return the name of the process group that a collective runs over: its last argument."""
    return str(node.args[-1])


def carries_on(node: fx.Node) -> bool:
    """Whether a node only stands for its argument: a wait, a view, a piece of a result."""
    target = node.target
    return is_wait(node) or not isinstance(target, OpOverload) or _is_view(target)


@lru_cache(maxsize=1 << 10)  # reading a schema is slow beside other questions about a node
def _is_view(target: OpOverload) -> bool:
    """Whether an op's result shares the storage of an operand, or costs as little."""
    aliases = [r.alias_info for r in target._schema.returns]
    return target in _FREE or (
        bool(aliases) and all(a is not None and not a.is_write for a in aliases)
    )


def writes(node: fx.Node) -> bool:
    """Whether a node's op writes into its operands."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def keeps_place(node: fx.Node) -> bool:
    """Whether a node's op writes or draws random numbers, and so runs in the graph's order."""
    assert isinstance(node.target, OpOverload)
    return writes(node) or torch.Tag.nondeterministic_seeded in node.target.tags


def _event(node: fx.Node, after: tuple[int, ...], world: World, early: bool, phase: Phase) -> Event:
    """Return the event of an op or a collective."""
    name = collective_of(node)
    module = origin(node)[1]
    if name is None:
        return Event(node.name, "compute", op_seconds(node, world), after, phase, module)
    sent_bytes, seconds, link_number, takes_s = collective_cost(node, world)
    return Event(
        node.name,
        KINDS[name],
        seconds,
        after,
        phase,
        module,
        lane=group_of(node),
        link=link_number,
        bytes=sent_bytes,
        ahead=early,
        in_flight_bytes=float(bytes_of(node)),
        takes_s=takes_s,
    )


def collective_cost(
    node: fx.Node, world: World, pieces: int = 1
) -> tuple[float, float, int, float]:
    """Return (bytes that a rank sends, seconds, link, seconds of computing lost while it runs) of a
    functional collective, or of one of so many equal pieces of it.
    """
    kind = KINDS[str(collective_of(node))]
    digits = group_pattern(group_of(node))
    input_bytes, output_bytes = (
        sum(map(bytes_of, n)) / pieces for n in (node.all_input_nodes, [node])
    )
    unsharded_bytes, pieces_of_value = _unsharded_bytes(
        kind, size(digits), input_bytes, output_bytes
    )
    price = flat_price(kind, digits, unsharded_bytes, world)
    return (
        price.bytes / pieces_of_value,
        price.seconds / pieces_of_value,
        link(world, digits),
        lost_s(price.seconds, world) / pieces_of_value,
    )


def bytes_sent(kind: str, ranks: int, taken: float, output: float) -> float:
    """Return the bytes that a rank sends in a collective that takes and makes so many bytes."""
    unsharded_bytes, parts = _unsharded_bytes(kind, ranks, taken, output)
    return sent(kind, ranks) * unsharded_bytes / parts


def _unsharded_bytes(kind: str, ranks: int, taken: float, output: float) -> tuple[float, int]:
    """Return the bytes of the unsharded value, as the cost model counts them, and the number of its
    pieces of which this is one.
    """
    largest_bytes = max(taken, output)
    if kind == "all_to_all":
        return largest_bytes * ranks, 1
    return (largest_bytes * ranks, ranks) if kind in ROOTED else (largest_bytes, 1)


@lru_cache(maxsize=1 << 10)
def group_pattern(name: str) -> Pattern:
    """Return the pattern of the groups of this name, also of a part of an axis.

    >>> group_pattern("autopar/data4.x2/data/2@1")
    ((2, 2),)
    """
    ranks, digits = group_ranks(name, 0), []
    while len(ranks) > 1:
        stride = ranks[1] - ranks[0]
        count = 2
        while count < len(ranks) and ranks[count] == ranks[0] + count * stride:
            count += 1
        digits.append((count, stride))
        ranks = ranks[::count]
    return tuple(reversed(digits))


def op_seconds(node: fx.Node, world: World, pieces: int = 1) -> float:
    """Return the seconds of an aten op by roofline, from its FLOPs and the bytes that it reads and
    writes; or those of one of so many equal pieces of it.
    """
    moved_bytes = (bytes_of(node) + sum(bytes_of(n) for n in node.all_input_nodes)) / pieces
    results = _tensors(node)
    dtype = results[0].dtype if results else torch.float32
    op_flops = flops(node) / pieces
    attention = _attention(node)
    if attention is None:
        return matmul_seconds(op_flops, moved_bytes, dtype, world.device)
    attends, backward, _ = attention
    return attention_seconds(op_flops, moved_bytes, attends, backward, dtype, world.device)


def flops(node: fx.Node) -> float:
    """Return the FLOPs of a node: matmuls and other ops that torch can count; for attention less
    the part that a causal mask hides, which torch counts; else 0.
    """
    assert isinstance(node.target, OpOverload)
    packet = node.target.overloadpacket
    if packet in _PRODUCTS:  # most nodes: counted as torch does, without its detour
        left_operand: Any = node.args[_PRODUCTS[packet]]
        return 2.0 * math.prod(node.meta["val"].shape) * left_operand.meta["val"].shape[-1]
    attention = _attention(node)
    if attention is not None:
        attends, backward, queries = attention
        return attends.flops(queries) * (attends.backward_times if backward else 1)
    count = flop_registry.get(packet)
    if count is None:
        return 0.0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return float(count(*args, **kwargs, out_val=node.meta["val"]))


def _attention(node: fx.Node) -> tuple[Attends, bool, int] | None:
    """Return for an attention kernel the shape that its time depends on, whether it is the
    backward, and the number of queries over all samples and heads. None for other ops.
    """
    assert isinstance(node.target, OpOverload)
    backward = _ATTENTION.get(node.target.overloadpacket)
    if backward is None:
        return None
    values = bound(node)
    q, k, v = (shape_of(value_of(values[name])) for name in ("query", "key", "value"))
    causal, share = values.get("is_causal", False), None
    if "digits" in values:
        band = Band(values["before"], values["after"])
        causal, share = band.is_causal, band.share(q[-2], k[-2], places_of(values["digits"]))
    return Attends(k[-2], (q[-1] + v[-1]) / 2, causal, share), backward, math.prod(q[:-1])


# Matmul ops, and the index of the left operand.
_PRODUCTS = {torch.ops.aten.mm: 0, torch.ops.aten.bmm: 0, torch.ops.aten.addmm: 1}

# Attention kernels, and whether each is a backward.
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: False,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: True,
    torch.ops.aten._scaled_dot_product_flash_attention: False,
    torch.ops.aten._scaled_dot_product_flash_attention_backward: True,
    torch.ops.aten._scaled_dot_product_efficient_attention: False,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward: True,
    torch.ops.aten._scaled_dot_product_cudnn_attention: False,
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward: True,
    MASKED_ATTENTION.overloadpacket: False,
    MASKED_ATTENTION_BACKWARD.overloadpacket: True,
}


def bytes_of(node: fx.Node) -> int:
    """Return the bytes of all results of a node."""
    return sum(value.nbytes for value in _tensors(node))


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    """Return the tensors that a node gives."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]  # as nearly all nodes give: looking for leaves takes ten times as long
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
