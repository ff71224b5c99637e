"""How well a calibrated world predicts collectives that calibration did not see.

    torchrun --nproc-per-node 4 -m benchmarks.calibration [--seconds 120] [--interleaved]

Calibrates the running ranks, then measures 12 drawn (collective, pattern, size) combinations, none
of whose sizes was measured, all groups at once; prints what was predicted and what was measured.
On a machine that others use, too, its speed drifts between the two: `--interleaved` measures both
in the same rounds, so that what is left is the error of the model.
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

from autopar import calibration, ranks
from autopar.cost.calibrate import (
    CPU_SIZES,
    GPU_SIZES,
    Times,
    calibrate,
    cases,
    lines,
    patterns,
    timed_collectives,
)
from autopar.cost.fit import fitted
from autopar.cost.measure import Case, actual_bytes
from autopar.cost.ways import flat_ways
from autopar.world import KINDS, World

UNSEEN = 12


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--interleaved", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with calibration.joined():
        gpu = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        sizes = GPU_SIZES if gpu else CPU_SIZES
        drawn = unseen(ranks.running(), sizes, options.seed)
        start = time.perf_counter()
        if options.interleaved:
            seen = cases(ranks.running(), sizes)
            both = timed_collectives([*seen, *drawn], device, options.seconds, quiet)
            known = Times({case: both.seconds[case] for case in seen}, both.rounds)
            world, measured = fitted(World.detect(), lines(known)), both
        else:
            world = calibrate(World.detect(), [], options.seconds)
            took = time.perf_counter() - start
            measured = timed_collectives(drawn, device, options.seconds / 4, quiet)
        if ranks.rank() == 0:
            took = time.perf_counter() - start if options.interleaved else took
            print(
                f"{world}\ncalibrated in {took:.0f} s; {measured.rounds} rounds of what is unseen"
            )
            show(world, drawn, measured)


def quiet(share: float, doing: str) -> None:
    """No progress bar."""


def unseen(count: int, sizes: Sequence[int], seed: int) -> list[Case]:
    """Drawn evenly over collectives and patterns, and over sizes on a logarithmic scale; at least
    a fifth away from any size that is measured.
    """
    rng = np.random.default_rng(seed)
    found: dict[Case, None] = {}
    known = patterns(count)
    while len(found) < UNSEEN:
        whole = int(math.exp(rng.uniform(math.log(sizes[0]), math.log(sizes[-1]))))
        if min(abs(math.log(whole / size)) for size in sizes) > math.log(1.2):
            kind = KINDS[len(found) % len(KINDS)]
            found[Case(kind, known[rng.integers(len(known))], True, whole)] = None
    return list(found)


def show(world: World, drawn: Sequence[Case], measured: Times) -> None:
    """One line a case, and the middle of the errors: as measured patterns, and by the formulas that
    price what was not measured.
    """
    errors, formulas = [], []
    plain = replace(world, measured=())
    print("collective      pattern    bytes      predicted ms  measured ms  ratio  by formula")
    for case in drawn:
        size = actual_bytes(case)
        took = measured.seconds[case]
        line, formula = (
            min(way.seconds(size) for way in flat_ways(w, case.kind, case.pattern))
            for w in (world, plain)
        )
        errors.append(abs(line / took - 1))
        formulas.append(abs(formula / took - 1))
        groups = ".".join(f"{count}@{stride}" for count, stride in case.pattern)
        print(
            f"{case.kind:15} {groups:10} {size:<10} {line * 1e3:12.3f} {took * 1e3:12.3f} "
            f"{line / took:6.2f} {formula / took:11.2f}"
        )
    print(f"median error {np.median(errors):.1%}, worst {max(errors):.1%}; ", end="")
    print(f"by the fitted formulas {np.median(formulas):.1%}, worst {max(formulas):.1%}")


if __name__ == "__main__":
    main(sys.argv[1:])
