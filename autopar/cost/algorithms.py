"""Algorithms that a collective can run in over a group, with the seconds of each: start + seconds
per byte · bytes of the unsharded value, with bends where calibration found some.

A kind of collective and a pattern of groups enter `algorithms`, the fastest algorithms by size
leave. cost/communication.py prices collectives with them; calibration fits to them.

On a group of p ranks, with B the bytes of the unsharded value on its axes (Thakur, Rabenseifner,
Gropp 2005): a ring passes (p-1)/p·B over every edge in an all-gather or a reduce-scatter, twice
that in an all-reduce, in p-1 or 2(p-1) hops; a double binary tree (Sanders, Speck, Träff 2009) sums
2·B in twice its depth; an exchange sends B/p² to everyone in an all-to-all. A hierarchical
collective scatters inside, runs the same collective across on B/inside, and gathers inside; each of
the three in its own fastest algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.cost.contention import start_s
from autopar.cost.network import Pattern, halves, load, size
from autopar.world import Device, World


class Algorithm(NamedTuple):
    """One algorithm for a collective, and the seconds that it takes by the bytes of the unsharded
    value.

    `name`: "ring", "tree", "exchange", "measured" (whatever the backend does, as calibration
    found it) or "two-level" (hierarchical). `inside`: for a hierarchical one the ranks of the inner
    level, then those inside what is left across, and so on; else (). `start_s`: seconds for no
    bytes. `bends`: pairs (bytes, how many more seconds a byte takes from there on).
    """

    name: str
    inside: tuple[int, ...]
    start_s: float
    s_per_byte: float
    bends: tuple[tuple[float, float], ...] = ()

    def seconds(self, unsharded_bytes: float) -> float:
        """Return the seconds of a collective of so many bytes of the unsharded value."""
        total = self.start_s + self.s_per_byte * unsharded_bytes
        for bend_bytes, bend_s_per_byte in self.bends:
            if unsharded_bytes > bend_bytes:
                total += bend_s_per_byte * (unsharded_bytes - bend_bytes)
        return total

    def all_seconds(self, unsharded_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return `seconds` elementwise."""
        total = self.start_s + self.s_per_byte * unsharded_bytes
        for bend_bytes, bend_s_per_byte in self.bends:
            total += bend_s_per_byte * np.maximum(unsharded_bytes - bend_bytes, 0.0)
        return total

    def after(self, other: Algorithm) -> Algorithm:
        """Return both, one after the other, on values of as many bytes; named as this one."""
        return self._replace(
            start_s=self.start_s + other.start_s,
            s_per_byte=self.s_per_byte + other.s_per_byte,
            bends=self.bends + other.bends,
        )

    def on_share(self, ranks: int) -> Algorithm:
        """Return this algorithm on one of so many equal parts of the value."""
        bends = tuple(
            (bend_bytes * ranks, bend_s_per_byte / ranks)
            for bend_bytes, bend_s_per_byte in self.bends
        )
        return self._replace(s_per_byte=self.s_per_byte / ranks, bends=bends)


FREE = Algorithm("ring", (), 0.0, 0.0)


@lru_cache(maxsize=1 << 16)
def algorithms(world: World, kind: str, digits: Pattern) -> tuple[Algorithm, ...]:
    """Return the algorithms that are the fastest for some size, from the smallest size on."""
    return _best([*flat_algorithms(world, kind, digits), *_two_level(world, kind, digits)])


def formula(world: World, kind: str, digits: Pattern) -> Algorithm:
    """Return the first one-level algorithm by formula, measured or not: levels and factors are
    fitted to it.
    """
    name, start, rate = next(_flat_formulas(world, kind, digits))
    factor = world.factor(kind)
    return Algorithm(name, (), factor * (world.launch_s + start), factor * rate)


@lru_cache(maxsize=1 << 16)
def flat_algorithms(world: World, kind: str, digits: Pattern) -> tuple[Algorithm, ...]:
    """Return the algorithms in one level that are the fastest for some size, as a step pays for
    them; the measured one where calibration has one.
    """
    if not digits:
        return (FREE,)
    measured = world.timing(kind, digits)
    if measured is not None:
        start, rate = start_s(measured.start_s, world), measured.s_per_byte
        return (Algorithm("measured", (), start, rate, measured.bends),)
    factor = world.factor(kind)
    return _best(
        Algorithm(name, (), start_s(factor * (world.launch_s + start), world), factor * rate)
        for name, start, rate in _flat_formulas(world, kind, digits)
    )


