"""Helpers for fx graphs that passes, planner and cost share: what a node is, and how to edit
graphs.

Example: for a matmul in the third layer, `module_path(node)` is "blocks.2.mlp.up" and
`block_of(node)` is "blocks.2"; `where(node)` is how an error message names it.

The first part reads graphs, the second writes them: `add_node` and `add_call` add calls whose
`meta["val"]` is set, `reorder` and `sort` move nodes. show.py prints graphs.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from autopar._compat import pytree
from autopar.ir.containers import tensors_in
from autopar.ir.program import Annotations, Program, Value
from autopar.ir.sharding_rule import operands_of, results_of

Block = tuple[str, int]  # the path of repeated blocks, and a block's number
Unit = tuple[Block, ...]  # consecutive blocks that repeat together
_LONGEST_UNIT = 8  # blocks
_FEW_READERS = 2  # other blocks that read a value of one that goes from block to block


def is_inexact(dtype: torch.dtype) -> bool:
    """Whether numbers of this dtype are rounded, and may carry a gradient: integers and flags are
    not.
    """
    return dtype.is_floating_point or dtype.is_complex


def producer(node: fx.Node) -> Value:
    """Return the value that a node stands for, as (node, index of the result): a getitem stands for
    a result of its argument.
    """
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        return source.name, index
    return node.name, 0


def carries_gradient(notes: Annotations, node: fx.Node) -> bool:
    """Whether a gradient flows through any operand or result of a node."""
    if node.name not in notes.carrying:
        results = ((node.name, i) for i in range(len(results_of(node))))
        operands = (producer(n) for n in operands_of(node) if n is not None)
        carries = any(value in notes.gradient for value in (*results, *operands))
        notes.carrying[node.name] = carries
    return notes.carrying[node.name]


_MOST_CACHED = 8  # results of one kind: the first that was worked out goes first
T = TypeVar("T")


def remember(
    graph: fx.Graph,
    kind: str,
    reads: Sequence[object],
    make: Callable[[], T],
    value: Hashable = None,
    most: int = _MOST_CACHED,
) -> T:
    """Return what `make` works out from a graph that no pass changes any more, from `reads` and
    from `value`: once for each of these objects and equal values. Results live as long as the
    graph, the last `most` of a kind; a copy of the graph begins with none.

    >>> graph, sizes = fx.Graph(), [2, 3]
    >>> remember(graph, "sum", (sizes,), lambda: sum(sizes))
    5
    >>> remember(graph, "sum", (sizes,), lambda: 1 / 0)
    5
    """
    cached = graph.__dict__.setdefault("_remembered_by_autopar", {}).setdefault(kind, {})
    key = value, *map(id, reads)
    if key not in cached:
        cached[key] = tuple(reads), make()  # holding them keeps their ids from being reused
        while len(cached) > most:
            del cached[next(iter(cached))]
    result: T = cached[key][1]
    return result


def forget(graph: fx.Graph) -> None:
    """Drop what was worked out from a graph."""
    graph.__dict__.pop("_remembered_by_autopar", None)


def module_path(node: fx.Node) -> str:
    """Return the qualified name of the module whose code made the node; "" for the model's own."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    return path.removeprefix("L['self'].").removeprefix("L['self']")


def chain_name(node: fx.Node) -> str:
    """Return the name of a node's subgraph: its module's path up to one step past the last layer
    number, or its first two steps; "(model)" for the model's own code.
    """
    names = [name for name in module_path(node).split(".") if name]
    numbers = [i for i, name in enumerate(names) if name.isdigit()]
    return ".".join(names[: numbers[-1] + 2] if numbers else names[:2]) or "(model)"


def numbered_block(path: str) -> Block | None:
    """Return the repeated block of a module path, as (path before its first number, that number).

    >>> numbered_block("model.layers.3.mlp")
    ('model.layers', 3)
    """
    names = path.split(".")
    for index, name in enumerate(names):
        if name.isdigit():
            return ".".join(names[:index]), int(name)
    return None


def block_of(node: fx.Node) -> str:
    """Return the repeated block that a node belongs to, such as "blocks.3"; "" where there is none.
    A reshard belongs to the block of its first consumer.
    """
    block = numbered_block(node.meta.get("chain") or chain_name(node))
    return "" if block is None else block_name(block)


def block_name(block: Block) -> str:
    """Return the name of a block: ("blocks", 3) is "blocks.3"."""
    return f"{block[0]}.{block[1]}".lstrip(".")


