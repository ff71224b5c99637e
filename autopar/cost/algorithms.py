"""The ways to run a collective over a group, each seconds = start + per byte · bytes of the whole,
with bends where calibration found some.

On a group of p ranks, with B the bytes of the whole value on its axes (Thakur, Rabenseifner, Gropp
2005): a ring passes (p-1)/p·B over every edge in an all-gather or a reduce-scatter, twice that in
an all-reduce, in p-1 or 2(p-1) hops; a double binary tree (Sanders, Speck, Träff 2009) sums 2·B in
twice its depth; an exchange sends B/p² to everyone in an all-to-all. Two levels: scatter inside,
the same collective across on B/inside, gather inside; each of the three again in its best way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.cost.network import Pattern, halves, load, size
from autopar.world import Device, Measured, World


class Algorithm(NamedTuple):
    """One algorithm: "ring", "tree", "exchange", "measured" (whatever the backend does, as
    calibration found it) or "two-level" with so many ranks `inside`, then inside what is left
    across, and so on (else ()); seconds that it takes for nothing, and per byte of the whole value.
    `bends`: (bytes, how much more a byte takes from there on). `takes_s`, `slows`: of one level,
    seconds of computing that are lost to starting it, and in each second beside it from then on.
    """

    algorithm: str
    inside: tuple[int, ...]
    start_s: float
    s_per_byte: float
    bends: tuple[tuple[float, float], ...] = ()
    takes_s: float = 0.0
    slows: float = 0.0

    def seconds(self, whole_bytes: float) -> float:
        found = self.start_s + self.s_per_byte * whole_bytes
        for at, more in self.bends:
            if whole_bytes > at:
                found += more * (whole_bytes - at)
        return found

    def all_seconds(self, whole_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """`seconds`, elementwise."""
        found = self.start_s + self.s_per_byte * whole_bytes
        for at, more in self.bends:
            found += more * np.maximum(whole_bytes - at, 0.0)
        return found

    def after(self, other: Algorithm) -> Algorithm:
        """Both, one after the other, on values of as many bytes; named as this one."""
        return self._replace(
            start_s=self.start_s + other.start_s,
            s_per_byte=self.s_per_byte + other.s_per_byte,
            bends=self.bends + other.bends,
        )

    def on_part(self, ranks: int) -> Algorithm:
        """This on one of so many equal parts of the whole value."""
        bends = tuple((at * ranks, more / ranks) for at, more in self.bends)
        return self._replace(s_per_byte=self.s_per_byte / ranks, bends=bends)


FREE = Algorithm("ring", (), 0.0, 0.0)


@lru_cache(maxsize=1 << 16)
def algorithms(world: World, kind: str, digits: Pattern) -> tuple[Algorithm, ...]:
    """The ways that are the fastest for some size, from the one for the smallest on."""
    return _best([*flat_algorithms(world, kind, digits), *_two_level(world, kind, digits)])


def in_step(world: World, found: tuple[Algorithm, ...]) -> tuple[Algorithm, ...]:
    """The ways as a step pays them, whose ranks compute between collectives."""
    if not world.meeting_s or found == (FREE,):
        return found
    return tuple(way._replace(start_s=way.start_s + world.meeting_s) for way in found)


def formula(world: World, kind: str, digits: Pattern) -> Algorithm:
    """The first one-level way by formula, measured or not: levels and factors are fitted to it."""
    name, start, rate = next(_flat(world, kind, digits))
    factor = world.factor(kind)
    return Algorithm(name, (), factor * (world.launch_s + start), factor * rate)


@lru_cache(maxsize=1 << 16)
def flat_algorithms(world: World, kind: str, digits: Pattern) -> tuple[Algorithm, ...]:
    """Those in one level."""
    if not digits:
        return (FREE,)
    known = world.found(kind, digits)
    if known is not None:
        return (_measured(known),)
    factor = world.factor(kind)
    return _best(
        Algorithm(name, (), factor * (world.launch_s + start), factor * rate)
        for name, start, rate in _flat(world, kind, digits)
    )


def _measured(one: Measured) -> Algorithm:
    return Algorithm("measured", (), one.start_s, one.s_per_byte, one.bends, one.takes_s, one.slows)


def _flat(world: World, kind: str, digits: Pattern) -> Iterator[tuple[str, float, float]]:
    """(algorithm, seconds of latency, seconds per byte)."""
    ranks, on = size(digits), load(world, digits)
    part = (ranks - 1) / ranks
    around, passed = part * on.ring_hops, part * on.ring
    gloo = world.backend == "gloo"
    match kind:
        case "all_reduce":
            yield "ring", 2 * around, 2 * passed
            if not gloo:  # it has rings only
                yield "tree", 2 * on.tree_hops, 2 * on.ring
        case "reduce_scatter" if gloo:  # an all-to-all and a local sum of the parts: see wire.py
            summing = summing_s_per_byte(ranks, world.device)
            yield "exchange", on.exchange_hops, on.exchange / ranks + summing
        case "all_gather" | "reduce_scatter":
            yield "ring", around, passed
        case "all_to_all":
            yield "exchange", on.exchange_hops, on.exchange / ranks**2
        case "broadcast" | "reduce":  # one of B/p from or to each rank in turn
            yield "tree", ranks * on.tree_hops + (ranks - 1) * world.launch_s, passed
        case _:
            raise AssertionError(kind)


def summing_s_per_byte(ranks: int, device: Device) -> float:
    """Of adding up a value from its parts of so many ranks, per byte of all of them."""
    return (ranks + 1) / ranks / device.memory_bytes_per_s


class Stage(NamedTuple):
    """What a collective in several levels runs over one of them, on one of so many equal parts of
    the whole value.
    """

    kind: str
    digits: Pattern
    parts: int


@lru_cache(maxsize=1 << 12)
def stages(kind: str, digits: Pattern, inside: tuple[int, ...]) -> tuple[Stage, ...]:
    """What runs one after the other where a collective goes in these levels (`Way.inside`).

    >>> [stage.kind for stage in stages("all_reduce", ((4, 1),), (2,))]
    ['reduce_scatter', 'all_reduce', 'all_gather']
    """
    if not inside:
        return (Stage(kind, digits, 1),)
    within, across = next(both for both in halves(digits) if size(both[0]) == inside[0])
    rest = stages(kind, across, inside[1:])
    late = [stage._replace(parts=stage.parts * inside[0]) for stage in rest]
    before, after = ([Stage(one, within, 1)] if one else [] for one in _WITHIN[kind])
    return (*before, *late, *after)


# What a collective in several levels runs within, before and after what goes across.
_WITHIN = {
    "all_reduce": ("reduce_scatter", "all_gather"),
    "reduce_scatter": ("reduce_scatter", ""),
    "all_gather": ("", "all_gather"),
}


def _two_level(world: World, kind: str, digits: Pattern) -> Iterator[Algorithm]:
    for inside, across in halves(digits) if kind in _WITHIN else ():
        ranks = size(inside)
        for way in algorithms(world, kind, across):  # what goes across is the part that a rank has
            made = [Algorithm("two-level", (ranks, *way.inside), *way.on_part(ranks)[2:])]
            for stage in filter(None, _WITHIN[kind]):
                once = flat_algorithms(world, stage, inside)
                made = [found.after(w) for found in made for w in once]
            yield from made


def _best(candidates: Iterable[Algorithm]) -> tuple[Algorithm, ...]:
    """The lower envelope; of equal ones the first, which is the simplest."""
    kept: list[Algorithm] = []
    for way in candidates:
        if not any(_beats(other, way) for other in kept):
            kept = [other for other in kept if not _beats(way, other)] + [way]
    kept.sort(key=lambda way: way.start_s)
    if any(way.bends for way in kept):
        return tuple(kept)
    hull: list[Algorithm] = []
    for way in kept:
        while len(hull) > 1 and _overtakes(hull[-2], way) <= _overtakes(hull[-2], hull[-1]):
            hull.pop()
        hull.append(way)
    return tuple(hull)


def _beats(one: Algorithm, other: Algorithm) -> bool:
    """As fast or faster at every size, but for rounding."""
    sizes = (0.0, *(at for at, _ in (*one.bends, *other.bends)))
    mine, theirs = (w.s_per_byte + sum(more for _, more in w.bends) for w in (one, other))
    return mine <= theirs * (1 + 1e-9) and all(
        one.seconds(size) <= other.seconds(size) * (1 + 1e-9) for size in sizes
    )


def _overtakes(early: Algorithm, late: Algorithm) -> float:
    """Bytes from which on the one that starts slower is the faster."""
    gain = early.s_per_byte - late.s_per_byte
    return (late.start_s - early.start_s) / gain if gain > 0 else math.inf
