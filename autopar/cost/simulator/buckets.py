"""Buckets: small collectives of one kind, group and element type that are fused into one.

`together` says which collectives of a step are fused, in what order and up to what size;
`fuse_buckets` makes a step's events with them fused. `timeline` calls both for a modelled step,
passes/overlap/bucket.py for the graphs that run.

Fused are sums of gradients on which no matmul depends any more, and gathers of stored tensors, in
the order in which they are ready or needed. Hierarchical collectives are fused in each level as in
the one before, so a bucket stays the same from the first level to the last.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from autopar.cost.simulator.engine import Event, Run

SIZES = (1 << 18, 1 << 20, 1 << 22, 1 << 23, 1 << 25)  # bytes of a bucket that are tried

Bucket = list[int]  # events, in the order in which they are ready or needed


def leading(events: Sequence[Event], products: Sequence[bool]) -> list[bool]:
    """Return for every event whether a matmul depends on it later on."""
    leads = [False] * len(events)
    for index in range(len(events) - 1, -1, -1):
        leads_on = leads[index] or products[index]
        for needed in events[index].after:
            leads[needed] |= leads_on
    return leads


def together(
    events: Sequence[Event], keys: Sequence[Hashable], leads: Sequence[bool], run: Run, size: int
) -> list[Bucket]:
    """Return the buckets, each of up to `size` bytes and of more than one event.

    `keys`: for every event what it shares with those that it may be fused with, None for one that
    stays alone. `leads`: whether a matmul depends on it. `run`: the simulation of the events
    without buckets.
    """
    first_uses = [float("inf")] * len(events)
    for index, event in enumerate(events):
        for needed in event.after:
            first_uses[needed] = min(first_uses[needed], run.start[index])

    def when(index: int) -> tuple[float, int]:
        operands_end = max((run.end[i] for i in events[index].after), default=0.0)
        return (first_uses[index] if events[index].ahead else operands_end), index

    open_buckets: dict[Hashable, int] = {}
    bucket_bytes: dict[Hashable, float] = defaultdict(float)
    buckets: list[Bucket] = []
    bucket_of: dict[int | None, int] = {}  # by event
    fusable = _fusable(events, keys, leads)
    for index in sorted(fusable, key=when):
        event, position = events[index], fusable[index]
        if event.in_flight_bytes > size / 2:
            continue
        key = (keys[index], event.lane, event.ahead, position.depth, bucket_of.get(position.last))
        if key not in open_buckets or bucket_bytes[key] + event.in_flight_bytes > size:
            open_buckets[key], bucket_bytes[key] = len(buckets), 0.0
            buckets.append([])
        bucket_of[index] = open_buckets[key]
        buckets[open_buckets[key]].append(index)
        bucket_bytes[key] += event.in_flight_bytes
    return [members for members in buckets if len(members) > 1]


class _Position(NamedTuple):
    """The number of collectives that may be fused and precede an event one after another, and the
    last of them, where there is a single one.
    """

    depth: int = 0
    last: int | None = None


def _fusable(
    events: Sequence[Event], keys: Sequence[Hashable], leads: Sequence[bool]
) -> dict[int, _Position]:
    """Return the collectives that may be fused, with what precedes each: no matmul depends on their
    results, or they depend on stored tensors only.
    """
    fusable: dict[int, _Position] = {}
    positions: list[_Position] = []
    for index, event in enumerate(events):
        operands = {positions[i] for i in event.after if event.ahead or not leads[i]}
        depth = max((position.depth for position in operands), default=0)
        predecessors = {position.last for position in operands if position.depth == depth}
        own_position = _Position(depth, predecessors.pop() if len(predecessors) == 1 else None)
        is_late_sum = event.phase == "backward" and not leads[index]
        if keys[index] is not None and (event.ahead or is_late_sum):
            fusable[index], own_position = own_position, _Position(depth + 1, index)
        positions.append(own_position)
    return fusable


def fuse_buckets(
    events: Sequence[Event], buckets: Sequence[Bucket], event_of: Callable[[Bucket], Event]
) -> tuple[Event, ...] | None:
    """Return the events with each bucket as one event, which `event_of` makes except for what it
    depends on. Sums stand where the last of the bucket stood, gathers where the first did. None
    where two buckets wait for one another: each has a member that depends on a member of the other.
    """
    leaders = {i: i for i in range(len(events))}  # by event, the one in whose place it runs
    for members in buckets:
        leader = min(members) if events[members[0]].ahead else max(members)
        leaders.update(dict.fromkeys(members, leader))
    fused = {leaders[members[0]]: event_of(members) for members in buckets}
    needs: dict[int, dict[int, None]] = {leader: {} for leader in sorted(set(leaders.values()))}
    for index, event in enumerate(events):
        needs[leaders[index]].update(dict.fromkeys(leaders[i] for i in event.after))
    order = _topological_order(
        needs, {leader: fused.get(leader, events[leader]).ahead for leader in needs}
    )
    if len(order) < len(needs):
        return None
    places = {leader: place for place, leader in enumerate(order)}
    return tuple(
        fused.get(leader, events[leader])._replace(
            after=tuple(sorted(places[i] for i in needs[leader]))
        )
        for leader in order
    )


def _topological_order(needs: dict[int, dict[int, None]], ahead: dict[int, bool]) -> list[int]:
    """Return a topological order that otherwise follows the numbers. What is fetched ahead stands
    no later than just before what needs it. Events that wait for one another in a cycle are left
    out, and those that need them.
    """
    place = {event: event for event in needs}
    fetched = [event for event in needs if ahead[event]]
    while fetched:
        event = fetched.pop()
        needed_late = [other for other in needs[event] if place[other] > place[event]]
        place.update(dict.fromkeys(needed_late, place[event]))
        fetched += needed_late
    users: dict[int, list[int]] = defaultdict(list)
    for event, before in needs.items():
        for other in before:
            users[other].append(event)
    missing = {event: len(before) for event, before in needs.items()}
    waiting = [(place[event], event) for event, count in missing.items() if not count]
    heapq.heapify(waiting)
    order = []
    while waiting:
        _, event = heapq.heappop(waiting)
        order.append(event)
        for user in users[event]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(waiting, (place[user], user))
    return order
