"""Calibration: measure what runs, in rounds over all cases so that drift meets them alike, until
the time is used up; medians, since a step pays what is usual; a world that plans use from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from autopar.cost.algorithms import summing_s_per_byte
from autopar.cost.calibration import fit, measure
from autopar.cost.calibration.contention import measure_meeting_seconds, measure_slowing
from autopar.cost.calibration.fit import Attended, Attending, curve, efficiencies, fitted, six
from autopar.cost.calibration.measure import (
    Case,
    Matmul,
    Progress,
    after_warming,
    in_rounds,
    part,
    warmed,
)
from autopar.cost.network import Pattern, size
from autopar.errors import WorldError
from autopar.world import KINDS, Device, Form, Forms, Measured, World, ranks

# Bytes of the whole value; four times the one before, as what lies between is read off a line.
CPU_SIZES = tuple(2**power for power in (8, 12, 14, 16, 18, 20, 22, 24))
GPU_SIZES = tuple(2**power for power in (10, 14, 16, 18, 20, 22, 24, 26, 28))
CPU_SQUARES = (16, 32, 64, 128, 256, 512, 1024)
GPU_SQUARES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CPU_MEMORY, GPU_MEMORY = 3 * 2**24, 3 * 2**28  # bytes that the test of the bandwidth touches
LONGEST_S = 1.0  # a product that is modelled to take longer is left out
_ON_COLLECTIVES = 0.65  # of the time; of the rest half on products with attention, half on forms
_ON_MEETING, _ON_SLOWING = 0.08, 0.12  # of the time, among that on collectives
_COPIED = 0.75  # the quantile that counts with an operand copied
_MOST_VISITS, _VISITING_S = 12, 0.1  # of one case in one round; all of them together
_ALONE = 4  # what plans do not run is measured so many times less often


@dataclass(frozen=True)
class Times:
    """What was measured: seconds of each case and product, and from how many samples at least."""

    seconds: dict[Case | Matmul, float]
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


def cases(count: int, sizes: Sequence[int], kinds: Sequence[str] = KINDS) -> list[Case]:
    """Every collective over every pattern at every size: with all groups at once, and alone where
    there are several.
    """
    return [
        Case(kind, digits, together, whole)
        for together in (True, False)
        for digits in patterns(count)
        if together or size(digits) < count
        for kind in kinds
        for whole in sizes
    ]


def calibrate(
    world: World,
    products: Sequence[Matmul] = (),
    seconds: float = 120.0,
    progress: Progress = lambda share, doing: None,
    attended: Sequence[Attended] = (),
) -> World:
    """This world with what was measured on the running ranks in about so many seconds. Collective.

    `products`: those of a model on one rank, `attended`: its attention; others are measured in any
    case. Every rank computes at the same time, as in a step. Raises WorldError where the ranks that
    run are not the world's.
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
        device=replace(world.device, memory_bytes_per_s=memory, launch_s=measure.node_s(device)),
    )
    share = 1 - _ON_COLLECTIVES if world.ranks > 1 else 1.0
    grid = fit.wanted(attended, _dtypes(gpu), world.device, gpu)
    world = _computing(world, products, grid, device, seconds, share, progress)
    return world if world.ranks == 1 else _communicating(world, device, seconds, share, progress)


def _computing(
    world: World,
    products: Sequence[Matmul],
    attended: Sequence[Attending],
    device: torch.device,
    seconds: float,
    share: float,
    progress: Progress,
) -> World:
    """With what products and attention take, measured in this share of the time."""
    on_products = share / 2 if products else share
    everything = dict.fromkeys((*squares(device.type == "cuda"), *products))
    shapes = [p for p in everything if _bearable(p, world)]
    left = len(everything) - len(shapes)
    note = f" ({left} left out: over {LONGEST_S:g} s or a quarter of the memory)" if left else ""
    noted = part(progress, 0.0, on_products)
    found, each, others = time_computing(
        shapes,
        attended,
        device,
        seconds * on_products,
        lambda done, doing: noted(done, doing + note),
    )
    world = with_matmuls(world, found, measure.launch_s(device))
    reached = fit.shares(each, world.device)
    forms = time_kernel_choices(
        [p for p in shapes if p in set(products)],
        device,
        seconds * (share - on_products),
        part(progress, on_products, share - on_products),
    )
    known = replace(world.device, forms=forms, attention=reached, op_bytes_per_s=others)
    return replace(world, device=known)


