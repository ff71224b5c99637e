"""Small questions about fx graphs that several passes ask."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

from torch import fx

from autopar.ir.program import Annotations, Program, Value
from autopar.ir.sharding_rule import operands_of, results_of


def producer(node: fx.Node) -> Value:
    """The value that a node stands for: a getitem is its argument's result."""
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        return source.name, index
    return node.name, 0


def carries_gradient(notes: Annotations, node: fx.Node) -> bool:
    """Whether a gradient flows through any operand or result of a node."""
    results = ((node.name, i) for i in range(len(results_of(node))))
    operands = (producer(n) for n in operands_of(node) if n is not None)
    return any(value in notes.gradient for value in (*results, *operands))


def module_path(node: fx.Node) -> str:
    """The qualified name of the module whose code made the node; "" for the model's own forward."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    return path.removeprefix("L['self'].").removeprefix("L['self']")


def chain_name(node: fx.Node) -> str:
    """The subgraph of a node: its module's path up to one step past the last layer number, or its
    first two steps.
    """
    parts = [part for part in module_path(node).split(".") if part]
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 2] if numbers else parts[:2]) or "(model)"


def numbered_block(path: str) -> tuple[str, int] | None:
    """The repeated block that a module path lies in: what stands before its first number, and that.

    >>> numbered_block("model.layers.3.mlp")
    ('model.layers', 3)
    """
    parts = path.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:place]), int(part)
    return None


def block_of(node: fx.Node) -> str:
    """The repeated block that a node belongs to, such as "blocks.3"; "" where there is none. A
    conversion belongs to the block that first wants it.
    """
    found = numbered_block(node.meta.get("chain") or chain_name(node))
    return "" if found is None else block_name(found)


def block_name(block: tuple[str, int]) -> str:
    """A block by its name: "blocks.3"."""
    return f"{block[0]}.{block[1]}".lstrip(".")


def alike(looks: Mapping[tuple[str, int], Hashable]) -> Iterator[list[tuple[str, int]]]:
    """Of blocks and how each looks: those with numbers in a row that look the same, in runs."""
    run: list[tuple[str, int]] = []
    for block in sorted(looks):
        if run and (block != (run[-1][0], run[-1][1] + 1) or looks[block] != looks[run[-1]]):
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def blocks(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """The repeated blocks that these nodes belong to, in their order."""
    found = (block_of(node) for node in nodes if node.op == "call_function")
    return tuple(name for name in dict.fromkeys(found) if name)


def every_node(module: fx.GraphModule) -> Iterator[tuple[fx.Node, bool]]:
    """The nodes of a graph in the order in which they run, those of the graphs that it calls among
    them; and whether the node runs again in the backward.
    """
    for node in module.graph.nodes:
        yield node, bool(node.meta.get("again"))
        for block in called(module, node):
            yield from ((inner, inner.meta.get("again", True)) for inner, _ in every_node(block))


def called(module: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    """The graphs of the module that a node calls."""
    if node.op != "call_function":
        return []
    names = [n.target for n in node.all_input_nodes if n.op == "get_attr"]
    found = [getattr(module, str(name)) for name in names]
    return [block for block in found if isinstance(block, fx.GraphModule)]


def inlined(module: fx.GraphModule) -> fx.GraphModule:
    """The module with the graphs that it calls in its own: their nodes have `meta["block"]`, the
    name of the call.
    """
    if not any(called(module, node) for node in module.graph.nodes):
        return module
    graph = fx.Graph()
    made: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            continue
        for block in called(module, node):
            given = iter(node.args[2:])
            inner: dict[fx.Node, fx.Node] = {}
            for part in block.graph.nodes:
                if part.op == "placeholder":
                    inner[part] = made[next(given)]
                elif part.op == "output":
                    made[node] = [inner[n] for n in part.args[0]]
                else:
                    inner[part] = graph.node_copy(part, inner.__getitem__)
                    inner[part].meta["block"] = node.name
        if node in made:
            continue
        taken = made.get(node.all_input_nodes[0]) if node.target is operator.getitem else None
        if isinstance(taken, list):
            made[node] = taken[node.args[1]]
        else:
            made[node] = graph.node_copy(node, made.__getitem__)
    return fx.GraphModule(module, graph)


def stored(program: Program) -> set[fx.Node]:
    """What is there before a step begins, and what hangs on that alone; what hangs on nothing, as
    positions do, among it.
    """
    names = {entry.node for entry in program.signature.inputs if entry.stored}
    found: set[fx.Node] = set()
    for node in program.module.graph.nodes:
        made = node.op == "call_function" and found.issuperset(node.all_input_nodes)
        if node.name in names or made:
            found.add(node)
    return found


def where(node: fx.Node) -> str:
    """What to tell a user about a node: its name, its module, and the line of the code that made
    it.
    """
    path = module_path(node)
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File")]
    line = lines[-1].split(", in ")[0] if lines else ""
    return " ".join(
        part
        for part in (node.name, f"in {path}" if path else "", f"({line})" if line else "")
        if part
    )


# -- writing ---------------------------------------------------------------------------------------
def copied(graph: fx.Graph) -> fx.Graph:
    """Another graph of the same nodes, under the same names and with the same values."""
    found = fx.Graph()
    result = found.graph_copy(graph, {})
    found.create_node("output", "output", (result,)).meta = dict(graph.output_node().meta)
    return found


def made(
    graph: fx.Graph,
    target: Callable[..., Any] | str,
    arguments: tuple[Any, ...],
    value: Any,
    more: Mapping[str, Any] | None = None,
) -> fx.Node:
    """A new call, whose value is known. `more`: its arguments by name."""
    assert callable(target)
    node = graph.call_function(target, arguments, dict(more or {}))
    node.meta["val"] = value
    return node


def computed(
    graph: fx.Graph,
    target: Callable[..., Any],
    arguments: tuple[Any, ...],
    more: Mapping[str, Any] | None = None,
) -> fx.Node:
    """A new call, whose value is what the operands' values give."""
    values = fx.node.map_arg(arguments, lambda node: node.meta["val"])
    return made(graph, target, arguments, target(*values, **(more or {})), more)


def reorder(graph: fx.Graph, order: Iterable[fx.Node]) -> None:
    """Put these nodes into this order, before all others."""
    cursor = graph._root
    for node in order:
        cursor.append(node)
        cursor = node


def ordered(graph: fx.Graph) -> bool:
    """Put every node behind what it takes, else in the order that there was; False, and the graph
    as it was, where nodes wait for one another.
    """
    missing = {node: len(node.all_input_nodes) for node in graph.nodes}
    place = {node: i for i, node in enumerate(graph.nodes)}
    found: list[fx.Node] = []
    waiting = [(place[node], node) for node in graph.nodes if not missing[node]]
    heapq.heapify(waiting)
    while waiting:
        _, node = heapq.heappop(waiting)
        found.append(node)
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(waiting, (place[user], user))
    if len(found) < len(place):
        return False
    cursor = graph._root
    for node in found[:-1]:  # the output stays last
        cursor.append(node)
        cursor = node
    return True
