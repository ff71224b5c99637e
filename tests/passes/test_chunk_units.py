"""How a cut goes through views and permutes, against numbers."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from torch import fx

from autopar import _compat
from autopar.passes.overlap import chunk_units
from autopar.passes.overlap.chunk_units import Cut, result_cut
from derived import called

aten = torch.ops.aten


@pytest.mark.parametrize("seed", range(40))
def test_views_carry_a_cut_as_they_carry_numbers(seed: int) -> None:
    """Random views and permutes: a piece of the result is the result of a piece."""
    draw, pieces = random.Random(seed), 2
    graph = fx.Graph()
    shape = [draw.choice([1, 2, 3, 4, 6]) for _ in range(3)]
    shape[draw.randrange(3)] *= 4
    with _compat.fake_mode():
        value = torch.empty(shape)
    node = graph.placeholder("x")
    node.meta["val"] = value
    dim = draw.choice([d for d, n in enumerate(shape) if n % 4 == 0])
    own: Any = Cut(dim, draw.choice([1, 2]))
    number = torch.arange(value.numel()).reshape(shape)
    part = taken(number, own, pieces, 1)
    for _ in range(6):
        node, own, number, part = moved(draw, graph, node, own, number, part, pieces)
        if own is None:
            return
        assert torch.equal(taken(number, own, pieces, 1), part)


def taken(x: torch.Tensor, own: Cut, pieces: int, which: int) -> torch.Tensor:
    """One piece of a value."""
    apart = x.unflatten(own.dim, (own.outer, pieces, -1)).select(own.dim + 1, which)
    return apart.flatten(own.dim, own.dim + 1)


def moved(draw: random.Random, graph: fx.Graph, source: fx.Node, own: Cut, *rest: Any) -> Any:
    """A random step: (its node, how it is cut, the whole and the piece behind it)."""
    number, part, pieces = rest
    kind = draw.choice(["view", "permute", "unsqueeze", "clone"])
    shape = list(number.shape)
    if kind == "view":
        number, part = number.contiguous(), part.contiguous()
        factors = [f for n in shape for f in prime_factors(n)] or [1]
        borders = sorted(draw.sample(range(len(factors) + 1), min(2, len(factors))))
        bounds = itertools.pairwise([0, *borders, len(factors)])
        args: tuple[Any, ...] = ([math.prod(factors[a:b]) for a, b in bounds],)
        source = called(graph, aten.clone.default, (source,))
        source.meta["val"] = source.meta["val"].contiguous()
        target: Any = aten.view.default
    elif kind == "permute":
        target, args = aten.permute.default, (draw.sample(range(len(shape)), len(shape)),)
    elif kind == "unsqueeze":
        target, args = aten.unsqueeze.default, (draw.randrange(len(shape) + 1),)
    else:
        target, args = aten.clone.default, ()
    node = called(graph, target, (source, *args))
    onward = result_cut(node, source, own, pieces)
    if onward is not None and kind == "view":
        smaller = list(args[0])
        smaller[onward.dim] //= pieces
        return node, onward, target(number, *args), target(part, smaller)
    return node, onward, target(number, *args), None if onward is None else target(part, *args)


def prime_factors(number: int) -> list[int]:
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors


def test_a_residual_stream_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leads from every product past all later ones: the search was quadratic in layers."""
    steps = []

    def counted(*arguments: Any) -> Cut | None:
        steps[-1] += 1
        return result_cut(*arguments)

    monkeypatch.setattr(chunk_units, "result_cut", counted)
    for layers in (20, 40):
        steps.append(0)
        graph = fx.Graph()
        stream, weight = graph.placeholder("x"), graph.placeholder("w")
        with _compat.fake_mode():
            stream.meta["val"], weight.meta["val"] = torch.empty(8, 4), torch.empty(4, 4)
        for _ in range(layers):
            product = called(graph, aten.mm.default, (stream, weight))
            stream = called(graph, aten.add.Tensor, (stream, product))
        assert not chunk_units.units(graph, 2, frozenset())
    assert 0 < steps[1] < 3 * steps[0]
