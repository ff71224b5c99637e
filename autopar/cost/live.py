"""The most bytes that a derived graph holds at once when its nodes run in their order."""

from __future__ import annotations

from torch import fx

from .derived import bytes_of, carries_on, collective_of, is_wait


def live_bytes(graph: fx.Graph, primals: float) -> float:
    """At the peak, with `primals`, the bytes of all that the forward was given, throughout.

    What is made lives until its last use, a saved value until its last use in the backward, what
    goes out to the end; the operands of a collective until it is waited for. Views share what they
    show. Of tensors that are saved twice, as views of one another, each is counted.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}
    root = _roots(graph)
    last = {node: place[node] for node in graph.nodes}
    for node in graph.nodes:
        for taken in node.all_input_nodes:
            last[root[taken]] = max(last[root[taken]], place[node])
        if is_wait(node):
            issued = _issue(node)
            for taken in issued.all_input_nodes if issued is not None else ():
                last[root[taken]] = max(last[root[taken]], place[node])
    freed: dict[int, float] = {}
    now = most = primals
    for node in graph.nodes:
        if root[node] is node and not _is_primal(node):
            now += bytes_of(node)
            freed[last[node]] = freed.get(last[node], 0.0) + bytes_of(node)
        if node.op == "placeholder":
            continue  # all are there before anything runs
        most = max(most, now)
        now -= freed.get(place[node], 0.0)
    return max(most, now)


def _roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """By node the one that made the memory that it shows."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        shows = node.op == "call_function" and bool(inputs) and carries_on(node)
        found[node] = found[inputs[0]] if shows else node
    return found


def _issue(wait: fx.Node) -> fx.Node | None:
    """The collective that a wait waits for."""
    node = wait.all_input_nodes[0]
    while collective_of(node) is None and node.op == "call_function" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node if collective_of(node) is not None else None


def _is_primal(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.name.startswith("primals")
