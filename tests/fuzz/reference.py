"""What the module itself gives on one device in plain eager PyTorch, and how it is compared.

Nothing here knows of autopar's trace. Random numbers alone are replayed: they are a hash of a seed
and of the global index, so the seeds that the parallel program drew are given to the module, in the
order in which it draws.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.ops import sharded

from .habits import Session
from .source import Built, Unfit

# the function of that name hides the module
sharded_dropout = importlib.import_module("autopar.ops.sharded.dropout")
STEPS = 2  # without habits


@dataclass
class Trained:
    """What two steps of SGD leave, or one before the first habit and one after each: all outputs,
    the gradients of the first step (of all, where there are habits), of parameters and of inputs,
    the parameters and the buffers after the last.
    """

    outputs: list[Any] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    room: dict[str, float] = field(default_factory=dict)  # of a value: see `agrees`


def cotangents(leaves: Sequence[Any]) -> list[Tensor | None]:
    """What the backward starts from: all scalars; where there is none, all that has gradients."""
    able = [isinstance(x, Tensor) and x.requires_grad for x in leaves]
    scalars = any(a and x.dim() == 0 for a, x in zip(able, leaves))
    tensors: list[Tensor | None] = []
    for place, (leaf, wanted) in enumerate(zip(leaves, able)):
        if not wanted or (scalars and leaf.dim()):
            tensors.append(None)
            continue
        draws = torch.Generator().manual_seed(place)
        shape = tuple(leaf.shape)
        unsharded = (
            torch.randn(shape, generator=draws, dtype=torch.float64) if shape else 1 - 0.3 * place
        )
        tensors.append(torch.as_tensor(unsharded, dtype=leaf.dtype))
    return tensors


def trained(
    built: Built,
    masks: Sequence[Sequence[int]] = (),
    counts: list[int] | None = None,
    off: float = 0.0,
) -> Trained:
    """The module of this text, made anew, trained. `masks`: the seeds of draws in every step, and
    in every habit; `counts` gets how many draws each of them made. `off`: how far each parameter is
    off to begin with, as a share of it.
    """
    draws = torch.Generator().manual_seed(0)
    for parameter in built.model.parameters() if off else ():
        shares = torch.rand(parameter.shape, generator=draws, dtype=torch.float64)
        parameter.detach().mul_(1 - off * shares)
    seeds = iter(masks)

    def call(act: Callable[[], list[Any]]) -> list[Any]:
        replay = _Replay(next(seeds, ()), differentiates(built.text))
        with replay if replay.seeds else nullcontext():
            results = act()
        if counts is not None:
            counts.append(replay.used)
        return results

    return train(Session(built.model, built.inputs), [line for _, line in built.habits], call)


def train(
    session: Session,
    habits: Sequence[str],
    call: Callable[[Callable[[], list[Any]]], list[Any]],
    unsharded: Callable[[Any], Any] = lambda value: value,
) -> Trained:
    """Steps of SGD with a habit before each but the first. `call`: runs what may call the module;
    `unsharded`: what a value is on one device.
    """
    record, model = Trained(), session.model
    for step, line in enumerate(["", *habits] if habits else [""] * STEPS):
        seen = call(partial(session.do, line)) if line else []
        leaves = [unsharded(x) for x in call(session.call)]
        results = [*map(unsharded, seen), *leaves]
        record.outputs += [x.detach().clone() if isinstance(x, Tensor) else x for x in results]
        pairs = [(x, g) for x, g in zip(leaves, cotangents(leaves)) if g is not None]
        if pairs:
            torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])
        if step == 0 or habits:
            named = gradients(model.named_parameters(), session.inputs)
            where = f" of step {step}" if step else ""
            record.gradients |= {f"{n}{where}": unsharded(g) for n, g in named.items()}
        session.update()
        for x in session.inputs:
            if habits and isinstance(x, Tensor):
                x.grad = None
    record.parameters = {n: unsharded(p.detach()) for n, p in model.named_parameters()}
    record.buffers = {n: unsharded(b.detach()) for n, b in model.named_buffers()}
    return record


def gradients(named: Any, inputs: Sequence[Any]) -> dict[str, Tensor | None]:
    able = {n: p.grad for n, p in named if p.requires_grad}
    tensors = ((i, x) for i, x in enumerate(inputs) if isinstance(x, Tensor))
    able |= {f"inputs[{i}]": x.grad for i, x in tensors if x.requires_grad}
    return {n: None if g is None else g.detach().clone() for n, g in able.items()}


# -- random numbers --------------------------------------------------------------------------------
def differentiates(text: str) -> bool:
    """Whether a module takes derivatives in forward: it is then traced below autograd, where torch
    makes dropout of a bernoulli draw.
    """
    return any(call in text for call in ("autograd.grad(", "func.grad(", "func.jvp("))


class _Replay(TorchFunctionMode):
    """Drops and draws what the ranks do by these seeds. `below`: as traced below autograd."""

    def __init__(self, seeds: Sequence[int], below: bool) -> None:
        self.seeds, self.below, self.used = list(seeds), below, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "dropout":
            x, p = args[0], args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            rest = args[2] if len(args) > 2 else kwargs.get("training", True)
            return self._dropped(x, p) if rest and p else x  # none is drawn where p is 0
        if name == "scaled_dot_product_attention" and kwargs.get("dropout_p"):
            q, k, v = args[:3]
            scores = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
            return self._dropped(scores, kwargs["dropout_p"]) @ v
        if name == "randn_like":
            return self._drawn("normal", (0, 1), args[0].shape, args[0].dtype)
        if name == "randint":
            return self._drawn("integers", args[:2], args[2], torch.int64)
        if name == "rand_like":
            return self._uniform(args[0].shape, args[0].dtype)
        if name == "bernoulli":
            return self._coins(args[0].shape, args[0]).to(args[0].dtype)
        if name == "exponential_":
            return args[0].copy_(-torch.log1p(-self._uniform(args[0].shape, torch.float64)))
        if name == "randperm":
            return self._uniform((args[0],), torch.float64).argsort()
        return func(*args, **kwargs)

    def _seed(self) -> Tensor:
        seed = self.seeds[self.used % len(self.seeds)] if self.seeds else 0
        self.used += 1
        return torch.tensor(seed)

    def _dropped(self, x: Tensor, p: float) -> Tensor:
        if self.below:
            return torch.where(self._coins(x.shape, 1 - p), x / (1 - p), 0)
        index = torch.arange(x.numel()).view(x.shape)
        saved = sharded_dropout.hash_of(index, sharded_dropout.keys_of(self._seed())) >= round(
            p * 2**32
        )
        return torch.where(saved, x / (1 - p), 0)

    def _coins(self, shape: Any, rate: Any) -> Tensor:
        return self._uniform(shape, torch.float32) < rate

    def _uniform(self, shape: Any, dtype: torch.dtype) -> Tensor:
        return self._drawn("uniform", (0, 1), shape, dtype)

    def _drawn(self, kind: Any, limits: Any, shape: Any, dtype: torch.dtype) -> Tensor:
        digits: list[Any] = [()] * len(shape)
        return sharded.draw(kind, limits, shape, dtype, self._seed(), [], digits, shape)


def agrees(
    differ: Callable[[Trained], str],
    text: Callable[[], Built],
    masks: list[list[int]],
    tolerance: float,
    alarm: str = "",
) -> str:
    """What differs between the parallel program and the module; "" where nothing does. `alarm`:
    what verify said of it. Raises Unfit where rounding moves the module's own values as far.

    Seeds of a step are in the order in which the traced graph draws, as their upper words number
    its draws. A draw whose result nothing uses is not in that graph: which ones, is tried out.
    """
    seeds: list[list[int]] = [sorted(step) for step in masks]
    counts: list[int] = []
    expected = trained(text(), seeds, counts)
    first = differ(expected)
    fewer = {(n, len(step)) for n, step in zip(counts, seeds) if n > len(step)}
    if first and len(fewer) == 1:
        ((draws, used),) = fewer
        for drawn in itertools.combinations(range(draws), used):
            spread = [_spread(step, drawn, draws) if len(step) == used else step for step in seeds]
            if not differ(trained(text(), spread)):
                return ""
    if first or alarm:
        expected.room = _room(trained(text(), seeds, off=ROUNDING), expected, tolerance)
        moved = [name for name, times in expected.room.items() if first or times > _OFTEN]
        if moved and not differ(expected):
            raise Unfit(f"{first or alarm}; rounding moves {', '.join(moved)} of the module")
    return first


# A row that is zero, divided by its norm, has a gradient of 1e12 times terms that may cancel.
ROUNDING, _OFTEN = 2.0**-46, 100.0


def _room(off: Trained, expected: Trained, tolerance: float) -> dict[str, float]:
    """By how many times the tolerance values may be off: _OFTEN as far as they move when parameters
    are off by ROUNDING; those that may by more than once.
    """
    moved = {name: _OFTEN * times for name, times in _apart(off, expected, tolerance)}
    return {name: times for name, times in moved.items() if times > 1}


def _spread(seeds: Sequence[int], drawn: Sequence[int], draws: int) -> list[int]:
    """The seeds of this many draws, of which those not in `drawn` have any."""
    by_place = dict(zip(drawn, seeds))
    return [by_place.get(place, 0) for place in range(draws)]


# -- comparing -------------------------------------------------------------------------------------
def difference(actual: Any, expected: Any, tolerance: float, least: float) -> float:
    """How many times the tolerance two values are apart; 0 where they are equal enough. None is a
    gradient of zeros.
    """
    if not isinstance(expected, Tensor) and not isinstance(actual, Tensor):
        return 0.0 if actual == expected else float("inf")
    if actual is None or expected is None:
        other = expected if actual is None else actual
        return float(other.abs().max()) / (tolerance * least) if other.numel() else 0.0
    if not isinstance(actual, Tensor) or not isinstance(expected, Tensor):
        return float("inf")
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    if not expected.numel():
        return 0.0
    if not expected.dtype.is_floating_point:
        return 0.0 if torch.equal(actual, expected) else float("inf")
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    apart = torch.where(same, 0.0, (actual - expected).abs()).max()
    finite = expected[expected.isfinite()]
    scale = max(float(finite.abs().max()) if finite.numel() else 0.0, least)
    return float(apart) / (tolerance * scale) if not apart.isnan() else float("inf")


def _largest(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def differences(
    actual: Trained, expected: Trained, tolerance: float, cut: Callable[[str, Any], Any]
) -> str:
    """The first value that is not as it should be, "" where all are. `cut(name, whole)`: the part
    of an expected value that was found.
    """
    if len(actual.outputs) != len(expected.outputs):
        return f"{len(actual.outputs)} outputs, not {len(expected.outputs)}"
    for what in ("gradients", "parameters", "buffers"):
        ours, theirs = getattr(actual, what), getattr(expected, what)
        if ours.keys() != theirs.keys():
            return f"{what} of {sorted(ours.keys() ^ theirs.keys())} on one side only"
    for name, times in _apart(actual, expected, tolerance, cut):
        if times > expected.room.get(name, 1):
            return f"{name} is off by {times * tolerance:.1e} (relative)"
    return ""


def _apart(
    actual: Trained,
    expected: Trained,
    tolerance: float,
    cut: Callable[[str, Any], Any] = lambda name, whole: whole,
) -> Iterator[tuple[str, float]]:
    """Yields how many times the tolerance each value is off, by its name."""
    for i, (ours, theirs) in enumerate(zip(actual.outputs, expected.outputs)):
        name = f"outputs[{i}]"
        yield name, difference(ours, cut(name, theirs), tolerance, 0.01)
    largest = [_largest(g) for g in expected.gradients.values() if g is not None]
    floor = max([0.01 * max(largest, default=0.0), 1e-6])
    # A parameter whose gradient is zero but for rounding moves by that of the largest ones.
    moved = max([0.01, *(0.01 * _largest(p) for p in expected.parameters.values())])
    for what, least in (("gradients", floor), ("parameters", moved), ("buffers", 0.01)):
        ours, theirs = getattr(actual, what), getattr(expected, what)
        for key in theirs:
            name = f"{what}[{key!r}]"
            yield name, difference(ours[key], cut(name, theirs[key]), tolerance, least)
