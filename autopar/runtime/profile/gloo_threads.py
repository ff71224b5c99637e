"""When the transport worked on the collectives of a profiled step, and for how long of that on the
wire: what is left where no rank waits for another one.

gloo's threads say when they begin and end a collective, by kind and size alone.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from autopar.ir.mesh import group_ranks

_GLOO = "gloo:"
_THREADS = (1, 2)  # that work for one group


class Issued(NamedTuple):
    """A collective of a step: its kind, the name of its group, how many `numbers` it takes; when it
    was issued, and when something had waited for it, in microseconds of the profile.
    """

    kind: str
    group: str
    numbers: int
    since: float
    until: float

    def fits(self, event: Any) -> bool:
        """Whether an event of the transport may be this one."""
        when = event.time_range
        alike = event.name == _GLOO + self.kind and _numbers(event) == self.numbers
        return alike and self.since <= when.start and when.end <= self.until


def ran(issued: Sequence[Issued], events: Sequence[Any], begin: float) -> list[tuple[float, float]]:
    """From when to when each one ran, of a step that began at `begin`: one after the other in its
    group, whose first that was issued counts as the one that runs. Issued to waited for where the
    transport says nothing.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for place, one in enumerate(issued):
        groups[one.group].append(place)
    carried = _carried(list(groups.values()), _threads(events, begin), issued)
    found, until = [], defaultdict[str, float](float)  # the end of what runs in a group
    for place, one in enumerate(issued):
        start, end = one.since, one.until
        if place in carried:
            when = carried[place].time_range
            start, end = when.start, when.end
        start = min(end, max(start, until[one.group]))
        until[one.group] = max(until[one.group], end)
        found.append((start, end))
    return found


def _threads(events: Sequence[Any], begin: float) -> list[list[Any]]:
    """The transport's own events in the step, of each of its threads in order."""
    found: dict[int, list[Any]] = defaultdict(list)
    for event in sorted(events, key=lambda e: e.time_range.start):
        if event.name.startswith(_GLOO) and event.time_range.start >= begin:
            found[event.thread].append(event)
    return list(found.values())


def _carried(
    groups: list[list[int]], threads: list[list[Any]], issued: Sequence[Issued]
) -> dict[int, Any]:
    """The event of each collective. A thread works for one group, and a group's threads take its
    collectives in the order of issue: of equal ones nothing else tells which is which.
    """
    if not groups:
        return {}
    own, *rest = groups
    best: dict[int, Any] = {}
    for mine in _some(len(threads)):
        found = _merged([(n, issued[n]) for n in own], [threads[i] for i in mine])
        if found is not None:
            left = [thread for i, thread in enumerate(threads) if i not in mine]
            best = max(best, found | _carried(rest, left, issued), key=len)
        if len(best) == sum(map(len, groups)):
            return best
    return best or _carried(rest, threads, issued)


def _some(threads: int) -> Iterator[tuple[int, ...]]:
    for count in _THREADS:
        yield from itertools.combinations(range(threads), count)


def _merged(own: list[tuple[int, Issued]], threads: list[list[Any]]) -> dict[int, Any] | None:
    """The collectives of a group on these threads; None where they are not the same ones."""
    if sum(map(len, threads)) != len(own):
        return None
    left, found = [list(reversed(thread)) for thread in threads], {}
    for place, one in own:
        able = [thread for thread in left if thread and one.fits(thread[-1])]
        if not able:
            return None
        found[place] = min(able, key=lambda thread: thread[-1].time_range.start).pop()
    return found


def _numbers(event: Any) -> int:
    """How many numbers an event of the transport took."""
    return sum(torch.Size(shape).numel() for shape in event.input_shapes)


# -- on the wire -----------------------------------------------------------------------------------
Lasted = Mapping[str, Sequence[float]]  # how long the collectives of each group ran, in their order


def lasted(issued: Sequence[Issued], when: Sequence[tuple[float, float]]) -> Lasted:
    """Of one rank: what the others need to know."""
    found: dict[str, list[float]] = defaultdict(list)
    for one, (start, end) in zip(issued, when, strict=True):
        found[one.group].append(end - start)
    return dict(found)


def on_the_wire(issued: Sequence[Issued], rank: int, everywhere: Sequence[Lasted]) -> list[float]:
    """How long each collective of this rank was on the wire: the least that it took on a rank of
    its group, which is the one that came last and so waited for none. `everywhere`: `lasted` of all
    ranks. No clocks are compared.
    """
    least = {
        group: [min(times) for times in zip(*(everywhere[r][group] for r in members), strict=True)]
        for group, members in ((g, group_ranks(g, rank)) for g in everywhere[rank])
    }
    left = {group: iter(times) for group, times in least.items()}
    return [next(left[one.group]) for one in issued]
