"""Attention with dropout of its weights.

On a CPU, where no fused kernel drops, and where the queries or keys are split, it is the plain
formula, whose mask does not depend on the layout. On a GPU, where batch and heads alone are split,
it is torch's own fused kernel, seeded by the step and the rank's place on the axes that split them:
ranks that hold the same heads drop the same, others are independent. What it drops depends on the
layout then, as it does in every other library; `verify`, which runs on a CPU, sees the formula.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar._compat import recording_again
from autopar.ops.devices import filled
from autopar.ops.sharded.dropout import dropout
from autopar.ops.sharded.vocabulary import Digit

_ODD = 0x9E3779B97F4A7C15  # seeds of one step lie that far apart


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    p: float,
    is_causal: bool,
    scale: float | None,
    seed: Tensor,
    coordinates: Sequence[Tensor],
    digits_by_dim: Sequence[Sequence[Digit]],
    shape: Sequence[int],
    own_seed: Tensor | None = None,
    draw: int = 0,
) -> Tensor:
    """softmax(query · keyᵀ · scale + mask) · value with dropout of the weights; query (…, heads, q,
    e), key and value (…, groups, k, ·).

    `shape` is the global shape of the weights (…, heads, q, k); see `dropout` for `seed`,
    `coordinates`, `digits_by_dim`. `own_seed`: a seed on the host that knows the rank's place (see
    `seed_at`), where a kernel may be seeded by it; `draw` tells its uses in a step apart.
    """
    if own_seed is not None and _has_kernel(query.device):
        more = mask, p, is_causal, scale, own_seed, draw
        return _turned(_fused(query, key, value, *more))
    repeats = query.shape[-3] // key.shape[-3] if query.dim() > 2 else 1
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.mT * scale
    if is_causal:
        kept = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~kept, float("-inf"))
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        )
    weights = torch.softmax(scores, -1) if mask is None else _weights(scores)
    return dropout(weights, p, seed, coordinates, digits_by_dim, shape) @ value


def seed_at(seed: int, coordinate: Mapping[str, int], axes: str) -> Tensor:
    """The seed of a step on ranks that stand where this one does on axes ("@x.z"), int64 on the
    host, from where kernels take it: another for every step and place.

    >>> bool(seed_at(7, {"x": 0}, "@x") == seed_at(7, {"x": 1}, "@x"))
    False
    """
    places = [f"{axis}={coordinate[axis]}" for axis in axes.removeprefix("@").split(".") if axis]
    text = " ".join([str(seed), *places])
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())
    return filled((), number, torch.device("cpu"))


def _weights(scores: Tensor) -> Tensor:
    """Softmax that gives zeros, as torch's attention does, to a query from which a mask hides every
    key.
    """
    blind = (scores == float("-inf")).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(blind, 0), -1).masked_fill(blind, 0)


# -- by torch's own kernel -------------------------------------------------------------------------
def _has_kernel(device: torch.device) -> bool:
    """Whether torch has a fused kernel there that drops weights."""
    return device.type != "cpu"


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """What is drawn within comes from this seed; the device's own generator is as before after it.
    All of it is on the host.
    """
    generator = torch.default_generator
    if device.type != "cpu":
        module = torch.get_device_module(device)
        place = module.current_device() if device.index is None else device.index
        generator = module.default_generators[place]
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


def _by_torch(
    operands: Sequence[Tensor | None],
    p: float,
    is_causal: bool,
    scale: float | None,
    own_seed: Tensor,
    draw: int,
) -> Tensor:
    query, key, value, mask = operands
    assert query is not None and key is not None and value is not None
    grouped = query.dim() > 2 and query.shape[-3] != key.shape[-3]
    with _seeded(query.device, (int(own_seed) + draw * _ODD) % 2**63):
        return F.scaled_dot_product_attention(
            query, key, value, mask, p, is_causal, scale=scale, enable_gqa=grouped
        )


# The seed is no op that a graph could keep in its place, so the kernel and its seed are one op.
@torch.library.custom_op("autopar::attention", mutates_args=())
def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    p: float,
    is_causal: bool,
    scale: float | None,
    own_seed: Tensor,
    draw: int,
) -> Tensor:
    operands = (query, key, value, mask)
    return _turned(_by_torch(operands, p, is_causal, scale, own_seed, draw)).contiguous()


def _turned(x: Tensor) -> Tensor:
    """With heads behind the queries or keys, or back: the order in which kernels lay them out, so
    that no copy is made.
    """
    return x.transpose(-3, -2) if x.dim() > 2 else x


@_fused.register_fake
def _fused_of_fakes(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    shape = (*_turned(query).shape[:-1], value.shape[-1])
    return query.new_empty(shape)


@torch.library.custom_op("autopar::attention_backward", mutates_args=())
def _fused_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    p: float,
    is_causal: bool,
    scale: float | None,
    own_seed: Tensor,
    draw: int,
    of_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel once more from the same seed, and its backward: nothing but operands is kept."""
    given = [None if x is None else x.detach() for x in (query, key, value, mask)]
    wanted = [x.requires_grad_() for x in given[: 3 + of_mask] if x is not None]
    with recording_again():
        result = _by_torch(given, p, is_causal, scale, own_seed, draw)
        found = torch.autograd.grad(result, wanted, _turned(gradient))
    last = found[3] if of_mask else gradient.new_empty(0)
    query, key, value = (_turned(x).contiguous() for x in found[:3])
    return query, key, value, last.contiguous()


@_fused_backward.register_fake
def _fused_backward_of_fakes(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = [x.new_empty(_turned(x).shape) for x in (query, key, value)]
    last = mask.new_empty(mask.shape) if mask is not None and rest[-1] else gradient.new_empty(0)
    return made[0], made[1], made[2], last


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *operands, p, is_causal, scale, own_seed, draw = inputs
    ctx.save_for_backward(*operands, own_seed)
    ctx.facts = p, is_causal, scale, draw


def _fused_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    *operands, own_seed = ctx.saved_tensors
    p, is_causal, scale, draw = ctx.facts
    of_mask = ctx.needs_input_grad[3]
    more = p, is_causal, scale, own_seed, draw, of_mask
    *found, last = _fused_backward(gradient, *operands, *more)
    return *map(_turned, found), last if of_mask else None, *[None] * 5


_fused.register_autograd(_fused_gradient, setup_context=_keep)
