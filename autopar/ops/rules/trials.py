"""Trials that find which dims of a function of tensors commute with slicing.

Example: for `lambda t: [t[0] @ t[1]]` on (4, 6) and (6, 8), the rows of the first operand and the
columns of the second do. The function runs on random operands in float64, forward and backward,
with no dim cut and with one dim of some operands cut. The dim is a factor where, in each way of
cutting that is tried,

    every result comes out cut on one dim as well,
    the gradient of a cut operand is the same slice of the uncut gradient, and
    the gradients of an operand that is not cut add up to the uncut one over the slices.

`rule_by_trial` does this for any callable; probe.py calls it. The op's kernel gets only shapes that
fake tensors go through with the results that a slice should have: kernels trust their callers, and
read or write beyond their memory on other shapes.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from autopar._compat import FakeTensorMode, strict_fake_mode
from autopar.ir.graph import is_inexact
from autopar.ir.sharding_rule import Dims, OpShardingRule, shape_of

_MAX_COMBINATIONS = 256  # combinations of operands' dims of one size that are tried
_PRIMES = (2, 3, 5, 7)
# The scale of the cotangents in each set of random operands: several sets, as one may agree by
# chance, and several scales, as a backward may clip.
_SCALES = (1.0, 1e4, 1e-4)
_ROUNDING = 1e-12  # rounding of float64
_NARROW_ROUNDING = 1e-5  # rounding of an op that computes in float32 inside

Splits = tuple[int | None, ...]  # the dim on which each operand (or result) is cut; None: not cut
Factor = tuple[Splits, Splits]  # the dim of each operand and of each result that a factor is
Call = Callable[[Sequence[Tensor]], list[Tensor]]


# -- runs ------------------------------------------------------------------------------------------
class Outcome(NamedTuple):
    """One run: its results, and the gradient of each operand (None: not compared)."""

    results: list[Tensor]
    gradients: list[Tensor | None]

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.results, *(g for g in self.gradients if g is not None)]


class TrialResult(NamedTuple):
    """What a trial found: the factors, the shapes of the results, and whether the backward is not
    linear in its incoming gradient.
    """

    factors: list[Factor]
    results: list[tuple[int, ...]]
    nonlinear: bool


class Trial(NamedTuple):
    """One set of random operands and cotangents, and the outcome with no dim cut."""

    operands: list[Tensor]
    cotangents: list[Tensor]
    unsharded: Outcome


@dataclass(frozen=True)
class TrialOp:
    """A function of tensors that is tried."""

    call: Call
    compared: tuple[bool, ...]  # operands whose gradient is compared

    def run(
        self, operands: Sequence[Tensor], cotangents: Sequence[Tensor] | None = None
    ) -> Outcome:
        """Run forward and backward. With `cotangents` None, empty ones stand in."""
        leaves = [
            x.detach().requires_grad_(compared)
            for x, compared in zip(operands, self.compared, strict=True)
        ]
        results = self.call(leaves)
        cotangents = [torch.empty_like(r) for r in results] if cotangents is None else cotangents
        pairs = [(r, c) for r, c in zip(results, cotangents, strict=True) if r.requires_grad]
        inputs = [x for x in leaves if x.requires_grad]
        if not pairs or not inputs:
            return Outcome([r.detach() for r in results], [None] * len(leaves))
        ends, end_cotangents = zip(*pairs, strict=True)
        computed = iter(torch.autograd.grad(ends, inputs, end_cotangents, materialize_grads=True))
        gradients = [next(computed).detach() if x.requires_grad else None for x in leaves]
        return Outcome([r.detach() for r in results], gradients)

    def imagine(
        self, mode: FakeTensorMode, like: Sequence[Tensor], shapes: Sequence[Sequence[int]]
    ) -> Outcome | None:
        """Return the run on fake tensors of these shapes; None where the op has no fake
        implementation or refuses them.
        """
        try:
            with mode:
                fakes = [torch.empty(s, dtype=x.dtype) for x, s in zip(like, shapes, strict=True)]
                return self.run(fakes)
        except Exception:
            return None


def rule_by_trial(call: Call, values: Sequence[Tensor]) -> OpShardingRule | None:
    """Return the rule of any function of tensors whose forward and backward commute with slicing
    some dim of its operands and results; None where there is no such dim, or where it cannot be
    tried.

    `values` give shapes and dtypes, and may be fake. `call` must be the same function at each call.
    """
    outcome = find_factors(call, values)
    if outcome is None or not outcome.factors:
        return None
    shapes = [shape_of(value) for value in values]
    return rule_of_factors(shapes, outcome.results, outcome.factors, outcome.nonlinear)


def find_factors(call: Call, values: Sequence[Tensor]) -> TrialResult | None:
    """Return the dims of a function of tensors that commute with slicing; None where it cannot be
    tried.
    """
    with _trial_settings():
        try:
            return _find_factors(call, values)
        except Exception:  # a function that does not run on plain tensors cannot be tried
            return None


def is_cut_alike(
    call: Call, values: Sequence[Tensor], results: Sequence[tuple[int, ...]], factor: Factor
) -> bool:
    """Whether the function, on tensors without storage, gives results of these shapes, and results
    cut on the dims of a factor where the operands are. Nothing is computed.
    """
    operand_splits, result_splits = factor
    shapes = [shape_of(value) for value in values]
    size = next(s[dim] for s, dim in zip(shapes, operand_splits, strict=True) if dim is not None)
    prime = next((p for p in _PRIMES if size % p == 0), None)
    if prime is None:
        return False

    def cut(shape: tuple[int, ...], dim: int | None) -> tuple[int, ...]:
        return tuple(s // prime if d == dim else s for d, s in enumerate(shape))

    own = [torch.empty(0, dtype=_wide_dtype(value.dtype)) for value in values]
    with _trial_settings():
        mode = strict_fake_mode()
        op = TrialOp(call, (False,) * len(values))
        unsharded = op.imagine(mode, own, shapes)
        parts = op.imagine(
            mode, own, [cut(s, dim) for s, dim in zip(shapes, operand_splits, strict=True)]
        )
    if unsharded is None or parts is None:
        return False
    cut_results = [cut(s, dim) for s, dim in zip(results, result_splits, strict=True)]
    return [shape_of(r) for r in unsharded.results] == list(results) and [
        shape_of(r) for r in parts.results
    ] == cut_results


@contextmanager
def _trial_settings() -> Iterator[None]:
    """Gradients on, and no trace of the trial: no random state, warning or log."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(action="ignore"),
        _without_logging(),
    ):
        yield


