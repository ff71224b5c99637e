"""Which dims of a function of tensors commute with slicing? Found by trial.

The function runs on random operands in float64, forward and backward, whole and with one dim of
some operands cut. The dim is a factor where, in each way of cutting that is tried,

    every result comes out cut on one dim as well,
    the gradient of an operand that is cut is the same slice of the whole gradient, and
    the gradients of an operand that is not cut add up to the whole one over the slices.

`spec_by_trial` does this for any callable. No shapes reach the op's kernel that fake tensors do not
go through with the very results that a slice should have: kernels trust their callers, and read or
write beyond their memory on others.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from autopar._compat import FakeTensorMode, strict_fake_mode
from autopar.ir.sharding_rule import Dims, OpShardingRule, shape_of

_COMBINATIONS = 256  # of operands' dims of one size
_PRIMES = (2, 3, 5, 7)
# Sets of random operands, one alone may agree by chance; of each how large its cotangents are: a
# backward may clip.
_SCALES = (1.0, 1e4, 1e-4)
_ROUNDING = 1e-12  # of float64
_NARROW_ROUNDING = 1e-5  # of what an op makes in float32 inside

Cuts = tuple[int | None, ...]  # the dim on which each operand (or result) is cut; None: not cut
Call = Callable[[Sequence[Tensor]], list[Tensor]]


# -- runs ------------------------------------------------------------------------------------------
class Outcome(NamedTuple):
    """What one run gives: the results, and the gradient of each operand (None: not asked for)."""

    results: list[Tensor]
    gradients: list[Tensor | None]

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.results, *(g for g in self.gradients if g is not None)]


class Trial(NamedTuple):
    """One set of random operands and cotangents, and what the op makes of them whole."""

    operands: list[Tensor]
    cotangents: list[Tensor]
    whole: Outcome


@dataclass(frozen=True)
class _Op:
    call: Call
    asked: tuple[bool, ...]  # operands whose gradient is compared

    def run(
        self, operands: Sequence[Tensor], cotangents: Sequence[Tensor] | None = None
    ) -> Outcome:
        """Forward and backward; `cotangents` None: drawn like the results, to be thrown away."""
        leaves = [
            x.detach().requires_grad_(asked) for x, asked in zip(operands, self.asked, strict=True)
        ]
        results = self.call(leaves)
        cotangents = [torch.empty_like(r) for r in results] if cotangents is None else cotangents
        carried = [(r, c) for r, c in zip(results, cotangents, strict=True) if r.requires_grad]
        wanted = [x for x in leaves if x.requires_grad]
        if not carried or not wanted:
            return Outcome([r.detach() for r in results], [None] * len(leaves))
        ends, given = zip(*carried, strict=True)
        found = iter(torch.autograd.grad(ends, wanted, given, materialize_grads=True))
        gradients = [next(found).detach() if x.requires_grad else None for x in leaves]
        return Outcome([r.detach() for r in results], gradients)

    def imagine(
        self, mode: FakeTensorMode, like: Sequence[Tensor], shapes: Sequence[Sequence[int]]
    ) -> Outcome | None:
        """The run on fake tensors of these shapes; None where the op has no such implementation or
        refuses them.
        """
        try:
            with mode:
                fakes = [torch.empty(s, dtype=x.dtype) for x, s in zip(like, shapes, strict=True)]
                return self.run(fakes)
        except Exception:
            return None


def rule_by_trial(call: Call, values: Sequence[Tensor]) -> OpShardingRule | None:
    """The rule of any function of tensors whose forward and backward commute with slicing some dim
    of its operands and results; None where there is no such dim, or where that cannot be tried.

    `values` say shapes and dtypes, and may be fake. `call` must be the same function at each call.
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(action="ignore"),
        _unlogged(),
    ):
        try:
            return _spec_by_trial(call, values)
        except Exception:  # a function that does not run on plain tensors cannot be tried
            return None


