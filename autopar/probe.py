"""Rules found by trial, for ops that have no line in the table: run on small tensors, see which dims commute with slicing."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch import fx

from .rules import Dims, Spec, operands_of, results_of, shape_of, value_of

_ELEMENTS = 1 << 20  # larger tensors are not probed: the op then runs unsplit, and is listed
_PIECES = 2


def probe(node: fx.Node, known: dict[object, Spec | None]) -> Spec | None:
    """The rule of a node by trial in float64, or None where no dim of its result commutes with slicing.

    A dim of the result is a factor if cutting it in two gives what the op makes of operands cut in two on one dim of the same size
    each (or not cut). `known` keeps what was found for the same op, shapes and other arguments.
    """
    operands = [n for n in operands_of(node) if n is not None]
    outputs = results_of(node)
    if not operands or len(outputs) != 1 or not isinstance(outputs[0], torch.Tensor):
        return None
    shapes = [shape_of(value_of(n)) for n in operands]
    key = (node.target, tuple(shapes), str(node.args), str(node.kwargs))
    if key not in known:
        small = all(value_of(n).numel() <= _ELEMENTS for n in operands)
        known[key] = _aligned(node, _probe(node, operands, shapes) if small else None)
    return known[key]


def _aligned(node: fx.Node, spec: Spec | None) -> Spec | None:
    """The rule with None again for each optional operand that is absent."""
    if spec is None:
        return None
    present = iter(spec.operands)
    operands = tuple(None if n is None else next(present) for n in operands_of(node))
    return dataclasses.replace(spec, operands=operands)


def _probe(node: fx.Node, operands: list[fx.Node], shapes: list[tuple[int, ...]]) -> Spec | None:
    samples = [_sample(value_of(n), seed) for seed, n in enumerate(operands)]

    def call(tensors: list[torch.Tensor]) -> Any:
        env = {n: t for n, t in zip(operands, tensors, strict=True)}
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
        return node.target(*args, **kwargs)  # type: ignore[operator]

    try:
        with torch.no_grad():
            whole = call(samples)
            repeated = call(samples)
    except Exception:  # an op that does not run on plain tensors cannot be probed
        return None
    if not isinstance(whole, torch.Tensor) or not _equal(whole, repeated):
        return None  # random: nothing can be learned
    found = {dim: cuts for dim in range(whole.dim()) if (cuts := _cuts(call, samples, whole, dim)) is not None}
    return _spec(shapes, tuple(whole.shape), found) if found else None


def _sample(value: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if value.dtype.is_floating_point:
        return torch.randn(value.shape, generator=generator, dtype=torch.float64)
    return torch.randint(0, 2, value.shape, generator=generator).to(value.dtype)


def _equal(a: Any, b: Any) -> bool:
    return isinstance(b, torch.Tensor) and a.shape == b.shape and torch.allclose(
        a.double(), b.double(), rtol=1e-12, atol=1e-12, equal_nan=True
    )


def _cuts(call: Any, samples: list[torch.Tensor], whole: torch.Tensor, dim: int) -> tuple[int | None, ...] | None:
    """The dim on which each operand has to be cut (None: not) for this dim of the result to come out cut; None: no way."""
    size = whole.shape[dim]
    if size % _PIECES or size < 2:
        return None
    options = [[None, *(d for d, s in enumerate(t.shape) if s == size)] for t in samples]
    for cuts in itertools.product(*options):
        if any(cut is not None for cut in cuts) and _commutes(call, samples, whole, dim, cuts):
            return cuts
    return None


def _commutes(call: Any, samples: list[torch.Tensor], whole: torch.Tensor, dim: int, cuts: tuple[int | None, ...]) -> bool:
    for piece in range(_PIECES):
        cut = [
            t if d is None else t.chunk(_PIECES, d)[piece].contiguous() for t, d in zip(samples, cuts, strict=True)
        ]
        try:
            with torch.no_grad():
                part = call(cut)
        except Exception:  # other shapes than the op takes: this cut does not commute
            return False
        if not _equal(whole.chunk(_PIECES, dim)[piece], part):
            return False
    return True


def _spec(shapes: list[tuple[int, ...]], result: tuple[int, ...], found: dict[int, tuple[int | None, ...]]) -> Spec:
    sizes: dict[str, int] = {}

    def name(text: str, size: int) -> tuple[str, ...]:
        sizes[text] = size
        return (text,)

    operands: list[Dims] = []
    for i, shape in enumerate(shapes):
        taken = {cuts[i]: f"d{dim}" for dim, cuts in found.items() if cuts[i] is not None}
        operands.append(tuple(name(taken.get(d, f"w{i}_{d}"), size) for d, size in enumerate(shape)))
    results = tuple(name(f"d{dim}" if dim in found else f"v{dim}", size) for dim, size in enumerate(result))
    whole = frozenset(n for n in sizes if not n.startswith("d"))
    return Spec(tuple(operands), (results,), sizes, whole=whole, found="probe")
