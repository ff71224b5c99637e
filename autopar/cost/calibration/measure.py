"""Measurements on the running ranks: collectives as emitted graphs call them (ops/comm.py),
matmuls, memory bandwidth, launches.

Every function here is collective: all ranks call it in the same order and measure the same.
`in_rounds` measures all cases in rounds, each in another order, until the time is used up, so that
drift meets all alike. `calibrate`, contention.py and fit.py call these functions.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from autopar import _compat
from autopar.cost.network import Pattern, members, size
from autopar.ops import comm
from autopar.ops.sharded.matmul import other_order
from autopar.world import Copied, Form, ranks

_WARM_S = 2e-3  # on a GPU, shorter work is run several times for one measurement
_MOST = 20  # runs for one measurement
# Runs for one measurement on a CPU, for work of 0.1 as of 10 ms: the system sets a rank aside that
# computes for long, so many small collectives in a row would seem slower than one large one.
_ON_CPU = 3
_SHARED_S = 0.1
_LAUNCHES = 200
_POOL = 2**24  # numbers that operands are taken from in turn: more than a rank's caches hold
_TURNS = 16  # matrices at the most, so that small ones stay in the caches
_WIDTH = 1024  # of rows
_SIDE = 512  # of the square matrices that are multiplied while collectives run
_LONG_S = 20e-3  # longer work is run once, so that there are more rounds
aten = torch.ops.aten
COPIES: tuple[Copied, ...] = ("", "left", "right")


class Case(NamedTuple):
    """One collective to measure: of so many bytes (the unsharded value of a group), over the groups
    of a pattern, all at once or the one of rank 0 alone.
    """

    kind: str
    pattern: Pattern
    together: bool
    unsharded_bytes: int


class Matmul(NamedTuple):
    """One rank's matmul (m, k) · (k, n) in this dtype; "T" in its form means that the operand lies
    transposed. `copied`: the operand that is copied into the other order first.
    """

    dtype: torch.dtype
    m: int
    n: int
    k: int
    form: Form = "NN"
    copied: Copied = ""

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def moved_bytes(self) -> int:
        return (self.m * self.k + self.k * self.n + self.m * self.n) * self.dtype.itemsize


@contextmanager
def groups(patterns: Sequence[Pattern]) -> Iterator[dict[Pattern, str]]:
    """Open this rank's groups, one of each pattern, within the context; yield their names."""
    names: dict[Pattern, str] = {}
    opened: list[dist.ProcessGroup] = []
    try:
        for digits in patterns:
            names[digits] = "autopar/calibrate/" + ".".join(f"{n}@{s}" for n, s in digits)
            if size(digits) == ranks.running():
                group = dist.group.WORLD
            else:
                lists = members(digits, ranks.running()).tolist()
                group, _ = dist.new_subgroups_by_enumeration(lists)
                opened.append(group)
            assert group is not None
            _compat.register_process_group(names[digits], group)
        yield names
    finally:
        for name in names.values():
            _compat.unregister_process_group(name)
        for group in opened:
            dist.destroy_process_group(group)