def _communicating(
    world: World, device: torch.device, seconds: float, start: float, progress: Progress
) -> World:
    """With what collectives take. `start`: the share of the time that is over by then."""
    gloo = world.backend == "gloo"
    kinds = [kind for kind in KINDS if not (gloo and kind == "reduce_scatter")]
    wanted = cases(world.ranks, GPU_SIZES if device.type == "cuda" else CPU_SIZES, kinds)
    share = _ON_COLLECTIVES - _ON_MEETING - _ON_SLOWING
    times = time_collectives(wanted, device, seconds * share, part(progress, start, share))
    meeting = measure_meeting_seconds(
        patterns(world.ranks),
        device,
        seconds * _ON_MEETING,
        lambda done: part(progress, start + share, _ON_MEETING)(done, "meetings"),
    )
    found = lines(times)
    world = fitted(
        replace(world, meeting_s=meeting),
        [*found, *scatter_of_measures(found, world.device)] if gloo else found,
    )
    return measure_slowing(
        world,
        patterns(world.ranks),
        device,
        seconds * _ON_SLOWING,
        lambda done: part(progress, 1 - _ON_SLOWING, _ON_SLOWING)(done, "computing beside them"),
    )


def squares(gpu: bool) -> list[Matmul]:
    """Products of square matrices, from those that are launched to those that are computed."""
    sizes = GPU_SQUARES if gpu else CPU_SQUARES
    return [Matmul(d, n, n, n) for d in _dtypes(gpu) for n in sizes]


def _dtypes(gpu: bool) -> tuple[torch.dtype, ...]:
    return (torch.bfloat16, torch.float32) if gpu else (torch.float32,)


def _bearable(shape: Matmul, world: World) -> bool:
    """It fits and it ends: the same answer on all ranks."""
    long = shape.flops / world.device.rate(shape.dtype) > LONGEST_S
    return not long and shape.moved_bytes < world.device.memory_bytes / 4