def alike(keys: Mapping[Block, Hashable]) -> Iterator[list[Block]]:
    """Yield the longest runs of blocks with consecutive numbers that look the same. `keys` maps
    each block to a value that is equal for blocks that look the same.
    """
    run: list[Block] = []
    for block in sorted(keys):
        if run and (block != (run[-1][0], run[-1][1] + 1) or keys[block] != keys[run[-1]]):
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def repeats(keys: Mapping[Block, Hashable]) -> Iterator[list[Unit]]:
    """Yield the longest runs of units that look the same. A unit is one block, or several with
    consecutive numbers that come in turns, as layers of windowed and of full attention do.

    >>> list(repeats({("layers", i): "wf"[i % 2] for i in range(6)}))[0][0]
    (('layers', 0), ('layers', 1))
    """
    for stretch in alike(dict.fromkeys(keys)):  # whatever they look like
        start = 0
        while start < len(stretch):
            left = stretch[start:]
            sizes = range(1, min(_LONGEST_UNIT, len(left)) + 1)
            counts = [(_times(left, size, keys), size) for size in sizes]
            # several blocks are a unit only where they come often: two of them stand for nothing
            count, size = max(
                ((n, size) for n, size in counts if size == 1 or n > 2),
                key=lambda pair: (pair[0] * pair[1], -pair[1]),
            )
            yield [tuple(left[i * size : (i + 1) * size]) for i in range(count)]
            start += count * size


def _times(stretch: list[Block], size: int, keys: Mapping[Block, Hashable]) -> int:
    """Return how often the first `size` blocks of a stretch repeat from its beginning on."""
    pairs = zip(stretch, stretch[size:], strict=False)
    equal = itertools.takewhile(lambda pair: keys[pair[0]] == keys[pair[1]], pairs)
    return sum(1 for _ in equal) // size + 1


