"""Trials of ops whose tensors are too large to run: the op runs with smaller dims instead, at
several sizes, with its other arguments as they are.

    (64, 4096, 4096) -> (64, 4096, 4096)    is tried as    (9, 10, 10), (14, 12, 12), (14, 15, 15)

Sizes that are equal stay equal. A dim is a factor where the trials at all sizes agree that it is
one, and where the op at its own sizes, on tensors without storage, gives results that are cut as
the operands are. One size would not do: a roll by 8 commutes with slicing a dim of 8 or less. So
every size that is tried is larger than the integers among the op's arguments. probe.py calls
`scaled_rule` and `scaled_values`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from autopar.ir.sharding_rule import OpShardingRule, shape_of
from autopar.ops.rules.trials import Call, find_factors, is_cut_alike, rule_of_factors

TRIED_ELEMENTS = 1 << 20  # of an operand: those with more are not run
_UNCHANGED_SIZE = 8  # sizes up to this are not made smaller
_AGREEING = 3  # the number of sets of sizes that are tried, of which two must run
_PRIMES = (2, 3, 5, 7)

Sizes = dict[int, int]  # the size that stands for each larger one


def scaled_rule(
    call: Call,
    values: Sequence[Tensor],
    results: Sequence[tuple[int, ...]],
    integers: Iterable[int] = (),
) -> OpShardingRule | None:
    """Return the rule of a function of tensors of these shapes by trials at smaller sizes; None
    where no dim is a factor or where the function does not run at two sets of sizes.

    `results`: the shapes of its results at its own sizes. `integers`: those among its arguments.
    """
    shapes = [shape_of(value) for value in values]
    for family in _families(shapes, integers):
        trials = [find_factors(call, _resized(values, sizes)) for sizes in family]
        ran = [trial for trial in trials if trial is not None]
        if len(ran) < 2:
            continue
        common = [f for f in ran[0].factors if all(f in trial.factors for trial in ran[1:])]
        factors = [f for f in common if is_cut_alike(call, values, results, f)]
        if not factors:
            return None
        nonlinear = any(trial.nonlinear for trial in ran)
        return rule_of_factors(shapes, results, factors, nonlinear)
    return None


def scaled_values(values: Sequence[Tensor], integers: Iterable[int]) -> Iterator[list[Tensor]]:
    """Yield tensors without storage of the sizes at which a function of `values` is tried: their
    own where that is small.
    """
    if all(value.numel() <= TRIED_ELEMENTS for value in values):
        yield list(values)
        return
    for family in _families([shape_of(value) for value in values], integers):
        for sizes in family:
            yield _resized(values, sizes)


def _resized(values: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
    return [
        torch.empty(_resized_shape(shape_of(v), sizes), dtype=v.dtype, device="meta")
        for v in values
    ]


def _resized_shape(shape: tuple[int, ...], sizes: Sizes) -> tuple[int, ...]:
    return tuple(sizes.get(size, size) for size in shape)


def _families(shapes: Sequence[tuple[int, ...]], integers: Iterable[int]) -> Iterator[list[Sizes]]:
    """Yield the sets of sizes to try: first such that tell the dims apart, then such that keep the
    ratios of the sizes, for an op that wants one dim to be twice another.
    """
    large = sorted({size for shape in shapes for size in shape if size > _UNCHANGED_SIZE})
    numbers = sorted({abs(i) for i in integers} - {0, 1})
    floor = max((_UNCHANGED_SIZE, *numbers))
    for family in (_distinct_sizes(large, numbers, floor), _proportional_sizes(large, floor)):
        small_enough = (
            sizes
            for sizes in family
            if all(math.prod(_resized_shape(s, sizes)) <= TRIED_ELEMENTS for s in shapes)
        )
        yield list(itertools.islice(small_enough, _AGREEING))


def _distinct_sizes(large: Sequence[int], numbers: Sequence[int], floor: int) -> Iterator[Sizes]:
    """Yield sets of sizes above `floor` that tell all dims apart. A size that some of `numbers`
    divide, such as a window, stays a multiple of them.
    """
    steps = {size: math.lcm(*(n for n in numbers if size % n == 0)) for size in large}
    for start, order in ((0, large), (3, large[::-1]), (6, large)):
        sizes: Sizes = {}
        for size in order:
            step = steps[size]
            multiples = itertools.count((floor + start) // step * step + step, step)
            sizes[size] = next(n for n in multiples if _has_divisor(n) and n not in sizes.values())
        yield sizes


def _proportional_sizes(large: Sequence[int], floor: int) -> Iterator[Sizes]:
    """Yield sets of sizes above `floor` in the ratios of the large ones."""
    divisor = math.gcd(*large)
    for factor in range(2, divisor):
        sizes = {size: size // divisor * factor for size in large}
        if all(size > floor and _has_divisor(size) for size in sizes.values()):
            yield sizes


def _has_divisor(size: int) -> bool:
    """Whether a trial can cut a dim of this size into parts of more than one entry."""
    return any(size % prime == 0 and size > prime for prime in _PRIMES)