# -- measuring -------------------------------------------------------------------------------------
def time_collectives(
    wanted: Sequence[Case], device: torch.device, seconds: float, progress: Progress
) -> Times:
    """Seconds of each case: the slowest rank's, as a step waits for it."""
    own = ranks.rank()
    numbers = torch.ones(max(measure.actual_bytes(case) for case in wanted) // 4, device=device)
    with measure.groups(list(dict.fromkeys(case.pattern for case in wanted))) as names:
        works = [measure.collective(case, names[case.pattern], numbers) for case in wanted]
        joins = [case.together or _with_first(case.pattern, own) for case in wanted]
        times, seconds = warmed(works, joins, device, seconds, progress, "collectives")

        def once(index: int) -> float:
            measure.barrier()
            if not joins[index]:
                return 0.0
            return measure.seconds(works[index], times[index].times, device)

        visits = [_visits(case, t) for case, t in zip(wanted, times, strict=True)]
        found = in_rounds(visits, once, seconds, after_warming(progress, "collectives"))
    return _medians(wanted, [np.max(s, axis=0) for s in zip(*ranks.all_of(found), strict=True)])


def _visits(case: Case, often: measure.Often) -> int:
    """In one round: many where a case is short and so easily disturbed, fewer where no plan runs
    it.
    """
    found = int(min(_MOST_VISITS, max(1, _VISITING_S // (often.times * often.took_s))))
    return found if case.together else max(1, found // _ALONE)


def _with_first(digits: Pattern, rank: int) -> bool:
    """Whether a rank is in the group of rank 0."""
    rest = rank
    for count, stride in digits:
        rest -= rank // stride % count * stride
    return rest == 0


def time_computing(
    wanted: Sequence[Matmul],
    attended: Sequence[Attending],
    device: torch.device,
    seconds: float,
    progress: Progress,
) -> tuple[Times, dict[Attending, float], float]:
    """Seconds of each product, seconds per FLOP of each attention, bytes/s of other ops: in the
    same rounds, as they are held against one another; over rounds and ranks, all at work at once.
    """
    others, moved = measure.other_ops(device)
    works = [*_products(wanted, device), others]
    count = len(works)
    often, seconds = warmed(works, [True] * count, device, seconds, progress, "products")

    def once(index: int) -> float:
        if index >= count:
            return fit.s_per_flop(attended[index - count], device)
        return measure.shared_seconds(works[index], often[index], device)

    visits = [1] * (count + len(attended))
    found = in_rounds(visits, once, seconds, after_warming(progress, "products"))
    samples = [np.concatenate(s) for s in zip(*ranks.all_of(found), strict=True)]
    *timed, of_others = samples[:count]
    each = {one: float(np.median(s)) for one, s in zip(attended, samples[count:], strict=True)}
    return _medians(wanted, timed), each, moved / float(np.median(of_others))


def time_kernel_choices(
    wanted: Sequence[Matmul], device: torch.device, seconds: float, progress: Progress
) -> tuple[Forms, ...]:
    """Each of these products as it comes and with either operand copied, over rounds and ranks. The
    lower quartile as it comes stands against the upper ones with a copy: noise is no gain.
    """
    if not wanted:
        return ()
    ways = [one._replace(copied=copied) for one in wanted for copied in measure.COPIES]
    works = _products(ways, device)
    doing = "forms of products"

    def once(index: int) -> float:
        return measure.working_seconds(works[index], device)

    found = in_rounds([1] * len(ways), once, seconds, lambda share: progress(share, doing))
    samples = [np.concatenate(s) for s in zip(*ranks.all_of(found), strict=True)]
    found_s = [
        float(np.quantile(s, _COPIED if way.copied else 1 - _COPIED))
        for way, s in zip(ways, samples, strict=True)
    ]
    return tuple(
        Forms(_name(one.dtype), one.m, one.n, one.k, one.form, *found_s[3 * place : 3 * place + 3])
        for place, one in enumerate(wanted)
    )


def _products(wanted: Sequence[Matmul], device: torch.device) -> list[Callable[[], torch.Tensor]]:
    """What runs each, on some of common numbers and into others."""
    numbers = {
        dtype: [measure.pool(count, device, dtype) for count in counts]
        for dtype, counts in _sizes(wanted).items()
    }
    return [measure.time_matmul(shape, *numbers[shape.dtype]) for shape in wanted]


def _sizes(wanted: Sequence[Matmul]) -> dict[torch.dtype, tuple[int, int, int]]:
    """By dtype, the numbers of the largest left and right operand and of the largest result."""
    found: dict[torch.dtype, tuple[int, int, int]] = {}
    for shape in wanted:
        left, right, result = found.get(shape.dtype, (0, 0, 0))
        found[shape.dtype] = (
            max(left, shape.m * shape.k),
            max(right, shape.k * shape.n),
            max(result, shape.m * shape.n),
        )
    return found


def _medians(
    wanted: Sequence[Case | Matmul], samples: Sequence[Sequence[float] | np.ndarray]
) -> Times:
    found = {one: float(np.median(s)) for one, s in zip(wanted, samples, strict=True)}
    return Times(found, min(len(s) for s in samples))


# -- what follows from it --------------------------------------------------------------------------
def lines(times: Times) -> list[Measured]:
    """A line with bends through the sizes of each collective over each pattern."""
    series: dict[tuple[str, Pattern, bool], list[tuple[int, float]]] = {}
    for case, seconds in times.seconds.items():
        assert isinstance(case, Case)
        key = case.kind, case.pattern, case.together
        series.setdefault(key, []).append((measure.actual_bytes(case), seconds))
    found = []
    for (kind, digits, together), points in series.items():
        start, rate, bends = curve(*zip(*sorted(points), strict=True))
        found.append(Measured(kind, digits, size(digits), start, rate, together, bends))
    return found


def scatter_of_measures(known: Sequence[Measured], device: Device) -> list[Measured]:
    """gloo's reduce-scatters: all-to-alls of what they take, and a local sum of what arrives (see
    wire.py).
    """
    return [
        replace(
            one,
            kind="reduce_scatter",
            s_per_byte=six(one.s_per_byte * one.ranks + summing_s_per_byte(one.ranks, device)),
            bends=tuple((at / one.ranks, six(more * one.ranks)) for at, more in one.bends),
        )
        for one in known
        if one.kind == "all_to_all"
    ]


def with_matmuls(world: World, times: Times, launch_s: float) -> World:
    """The world with the rates and efficiencies of the products that were measured, each with the
    seconds that launching it took.
    """
    device = world.device
    rates, shares = dict(device.flop_per_s), dict(device.efficiency)
    by_dtype: dict[str, list[tuple[float, float]]] = {}
    for shape, seconds in times.seconds.items():
        assert isinstance(shape, Matmul)
        by_dtype.setdefault(_name(shape.dtype), []).append((shape.flops, seconds))
    for name, points in by_dtype.items():
        rates[name], shares[name] = efficiencies(points, launch_s)
    return replace(world, device=replace(device, flop_per_s=rates, efficiency=shares))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def local_matmuls(
    products: Sequence[tuple[torch.dtype, int, int, int]], count: int
) -> list[Matmul]:
    """The products that a rank may get of a model's whole ones, (dtype, m, n, k): each split over
    all the ranks in every way that comes out even; forward, for the gradient of what comes in, and
    for that of the weight.
    """
    found: dict[Matmul, None] = {}
    sizes: tuple[int, int, int]
    form: Form
    for dtype, whole_m, whole_n, whole_k in products:
        for rows, columns, inner in _factored(count):
            if whole_m % rows == whole_n % columns == whole_k % inner == 0:
                m, n, k = whole_m // rows, whole_n // columns, whole_k // inner
                for sizes, form in (((m, n, k), "NT"), ((m, k, n), "NN"), ((n, k, m), "TN")):
                    found[Matmul(dtype, *sizes, form)] = None
    return list(found)


def _factored(count: int) -> list[tuple[int, int, int]]:
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    return [(a, b, count // (a * b)) for a in divisors for b in divisors if count % (a * b) == 0]
