"""schedule: the order in which a derived graph computes, issues collectives and waits for them.

The graph is one that AOTAutograd derived, forward or backward. The simulation of cost/simulator/engine.py
decides: a collective is issued as soon as its operands are there, or, where it fetches what is
stored, just before it would be late; it is waited for at its first use, or when it is modelled done
and another collective hangs on it; a while later where that costs nothing, as ranks drift apart and
collectives are late. Numbers stay the same to the bit: nothing but the order changes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import fx

from autopar.cost.simulator.engine import Run, overlapped
from autopar.cost.simulator.graph_events import (
    Phase,
    collective_of,
    graph_events,
    group_of,
    is_wait,
)
from autopar.cost.simulator.links import Event
from autopar.world import World


class Freedom(NamedTuple):
    """How far from its place in the graph an op may go. `ahead`: how much may be fetched before its
    use, in times the largest; `window`: of events, past the first that is not done; `patience`:
    for how long after its modelled end a collective may be left alone while there is something to
    compute, in times the mean interval between two collectives, what is tried first.
    """

    ahead: int = 4
    window: int = 256
    patience: tuple[float, ...] = (2.0, 1.0)


USUAL = Freedom()
PUNCTUAL = Freedom(patience=())
LEAST = Freedom(1, 8, ())  # holds hardly more at once than the graph's own order
_FREE = 0.005  # of the simulated step: what patience may cost


def schedule(
    graph: fx.Graph,
    world: World,
    stored: frozenset[str],
    phase: Phase,
    freedom: Freedom = USUAL,
) -> Run:
    """Reorder the graph in place; the simulated run of it. The same on every rank."""
    listed = graph_events(graph, world, stored, phase)
    run = _patient(listed.events, freedom)
    _arrange(graph, [listed.nodes[action.event] for action in run.order])
    return run


def _patient(events: Sequence[Event], freedom: Freedom) -> Run:
    """The simulated run that leaves collectives alone longest, among those as short as the one that
    asks for them at once.
    """
    ahead = _most_ahead(events, freedom)
    prompt = overlapped(events, ahead, freedom.window)
    interval = prompt.seconds / (sum(bool(event.lane) for event in events) or math.inf)
    for times in freedom.patience if interval else ():
        patience, defers = times * interval, (prompt.defer,)
        run = overlapped(events, ahead, freedom.window, defers, patience)
        if run.seconds <= (1 + _FREE) * prompt.seconds:
            return run
    return prompt


def _most_ahead(events: Sequence[Event], freedom: Freedom) -> float:
    """Bytes that may be held before their use."""
    largest = max((event.held_bytes for event in events if event.ahead), default=0.0)
    return freedom.ahead * largest


def check(graph: fx.Graph, before: Sequence[fx.Node]) -> None:
    """The contract: the nodes are those of before, each after what it takes, and every collective
    is waited for.
    """
    graph.lint()
    assert set(graph.nodes) == set(before), "nodes were lost or made"
    for node in graph.nodes:
        if collective_of(node) is not None:
            waited = any(is_wait(user) for user in _users(node))
            assert waited or not node.users, f"nothing waits for {node.name}"


def collectives_in_order(graph: fx.Graph) -> list[str]:
    """One line a collective, as issued: what the ranks of a group must have in common."""
    return [
        f"{group_of(node)} {collective_of(node)} "
        + " ".join(str(tuple(n.meta["val"].shape)) for n in node.all_input_nodes)
        for node in graph.nodes
        if collective_of(node) is not None
    ]


def _arrange(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    """Put the nodes in this order, views and waits right before their first user."""
    given = graph.find_nodes(op="placeholder")
    placed, cursor = set(given), given[-1] if given else graph._root
    rest = [node for node in graph.nodes if node.op != "output"]
    for wanted in (*order, *rest):
        for node in _with_carriers(wanted, placed):
            cursor.append(node)
            cursor = node


def _with_carriers(node: fx.Node, placed: set[fx.Node]) -> Iterator[fx.Node]:
    """The node after those that it needs and that are not placed yet. A tuple of results is taken
    apart at once: it would keep all of them alive until the last is asked for.
    """
    if node in placed:
        return
    for needed in node.all_input_nodes:
        yield from _with_carriers(needed, placed)
    placed.add(node)
    yield node
    for user in node.users:
        if user.target is operator.getitem and user not in placed:
            placed.add(user)
            yield user


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """The users of a collective's results."""
    for user in node.users:
        yield user
        if user.target is operator.getitem:
            yield from user.users
