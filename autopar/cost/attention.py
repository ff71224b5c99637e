"""Calibration of attention: by the kernel that torch takes, forward and backward, with a causal
mask and without, for a few numbers of keys and head sizes; a model's own among them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn import functional as F

from .. import ranks
from ..rules import ATTENTION_BACKWARD, Attends
from ..world import Attention, Device
from . import measure
from .fit import six
from .rounds import Progress, in_rounds

Attended = tuple[torch.dtype, Attends]

CPU_KEYS, GPU_KEYS = (128, 512, 2048), (512, 2048, 8192)
HEAD_SIZES = (32, 128)  # what lies between follows a line in 1 / head size
LONGEST_S = 1.0  # keys whose longest forward is modelled to take longer are left out
_CPU_FLOPS, _GPU_FLOPS = 2.0**27, 2.0**36  # of one forward at least: launching it does not count
_HEADS = 8  # of one sample, which lie beside one another in memory, as in a model
_MOST_SAMPLES = 512


def timed_attention(
    own: Sequence[Attended],
    dtypes: Sequence[torch.dtype],
    known: Device,
    device: torch.device,
    seconds: float,
    progress: Progress,
) -> tuple[Attention, ...]:
    """The shares of the FLOP/s of the `known` device that attention reaches in these dtypes and
    those of a model's `own`, medians over rounds and ranks, all ranks at work at once.
    """
    wanted = _grid(own, dtypes, known, device.type == "cuda")

    def once(index: int) -> tuple[float, float]:
        work, *both = attention(*wanted[index], device)
        shares = []
        for run, flops in zip(both, (work, work * ATTENTION_BACKWARD), strict=True):
            took = measure.shared_seconds(run, measure.times_for(run, device), device)
            shares.append(flops / (took * known.rate(wanted[index][0])))
        return shares[0], shares[1]

    found = in_rounds([1] * len(wanted), once, seconds, lambda share: progress(share, "attention"))
    samples = [np.concatenate(s) for s in zip(*ranks.all_of(found), strict=True)]
    return tuple(
        Attention(
            str(dtype).removeprefix("torch."),
            one.causal,
            one.keys,
            round(one.head_size),
            *map(six, np.median(some, axis=0).tolist()),
        )
        for (dtype, one), some in zip(wanted, samples, strict=True)
    )


def _grid(
    own: Sequence[Attended], dtypes: Sequence[torch.dtype], known: Device, gpu: bool
) -> list[Attended]:
    """Of each dtype, causal or not, every number of keys with every head size."""
    found = []
    for dtype in dict.fromkeys((*dtypes, *(dtype for dtype, _ in own))):
        for causal in (True, False):
            mine = [one for other, one in own if (other, one.causal) == (dtype, causal)]
            sizes = sorted({*HEAD_SIZES, *(round(one.head_size) for one in mine)})
            keys = sorted({*(GPU_KEYS if gpu else CPU_KEYS), *(one.keys for one in mine)})
            found += [
                (dtype, Attends(many, size, causal))
                for many, size in itertools.product(keys, sizes)
                if Attends(many, sizes[-1], causal).flops(many) < LONGEST_S * known.rate(dtype)
            ]
    return found


def attention(
    dtype: torch.dtype, shape: Attends, device: torch.device
) -> tuple[float, Callable[[], object], Callable[[], object]]:
    """(FLOPs of the forward, what runs the forward, what runs the backward), each once: of as many
    queries as keys, and so many samples and heads that it takes long enough.
    """
    wanted = _GPU_FLOPS if device.type == "cuda" else _CPU_FLOPS
    count = max(1, round(wanted / shape.flops(shape.keys)))
    heads = min(_HEADS, count)
    samples = min(_MOST_SAMPLES, count // heads)
    sizes = samples, shape.keys, heads, round(shape.head_size)
    query, key, value = (
        torch.randn(sizes, device=device).to(dtype).requires_grad_().transpose(1, 2)
        for _ in range(3)
    )

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=shape.causal)

    made = forward()
    above = torch.randn_like(made)

    def backward() -> object:
        return torch.autograd.grad(made, (query, key, value), above, retain_graph=True)

    return shape.flops(samples * heads * shape.keys), forward, backward
