"""The calibration of a machine: what `autopar calibrate` measures on its ranks, in which order, and
in which share of the seconds that it is given.

A world that fits the running ranks enters `calibrate`, the same world with measured numbers leaves;
plans use it from then on. runtime/calibrate_on_ranks.py calls it on every rank. First memory and
launches, then matmuls with attention, then kernel choices, then collectives, then contention
(contention.py); measure.py takes the times, fit.py makes the world's numbers of them.

Cases are measured in rounds over all of them, so that drift meets them alike, until the time is
used up. Medians count, since a step pays what is usual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from autopar.cost.algorithms import summing_s_per_byte
from autopar.cost.calibration import fit, measure
from autopar.cost.calibration.contention import measure_contention
from autopar.cost.calibration.fit import Attended, Attending, curve, efficiencies, fit_world, six
from autopar.cost.calibration.measure import (
    Case,
    Matmul,
    Progress,
    after_warming,
    in_rounds,
    warm_up,
    within,
)
from autopar.cost.network import Pattern, size
from autopar.errors import WorldError
from autopar.world import KINDS, Device, Form, KernelTimes, Measured, World, ranks

# Bytes of the unsharded value; each four times the one before, as a line gives what lies between.
CPU_SIZES = tuple(2**power for power in (8, 12, 14, 16, 18, 20, 22, 24))
GPU_SIZES = tuple(2**power for power in (10, 14, 16, 18, 20, 22, 24, 26, 28))
CPU_SQUARES = (16, 32, 64, 128, 256, 512, 1024)
GPU_SQUARES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CPU_MEMORY, GPU_MEMORY = 3 * 2**24, 3 * 2**28  # bytes that the test of the bandwidth touches
LONGEST_S = 1.0  # a matmul that is modelled to take longer is left out
_ON_COLLECTIVES = 0.65  # of the time; the rest: half matmuls with attention, half kernel choices
_ON_CONTENTION = 0.1  # of the time, among that for collectives
_COPIED = 0.75  # the quantile that counts with an operand copied
_MOST_VISITS, _VISITING_S = 12, 0.1  # measurements of one case in one round; seconds of them all
_ALONE = 4  # cases that plans do not run are measured so many times less often


@dataclass(frozen=True)
class Times:
    """The seconds of each measured case or matmul, and the least number of samples of one."""

    seconds: dict[Case | Matmul, float]
    rounds: int


def patterns(count: int) -> list[Pattern]:
    """Return every pattern (size, stride) that a world of so many ranks can form.

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
    """Return every collective over every pattern at every size: with all groups at once, and with
    one group alone where there are several.
    """
    return [
        Case(kind, digits, together, unsharded_bytes)
        for together in (True, False)
        for digits in patterns(count)
        if together or size(digits) < count
        for kind in kinds
        for unsharded_bytes in sizes
    ]


