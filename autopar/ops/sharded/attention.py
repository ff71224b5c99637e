"""Attention with dropout of its weights, where a rank has a shard of batch, heads or queries.

On a CPU, where no fused kernel has dropout, and where the queries are split, it runs as matmuls and
softmax, with `dropout`, whose mask does not depend on the layout. On a GPU, where batch and heads
alone are split, torch's fused kernel runs, seeded by the step and the rank's coordinates on the
axes that split them: ranks that hold the same heads drop the same weights, others drop
independently. That mask depends on the layout, as in other libraries; `verify` runs on a CPU, so it
does not see it.

ops/local.py emits `attention`; the runtime calls `seed_at` for each step.
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
from autopar.ops.devices import fill_on
from autopar.ops.sharded.dropout import dropout
from autopar.ops.sharded.vocabulary import Digit

_ODD = 0x9E3779B97F4A7C15  # the distance between two seeds of one step


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
    """Return softmax(query · keyᵀ · scale + mask) · value with dropout of the weights; query (…,
    heads, q, e), key and value (…, groups, k, ·).

    `shape` is the global shape of the weights (…, heads, q, k); see `dropout` for `seed`,
    `coordinates` and `digits_by_dim`. `own_seed` is a seed on the host that depends on the rank's
    coordinates (see `seed_at`), given where a fused kernel may run; `draw` numbers its uses in a
    step.
    """
    if own_seed is not None and _has_kernel(query.device):
        options = mask, p, is_causal, scale, own_seed, draw
        return _swap_heads(_fused(query, key, value, *options))
    repeats = query.shape[-3] // key.shape[-3] if query.dim() > 2 else 1
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.mT * scale
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~visible, float("-inf"))
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        )
    weights = torch.softmax(scores, -1) if mask is None else _masked_softmax(scores)
    return dropout(weights, p, seed, coordinates, digits_by_dim, shape) @ value


def seed_at(seed: int, coordinate: Mapping[str, int], axes: str) -> Tensor:
    """Return the seed of a step for this rank's coordinates on axes ("@x.z"): int64 on the host,
    where kernels read it, another for every step and every place.

    >>> bool(seed_at(7, {"x": 0}, "@x") == seed_at(7, {"x": 1}, "@x"))
    False
    """
    places = [f"{axis}={coordinate[axis]}" for axis in axes.removeprefix("@").split(".") if axis]
    text = " ".join([str(seed), *places])
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())
    return fill_on((), number, torch.device("cpu"))


def _masked_softmax(scores: Tensor) -> Tensor:
    """Return a softmax that is zero, as in torch's attention, for a query from which a mask hides
    every key.
    """
    blind = (scores == float("-inf")).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(blind, 0), -1).masked_fill(blind, 0)


# -- torch's fused kernel --------------------------------------------------------------------------
def _has_kernel(device: torch.device) -> bool:
    """Whether torch has a fused attention with dropout for this device."""
    return device.type != "cpu"


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the device's generator within and restore its state afterwards. All of this runs on the
    host.
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


def _torch_attention(
    operands: Sequence[Tensor | None],
    p: float,
    is_causal: bool,
    scale: float | None,
    own_seed: Tensor,
    draw: int,
) -> Tensor:
    """Return torch's own attention of these operands, seeded by `own_seed` and `draw`."""
    query, key, value, mask = operands
    assert query is not None and key is not None and value is not None
    grouped = query.dim() > 2 and query.shape[-3] != key.shape[-3]
    with _seeded(query.device, (int(own_seed) + draw * _ODD) % 2**63):
        return F.scaled_dot_product_attention(
            query, key, value, mask, p, is_causal, scale=scale, enable_gqa=grouped
        )


# Seeding is no op that a graph could keep in order, so seeding and the kernel are one op.
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
    return _swap_heads(_torch_attention(operands, p, is_causal, scale, own_seed, draw)).contiguous()


def _swap_heads(x: Tensor) -> Tensor:
    """Return x with heads and queries (or keys) swapped: the order of dims in which kernels write,
    so that no copy is made.
    """
    return x.transpose(-3, -2) if x.dim() > 2 else x


@_fused.register_fake
def _fused_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    shape = (*_swap_heads(query).shape[:-1], value.shape[-1])
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
    """Return the gradients of the operands. The kernel runs again from the same seed, so that only
    operands are saved.
    """
    detached = [None if x is None else x.detach() for x in (query, key, value, mask)]
    differentiated = [x.requires_grad_() for x in detached[: 3 + of_mask] if x is not None]
    with recording_again():
        result = _torch_attention(detached, p, is_causal, scale, own_seed, draw)
        gradients = torch.autograd.grad(result, differentiated, _swap_heads(gradient))
    mask_gradient = gradients[3] if of_mask else gradient.new_empty(0)
    query, key, value = (_swap_heads(x).contiguous() for x in gradients[:3])
    return query, key, value, mask_gradient.contiguous()


@_fused_backward.register_fake
def _fused_backward_fake(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gradients = [x.new_empty(_swap_heads(x).shape) for x in (query, key, value)]
    mask_gradient = (
        mask.new_empty(mask.shape) if mask is not None and rest[-1] else gradient.new_empty(0)
    )
    return gradients[0], gradients[1], gradients[2], mask_gradient


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *operands, p, is_causal, scale, own_seed, draw = inputs
    ctx.save_for_backward(*operands, own_seed)
    ctx.facts = p, is_causal, scale, draw


def _fused_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    *operands, own_seed = ctx.saved_tensors
    p, is_causal, scale, draw = ctx.facts
    of_mask = ctx.needs_input_grad[3]
    options = p, is_causal, scale, own_seed, draw, of_mask
    *gradients, mask_gradient = _fused_backward(gradient, *operands, *options)
    return *map(_swap_heads, gradients), mask_gradient if of_mask else None, *[None] * 5


_fused.register_autograd(_fused_gradient, setup_context=_save_for_backward)
