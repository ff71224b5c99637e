"""How well a calibrated world predicts collectives and attention that calibration did not see.

    torchrun --nproc-per-node 4 -m benchmarks.model.calibration [--seconds 120] [--interleaved]
    OMP_NUM_THREADS=1 python -m benchmarks.model.calibration     (attention alone)
    python -m benchmarks.cluster --rate 400mbit -- python -m benchmarks.model.calibration

Calibrates the running ranks, then measures 12 drawn (collective, pattern, size) combinations, all
groups at once; prints what was predicted and what was measured. None of their sizes was measured;
for a third of them the whole pattern counts as unseen: these are predicted by levels and factors
that are fitted to the other patterns alone. On a machine that others use, too, its speed drifts
between the two: `--interleaved` measures both in the same rounds, so that what is left is the error
of the model; collectives alone. Then the forward and the backward of 3 drawn shapes of attention,
with numbers of keys and head sizes that were not measured, on all ranks at once.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from autopar.cost.algorithms import flat_algorithms
from autopar.cost.calibration import (
    CPU_SIZES,
    GPU_SIZES,
    Times,
    calibrate,
    cases,
    lines,
    measure,
    patterns,
    time_collectives,
)
from autopar.cost.calibration.fit import (
    CPU_KEYS,
    GPU_KEYS,
    HEAD_SIZES,
    Attending,
    attention,
    fit_world,
)
from autopar.cost.calibration.measure import Case, actual_bytes
from autopar.cost.compute import attention_seconds
from autopar.cost.network import Pattern
from autopar.ir.sharding_rule import Attends
from autopar.runtime import calibrate_on_ranks
from autopar.world import KINDS, Device, World, ranks

UNSEEN = 12
STRANGE = 4  # so many are of patterns that count as unseen
UNSEEN_ATTENTION, ROUNDS = 3, 5
WANTED = 0.15  # median error


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--interleaved", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with calibrate_on_ranks.open_process_group():
        gpu = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        sizes = GPU_SIZES if gpu else CPU_SIZES
        drawn = unseen(ranks.running(), sizes, options.seed) if ranks.running() > 1 else []
        start = time.perf_counter()
        if options.interleaved:
            seen = cases(ranks.running(), sizes)
            both = time_collectives([*seen, *drawn], device, options.seconds, quiet)
            known = Times({case: both.seconds[case] for case in seen}, both.rounds)
            world, measured = fit_world(World.detect(), lines(known)), both
        else:
            shown = quiet if ranks.rank() else said
            world = calibrate(World.detect(), [], options.seconds, shown)
            took = time.perf_counter() - start
            if drawn:
                measured = time_collectives(drawn, device, options.seconds / 4, quiet)
        if ranks.rank() == 0:
            took = time.perf_counter() - start if options.interleaved else took
            print(f"{world}\ncalibrated in {took:.0f} s")
        if ranks.rank() == 0 and drawn:
            print(f"{measured.rounds} rounds of what is unseen")
            strange = np.random.default_rng(options.seed).permutation(UNSEEN)[:STRANGE]
            show(world, drawn, set(strange.tolist()), measured)
        if not options.interleaved:
            attended = attended_seconds(world.device, device, options.seed)
            if ranks.rank() == 0:
                show_attention(attended)


def quiet(share: float, doing: str) -> None:
    """No progress bar."""


def said(share: float, doing: str) -> None:
    """A line that is written over, on a terminal."""
    if sys.stderr.isatty():
        print(f"\r{doing} {share:.0%} ", end="", file=sys.stderr, flush=True)


def unseen(count: int, sizes: Sequence[int], seed: int) -> list[Case]:
    """Drawn evenly over collectives and patterns, and over sizes on a logarithmic scale; at least
    a fifth away from any size that is measured.
    """
    rng = np.random.default_rng(seed)
    new_cases: dict[Case, None] = {}
    known = patterns(count)
    while len(new_cases) < UNSEEN:
        whole = int(math.exp(rng.uniform(math.log(sizes[0]), math.log(sizes[-1]))))
        if min(abs(math.log(whole / size)) for size in sizes) > math.log(1.2):
            kind = KINDS[len(new_cases) % len(KINDS)]
            new_cases[Case(kind, known[rng.integers(len(known))], True, whole)] = None
    return list(new_cases)


def without(world: World, pattern: Pattern) -> World:
    """What the calibration would have found, had the pattern not been measured."""
    known = [measured for measured in world.measured if measured.pattern != pattern]
    return fit_world(replace(World.detect(), device=world.device), known)


def show(world: World, drawn: Sequence[Case], strange: set[int], measured: Times) -> None:
    """One line a case, and the middle of the errors: of all, of those of patterns that were
    measured and of the `strange` ones, whose patterns count as unseen.
    """
    errors: dict[bool, list[float]] = {True: [], False: []}
    print("collective      pattern    bytes      predicted ms  measured ms  ratio")
    for number, case in enumerate(drawn):
        size, took = actual_bytes(case), measured.seconds[case]
        known = (
            without(world, case.pattern) if number in strange else replace(world, contention=0.0)
        )
        expected = min(
            algorithm.seconds(size) for algorithm in flat_algorithms(known, case.kind, case.pattern)
        )
        errors[number in strange].append(abs(expected / took - 1))
        groups = ".".join(f"{count}@{stride}" for count, stride in case.pattern)
        print(
            f"{case.kind:15} {groups:10} {size:<10} {expected * 1e3:12.3f} {took * 1e3:12.3f} "
            f"{expected / took:6.2f}{' unseen pattern' if number in strange else ''}"
        )
    everything = errors[True] + errors[False]
    median = np.median(everything)
    print(f"median error {median:.1%}, worst {max(everything):.1%} (wanted {WANTED:.0%}: ", end="")
    print(f"{'met' if median <= WANTED else 'missed'}); ", end="")
    print(f"of measured patterns {np.median(errors[False]):.1%}, ", end="")
    print(f"of unseen ones {np.median(errors[True]):.1%}")


def unseen_attention(gpu: bool, seed: int) -> list[Attends]:
    """Drawn from the multiples of 64 keys, as sequences have, that are not measured, and from head
    sizes in between; two of three are causal. Keys that leave a rest of a block take longer: they
    are as modelled only where calibration was given the model.
    """
    rng = np.random.default_rng(seed)
    seen = GPU_KEYS if gpu else CPU_KEYS
    between = [n for n in range(seen[0], seen[-1], 64) if n not in seen]
    rarer = 1 / np.array(between)  # evenly on a logarithmic scale
    keys = rng.choice(between, UNSEEN_ATTENTION, replace=False, p=rarer / rarer.sum())
    sizes = rng.choice(range(HEAD_SIZES[0] + 8, HEAD_SIZES[-1], 8), UNSEEN_ATTENTION)
    return [
        Attends(int(many), int(size), number % 3 < 2)
        for number, (many, size) in enumerate(zip(keys, sizes, strict=True))
    ]


def attended_seconds(
    known: Device, device: torch.device, seed: int
) -> list[tuple[Attends, bool, float, float]]:
    """(shape, backward, predicted, measured) of what is unseen: medians over rounds and ranks."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = []
    for shape in unseen_attention(device.type == "cuda", seed):
        for backward in (False, True):
            flops, run = attention(Attending(dtype, shape, backward), device)
            often = measure.times_for(run, device)
            took = [measure.shared_seconds(run, often, device) for _ in range(ROUNDS)]
            measured = float(np.median(ranks.all_of(took)))
            predicted = attention_seconds(flops, 0.0, shape, backward, dtype, known)
            rows.append((shape, backward, predicted, measured))
    return rows


def show_attention(attended: Sequence[tuple[Attends, bool, float, float]]) -> None:
    """One line each, and the middle of the errors."""
    print("attention of               predicted ms  measured ms  ratio")
    for shape, backward, predicted, measured in attended:
        what = f"{shape.keys} keys of {shape.head_size:g}{', causal' if shape.causal else ''}"
        print(
            f"{what:26} {predicted * 1e3:12.3f} {measured * 1e3:12.3f} {predicted / measured:6.2f} "
            f"{'backward' if backward else 'forward'}"
        )
    errors = [abs(predicted / measured - 1) for *_, predicted, measured in attended]
    median = np.median(errors)
    print(f"median error {median:.1%}, worst {max(errors):.1%} (wanted {WANTED:.0%}: ", end="")
    print(f"{'met' if median <= WANTED else 'missed'})")


if __name__ == "__main__":
    main(sys.argv[1:])