def calibrate(
    world: World,
    products: Sequence[Matmul] = (),
    seconds: float = 120.0,
    progress: Progress = lambda share, doing: None,
    attended: Sequence[Attended] = (),
) -> World:
    """Return this world with what its ranks measure in about so many seconds. Collective.
    `products`: the matmuls of a model on one rank, `attended`: its attention; others are measured
    in any case. Every rank computes at the same time, as in a step. Raises WorldError where the
    running ranks are not the world's.
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
    grid = fit.attention_cases(attended, _dtypes(gpu), world.device, gpu)
    world = _with_computing(world, products, grid, device, seconds, share, progress)
    return world if world.ranks == 1 else _with_collectives(world, device, seconds, share, progress)


def _with_computing(
    world: World,
    products: Sequence[Matmul],
    attended: Sequence[Attending],
    device: torch.device,
    seconds: float,
    share: float,
    progress: Progress,
) -> World:
    """Return the world with the times of matmuls and attention, in this share of the time."""
    on_products = share / 2 if products else share
    all_matmuls = dict.fromkeys((*squares(device.type == "cuda"), *products))
    shapes = [p for p in all_matmuls if _is_measurable(p, world)]
    left = len(all_matmuls) - len(shapes)
    note = f" ({left} left out: over {LONGEST_S:g} s or a quarter of the memory)" if left else ""
    report = within(progress, 0.0, on_products)
    times, attention_times, other_rate = time_computing(
        shapes,
        attended,
        device,
        seconds * on_products,
        lambda done, doing: report(done, doing + note),
    )
    world = with_matmuls(world, times, measure.launch_s(device))
    shares = fit.shares(attention_times, world.device)
    choices = time_kernel_choices(
        [p for p in shapes if p in set(products)],
        device,
        seconds * (share - on_products),
        within(progress, on_products, share - on_products),
    )
    timed = replace(world.device, forms=choices, attention=shares, op_bytes_per_s=other_rate)
    return replace(world, device=timed)


def _with_collectives(
    world: World, device: torch.device, seconds: float, start: float, progress: Progress
) -> World:
    """Return the world with the times of collectives. `start`: the share of the time that
    is over.
    """
    gloo = world.backend == "gloo"
    kinds = [kind for kind in KINDS if not (gloo and kind == "reduce_scatter")]
    all_cases = cases(world.ranks, GPU_SIZES if device.type == "cuda" else CPU_SIZES, kinds)
    share = _ON_COLLECTIVES - _ON_CONTENTION
    times = time_collectives(all_cases, device, seconds * share, within(progress, start, share))
    measured = lines(times)
    world = fit_world(
        world, [*measured, *scatter_of_measures(measured, world.device)] if gloo else measured
    )
    contention = measure_contention(
        patterns(world.ranks),
        device,
        seconds * _ON_CONTENTION,
        lambda done: within(progress, 1 - _ON_CONTENTION, _ON_CONTENTION)(done, "contention"),
    )
    return replace(world, contention=contention)


def squares(gpu: bool) -> list[Matmul]:
    """Return square matmuls, from those that the launch dominates to those that FLOPs do."""
    sizes = GPU_SQUARES if gpu else CPU_SQUARES
    return [Matmul(d, n, n, n) for d in _dtypes(gpu) for n in sizes]


def _dtypes(gpu: bool) -> tuple[torch.dtype, ...]:
    return (torch.bfloat16, torch.float32) if gpu else (torch.float32,)


def _is_measurable(shape: Matmul, world: World) -> bool:
    """Whether the matmul fits in memory and ends soon; the answer is the same on all ranks."""
    long = shape.flops / world.device.rate(shape.dtype) > LONGEST_S
    return not long and shape.moved_bytes < world.device.memory_bytes / 4


# -- measuring -------------------------------------------------------------------------------------
def time_collectives(
    wanted: Sequence[Case], device: torch.device, seconds: float, progress: Progress
) -> Times:
    """Return the seconds of each case: the slowest rank's, as a step waits for it."""
    rank = ranks.rank()
    numbers = torch.ones(max(measure.actual_bytes(case) for case in wanted) // 4, device=device)
    with measure.groups(list(dict.fromkeys(case.pattern for case in wanted))) as names:
        runs = [measure.collective(case, names[case.pattern], numbers) for case in wanted]
        joins_in = [case.together or _in_first_group(case.pattern, rank) for case in wanted]
        times, seconds = warm_up(runs, joins_in, device, seconds, progress, "collectives")

        def once(index: int) -> float:
            measure.barrier()
            if not joins_in[index]:
                return 0.0
            return measure.seconds(runs[index], times[index].times, device)

        visits = [_visits(case, t) for case, t in zip(wanted, times, strict=True)]
        samples = in_rounds(visits, once, seconds, after_warming(progress, "collectives"))
    return _medians(wanted, [np.max(s, axis=0) for s in zip(*ranks.all_of(samples), strict=True)])


def _visits(case: Case, often: measure.Often) -> int:
    """Return how often a case is measured in one round: often where it is short and so easily
    disturbed, less often where no plan runs it.
    """
    visits = int(min(_MOST_VISITS, max(1, _VISITING_S // (often.times * often.took_s))))
    return visits if case.together else max(1, visits // _ALONE)


def _in_first_group(digits: Pattern, rank: int) -> bool:
    """Whether a rank is in the group of rank 0."""
    first_rank = rank
    for count, stride in digits:
        first_rank -= rank // stride % count * stride
    return first_rank == 0


def time_computing(
    wanted: Sequence[Matmul],
    attended: Sequence[Attending],
    device: torch.device,
    seconds: float,
    progress: Progress,
) -> tuple[Times, dict[Attending, float], float]:
    """Return the seconds of each matmul, the seconds per FLOP of each attention, and the bytes/s of
    other ops. They are measured in the same rounds, as they are compared with each other; over
    rounds and ranks, all at work at once.
    """
    run_other_ops, op_bytes = measure.other_ops(device)
    runs = [*_products(wanted, device), run_other_ops]
    count = len(runs)
    often, seconds = warm_up(runs, [True] * count, device, seconds, progress, "products")

    def once(index: int) -> float:
        if index >= count:
            return fit.s_per_flop(attended[index - count], device)
        return measure.shared_seconds(runs[index], often[index], device)

    visits = [1] * (count + len(attended))
    rank_samples = in_rounds(visits, once, seconds, after_warming(progress, "products"))
    samples = [np.concatenate(s) for s in zip(*ranks.all_of(rank_samples), strict=True)]
    *matmul_samples, other_samples = samples[:count]
    per_flop = {key: float(np.median(s)) for key, s in zip(attended, samples[count:], strict=True)}
    return _medians(wanted, matmul_samples), per_flop, op_bytes / float(np.median(other_samples))


def time_kernel_choices(
    wanted: Sequence[Matmul], device: torch.device, seconds: float, progress: Progress
) -> tuple[KernelTimes, ...]:
    """Return the seconds of each of these matmuls as it comes and with either operand copied, over
    rounds and ranks. The lower quartile as it comes stands against the upper ones with a copy, so
    that noise is no gain.
    """
    if not wanted:
        return ()
    variants = [shape._replace(copied=copied) for shape in wanted for copied in measure.COPIES]
    runs = _products(variants, device)
    doing = "forms of products"

    def once(index: int) -> float:
        return measure.working_seconds(runs[index], device)

    own_times = in_rounds([1] * len(variants), once, seconds, lambda share: progress(share, doing))
    samples = [np.concatenate(s) for s in zip(*ranks.all_of(own_times), strict=True)]
    quartiles = [
        float(np.quantile(s, _COPIED if variant.copied else 1 - _COPIED))
        for variant, s in zip(variants, samples, strict=True)
    ]
    return tuple(
        KernelTimes(
            _name(mm.dtype), mm.m, mm.n, mm.k, mm.form, *quartiles[3 * index : 3 * index + 3]
        )
        for index, mm in enumerate(wanted)
    )


def _products(wanted: Sequence[Matmul], device: torch.device) -> list[Callable[[], torch.Tensor]]:
    """Return for each matmul a function that runs it, on some of common numbers and into others."""
    numbers = {
        dtype: [measure.pool(count, device, dtype) for count in counts]
        for dtype, counts in _sizes(wanted).items()
    }
    return [measure.time_matmul(shape, *numbers[shape.dtype]) for shape in wanted]


def _sizes(wanted: Sequence[Matmul]) -> dict[torch.dtype, tuple[int, int, int]]:
    """Return by dtype the elements of the largest left and right operand and largest result."""
    counts: dict[torch.dtype, tuple[int, int, int]] = {}
    for shape in wanted:
        left, right, result = counts.get(shape.dtype, (0, 0, 0))
        counts[shape.dtype] = (
            max(left, shape.m * shape.k),
            max(right, shape.k * shape.n),
            max(result, shape.m * shape.n),
        )
    return counts


def _medians(
    wanted: Sequence[Case | Matmul], samples: Sequence[Sequence[float] | np.ndarray]
) -> Times:
    """Return the median of each case's samples."""
    medians = {case: float(np.median(s)) for case, s in zip(wanted, samples, strict=True)}
    return Times(medians, min(len(s) for s in samples))


# -- what follows from it --------------------------------------------------------------------------
def lines(times: Times) -> list[Measured]:
    """Return a line with bends through the sizes of each collective over each pattern."""
    series: dict[tuple[str, Pattern, bool], list[tuple[int, float]]] = {}
    for case, seconds in times.seconds.items():
        assert isinstance(case, Case)
        key = case.kind, case.pattern, case.together
        series.setdefault(key, []).append((measure.actual_bytes(case), seconds))
    measured = []
    for (kind, digits, together), points in series.items():
        start, s_per_byte, bends = curve(*zip(*sorted(points), strict=True))
        measured.append(Measured(kind, digits, size(digits), start, s_per_byte, together, bends))
    return measured


def scatter_of_measures(known: Sequence[Measured], device: Device) -> list[Measured]:
    """Return gloo's reduce-scatters, which are all-to-alls and a local sum (see ops/comm.py)."""
    return [
        replace(
            m,
            kind="reduce_scatter",
            s_per_byte=six(m.s_per_byte * m.ranks + summing_s_per_byte(m.ranks, device)),
            bends=tuple((at / m.ranks, six(extra * m.ranks)) for at, extra in m.bends),
        )
        for m in known
        if m.kind == "all_to_all"
    ]


def with_matmuls(world: World, times: Times, launch_s: float) -> World:
    """Return the world with the rates and efficiencies of the matmuls that were measured; launching
    each took `launch_s`.
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
    """Return the matmuls that a rank may get of a model's unsharded ones, (dtype, m, n, k): each
    split over all the ranks in every way that comes out even; forward, for the gradient of the
    input, and for that of the weight.
    """
    matmuls: dict[Matmul, None] = {}
    sizes: tuple[int, int, int]
    form: Form
    for dtype, whole_m, whole_n, whole_k in products:
        for rows, columns, inner in _factorizations(count):
            if whole_m % rows == whole_n % columns == whole_k % inner == 0:
                m, n, k = whole_m // rows, whole_n // columns, whole_k // inner
                for sizes, form in (((m, n, k), "NT"), ((m, k, n), "NN"), ((n, k, m), "TN")):
                    matmuls[Matmul(dtype, *sizes, form)] = None
    return list(matmuls)


def _factorizations(count: int) -> list[tuple[int, int, int]]:
    """Return every product of three factors that the count is."""
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    return [(a, b, count // (a * b)) for a in divisors for b in divisors if count % (a * b) == 0]
