"""Random numbers by a hash: independent of the layout, and distributed as they should be."""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar._compat import compiled_for
from autopar.ops import sharded
from autopar.ops.sharded.dropout import FORMULAS

N = 1 << 17
OP: Any = torch.ops.autopar.draw.default


def drawn(kind: Any, *size: int, seed: int = 7, dtype: torch.dtype = torch.float32) -> Tensor:
    limits = (-5, 12) if kind == "integers" else (0, 1)
    return sharded.draw(kind, limits, size, dtype, torch.tensor(seed), [], [()] * len(size), size)


@pytest.mark.parametrize("kind", ["uniform", "normal", "integers"])
@pytest.mark.parametrize("digits", [(("a", 12, 2),), (("a", 1, 2),), (("b", 2, 3), ("a", 12, 2))])
def test_a_shard_has_the_unsharded_numbers(kind: Any, digits: tuple[Any, ...]) -> None:
    whole, index = drawn(kind, 5, 24, dtype=torch.float64), torch.arange(24)
    length = 24 // math.prod(size for _, _, size in digits)
    seen = []
    for place in range(24 // length):
        coordinates = [place % digits[0][2], place // digits[0][2]][: len(digits)]
        own = torch.ones(24, dtype=torch.bool)
        for coordinate, (_, stride, size) in zip(coordinates, digits, strict=True):
            own &= index // stride % size == coordinate
        drawn_here = sharded.draw(
            kind, (-5, 12), (5, length), torch.float64, torch.tensor(7),
            [torch.tensor([coordinate]) for coordinate in coordinates], [(), digits], (5, 24),
        )  # fmt: skip
        assert torch.equal(drawn_here, whole[:, own])
        seen.append(index[own])
    assert torch.equal(torch.cat(seen).sort().values, index)


def farthest(numbers: Tensor) -> float:
    """Kolmogorov's statistic of uniform numbers, times the root of how many there are."""
    ordered = numbers.double().flatten().sort().values
    steps = torch.arange(len(ordered) + 1, dtype=torch.float64) / len(ordered)
    above, below = (steps[1:] - ordered).max(), (ordered - steps[:-1]).max()
    return float(torch.maximum(above, below)) * len(ordered) ** 0.5


SEEDS = (0, 1, -1, 2**31, 2**40 + 3)
CHANCE = 2.2  # of a statistic beyond it: 1e-4


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_are_distributed_as_they_should_be(seed: int, dtype: torch.dtype) -> None:
    uniform, normal = (drawn(kind, N, seed=seed, dtype=dtype) for kind in ("uniform", "normal"))
    assert uniform.dtype == normal.dtype == dtype
    assert uniform.min() >= 0 and uniform.max() < 1
    assert farthest(uniform) < CHANCE
    assert farthest(torch.special.ndtr(normal.double())) < CHANCE
    assert abs(normal.mean()) < 4 / N**0.5 and abs(normal.var() - 1) < 4 * (2 / N) ** 0.5
    assert abs(normal.double().pow(4).mean() - 3) < 4 * (96 / N) ** 0.5
    whole = drawn("integers", N, seed=seed, dtype=torch.int64)
    shares = torch.bincount(whole + 5, minlength=17) / N
    assert len(shares) == 17
    assert (shares - 1 / 17).abs().max() < 4.5 * (1 / 17 / N) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_numbers_stay_below_one(dtype: torch.dtype) -> None:
    numbers = drawn("uniform", N, dtype=dtype)
    assert numbers.dtype == dtype and 0.99 < numbers.max() < 1
    assert abs(numbers.double().mean() - 0.5) < 0.005


def near(first: Tensor, other: Tensor) -> bool:
    """Whether two sets of normal numbers and of their squares are not correlated."""
    products = first * other, (first.square() - 1) * (other.square() - 1) / 2
    return all(abs(float(x.mean())) < 5 / N**0.5 for x in products)


@pytest.mark.parametrize("seeds", [(0, 1), (5, 5 + 2**32), (5, 5 + 2**33), (1, -1), (8, 8 ^ 2**31)])
def test_seeds_draws_and_neighbours_are_independent(seeds: tuple[int, int]) -> None:
    """The upper word of a seed is the number of the draw, the lower one counts steps."""
    first, other = (drawn("normal", 512, N // 512, seed=seed) for seed in seeds)
    for shift in (0, 1, 2, 3, 64, 1000):
        assert near(first.flatten(), other.flatten().roll(shift))
        assert shift == 0 or near(first.flatten(), first.flatten().roll(shift))
    for dim in (0, 1):  # no row and no column stands out
        assert first.mean(dim).abs().max() < 5.5 / min(first.shape) ** 0.5


def test_elements_beyond_two_to_the_32_differ() -> None:
    first, second = (
        sharded.draw(
            "normal", (0, 1), (4096,), torch.float32, torch.tensor(3), [torch.tensor([place])],
            [(("a", 2**33, 2),)], (2**34,),
        )
        for place in (0, 1)
    )  # fmt: skip
    assert abs(float((first * second).mean())) < 5 / 4096**0.5


@pytest.mark.parametrize("kind", ["uniform", "normal", "integers"])
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (70000,), (7, 40000), (2, 3, 1, 11000)])
def test_blocks_are_the_formula(kind: str, shape: tuple[int, ...]) -> None:
    own, last = ([torch.tensor([1])], [1]) if shape else ([], [])
    counts = [0] * (len(shape) - 1) + last
    whole = [*shape[:-1], shape[-1] * 2] if shape else []
    facts = [1, 2] if shape else []
    rest = torch.tensor(-77 << 30), own, counts, facts, whole
    arguments = kind, [3, 9], list(shape), torch.float64, *rest
    assert torch.equal(OP(*arguments), FORMULAS[OP](*arguments))


def test_torch_knows_all_about_the_op() -> None:
    rest = torch.tensor(5), [torch.tensor([1])], [0, 1], [1, 2], [3, 8]
    torch.library.opcheck(OP, ("normal", [0, 1], [3, 4], torch.float32, *rest))


@pytest.mark.slow
def test_it_is_compiled_where_a_gpu_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (0, 1), (4, 8), torch.float64, torch.tensor(7), [torch.tensor([1])]
    digits = [(("a", 4, 2),), ()], (8, 8)
    plain = sharded.draw("normal", *arguments, *digits)
    formula = sys.modules["autopar.ops.sharded.draws"]

    def on_gpu(seed: Tensor, coordinates: Any, how: Any) -> Tensor:
        return compiled_for(partial(formula._all_at_once, how=how))(seed, *coordinates)

    monkeypatch.setattr(formula, "_in_blocks", on_gpu)
    torch.testing.assert_close(sharded.draw("normal", *arguments, *digits), plain)