@contextmanager
def _without_logging() -> Iterator[None]:
    """Silence the log of fake tensors within: a refusal of an op is an answer here."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(level)


def _find_factors(call: Call, values: Sequence[Tensor]) -> TrialResult | None:
    shapes, mode = [shape_of(v) for v in values], strict_fake_mode()
    samples = [_sample(v, i, positive=False) for i, v in enumerate(values)]
    op = TrialOp(call, _takes_gradients(call, mode, samples))
    imagined = op.imagine(mode, samples, shapes)
    if imagined is None:
        return None
    trials = _run_trials(op, values, imagined)
    factors = list(_factors(op, mode, trials, shapes)) if trials else []
    nonlinear = bool(factors) and not all(gradients_add_up(op, trial) for trial in trials)
    return TrialResult(factors, [shape_of(r) for r in imagined.results], nonlinear)


def differing_results(call: Call, values: Sequence[Tensor]) -> list[int]:
    """Return the numbers of the results that differ when the function runs again on the same
    operands; an empty list where it cannot be tried.
    """
    samples = [_sample(v, i, positive=False).to(v.dtype) for i, v in enumerate(values)]
    op = TrialOp(call, (False,) * len(samples))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            if op.imagine(strict_fake_mode(), samples, [shape_of(x) for x in samples]) is None:
                return []
            first, second = (op.run([x.clone() for x in samples]).results for _ in range(2))
    except Exception:  # a function that does not run on plain tensors cannot be tried
        return []
    return [n for n, (a, b) in enumerate(zip(first, second, strict=True)) if not _repeats(a, b)]


def _repeats(actual: Tensor, again: Tensor) -> bool:
    return torch.allclose(_widen(actual), _widen(again), rtol=1e-3, atol=1e-5, equal_nan=True)


def _takes_gradients(call: Call, mode: FakeTensorMode, samples: list[Tensor]) -> tuple[bool, ...]:
    """Return for each operand whether the op takes its gradient. An op may refuse that of some, as
    losses do for their weights; no model has one there.
    """

    def takes_gradient(place: int) -> bool:
        try:
            with mode:
                fakes = [torch.empty(x.shape, dtype=x.dtype) for x in samples]
                fakes[place].requires_grad_()
                call(fakes)
        except Exception:
            return False
        return True

    return tuple(is_inexact(x.dtype) and takes_gradient(n) for n, x in enumerate(samples))


def _run_trials(op: TrialOp, values: Sequence[Tensor], imagined: Outcome) -> list[Trial]:
    """Return trials with random operands; none if a second run differs, or if fake tensors have
    other shapes.
    """
    trials: list[Trial] = []
    for seed, scale in enumerate(_SCALES):
        samples = [_sample(v, 100 * seed + i, positive=seed == 1) for i, v in enumerate(values)]
        cotangents = [_cotangent(r, 7000 + i, scale) for i, r in enumerate(imagined.results)]
        uncut, again = op.run(samples, cotangents), op.run(samples, cotangents)
        if not _same_form(uncut, imagined) or not all_near(uncut.tensors, again.tensors):
            return []
        if not any(bool(t.isnan().any()) for t in uncut.tensors):  # nan is nan: proves nothing
            trials.append(Trial(samples, cotangents, uncut))
    return trials


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a sample of an operand of this dtype is drawn."""
    if dtype.is_floating_point:
        return torch.float64
    return torch.complex128 if dtype.is_complex else dtype


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
    dtype = like.dtype if is_inexact(like.dtype) else torch.float64
    return scale * torch.randn(like.shape, generator=generator, dtype=dtype)


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.complex128) if x.is_complex() else x.double()