def collective(case: Case, group: str, numbers: Tensor) -> Callable[[], object]:
    """Return a function that runs the case once, on the first of these float32 numbers."""
    count = size(case.pattern)
    block = max(1, case.unsharded_bytes // (4 * count * count))  # numbers of one rank for one other
    x = numbers[: block * count * (count if case.kind in FULL_OPERANDS else 1)]
    match case.kind:
        case "all_gather":
            return lambda: comm.all_gather(x, count, group)
        case "reduce_scatter":
            return lambda: comm.reduce_scatter(x, count, group)
        case "all_reduce":
            return lambda: comm.all_reduce(x, count, group)
        case "all_to_all":
            return lambda: comm.all_to_all(x.view(count, block), group)
        case "broadcast":
            return lambda: [comm.broadcast(x, root, count, group) for root in range(count)]
        case "reduce":
            return lambda: [comm.reduce(x, root, count, group) for root in range(count)]
    raise AssertionError(case.kind)


FULL_OPERANDS = ("reduce_scatter", "all_reduce")  # their ranks start with an unsharded value each


def actual_bytes(case: Case) -> int:
    """Return the bytes of the unsharded value that `collective` moves: those of the case, rounded
    down to the same number of elements for every pair of ranks.
    """
    count = size(case.pattern)
    return 4 * count * count * max(1, case.unsharded_bytes // (4 * count * count))


def pool(least: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return at least so many random numbers, for works to read and write."""
    return torch.randn(max(least, _POOL), device=device).to(dtype)


def in_turn(source: Tensor, rows: int, columns: int, transposed: bool = False) -> Iterator[Tensor]:
    """Yield matrices from the source one after another, without end.

    So what an op reads comes from memory, as in a step, and not from the caches, and what it writes
    goes to other memory than what the op before wrote. `transposed`: each lies column by column.
    """
    count = rows * columns
    sources = source[: min(_TURNS, source.numel() // count) * count].split(count)
    matrices = [x.view(columns, rows).t() if transposed else x.view(rows, columns) for x in sources]
    return itertools.cycle(matrices)


def time_matmul(
    shape: Matmul, left: Tensor, right: Tensor, results: Tensor
) -> Callable[[], Tensor]:
    """Return a function that runs the matmul once, on some of these numbers and into some of the
    results.
    """
    x = in_turn(left, shape.m, shape.k, shape.form[0] == "T")
    y = in_turn(right, shape.k, shape.n, shape.form[1] == "T")
    z = in_turn(results, shape.m, shape.n)
    match shape.copied:
        case "left":
            return lambda: torch.mm(other_order(next(x)), next(y), out=next(z))
        case "right":
            return lambda: torch.mm(next(x), other_order(next(y)), out=next(z))
    return lambda: torch.mm(next(x), next(y), out=next(z))


def seconds(
    work: Callable[[], object],
    times: int,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds of one run, from `times` runs in a row."""
    synchronize(device)
    start = clock()
    for _ in range(times):
        work()
    synchronize(device)
    return (clock() - start) / times


def working_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one run; on a CPU those in which this process works, not those in which
    others do.
    """
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    return seconds(work, 1, device, clock)


def shared_seconds(work: Callable[[], object], often: Often, device: torch.device) -> float:
    """Return the seconds of one run while all ranks run the same, for long enough that ranks which
    share a core have taken turns. A short run would get a core for itself, or none.
    """
    times = max(1, math.ceil(_SHARED_S / often.took_s)) if device.type == "cpu" else often.times
    barrier()
    return seconds(work, times, device)


class Often(NamedTuple):
    """The number of runs of a work for one measurement, and the seconds that one run takes,
    about.
    """

    times: int
    took_s: float


def times_for(work: Callable[[], object], device: torch.device, joining: bool = True) -> Often:
    """Warm up, and return how often to run for one measurement: the same number on all ranks."""
    took = 0.0
    if joining:
        took = seconds(work, 1, device)
    if joining and device.type != "cpu":  # the first run may have been compiled
        took = seconds(work, 1, device)
    longest = max(ranks.all_of(took))
    if device.type == "cpu":
        return Often(_ON_CPU if longest < _LONG_S else 1, longest)
    return Often(int(min(_MOST, max(1, _WARM_S // max(longest, 1e-9)))), longest)


def memory_bytes_per_s(total_bytes: float, device: torch.device) -> float:
    """Return the bytes read and written in a second by adding two large tensors into a third, on
    all ranks at once.
    """
    x, y, z = (torch.ones(int(total_bytes / 12), device=device) for _ in range(3))

    def work() -> None:
        torch.add(x, y, out=z)

    often = times_for(work, device)
    median_s = sorted(shared_seconds(work, often, device) for _ in range(5))[2]
    return 12 * x.numel() / _median(ranks.all_of(median_s))


def other_ops(device: torch.device) -> tuple[Callable[[], object], int]:
    """Return a function that runs ops without FLOPs and their backward, as in the graphs of a
    transformer: a normalization, exponentials, a sum; and the bytes that it reads and writes. Layer
    norms have no form that writes into given memory without a copy, so theirs is the allocator's.
    """
    rows, line = _POOL // _TURNS // _WIDTH, [_WIDTH]
    xs, gs, results = (in_turn(pool(0, device), rows, _WIDTH) for _ in range(3))
    scale, shift = torch.ones(line, device=device), torch.zeros(line, device=device)

    def work() -> None:
        x, g = next(xs), next(gs)
        _, mean, spread = aten.native_layer_norm(x, line, scale, shift, 1e-5)
        aten.native_layer_norm_backward(g, x, line, mean, spread, scale, shift, [True] * 3)
        aten.gelu(x, out=next(results))
        aten.gelu_backward(g, x, grad_input=next(results))
        y = aten._log_softmax(x, 1, False, out=next(results))
        aten._log_softmax_backward_data(g, y, 1, x.dtype, out=next(results))
        aten.add(x, g, out=next(results))

    tensors = (2 + 3) * 3 + 3  # of so many rows: forward and backward of three ops, and the sum
    return work, 4 * tensors * rows * _WIDTH


def launch_s(device: torch.device) -> float:
    """Return the seconds of starting one small op, on all ranks at once."""
    x = torch.ones(8, device=device)
    seconds(lambda: x + x, _LAUNCHES, device)
    barrier()
    median_s = sorted(seconds(lambda: x + x, _LAUNCHES, device) for _ in range(5))[2]
    return _median(ranks.all_of(median_s))


def node_s(device: torch.device) -> float:
    """Return the seconds of starting one small op as emitted graphs run it, on all ranks at once:
    from Python, and a third of what it takes with its part in the backward, which is priced at
    twice the forward.
    """
    x = torch.ones(8, device=device, requires_grad=True)

    def work() -> None:
        y = x
        for _ in range(_LAUNCHES):
            y = y * x
        y.sum().backward()

    often = times_for(work, device)
    median_s = sorted(shared_seconds(work, often, device) for _ in range(5))[2]
    return _median(ranks.all_of(median_s)) / (3 * _LAUNCHES)


def computing(long_s: float, device: torch.device) -> Callable[[], None]:
    """Return a function that multiplies for about so many seconds: as often on every rank, where
    all give the same seconds.
    """
    x = torch.randn(_SIDE, _SIDE, device=device)
    seconds(lambda: x @ x, 1, device)  # the first one may be slow
    took = times_for(lambda: x @ x, device).took_s
    repeats = max(1, round(long_s / took))

    def multiply() -> None:
        for _ in range(repeats):
            _ = x @ x

    return multiply


def barrier() -> None:
    """Wait until all ranks are here."""
    if ranks.running() > 1:
        dist.barrier()


def synchronize(device: torch.device) -> None:
    """Wait for a GPU to finish its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


T = TypeVar("T")
Progress = Callable[[float, str], None]  # share that is done, what is being done
_WARMING = 0.1  # of the progress that is shown


def within(progress: Progress, start: float, share: float) -> Progress:
    """Return the progress of work that begins at `start` and takes this share of the total."""
    return lambda done, doing: progress(start + share * done, doing)


def warm_up(
    works: Sequence[Callable[[], object]],
    joins: Sequence[bool],
    device: torch.device,
    seconds: float,
    progress: Progress,
    doing: str,
) -> tuple[list[Often], float]:
    """Warm up; return how often to run each work for one measurement, and the seconds that are
    left.
    """
    start, times = time.perf_counter(), list[Often]()
    for done, (work, joining) in enumerate(zip(works, joins, strict=True)):
        progress(_WARMING * done / len(works), doing)
        times.append(times_for(work, device, joining))
    return times, max(seconds / 2, seconds - (time.perf_counter() - start))


def after_warming(progress: Progress, doing: str) -> Callable[[float], None]:
    """Return the progress of what follows the warm-up, from that of its rounds."""
    return lambda share: progress(_WARMING + (1 - _WARMING) * share, doing)


def in_rounds(
    visits: Sequence[int],
    once: Callable[[int], T],
    seconds: float,
    progress: Callable[[float], None],
) -> list[list[T]]:
    """Return what each case measured, in rounds over all cases, each in another order: as many
    rounds as the time allows and at least one; rank 0 decides. `visits`: how often each case is
    measured in one round.
    """
    samples: list[list[T]] = [[] for _ in visits]
    start, more, shown, rounds = time.perf_counter(), True, 0.0, 0
    places = np.repeat(np.arange(len(visits)), visits)
    while more:
        order = np.random.default_rng(rounds).permutation(places)  # the same on every rank
        for done, index in enumerate(order.tolist()):
            samples[index].append(once(index))
            used = (time.perf_counter() - start) / seconds
            shown = min(1.0, max(shown, used, (done + 1) / len(order) if not rounds else 0.0))
            progress(shown)
        rounds += 1
        elapsed = time.perf_counter() - start
        more = ranks.from_rank_0(elapsed * (1 + 1 / rounds) < seconds)
    return samples