def _flat_formulas(world: World, kind: str, digits: Pattern) -> Iterator[tuple[str, float, float]]:
    """Yield (algorithm, seconds of latency, seconds per byte) of the one-level formulas."""
    ranks, link_load = size(digits), load(world, digits)
    sent = (ranks - 1) / ranks
    ring_latency, ring_s_per_byte = sent * link_load.ring_hops, sent * link_load.ring
    gloo = world.backend == "gloo"
    match kind:
        case "all_reduce":
            yield "ring", 2 * ring_latency, 2 * ring_s_per_byte
            if not gloo:  # gloo has rings only
                yield "tree", 2 * link_load.tree_hops, 2 * link_load.ring
        case "reduce_scatter" if gloo:  # an all-to-all and a local sum: see ops/comm.py
            summing = summing_s_per_byte(ranks, world.device)
            yield "exchange", link_load.exchange_hops, link_load.exchange / ranks + summing
        case "all_gather" | "reduce_scatter":
            yield "ring", ring_latency, ring_s_per_byte
        case "all_to_all":
            yield "exchange", link_load.exchange_hops, link_load.exchange / ranks**2
        case "broadcast" | "reduce":  # p of them, of B/p each, from or to each rank in turn
            yield (
                "tree",
                ranks * link_load.tree_hops + (ranks - 1) * world.launch_s,
                ring_s_per_byte,
            )
        case _:
            raise AssertionError(kind)


def summing_s_per_byte(ranks: int, device: Device) -> float:
    """Return the seconds per byte of adding up a value from its parts of so many ranks, per byte of
    all parts.
    """
    return (ranks + 1) / ranks / device.memory_bytes_per_s


class Stage(NamedTuple):
    """One stage of a hierarchical collective: the kind that runs over one of its levels, on one of
    `parts` equal parts of the unsharded value.
    """

    kind: str
    digits: Pattern
    parts: int


@lru_cache(maxsize=1 << 12)
def stages(kind: str, digits: Pattern, inside: tuple[int, ...]) -> tuple[Stage, ...]:
    """Return what runs one after the other where a collective goes in these levels
    (`Algorithm.inside`).

    >>> [stage.kind for stage in stages("all_reduce", ((4, 1),), (2,))]
    ['reduce_scatter', 'all_reduce', 'all_gather']
    """
    if not inside:
        return (Stage(kind, digits, 1),)
    within, across = next(split for split in halves(digits) if size(split[0]) == inside[0])
    outer = stages(kind, across, inside[1:])
    scaled = [stage._replace(parts=stage.parts * inside[0]) for stage in outer]
    before, after = (
        [Stage(stage_kind, within, 1)] if stage_kind else [] for stage_kind in _WITHIN[kind]
    )
    return (*before, *scaled, *after)


# The kinds that a hierarchical collective runs inside, before and after the one across.
_WITHIN = {
    "all_reduce": ("reduce_scatter", "all_gather"),
    "reduce_scatter": ("reduce_scatter", ""),
    "all_gather": ("", "all_gather"),
}


def _two_level(world: World, kind: str, digits: Pattern) -> Iterator[Algorithm]:
    """Yield the hierarchical algorithms: each split of the groups, with each algorithm of its
    levels.
    """
    for inside, across in halves(digits) if kind in _WITHIN else ():
        ranks = size(inside)
        for outer in algorithms(world, kind, across):  # on the part that a rank has
            combined = [Algorithm("two-level", (ranks, *outer.inside), *outer.on_share(ranks)[2:])]
            for stage in filter(None, _WITHIN[kind]):
                flat = flat_algorithms(world, stage, inside)
                combined = [before.after(step) for before in combined for step in flat]
            yield from combined


def _best(candidates: Iterable[Algorithm]) -> tuple[Algorithm, ...]:
    """Return the lower envelope of the candidates; among equal ones the first, which is the
    simplest.
    """
    frontier: list[Algorithm] = []
    for candidate in candidates:
        if not any(_beats(other, candidate) for other in frontier):
            frontier = [other for other in frontier if not _beats(candidate, other)] + [candidate]
    frontier.sort(key=lambda candidate: candidate.start_s)
    if any(candidate.bends for candidate in frontier):
        return tuple(frontier)
    hull: list[Algorithm] = []
    for candidate in frontier:
        while len(hull) > 1 and _overtakes(hull[-2], candidate) <= _overtakes(hull[-2], hull[-1]):
            hull.pop()
        hull.append(candidate)
    return tuple(hull)


def _beats(candidate: Algorithm, other: Algorithm) -> bool:
    """Whether one algorithm is as fast as the other or faster at every size, up to rounding."""
    sizes = (0.0, *(at for at, _ in (*candidate.bends, *other.bends)))
    candidate_rate, other_rate = (
        algorithm.s_per_byte + sum(extra for _, extra in algorithm.bends)
        for algorithm in (candidate, other)
    )
    return candidate_rate <= other_rate * (1 + 1e-9) and all(
        candidate.seconds(size) <= other.seconds(size) * (1 + 1e-9) for size in sizes
    )


def _overtakes(early: Algorithm, late: Algorithm) -> float:
    """Return the bytes from which on the algorithm that starts later is the faster."""
    gain = early.s_per_byte - late.s_per_byte
    return (late.start_s - early.start_s) / gain if gain > 0 else math.inf