def _same_form(outcome: Outcome, imagined: Outcome) -> bool:
    """Whether the op gives the shapes and dtypes that its fake implementation gives."""
    pairs = zip(outcome.tensors, imagined.tensors, strict=True)
    return all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)


def all_near(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(_equal_but_for_rounding(a, b) for a, b in zip(actual, expected, strict=True))


def _equal_but_for_rounding(actual: Tensor, expected: Tensor) -> bool:
    """Whether tensors are equal but for the rounding of the precision that the op computes in."""
    if actual.shape != expected.shape:
        return False
    a, b = _widen(actual), _widen(expected)
    finite = b[b.isfinite()].abs()
    largest = max(1.0, float(finite.max())) if finite.numel() else 1.0
    narrow = not b.is_complex() and torch.equal(b.float().double().nan_to_num(), b.nan_to_num())
    rounding = _NARROW_ROUNDING if narrow and expected.is_floating_point() else _ROUNDING
    return torch.allclose(a, b, rtol=0, atol=rounding * largest, equal_nan=True)


def gradients_add_up(op: TrialOp, trial: Trial) -> bool:
    """Whether the gradients for two parts of a cotangent add up to that for their sum. If not, no
    rank may run the backward on a part.
    """
    part = [c.flip(0) * 0.5 if c.dim() else c * 0.5 for c in trial.cotangents]
    remainder = [c - p for c, p in zip(trial.cotangents, part, strict=True)]
    sides = [op.run(trial.operands, cotangents).gradients for cotangents in (part, remainder)]
    added = [a + b for a, b in zip(*sides, strict=True) if a is not None and b is not None]
    return all_near(added, [g for g in trial.unsharded.gradients if g is not None])


# -- factors ---------------------------------------------------------------------------------------
def _factors(
    op: TrialOp, mode: FakeTensorMode, trials: Sequence[Trial], shapes: Sequence[tuple[int, ...]]
) -> Iterator[Factor]:
    """Yield (dim of each operand, dim of each result) of every factor; no dim belongs to two."""
    used: set[tuple[str, int, int]] = set()
    for size in sorted({s for shape in shapes for s in shape if s > 1}):
        for splits in _combinations(shapes, size):
            dims = {("operand", i, d) for i, d in enumerate(splits) if d is not None}
            result_splits = None if dims & used else _commutes(op, mode, trials, splits, size)
            if result_splits is None:
                continue
            dims |= {("result", i, d) for i, d in enumerate(result_splits) if d is not None}
            if not dims & used:
                used |= dims
                yield splits, result_splits


def _combinations(shapes: Sequence[tuple[int, ...]], size: int) -> Iterator[Splits]:
    """Return every choice of a dim of this size, or none, of each operand; cuts come first."""
    options = [[*(d for d, s in enumerate(shape) if s == size), None] for shape in shapes]
    some = (splits for splits in itertools.product(*options) if any(d is not None for d in splits))
    return itertools.islice(some, _MAX_COMBINATIONS)


def _commutes(
    op: TrialOp, mode: FakeTensorMode, trials: Sequence[Trial], operand_splits: Splits, size: int
) -> Splits | None:
    """Return the dim on which each result comes out cut when the operands are; None if one does
    not, or if a gradient is wrong.
    """
    prime = next((p for p in _PRIMES if size % p == 0), None)
    if prime is None:
        return None
    samples, _, uncut = trials[0]
    length = size // prime
    shapes = [
        tuple(length if d == dim else s for d, s in enumerate(x.shape))
        for x, dim in zip(samples, operand_splits, strict=True)
    ]
    imagined = op.imagine(mode, samples, shapes)
    result_splits = (
        None if imagined is None else _cut_dims(imagined.results, uncut.results, size, length)
    )
    if result_splits is None:
        return None
    try:
        for trial, parts in itertools.product(trials, _partitions(size, prime)):
            if not _agrees(op, trial, parts, operand_splits, result_splits):
                return None
    except Exception:  # slice_scatter's kernel refuses shapes that its fake one takes
        return None
    return result_splits


def _agrees(
    op: TrialOp,
    trial: Trial,
    parts: Sequence[Tensor],
    operand_splits: Splits,
    result_splits: Splits,
) -> bool:
    """Whether the runs on these parts give the parts of the uncut results and gradients, and
    gradients of uncut operands that add up.
    """
    gradients = trial.unsharded.gradients
    sums = [
        torch.zeros_like(g)
        for g, dim in zip(gradients, operand_splits, strict=True)
        if _uncut(g, dim)
    ]
    for index in parts:
        operands = _slices(trial.operands, operand_splits, index)
        outcome = op.run(operands, _slices(trial.cotangents, result_splits, index))
        if [g is None for g in outcome.gradients] != [g is None for g in gradients]:
            return False
        rows = list(zip(outcome.gradients, gradients, operand_splits, strict=True))
        expected = [
            _take_indices(g, dim, index) for _, g, dim in rows if g is not None and dim is not None
        ]
        sliced = [g for g, _, dim in rows if g is not None and dim is not None]
        results = _slices(trial.unsharded.results, result_splits, index)
        if not all_near([*outcome.results, *sliced], [*results, *expected]):
            return False
        terms = [g for g, _, dim in rows if _uncut(g, dim)]
        sums = [total + term for total, term in zip(sums, terms, strict=True)]
    return all_near(
        sums, [g for g, dim in zip(gradients, operand_splits, strict=True) if _uncut(g, dim)]
    )


def _uncut(gradient: Tensor | None, dim: int | None) -> TypeGuard[Tensor]:
    """Whether this is the gradient of an operand that is not cut."""
    return gradient is not None and dim is None


def _partitions(size: int, prime: int) -> Iterator[Sequence[Tensor]]:
    """Yield slices, a digit that is not the outermost, and random subsets, all possible shards."""
    yield torch.arange(size).chunk(prime)
    yield [torch.arange(size)[place::prime] for place in range(prime)]
    mixed = torch.randperm(size, generator=torch.Generator().manual_seed(size))
    yield [part.sort().values for part in mixed.chunk(prime)]


def _slices(tensors: Sequence[Tensor], dims: Splits, index: Tensor) -> list[Tensor]:
    return [_take_indices(x, dim, index) for x, dim in zip(tensors, dims, strict=True)]


def _take_indices(x: Tensor, dim: int | None, index: Tensor) -> Tensor:
    return x if dim is None else x.index_select(dim, index)


def _cut_dims(
    parts: Sequence[Tensor], unsharded: Sequence[Tensor], size: int, length: int
) -> Splits | None:
    """Return the one dim of each result that went from `size` to `length`."""
    dims: list[int | None] = []
    for part, result in zip(parts, unsharded, strict=True):
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


def rule_of_factors(
    shapes: Sequence[tuple[int, ...]],
    results: Sequence[tuple[int, ...]],
    factors: Sequence[Factor],
    nonlinear: bool,
) -> OpShardingRule:
    """Return the rule with factors d0, d1, …; every other dim is an unsharded factor of its own."""
    sizes: dict[str, int] = {}

    def dims(prefix: str, index: int, shape: tuple[int, ...], side: int) -> Dims:
        names = {factor[side][index]: f"d{number}" for number, factor in enumerate(factors)}
        factor_names = [names.get(dim, f"{prefix}{index}_{dim}") for dim in range(len(shape))]
        sizes.update(zip(factor_names, shape, strict=True))
        return tuple((name,) for name in factor_names)

    operands = tuple(dims("w", i, shape, 0) for i, shape in enumerate(shapes))
    outputs = tuple(dims("v", i, shape, 1) for i, shape in enumerate(results))
    unsharded = frozenset(name for name in sizes if not name.startswith("d"))
    return OpShardingRule(
        operands, outputs, sizes, whole=unsharded, nonlinear=nonlinear, source="probe"
    )
