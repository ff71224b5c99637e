"""Rules of custom autograd functions, by trial, also of those whose tensors are too large to try:
they are tried with smaller dims.

    (64, 4096, 4096) -> (64, 4096, 4096)    is tried as    (12, 20, 20) -> (12, 20, 20)

A function whose trial makes other shapes of the small tensors, or fails, runs unsplit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

from autopar.ir.sharding_rule import Spec, operands_of, results_of, shape_of, value_of
from autopar.probe import probe
from autopar.trials import spec_by_trial

_ELEMENTS_AS_THEY_ARE = 1 << 16  # of tensors that are tried as they are
_KEPT = 8  # sizes up to this are not made smaller
_SMALL = (12, 20, 28, 18, 30, 42, 45, 50, 24, 36)  # what others become, in order of size


def function_spec(node: fx.Node, known: dict[object, Spec | None]) -> Spec | None:
    """The rule of a node whose target is a custom function, or None: it runs unsplit. `known` is
    that of `probe`.
    """
    values = [value_of(operand) for operand in operands_of(node) if operand is not None]
    shapes = [shape_of(value) for value in (*values, *results_of(node))]
    if all(math.prod(shape) <= _ELEMENTS_AS_THEY_ARE for shape in shapes):
        return probe(node, known)
    key = "smaller", node.target, tuple(shapes), tuple(value.dtype for value in values)
    if key not in known:
        known[key] = _by_smaller_trial(node, values, shapes)
    return known[key]


def _by_smaller_trial(
    node: fx.Node, values: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]
) -> Spec | None:
    small = _smaller(shapes)
    if small is None:
        return None
    tried = [
        torch.empty(_with(small, shape_of(value)), dtype=value.dtype, device="meta")
        for value in values
    ]

    def call(tensors: Sequence[Tensor]) -> list[Tensor]:
        assert callable(node.target)
        made = node.target(*tensors)
        return [made] if isinstance(made, Tensor) else list(made)

    spec = spec_by_trial(call, tried)
    if spec is None:
        return None
    dims = [*spec.operands, *spec.results]
    made = [_product(spec.sizes, of) for of in dims if of is not None]
    if made != [_with(small, shape) for shape in shapes]:
        return None
    large = {small_size: size for size, small_size in small.items()}
    return replace(spec, sizes={name: large.get(n, n) for name, n in spec.sizes.items()})


def _smaller(shapes: Sequence[tuple[int, ...]]) -> dict[int, int] | None:
    """A small size for every large one; None where there are more of them than there are sizes."""
    sizes = sorted({size for shape in shapes for size in shape if size > _KEPT})
    return dict(zip(sizes, _SMALL, strict=False)) if len(sizes) <= len(_SMALL) else None


def _with(small: dict[int, int], shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(small.get(size, size) for size in shape)


def _product(sizes: dict[str, int], dims: Sequence[tuple[str, ...]]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[name] for name in names) for names in dims)
