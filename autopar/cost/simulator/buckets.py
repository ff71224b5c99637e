"""Small collectives of one kind, group and element type that go as one: which of a step's, in what
order, up to what size. Of a modelled step here (timeline.py), of the graphs that run in
passes/overlap/bucket.py.

Joined are sums of gradients, on which no product hangs any more, and gathers of what is stored; in
the order in which they are ready or needed. Collectives in several levels are joined in each as in
the one before, so that a bucket stays as it is from the first level to the last.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from autopar.cost.simulator.engine import Run
from autopar.cost.simulator.links import Event

SIZES = (1 << 18, 1 << 20, 1 << 22, 1 << 23, 1 << 25)  # bytes of a bucket that are tried

Bucket = list[int]  # events, in the order in which they are ready or needed


def leading(events: Sequence[Event], products: Sequence[bool]) -> list[bool]:
    """Of every event, whether a product hangs on it further on."""
    found = [False] * len(events)
    for index in range(len(events) - 1, -1, -1):
        below = found[index] or products[index]
        for needed in events[index].after:
            found[needed] |= below
    return found


def together(
    events: Sequence[Event], keys: Sequence[Hashable], leads: Sequence[bool], run: Run, size: int
) -> list[Bucket]:
    """What goes as one, up to `size` bytes each. `keys`: of every event what it shares with those
    that it may be joined with, None for what stays alone; `run`: the simulation of them apart.
    """
    users = [float("inf")] * len(events)
    for index, event in enumerate(events):
        for needed in event.after:
            users[needed] = min(users[needed], run.start[index])

    def when(index: int) -> tuple[float, int]:
        ready = max((run.end[i] for i in events[index].after), default=0.0)
        return (users[index] if events[index].ahead else ready), index

    open_: dict[Hashable, int] = {}
    held: dict[Hashable, float] = defaultdict(float)
    found: list[Bucket] = []
    bucket: dict[int | None, int] = {}  # of each
    able = _able(events, keys, leads)
    for index in sorted(able, key=when):
        event, behind = events[index], able[index]
        if event.held_bytes > size / 2:
            continue
        key = (keys[index], event.lane, event.ahead, behind.depth, bucket.get(behind.last))
        if key not in open_ or held[key] + event.held_bytes > size:
            open_[key], held[key] = len(found), 0.0
            found.append([])
        bucket[index] = open_[key]
        found[open_[key]].append(index)
        held[key] += event.held_bytes
    return [members for members in found if len(members) > 1]


class _Behind(NamedTuple):
    """Of an event: how many collectives that may be joined stand behind one another before it, and
    the last of them, where there is one.
    """

    depth: int = 0
    last: int | None = None


def _able(
    events: Sequence[Event], keys: Sequence[Hashable], leads: Sequence[bool]
) -> dict[int, _Behind]:
    """The collectives that may be joined: on their results no product hangs, or they hang on
    nothing but what is stored.
    """
    found: dict[int, _Behind] = {}
    before: list[_Behind] = []
    for index, event in enumerate(events):
        needed = {before[i] for i in event.after if event.ahead or not leads[i]}
        depth = max((one.depth for one in needed), default=0)
        last = {one.last for one in needed if one.depth == depth}
        behind = _Behind(depth, last.pop() if len(last) == 1 else None)
        late = event.phase == "backward" and not leads[index]
        if keys[index] is not None and (event.ahead or late):
            found[index], behind = behind, _Behind(depth + 1, index)
        before.append(behind)
    return found


def joined(
    events: Sequence[Event], found: Sequence[Bucket], made: Callable[[Bucket], Event]
) -> tuple[Event, ...] | None:
    """The events with each bucket as one, which `made` makes but for what it hangs on. Sums stand
    where the last of them stood, gathers where the first did. None where buckets wait for one
    another: each has a member that hangs on one of the other's.
    """
    ones = {i: i for i in range(len(events))}  # by event, the one that it goes with
    for members in found:
        one = min(members) if events[members[0]].ahead else max(members)
        ones.update(dict.fromkeys(members, one))
    new = {ones[members[0]]: made(members) for members in found}
    needs: dict[int, dict[int, None]] = {one: {} for one in sorted(set(ones.values()))}
    for index, event in enumerate(events):
        needs[ones[index]].update(dict.fromkeys(ones[i] for i in event.after))
    order = _ordered(needs, {one: new.get(one, events[one]).ahead for one in needs})
    if len(order) < len(needs):
        return None
    places = {one: place for place, one in enumerate(order)}
    return tuple(
        new.get(one, events[one])._replace(after=tuple(sorted(places[i] for i in needs[one])))
        for one in order
    )


def _ordered(needs: dict[int, dict[int, None]], ahead: dict[int, bool]) -> list[int]:
    """Each behind what it needs, else in the order of the numbers; what is fetched ahead no later
    than before what needs it. Without those that wait for one another, and what waits for these.
    """
    place = {one: one for one in needs}
    early = [one for one in needs if ahead[one]]
    while early:
        one = early.pop()
        late = [other for other in needs[one] if place[other] > place[one]]
        place.update(dict.fromkeys(late, place[one]))
        early += late
    users: dict[int, list[int]] = defaultdict(list)
    for one, before in needs.items():
        for other in before:
            users[other].append(one)
    missing = {one: len(before) for one, before in needs.items()}
    waiting = [(place[one], one) for one, count in missing.items() if not count]
    heapq.heapify(waiting)
    found = []
    while waiting:
        _, one = heapq.heappop(waiting)
        found.append(one)
        for user in users[one]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(waiting, (place[user], user))
    return found
