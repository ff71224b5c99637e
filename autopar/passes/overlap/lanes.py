"""lanes: what can wait goes over a process group of its own, where that is modelled to be faster.

A process group carries one collective after the other. Where an axis has both, sums of gradients
and gathers of stored weights can stand before a sum that the next product hangs on. In lane 1, a
second group of the same ranks, they do not: the two share the link, but neither waits for the
other. Numbers stay the same to the bit, as ranks and their order are.
"""

from __future__ import annotations

from torch import fx

from autopar.cost.simulator.engine import simulate_overlap
from autopar.cost.simulator.graph_events import Listed, Phase, collective_of, graph_events, group_of, lead_to_matmuls
from autopar.cost.simulator.links import Event
from autopar.world import World

LANE = "/lane1"  # what mesh.group_name adds to the name of a group
WORTH = 0.01  # of the simulated seconds: what a second group must gain


def lanes(graph: fx.Graph, world: World, stored: frozenset[str], phase: Phase) -> None:
    """Move collectives in place, the same ones on every rank. See `opened`."""
    listed = graph_events(graph, world, stored, phase)
    best, least = frozenset[int](), simulate_overlap(listed.events).seconds * (1 - WORTH)
    for moved in _choices(listed, phase):
        seconds = simulate_overlap(_moved(listed, moved)).seconds
        if seconds < least:
            best, least = moved, seconds
    for index in best:
        node = listed.nodes[index]
        node.args = (*node.args[:-1], group_of(node) + LANE)


def opened(*graphs: fx.Graph) -> set[str]:
    """The names of the groups of lane 1 that graphs need."""
    sent = (n for graph in graphs for n in graph.nodes if collective_of(n) is not None)
    return {group_of(node) for node in sent if group_of(node).endswith(LANE)}


def _choices(listed: Listed, phase: Phase) -> list[frozenset[int]]:
    """What may be moved: sums of gradients, gathers of what is stored, both; only from groups that
    then keep something.
    """
    leads = lead_to_matmuls(listed)
    sent = [i for i, e in enumerate(listed.events) if e.lane and not e.lane.endswith(LANE)]
    gathers = {index for index in sent if listed.events[index].ahead}
    sums = {i for i in sent if phase == "backward" and not leads[i]} - gathers
    found = []
    for able in (sums, gathers, sums | gathers):
        kept = {listed.events[index].lane for index in sent if index not in able}
        moved = frozenset(index for index in able if listed.events[index].lane in kept)
        if moved and moved not in found:
            found.append(moved)
    return found


def _moved(listed: Listed, moved: frozenset[int]) -> list[Event]:
    """The events with these ones in lane 1."""
    return [
        event._replace(lane=event.lane + LANE) if index in moved else event
        for index, event in enumerate(listed.events)
    ]
