"""Calibration: measure what runs, in rounds over all cases so that drift meets them alike, until
the time is used up; medians, since a step pays what is usual; a world that plans use from then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from .. import ranks
from ..errors import WorldError
from ..world import KINDS, Measured, World
from . import measure
from .fit import efficiencies, fitted, line, rising
from .measure import Case, Product
from .pattern import Pattern, size

Progress = Callable[[float, str], None]  # share that is done, what is being done

# Bytes of the whole value; four times the one before, as what lies between is read off a line.
CPU_SIZES = tuple(2**power for power in (8, 12, 14, 16, 18, 20, 22, 24))
GPU_SIZES = tuple(2**power for power in (10, 14, 16, 18, 20, 22, 24, 26, 28))
CPU_SQUARES = (16, 32, 64, 128, 256, 512, 1024)
GPU_SQUARES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CPU_MEMORY, GPU_MEMORY = 3 * 2**24, 3 * 2**28  # bytes that the test of the bandwidth touches
LONGEST_S = 1.0  # a product that is modelled to take longer is left out
_ON_COLLECTIVES = 0.75  # of the time
_ALONE = 3  # what plans do not run is measured in every so manieth round


@dataclass(frozen=True)
class Times:
    """What was measured: seconds of each case and product, and in how many rounds."""

    seconds: dict[Case | Product, float]
    rounds: int


def patterns(count: int) -> list[Pattern]:
    """Every (size, stride) that a world of so many ranks can form.

    >>> patterns(4)
    [((2, 1),), ((4, 1),), ((2, 2),)]
    """
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    return [
        ((inner, stride),)
        for stride in divisors
        for inner in divisors
        if inner > 1 and count % (inner * stride) == 0
    ]


def cases(count: int, sizes: Sequence[int]) -> list[Case]:
    """Every collective over every pattern at every size: with all groups at once, and alone where
    there are several.
    """
    return [
        Case(kind, digits, together, whole)
        for together in (True, False)
        for digits in patterns(count)
        if together or size(digits) < count
        for kind in KINDS
        for whole in sizes
    ]


def calibrate(
    world: World,
    products: Sequence[Product] = (),
    seconds: float = 120.0,
    progress: Progress = lambda share, doing: None,
) -> World:
    """This world with what was measured on the running ranks in about so many seconds. Collective.

    `products`: those of a model on one rank; squares are measured in any case. Every rank computes
    at the same time, as in a step. Raises WorldError where the ranks that run are not the world's.
    """
    if ranks.running() != world.ranks:
        raise WorldError(
            f"the world has {world.ranks} ranks, {ranks.running()} are running: start as many "
            "with torchrun"
        )
    gpu = world.backend == "nccl" or torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    progress(0.0, "memory and launches")
    memory = measure.memory_bytes_per_s(GPU_MEMORY if gpu else CPU_MEMORY, device)
    world = replace(
        world,
        device=replace(world.device, memory_bytes_per_s=memory, launch_s=measure.launch_s(device)),
    )
    split = _ON_COLLECTIVES if world.ranks > 1 else 0.0
    everything = dict.fromkeys((*squares(gpu), *products))
    shapes = [p for p in everything if _bearable(p, world)]
    left = len(everything) - len(shapes)
    note = f" ({left} left out: over {LONGEST_S:g} s or a quarter of the memory)" if left else ""
    found = timed_products(
        shapes, device, seconds * (1 - split), lambda s, d: progress(s * (1 - split), d + note)
    )
    world = with_products(world, found)
    if world.ranks == 1:
        return world
    wanted = cases(world.ranks, GPU_SIZES if gpu else CPU_SIZES)
    times = timed_collectives(
        wanted, device, seconds * split, lambda s, d: progress(1 - split + s * split, d)
    )
    return fitted(world, lines(times))


def squares(gpu: bool) -> list[Product]:
    """Products of square matrices, from those that are launched to those that are computed."""
    dtypes = (torch.bfloat16, torch.float32) if gpu else (torch.float32,)
    return [Product(d, n, n, n) for d in dtypes for n in (GPU_SQUARES if gpu else CPU_SQUARES)]


def _bearable(shape: Product, world: World) -> bool:
    """It fits and it ends: the same answer on all ranks."""
    long = shape.flops / world.device.rate(shape.dtype) > LONGEST_S
    return not long and shape.moved_bytes < world.device.memory_bytes / 4


# -- measuring -------------------------------------------------------------------------------------
def timed_collectives(
    wanted: Sequence[Case], device: torch.device, seconds: float, progress: Progress
) -> Times:
    """Seconds of each case: the slowest rank's, as a step waits for it."""
    own = ranks.rank()
    numbers = torch.ones(max(measure.actual_bytes(case) for case in wanted) // 4, device=device)
    with measure.groups(list(dict.fromkeys(case.pattern for case in wanted))) as names:
        works = [measure.collective(case, names[case.pattern], numbers) for case in wanted]
        joins = [case.together or _with_first(case.pattern, own) for case in wanted]
        times = [measure.times_for(work, device, joins[index]) for index, work in enumerate(works)]

        def once(index: int) -> float:
            measure.barrier()
            if not joins[index]:
                return 0.0
            return measure.seconds(works[index], times[index], device)

        every = [1 if case.together else _ALONE for case in wanted]
        rows = _rounds(every, once, seconds, lambda s: progress(s, "collectives"))
    slowest = np.max(ranks.all_of(rows), axis=0)
    return _medians(wanted, slowest)


def _with_first(digits: Pattern, rank: int) -> bool:
    """Whether a rank is in the group of rank 0."""
    rest = rank
    for count, stride in digits:
        rest -= rank // stride % count * stride
    return rest == 0


def timed_products(
    wanted: Sequence[Product], device: torch.device, seconds: float, progress: Progress
) -> Times:
    """Seconds of each product, over rounds and ranks, all ranks at work at once."""
    works = [measure.product(shape, device) for shape in wanted]
    times = [measure.times_for(work, device) for work in works]

    def once(index: int) -> float:
        measure.barrier()
        return measure.seconds(works[index], times[index], device)

    rows = _rounds([1] * len(wanted), once, seconds, lambda s: progress(s, "products"))
    return _medians(wanted, np.concatenate(ranks.all_of(rows)))


def _rounds(
    every: Sequence[int],
    once: Callable[[int], float],
    seconds: float,
    progress: Callable[[float], None],
) -> np.ndarray:
    """Rounds over all cases, each in another order, as many as the time allows and at least one;
    rank 0 decides. `every`: a case takes part in the first of so many rounds. One row a round, NaN
    where a case took no part.
    """
    count = len(every)
    rows: list[np.ndarray] = []
    start, more, shown = time.perf_counter(), True, 0.0
    while more:
        order = np.random.default_rng(len(rows)).permutation(count)  # the same on every rank
        row = np.full(count, np.nan)
        for done, index in enumerate(order.tolist()):
            if len(rows) % every[index] == 0:
                row[index] = once(index)
            used = (time.perf_counter() - start) / seconds
            shown = min(1.0, max(shown, used, (done + 1) / count if not rows else 0.0))
            progress(shown)
        rows.append(row)
        taken = time.perf_counter() - start
        more = ranks.from_rank_0(taken * (1 + 1 / len(rows)) < seconds)
    return np.stack(rows)


def _medians(wanted: Sequence[Case | Product], rows: np.ndarray) -> Times:
    found = np.nanmedian(rows, axis=0).tolist()
    return Times(dict(zip(wanted, found, strict=True)), len(rows))


# -- what follows from it --------------------------------------------------------------------------
def lines(times: Times) -> list[Measured]:
    """The times of each collective over each pattern, in the order of sizes, and a line through
    them.
    """
    series: dict[tuple[str, Pattern, bool], list[tuple[int, float]]] = {}
    for case, seconds in times.seconds.items():
        assert isinstance(case, Case)
        key = case.kind, case.pattern, case.together
        series.setdefault(key, []).append((measure.actual_bytes(case), seconds))
    found = []
    for (kind, digits, together), points in series.items():
        points.sort()
        sizes, took = [size for size, _ in points], [took for _, took in points]
        start, rate = line(sizes, took)
        bent = tuple(zip(map(float, sizes), rising(took), strict=True))
        found.append(Measured(kind, digits, size(digits), start, rate, together, bent))
    return found


def with_products(world: World, times: Times) -> World:
    """The world with the rates and efficiencies of the products that were measured."""
    device = world.device
    rates, shares = dict(device.flop_per_s), dict(device.efficiency)
    by_dtype: dict[str, list[tuple[float, float]]] = {}
    for shape, seconds in times.seconds.items():
        assert isinstance(shape, Product)
        name = str(shape.dtype).removeprefix("torch.")
        by_dtype.setdefault(name, []).append((shape.flops, seconds))
    for name, points in by_dtype.items():
        rates[name], shares[name] = efficiencies(points, device.launch_s)
    return replace(world, device=replace(device, flop_per_s=rates, efficiency=shares))


def local_products(
    products: Sequence[tuple[torch.dtype, int, int, int]], count: int
) -> list[Product]:
    """The products that a rank may get of a model's whole ones, (dtype, m, n, k): each split over
    all the ranks in every way that comes out even.
    """
    found: dict[Product, None] = {}
    for dtype, m, n, k in products:
        for rows, columns, inner in _factored(count):
            if m % rows == n % columns == k % inner == 0:
                found[Product(dtype, m // rows, n // columns, k // inner)] = None
    return list(found)


def _factored(count: int) -> list[tuple[int, int, int]]:
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    return [(a, b, count // (a * b)) for a in divisors for b in divisors if count % (a * b) == 0]
