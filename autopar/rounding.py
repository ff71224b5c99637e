"""How far rounding alone may move what a step computes, found by running it a little off.

`layer_norm(x).sum()` is zero but for rounding, and so is the gradient of a bias before a norm. One
device gives 3e-16 there and four ranks -8e-16: a relative error of 3.7 that says nothing. What such
a value may be off by follows from the terms that cancel in it. Summing them in absolute value would
need a rule for every op and every adjoint; instead the step is run again with every value off by a
random part of SHAKE. What m moves by then was added up from terms of about m / SHAKE.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from autopar._compat import TorchDispatchMode, in_backward, pytree
from autopar.ops.recomputation import Visit
from autopar.widened import is_inexact

Key = TypeVar("Name", bound=Hashable)

# Large enough that where a value jumps (a relu at zero) it seems to be made of terms of at most a
# million times itself, small enough that all else moves in proportion.
SHAKE = 2.0**-20
SAMPLES = 2  # of random numbers a single one may come out near zero
# A value is held against a thousandth of its terms where it is smaller: with tolerance 1e-9 they
# count to 1e-12, where float64 rounds at 2e-16 and a long sum at some 1e-14.
_OF_TERMS = 1e-3


def shaken(decided: Mapping[fx.Node, Tensor], sample: int) -> Visit:
    """Give every float value of a run times 1 - SHAKE · (random numbers from 0 to 1).

    Never more, so that what an op is defined for (the cosine of an angle, a probability) it stays
    defined for. `decided`: the integers and flags of the undisturbed run, by node. A choice that
    was made, of experts for instance, stays made.
    """
    generator = torch.Generator().manual_seed(sample)

    def visit(node: fx.Node, result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        if node in decided:
            return decided[node]
        return _off(result, generator)

    return visit


@contextmanager
def shaken_backward(sample: int) -> Iterator[None]:
    """Every float that an op of a backward makes is off as well: in a composite op, such as
    cosine_similarity, terms may cancel in a backward of which the graph shows nothing.
    """
    with _Shaken(sample):
        yield


class _Shaken(TorchDispatchMode):
    def __init__(self, sample: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(sample)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        aliases = any(value.alias_info is not None for value in func._schema.returns)
        if aliases or not in_backward():
            return result
        return pytree.tree_map_only(torch.Tensor, self._off, result)

    def _off(self, value: Tensor) -> Tensor:
        return _off(value, self.generator) if is_inexact(value) else value


def _off(value: Tensor, generator: torch.Generator) -> Tensor:
    off = torch.rand(value.shape, generator=generator, dtype=torch.float64)
    return value * (1 - SHAKE * off).to(value.device)


def floors(
    plain: Mapping[Key, Tensor], samples: Iterable[Mapping[Key, Tensor]]
) -> dict[Key, float]:
    """The least number that an error of each value is held against, by its name. `samples` are
    taken one after the other, so that one alone is in memory.
    """
    found = {name: 0.0 for name, value in plain.items() if is_inexact(value)}
    for sample in samples:
        for name, floor in found.items():
            if name in sample:
                terms = _moved(plain[name], sample[name]) / SHAKE
                found[name] = max(floor, _OF_TERMS * terms)
    return found


def _moved(value: Tensor, other: Tensor) -> float:
    """The largest finite difference: where a disturbed run leaves what an op is defined for, it
    says nothing.
    """
    if not value.numel():
        return 0.0
    difference = (other - value).abs()
    return float(torch.where(difference.isfinite(), difference, 0.0).max())
