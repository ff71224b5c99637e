"""Rules found by trial, for ops without a line in the table: which dims commute with slicing?

The op runs on random operands in float64, whole and with one dim of some operands cut. Where every
result comes out cut on one dim as well, in each way of cutting that is tried, the dim is a factor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .rules import Dims, Spec, bound, operands_of, results_of, shape_of, value_of

_ELEMENTS = 1 << 20  # larger tensors are not probed: the op then runs unsplit, and is listed
_COMBINATIONS = 256  # of operands' dims of one size
_PRIMES = (2, 3, 5, 7)
_SAMPLES = 3  # sets of random operands: one alone may agree by chance

Cuts = tuple[int | None, ...]  # the dim on which each operand (or result) is cut; None: not cut
Call = Callable[[Sequence[Tensor]], list[Tensor]]


def probe(node: fx.Node, known: dict[object, Spec | None]) -> Spec | None:
    """The rule of a node by trial, or None where no dim of its results commutes with slicing.

    None too for ops that are random, that do not run on the CPU, and whose operands have more than
    a million elements. `known` keeps what was found for the same op, shapes and other arguments.
    """
    operands = operands_of(node)
    values = [value_of(n) for n in operands if n is not None]
    if not values or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return None
    if not all(isinstance(value, Tensor) for value in (*values, *results_of(node))):
        return None
    key = _key(node, values)
    if key not in known:
        small = all(value.numel() <= _ELEMENTS for value in values)
        known[key] = _probe(node, values) if small else None
    spec = known[key]
    return None if spec is None else _with_absent(spec, operands)


def _key(node: fx.Node, values: Sequence[Tensor]) -> object:
    others = fx.map_arg((node.args, node.kwargs), lambda n: None)
    return node.target, tuple((shape_of(v), v.dtype) for v in values), str(others)


def _with_absent(spec: Spec, operands: Sequence[fx.Node | None]) -> Spec:
    """The rule with None for each optional operand that is absent."""
    present = iter(spec.operands)
    dims = tuple(None if n is None else next(present) for n in operands)
    return Spec(dims, spec.results, spec.sizes, whole=spec.whole, found=spec.found)


def _probe(node: fx.Node, values: Sequence[Tensor]) -> Spec | None:
    call = _caller(node)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            trials = _trials(call, values)
            found = list(_factors(call, trials, [shape_of(v) for v in values])) if trials else []
    except Exception:  # an op that does not run on plain tensors cannot be probed
        return None
    results = [shape_of(value) for value in results_of(node)]
    return _spec([shape_of(v) for v in values], results, found) if found else None


def _caller(node: fx.Node) -> Call:
    """The op as a function of its tensors, which may be others where the graph passes one twice."""

    def call(tensors: Sequence[Tensor]) -> list[Tensor]:
        remaining = iter(tensors)

        def fill(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [fill(item) for item in value]
            return next(remaining) if isinstance(value, fx.Node) else value

        arguments = {name: fill(value) for name, value in bound(node).items()}
        assert callable(node.target)
        result = node.target(**arguments)
        return list(result) if isinstance(result, list | tuple) else [result]

    return call


def unrepeatable(node: fx.Node) -> bool:
    """Whether an op of someone's own gives other results where it runs again on the same operands:
    it draws random numbers of which its tags say nothing, or it keeps a state. Of results that are
    used; False for ops that do not run on the CPU or whose operands are large.
    """
    if getattr(node.target, "namespace", "aten") in ("aten", "prims", "autopar"):
        return False
    values = [value_of(n) for n in operands_of(node) if n is not None]
    if any(not isinstance(v, Tensor) or v.numel() > _ELEMENTS for v in values):
        return False
    samples = [_sample(v, i, positive=False).to(v.dtype) for i, v in enumerate(values)]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            first, second = (_caller(node)([s.clone() for s in samples]) for _ in range(2))
    except Exception:  # an op that does not run on plain tensors cannot be probed
        return False
    several = isinstance(value_of(node), list | tuple)
    used = {user.args[1] for user in node.users} if several else {0}
    pairs = [pair for i, pair in enumerate(zip(first, second, strict=True)) if i in used]
    return not all(torch.allclose(_wide(a), _wide(b), 1e-3, 1e-5, True) for a, b in pairs)


Trial = tuple[list[Tensor], list[Tensor]]  # operands, results


def _trials(call: Call, values: Sequence[Tensor]) -> list[Trial]:
    """Random operands and what the op makes of them; none at all if a second run makes another."""
    trials: list[Trial] = []
    for seed in range(_SAMPLES):
        samples = [_sample(v, 100 * seed + i, positive=seed == 1) for i, v in enumerate(values)]
        whole, again = call(samples), call(samples)
        if not _equal(whole, again):
            return []
        if not any(bool(r.isnan().any()) for r in whole):  # nan equals nan: that proves nothing
            trials.append((samples, whole))
    return trials


def _sample(value: Tensor, seed: int, positive: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if value.dtype.is_floating_point:
        sample = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        return sample.abs() + 0.1 if positive else sample
    return torch.randint(0, 2, value.shape, generator=generator).to(value.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.complex128) if x.is_complex() else x.double()


def _equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(
        a.shape == b.shape and torch.allclose(_wide(a), _wide(b), rtol=1e-12, atol=1e-12)
        for a, b in zip(found, expected, strict=True)
    )


# -- factors ---------------------------------------------------------------------------------------
def _factors(
    call: Call, trials: Sequence[Trial], shapes: Sequence[tuple[int, ...]]
) -> Iterator[tuple[Cuts, Cuts]]:
    """(dim of each operand, dim of each result) of every factor; no dim belongs to two."""
    used: set[tuple[str, int, int]] = set()
    for size in sorted({s for shape in shapes for s in shape if s > 1}):
        for cuts in _combinations(shapes, size):
            made = _commutes(call, trials, cuts, size)
            if made is None:
                continue
            own = {("operand", i, d) for i, d in enumerate(cuts) if d is not None}
            own |= {("result", i, d) for i, d in enumerate(made) if d is not None}
            if not own & used:
                used |= own
                yield cuts, made


def _combinations(shapes: Sequence[tuple[int, ...]], size: int) -> Iterator[Cuts]:
    """Every choice of a dim of this size, or none, of each operand; cut rather than not."""
    options = [[*(d for d, s in enumerate(shape) if s == size), None] for shape in shapes]
    some = (cuts for cuts in itertools.product(*options) if any(d is not None for d in cuts))
    return itertools.islice(some, _COMBINATIONS)


def _commutes(call: Call, trials: Sequence[Trial], cuts: Cuts, size: int) -> Cuts | None:
    """The dim on which each result comes out cut when the operands are; None if one does not."""
    prime = next((p for p in _PRIMES if size % p == 0), None)
    if prime is None:
        return None
    made: Cuts | None = None
    for samples, whole in trials:
        for index in _pieces(size, prime):
            try:
                parts = call([_take(x, dim, index) for x, dim in zip(samples, cuts, strict=True)])
            except Exception:  # other shapes than the op takes
                return None
            made = made or _cut_dims(parts, whole, size, len(index))
            if made is None:
                return None
            if not _equal(parts, [_take(x, d, index) for x, d in zip(whole, made, strict=True)]):
                return None
    return made


def _pieces(size: int, prime: int) -> Iterator[Tensor]:
    """Slices, a digit that is not the outermost, and some subset: a shard may be any of them."""
    yield from torch.arange(size).chunk(prime)
    yield torch.arange(size)[prime - 1 :: prime]
    some = torch.randperm(size, generator=torch.Generator().manual_seed(size))[: size // prime]
    yield some.sort().values


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
) -> Spec:
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
    return Spec(operands, outputs, sizes, whole=whole, found="probe")