def blocks(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """Return the names of the repeated blocks of these nodes, each once, in order."""
    names = (block_of(node) for node in nodes if node.op == "call_function")
    return tuple(name for name in dict.fromkeys(names) if name)


def every_node(module: fx.GraphModule) -> Iterator[tuple[fx.Node, bool]]:
    """Yield the nodes of a graph in execution order, followed each by those of the graphs that it
    calls; and whether the node runs again in the backward.
    """
    for node in module.graph.nodes:
        yield node, bool(node.meta.get("again"))
        for block in called_graphs(module, node):
            yield from ((inner, inner.meta.get("again", True)) for inner, _ in every_node(block))


def called_graphs(module: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    """Return the subgraphs of the module that a node calls."""
    if node.op != "call_function":
        return []
    names = [n.target for n in node.all_input_nodes if n.op == "get_attr"]
    attributes = [getattr(module, str(name)) for name in names]
    return [block for block in attributes if isinstance(block, fx.GraphModule)]


def inline(module: fx.GraphModule) -> fx.GraphModule:
    """Return the module with the graphs that it calls inlined. Inlined nodes have
    `meta["block"]`, the name of the call.
    """
    if not any(called_graphs(module, node) for node in module.graph.nodes):
        return module
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            continue
        for block in called_graphs(module, node):
            arguments = iter(node.args[2:])
            inner: dict[fx.Node, fx.Node] = {}
            for inner_node in block.graph.nodes:
                if inner_node.op == "placeholder":
                    inner[inner_node] = copies[next(arguments)]
                elif inner_node.op == "output":
                    copies[node] = [inner[n] for n in inner_node.args[0]]
                else:
                    inner[inner_node] = graph.node_copy(inner_node, inner.__getitem__)
                    inner[inner_node].meta["block"] = node.name
        if node in copies:
            continue
        results = copies.get(node.all_input_nodes[0]) if node.target is operator.getitem else None
        if isinstance(results, list):
            copies[node] = results[node.args[1]]
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(module, graph)


def weights_of(program: Program) -> set[Value]:
    """Return the values that depend on parameters and nothing else, trained or not."""
    stored = {e.node for e in program.signature.inputs if e.kind == "parameter"}
    weights: set[Value] = set()
    for node in program.module.graph.nodes:
        sources = node.all_input_nodes
        if node.op == "output" or node.target is operator.getitem:
            continue
        if node.name in stored or (sources and all(producer(n) in weights for n in sources)):
            weights.update((node.name, index) for index in range(len(results_of(node))))
    return weights


def stored_nodes(program: Program) -> set[fx.Node]:
    """Return the stored inputs, and the calls that depend on these alone or on nothing, as the
    arange of positions does.
    """
    names = {entry.node for entry in program.signature.inputs if entry.stored}
    constant_nodes: set[fx.Node] = set()
    for node in program.module.graph.nodes:
        constant_call = node.op == "call_function" and constant_nodes.issuperset(
            node.all_input_nodes
        )
        if node.name in names or constant_call:
            constant_nodes.add(node)
    return constant_nodes


def values_of_alone(
    graph: fx.Graph, names: Collection[str], sends: Callable[[fx.Node], bool]
) -> list[fx.Node]:
    """Return the values that are computed of the placeholders `names` alone and for which ranks
    send something, of those that other calls or the results take: gathered weights, of parameters.
    `sends`: whether a call sends something.
    """
    alone, sent = set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "placeholder" and node.name in names:
            alone.add(node)
        elif node.op == "call_function" and alone.issuperset(inputs) and not _is_random(node):
            alone.add(node)
            if sends(node) or not sent.isdisjoint(inputs):
                sent.add(node)
    return [n for n in graph.nodes if n in sent and not alone.issuperset(n.users)]


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def where(node: fx.Node) -> str:
    """Return how messages name a node: its name, its module, and the line of the user's code that
    made it.
    """
    path = module_path(node)
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File")]
    line = lines[-1].split(", in ")[0] if lines else ""
    return " ".join(
        text
        for text in (node.name, f"in {path}" if path else "", f"({line})" if line else "")
        if text
    )


def ancestors(nodes: Iterable[fx.Node], known: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Return these nodes and all that they are computed of, without what is known and what that
    alone is computed of.
    """
    reached, stack = set[fx.Node](), list(nodes)
    while stack:
        node = stack.pop()
        if node not in reached and node not in known:
            reached.add(node)
            stack.extend(node.all_input_nodes)
    return reached


# -- writing ---------------------------------------------------------------------------------------
def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Return a copy of a graph, whose nodes have the same names and values."""
    copy = fx.Graph()
    result = copy.graph_copy(graph, {})
    copy.create_node("output", "output", (result,)).meta = dict(graph.output_node().meta)
    return copy


def add_node(
    graph: fx.Graph,
    target: Callable[..., Any] | str,
    arguments: tuple[Any, ...],
    value: Any,
    more: Mapping[str, Any] | None = None,
) -> fx.Node:
    """Add a call with the (fake) value `value` and return it. `more`: keyword arguments."""
    assert callable(target)
    node = graph.call_function(target, arguments, dict(more or {}))
    node.meta["val"] = value
    return node


def with_more_results(graph: fx.Graph, names: Sequence[str]) -> fx.Graph:
    """Return a copy of a graph that returns the values of these nodes, too, after its results."""
    copy = copy_graph(graph)
    nodes = {node.name: node for node in copy.nodes}
    (results,) = copy.output_node().args
    assert isinstance(results, tuple | list)
    copy.output_node().args = ((*results, *(nodes[name] for name in names)),)
    return copy


def add_call(
    graph: fx.Graph,
    target: Callable[..., Any],
    arguments: tuple[Any, ...],
    more: Mapping[str, Any] | None = None,
) -> fx.Node:
    """Add a call and return it; its value is computed from the (fake) values of its operands."""
    values = fx.node.map_arg(arguments, lambda node: node.meta["val"])
    return add_node(graph, target, arguments, target(*values, **(more or {})), more)


def reorder(graph: fx.Graph, order: Iterable[fx.Node]) -> None:
    """Move these nodes to the front of the graph, in this order."""
    cursor = graph._root
    for node in order:
        cursor.append(node)
        cursor = node


def sort(graph: fx.Graph) -> bool:
    """Sort a graph topologically, keeping its order where inputs allow that. Return False, and
    leave the graph as it was, where there is a cycle.
    """
    open_inputs = {node: len(node.all_input_nodes) for node in graph.nodes}
    place = {node: i for i, node in enumerate(graph.nodes)}
    order: list[fx.Node] = []
    runnable = [(place[node], node) for node in graph.nodes if not open_inputs[node]]
    heapq.heapify(runnable)
    while runnable:
        _, node = heapq.heappop(runnable)
        order.append(node)
        for user in node.users:
            open_inputs[user] -= 1
            if not open_inputs[user]:
                heapq.heappush(runnable, (place[user], user))
    if len(order) < len(place):
        return False
    cursor = graph._root
    for node in order[:-1]:  # the output stays last
        cursor.append(node)
        cursor = node
    return True


def block_keys(
    blocks: Mapping[Block, list[fx.Node]], places: Mapping[fx.Node, tuple[Block, int]]
) -> dict[Block, Hashable]:
    """Return for every block what it computes, and from which values."""
    return {b: tuple(_node_key(places, b, node) for node in nodes) for b, nodes in blocks.items()}


def _node_key(places: Mapping[fx.Node, tuple[Block, int]], block: Block, node: fx.Node) -> Hashable:
    """Return what a node computes and the places of its inputs, the same for equal nodes of two
    blocks.
    """

    def seen(value: Any) -> Hashable:
        if not isinstance(value, fx.Node):
            return str(value)
        if value not in places or places[value][0][0] != block[0]:
            return value.name
        readers = (places[user][0] for user in value.users if user in places)
        if is_of_all_blocks(places[value][0], readers):
            return value.name
        other, place = places[value]
        return other[1] - block[1], place

    inputs = tuple(seen(value) for value in pytree.tree_leaves((node.args, node.kwargs)))
    return node.op, node.op == "placeholder" or node.target, _result_shapes(node), inputs


def is_of_all_blocks(maker: Block, readers: Iterable[Block]) -> bool:
    """Whether a block makes a value that these blocks read for all of them, as T5's first one makes
    the bias of positions: such a value is the same one for every block, and not the one of so many
    blocks before.
    """
    return len({*readers} - {maker}) > _FEW_READERS


def _result_shapes(node: fx.Node) -> Hashable:
    """Return the shapes and dtypes of a node's results."""
    values = tensors_in(node.meta.get("val"))
    return tuple((tuple(value.shape), value.dtype) for value in values)
