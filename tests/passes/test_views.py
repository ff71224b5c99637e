"""Views as arithmetic: random reshapes, and what their factors say of the digits on each side."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from autopar.ir.layout import Layout, S, State
from autopar.ir.mesh import Mesh
from autopar.ir.sharding_rule import Dims, view_factors

RESHAPES = 3000
PRIMES = (2, 2, 2, 3, 3, 5)


def random_reshape(draw: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of equal size: the same primes, in one order or two, cut into dims at random."""
    primes = [draw.choice(PRIMES) for _ in range(draw.randint(0, 6))]
    shuffled = draw.sample(primes, len(primes)) if draw.random() < 0.5 else primes
    return _dims(primes, draw), _dims(shuffled, draw)


def _dims(primes: list[int], draw: random.Random) -> tuple[int, ...]:
    shards = sorted(draw.randint(0, len(primes)) for _ in range(draw.randint(0, 4)))
    bounds = [0, *shards, len(primes)]
    return tuple(math.prod(primes[a:b]) for a, b in itertools.pairwise(bounds))


def flat(dims: Dims) -> list[str]:
    return [factor for dim in dims for factor in dim]


def digit(dims: Dims, sizes: dict[str, int], factor: str, parts: int) -> State | None:
    """The outermost digit of `parts` of a factor."""
    for dim, names in enumerate(dims):
        if factor in names:
            inside = math.prod(sizes[name] for name in names[names.index(factor) + 1 :])
            return S(dim, inside * sizes[factor] // parts)
    return None


def shards(
    shape: tuple[int, ...], state: State, parts: int, unsharded: torch.Tensor
) -> list[torch.Tensor]:
    mesh = Mesh.parse(f"x{parts}")
    layout = Layout(mesh, shape, (state,))
    return [layout.cut(unsharded, mesh.coordinate(rank)) for rank in range(parts)]


def test_factors_multiply_up_to_the_dims_and_run_in_the_same_order() -> None:
    draw = random.Random(0)
    for _ in range(RESHAPES):
        source, target = random_reshape(draw)
        sizes, left, right, unsharded = view_factors(source, target)
        note = f"{source} -> {target}: {left} -> {right} of {sizes}, whole {sorted(unsharded)}"
        for dims, shape in ((left, source), (right, target)):
            assert len(dims) == len(shape), note
            assert all(
                math.prod(sizes[f] for f in names) == size
                for names, size in zip(dims, shape, strict=True)
            ), note
        split_factors = [[f for f in flat(dims) if f not in unsharded] for dims in (left, right)]
        assert split_factors[0] == split_factors[1], note


@pytest.mark.slow
def test_a_split_factor_commutes_with_the_view() -> None:
    draw, count = random.Random(1), 0
    for _ in range(RESHAPES):
        source, target = random_reshape(draw)
        sizes, left, right, unsharded = view_factors(source, target)
        value = torch.arange(math.prod(source))
        for factor in flat(left):
            for parts in (2, 3):
                if factor in unsharded or sizes[factor] % parts:
                    continue
                before, after = (
                    digit(left, sizes, factor, parts),
                    digit(right, sizes, factor, parts),
                )
                assert before is not None and after is not None
                count += 1
                for own, expected in zip(
                    shards(source, before, parts, value.view(source)),
                    shards(target, after, parts, value.view(target)),
                    strict=True,
                ):
                    assert torch.equal(own.reshape(expected.shape), expected), (source, target)
    assert count > 5000


def test_nothing_is_left_unsharded_without_need() -> None:
    """Where the suffix products of two shapes form one divisor chain, every factor may be split."""
    draw, chains = random.Random(2), 0
    for _ in range(RESHAPES):
        source, target = random_reshape(draw)
        units = sorted(_suffixes(source) | _suffixes(target))
        if all(b % a == 0 for a, b in itertools.pairwise(units)):
            chains += 1
            assert not view_factors(source, target)[3], (source, target)
    assert chains > 1000


def _suffixes(shape: tuple[int, ...]) -> set[int]:
    return {math.prod(shape[i:]) for i in range(len(shape) + 1)}


@pytest.mark.parametrize(
    ("source", "target", "left", "right"),
    [
        ((8, 4, 5), (2, 16, 5), "(2 4) 4 5", "2 (4 4) 5"),
        ((4, 6, 12), (24, 12), "4 6 12", "(4 6) 12"),
        ((24, 12), (4, 6, 3, 4), "(4 6) (3 4)", "4 6 3 4"),
        ((1, 6, 1), (6,), "() 6 ()", "6"),
        ((2, 3), (3, 2), "2! 3!", "3! 2!"),
        ((7, 2, 3), (7, 3, 2), "7 2! 3!", "7 3! 2!"),
        ((), (1, 1), "", "() ()"),
        ((12, 6), (9, 8), "12! 6!", "9! 8!"),
    ],
)
def test_factors_of_known_views(
    source: tuple[int, ...], target: tuple[int, ...], left: str, right: str
) -> None:
    """Factors by their sizes, ! where no axis may split one."""
    sizes, a, b, unsharded = view_factors(source, target)

    def text(dims: Dims) -> str:
        words = [[f"{sizes[f]}{'!' * (f in unsharded)}" for f in names] for names in dims]
        return " ".join(w[0] if len(w) == 1 else f"({' '.join(w)})" for w in words)

    assert (text(a), text(b)) == (left, right)


def test_two_axes_on_one_side_of_a_view() -> None:
    """(batch, sequence), both split, the inner one by the first axis: flattened, a digit each."""
    mesh = Mesh.parse("x2.y3")
    before = Layout(mesh, (6, 4, 5), (S(1, 2), S(0, 2)))
    after = Layout(mesh, (24, 5), (S(0, 2), S(0, 8)))
    value = torch.arange(120)
    for rank in range(mesh.size):
        own = before.cut(value.view(6, 4, 5), mesh.coordinate(rank))
        assert torch.equal(own.reshape(4, 5), after.cut(value.view(24, 5), mesh.coordinate(rank)))
