"""Calibration of attention: by the kernel that torch takes, forward and backward, with a causal
mask and without, for a few numbers of keys and head sizes; a model's own among them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from autopar.cost.calibration import measure
from autopar.cost.calibration.fit import six
from autopar.ir.sharding_rule import ATTENTION_BACKWARD, Attends
from autopar.world import Attention, Device

Attended = tuple[torch.dtype, Attends]  # a model's

CPU_KEYS, GPU_KEYS = (128, 512, 2048), (512, 2048, 8192)
HEAD_SIZES = (32, 128)  # what lies between follows a line in 1 / head size
LONGEST_S = 1.0  # keys whose longest forward is modelled to take longer are left out
_CPU_FLOPS, _GPU_FLOPS = 2.0**27, 2.0**36  # of one forward at least: launching it does not count
_HEADS = 8  # of one sample, which lie beside one another in memory, as in a model
_MOST_SAMPLES = 512


class Attending(NamedTuple):
    """The forward or the backward of attention to measure, of as many queries as keys."""

    dtype: torch.dtype
    shape: Attends
    backward: bool


def wanted(
    own: Sequence[Attended], dtypes: Sequence[torch.dtype], known: Device, gpu: bool
) -> list[Attending]:
    """Of each dtype, causal or not, every number of keys with every head size; `own` ones, too."""
    found = []
    for dtype in dict.fromkeys((*dtypes, *(dtype for dtype, _ in own))):
        for causal in (True, False):
            mine = [one for other, one in own if (other, one.causal) == (dtype, causal)]
            sizes = sorted({*HEAD_SIZES, *(round(one.head_size) for one in mine)})
            keys = sorted({*(GPU_KEYS if gpu else CPU_KEYS), *(one.keys for one in mine)})
            found += [
                Attending(dtype, Attends(many, size, causal), backward)
                for many, size, backward in itertools.product(keys, sizes, (False, True))
                if Attends(many, sizes[-1], causal).flops(many) < LONGEST_S * known.rate(dtype)
            ]
    return found


def s_per_flop(one: Attending, device: torch.device) -> float:
    """What it takes while all ranks do the same."""
    work, run = attention(one, device)
    return measure.shared_seconds(run, measure.times_for(run, device), device) / work


def attention(one: Attending, device: torch.device) -> tuple[float, Callable[[], Any]]:
    """(its FLOPs, what runs it once): so many samples and heads that it takes long enough."""
    shape, least = one.shape, _GPU_FLOPS if device.type == "cuda" else _CPU_FLOPS
    count = max(1, round(least / shape.flops(shape.keys)))
    heads = min(_HEADS, count)
    samples = min(_MOST_SAMPLES, count // heads)
    sizes = samples, shape.keys, heads, round(shape.head_size)
    query, key, value = (
        torch.randn(sizes, device=device).to(one.dtype).requires_grad_().transpose(1, 2)
        for _ in range(3)
    )

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=shape.causal)

    work = shape.flops(samples * heads * shape.keys)
    if not one.backward:
        return work, forward
    made = forward()
    above = torch.randn_like(made)

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(made, (query, key, value), above, retain_graph=True)

    return work * ATTENTION_BACKWARD, backward


def shares(found: Mapping[Attending, float], known: Device) -> tuple[Attention, ...]:
    """The shares of the FLOP/s of the `known` device, from seconds per FLOP."""
    each = {one: six(1 / (seconds * known.rate(one.dtype))) for one, seconds in found.items()}
    return tuple(
        Attention(
            str(one.dtype).removeprefix("torch."),
            one.shape.causal,
            one.shape.keys,
            round(one.shape.head_size),
            each[one],
            each[one._replace(backward=True)],
        )
        for one in found
        if not one.backward
    )