@contextmanager
def _unlogged() -> Iterator[None]:
    """Fake tensors log what an op refuses, which is what is asked here."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(level)


def _spec_by_trial(call: Call, values: Sequence[Tensor]) -> OpShardingRule | None:
    shapes, mode = [shape_of(v) for v in values], strict_fake_mode()
    samples = [_sample(v, i, positive=False) for i, v in enumerate(values)]
    op = _Op(call, _differentiable(call, mode, samples))
    imagined = op.imagine(mode, samples, shapes)
    if imagined is None:
        return None
    trials = _trials(op, values, imagined)
    found = list(_factors(op, mode, trials, shapes)) if trials else []
    if not found:
        return None
    spec = _spec(shapes, [shape_of(r) for r in imagined.results], found)
    return replace(spec, nonlinear=not all(_adds_up(op, trial) for trial in trials))


def differing_results(call: Call, values: Sequence[Tensor]) -> list[int]:
    """The results of a function, by number, that come out otherwise when it runs again on the same
    operands. None where that cannot be tried.
    """
    samples = [_sample(v, i, positive=False).to(v.dtype) for i, v in enumerate(values)]
    op = _Op(call, (False,) * len(samples))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            if op.imagine(strict_fake_mode(), samples, [shape_of(x) for x in samples]) is None:
                return []
            first, second = (op.run([x.clone() for x in samples]).results for _ in range(2))
    except Exception:  # a function that does not run on plain tensors cannot be tried
        return []
    return [n for n, (a, b) in enumerate(zip(first, second, strict=True)) if not _repeats(a, b)]


def _repeats(found: Tensor, again: Tensor) -> bool:
    return torch.allclose(_wide(found), _wide(again), rtol=1e-3, atol=1e-5, equal_nan=True)


def _differentiable(call: Call, mode: FakeTensorMode, samples: list[Tensor]) -> tuple[bool, ...]:
    """The operands with which the op takes a gradient: it refuses that of some, as losses do for
    their weights, so no model has one there.
    """

    def taken(place: int) -> bool:
        try:
            with mode:
                fakes = [torch.empty(x.shape, dtype=x.dtype) for x in samples]
                fakes[place].requires_grad_()
                call(fakes)
        except Exception:
            return False
        return True

    floats = [x.is_floating_point() or x.is_complex() for x in samples]
    return tuple(is_float and taken(place) for place, is_float in enumerate(floats))


def _trials(op: _Op, values: Sequence[Tensor], imagined: Outcome) -> list[Trial]:
    """Random operands and what the op makes of them; none at all if a second run makes another, or
    if fake tensors have other shapes.
    """
    trials: list[Trial] = []
    for seed, scale in enumerate(_SCALES):
        samples = [_sample(v, 100 * seed + i, positive=seed == 1) for i, v in enumerate(values)]
        cotangents = [_cotangent(r, 7000 + i, scale) for i, r in enumerate(imagined.results)]
        whole, again = op.run(samples, cotangents), op.run(samples, cotangents)
        if not _alike(whole, imagined) or not _equal(whole.tensors, again.tensors):
            return []
        if not any(bool(t.isnan().any()) for t in whole.tensors):  # nan is nan: proves nothing
            trials.append(Trial(samples, cotangents, whole))
    return trials


def _sample(value: Tensor, seed: int, positive: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if value.dtype.is_floating_point:
        sample = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        return sample.abs() + 0.1 if positive else sample
    if value.dtype.is_complex:
        return torch.randn(value.shape, generator=generator, dtype=torch.complex128)
    return torch.randint(0, 2, value.shape, generator=generator).to(value.dtype)


def _cotangent(like: Tensor, seed: int, scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    floats = like.is_floating_point() or like.is_complex()
    dtype = like.dtype if floats else torch.float64
    return scale * torch.randn(like.shape, generator=generator, dtype=dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.complex128) if x.is_complex() else x.double()


def _alike(made: Outcome, imagined: Outcome) -> bool:
    """Whether the op makes what its own implementation for fake tensors says."""
    pairs = zip(made.tensors, imagined.tensors, strict=True)
    return all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)


def _equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(_near(a, b) for a, b in zip(found, expected, strict=True))


def _near(found: Tensor, expected: Tensor) -> bool:
    """Equal but for the rounding of the precision that an op works in."""
    if found.shape != expected.shape:
        return False
    a, b = _wide(found), _wide(expected)
    finite = b[b.isfinite()].abs()
    largest = max(1.0, float(finite.max())) if finite.numel() else 1.0
    narrow = not b.is_complex() and torch.equal(b.float().double().nan_to_num(), b.nan_to_num())
    rounding = _NARROW_ROUNDING if narrow and expected.is_floating_point() else _ROUNDING
    return torch.allclose(a, b, rtol=0, atol=rounding * largest, equal_nan=True)


def _adds_up(op: _Op, trial: Trial) -> bool:
    """Whether the gradients for two parts of a cotangent add up to that for their sum. If not, no
    rank may be given a part.
    """
    part = [c.flip(0) * 0.5 if c.dim() else c * 0.5 for c in trial.cotangents]
    rest = [c - p for c, p in zip(trial.cotangents, part, strict=True)]
    sides = [op.run(trial.operands, given).gradients for given in (part, rest)]
    added = [a + b for a, b in zip(*sides, strict=True) if a is not None and b is not None]
    return _equal(added, [g for g in trial.whole.gradients if g is not None])


# -- factors ---------------------------------------------------------------------------------------
def _factors(
    op: _Op, mode: FakeTensorMode, trials: Sequence[Trial], shapes: Sequence[tuple[int, ...]]
) -> Iterator[tuple[Cuts, Cuts]]:
    """(dim of each operand, dim of each result) of every factor; no dim belongs to two."""
    used: set[tuple[str, int, int]] = set()
    for size in sorted({s for shape in shapes for s in shape if s > 1}):
        for cuts in _combinations(shapes, size):
            own = {("operand", i, d) for i, d in enumerate(cuts) if d is not None}
            made = None if own & used else _commutes(op, mode, trials, cuts, size)
            if made is None:
                continue
            own |= {("result", i, d) for i, d in enumerate(made) if d is not None}
            if not own & used:
                used |= own
                yield cuts, made


def _combinations(shapes: Sequence[tuple[int, ...]], size: int) -> Iterator[Cuts]:
    """Every choice of a dim of this size, or none, of each operand; cut rather than not."""
    options = [[*(d for d, s in enumerate(shape) if s == size), None] for shape in shapes]
    some = (cuts for cuts in itertools.product(*options) if any(d is not None for d in cuts))
    return itertools.islice(some, _COMBINATIONS)


def _commutes(
    op: _Op, mode: FakeTensorMode, trials: Sequence[Trial], cuts: Cuts, size: int
) -> Cuts | None:
    """The dim on which each result comes out cut when the operands are; None if one does not, or if
    a gradient is not what it must be.
    """
    prime = next((p for p in _PRIMES if size % p == 0), None)
    if prime is None:
        return None
    samples, _, whole = trials[0]
    length = size // prime
    shapes = [
        tuple(length if d == dim else s for d, s in enumerate(x.shape))
        for x, dim in zip(samples, cuts, strict=True)
    ]
    imagined = op.imagine(mode, samples, shapes)
    made = None if imagined is None else _cut_dims(imagined.results, whole.results, size, length)
    if made is None:
        return None
    try:
        for trial, parts in itertools.product(trials, _partitions(size, prime)):
            if not _agrees(op, trial, parts, cuts, made):
                return None
    except Exception:  # slice_scatter's kernel refuses shapes that its fake one takes
        return None
    return made


def _agrees(op: _Op, trial: Trial, parts: Sequence[Tensor], cuts: Cuts, made: Cuts) -> bool:
    """Whether the runs on these parts of the dims give the parts of what the whole run gives, and
    for the gradients of operands that are not cut the terms of a sum.
    """
    gradients = trial.whole.gradients
    sums = [torch.zeros_like(g) for g, dim in zip(gradients, cuts, strict=True) if _whole(g, dim)]
    for index in parts:
        own = _slices(trial.operands, cuts, index)
        found = op.run(own, _slices(trial.cotangents, made, index))
        if [g is None for g in found.gradients] != [g is None for g in gradients]:
            return False
        rows = list(zip(found.gradients, gradients, cuts, strict=True))
        expected = [_take(g, dim, index) for _, g, dim in rows if g is not None and dim is not None]
        sliced = [g for g, _, dim in rows if g is not None and dim is not None]
        results = _slices(trial.whole.results, made, index)
        if not _equal([*found.results, *sliced], [*results, *expected]):
            return False
        terms = [g for g, _, dim in rows if _whole(g, dim)]
        sums = [total + term for total, term in zip(sums, terms, strict=True)]
    return _equal(sums, [g for g, dim in zip(gradients, cuts, strict=True) if _whole(g, dim)])


def _whole(gradient: Tensor | None, dim: int | None) -> TypeGuard[Tensor]:
    """Whether this is the gradient of an operand that is not cut."""
    return gradient is not None and dim is None


def _partitions(size: int, prime: int) -> Iterator[Sequence[Tensor]]:
    """Slices, a digit that is not the outermost, and some subsets: a shard may be any of them."""
    yield torch.arange(size).chunk(prime)
    yield [torch.arange(size)[place::prime] for place in range(prime)]
    mixed = torch.randperm(size, generator=torch.Generator().manual_seed(size))
    yield [part.sort().values for part in mixed.chunk(prime)]


def _slices(tensors: Sequence[Tensor], dims: Cuts, index: Tensor) -> list[Tensor]:
    return [_take(x, dim, index) for x, dim in zip(tensors, dims, strict=True)]


def _take(x: Tensor, dim: int | None, index: Tensor) -> Tensor:
    return x if dim is None else x.index_select(dim, index)


def _cut_dims(
    parts: Sequence[Tensor], whole: Sequence[Tensor], size: int, length: int
) -> Cuts | None:
    """The one dim of each result that went from `size` to `length`."""
    dims: list[int | None] = []
    for part, result in zip(parts, whole, strict=True):
        if part.dim() != result.dim():
            return None
        changed = [d for d in range(part.dim()) if part.shape[d] != result.shape[d]]
        if len(changed) != 1:
            return None
        dim = changed[0]
        if (result.shape[dim], part.shape[dim]) != (size, length):
            return None
        dims.append(dim)
    return tuple(dims)


def _spec(
    shapes: Sequence[tuple[int, ...]],
    results: Sequence[tuple[int, ...]],
    found: Sequence[tuple[Cuts, Cuts]],
) -> OpShardingRule:
    """Factors d0, d1, … as found; every other dim is a whole factor of its own."""
    sizes: dict[str, int] = {}

    def dims(prefix: str, index: int, shape: tuple[int, ...], side: int) -> Dims:
        names = {factor[side][index]: f"d{number}" for number, factor in enumerate(found)}
        made = [names.get(dim, f"{prefix}{index}_{dim}") for dim in range(len(shape))]
        sizes.update(zip(made, shape, strict=True))
        return tuple((name,) for name in made)

    operands = tuple(dims("w", i, shape, 0) for i, shape in enumerate(shapes))
    outputs = tuple(dims("v", i, shape, 1) for i, shape in enumerate(results))
    whole = frozenset(name for name in sizes if not name.startswith("d"))
    return OpShardingRule(operands, outputs, sizes, whole=whole, found="probe")
